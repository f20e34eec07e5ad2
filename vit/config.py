"""Every setting of a run: its name, type, default, and one sentence of help.

Frozen dataclasses, checked when built; the flags of the command line and the keys of a YAML file
are the fields' names. Imports no torch, so `--help` is instant.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vit.errors import ConfigError

Triple = tuple[float, float, float]


def setting(default: Any, *aliases: str) -> Any:
    """A field with the other flags that people type for it, such as `-b` or `--img-size`."""
    return field(default=default, metadata={"aliases": aliases})


class Section:
    """A group of settings; its subclasses are frozen dataclasses."""

    def refuse(self, name: str, why: str) -> None:
        """Raise a ConfigError that names the setting and its value."""
        raise ConfigError(f"{name}={getattr(self, name)!r}: {why}")

    def check_least(self, least: float, *names: str) -> None:
        for name in names:
            if not getattr(self, name) >= least:
                self.refuse(name, f"must be at least {least}")

    def check_above(self, bound: float, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > bound:
                self.refuse(name, f"must be more than {bound}")

    def check_share(self, *names: str, one: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if not (0 <= value < 1 or (one and value == 1)):
                self.refuse(name, f"must be a share from 0 to 1{'' if one else ', 1 excluded'}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Everything that decides what the network computes, and nothing else."""

    image_size: int = setting(224, "--img-size")
    """Side of the square picture the network sees, in pixels; a multiple of patch_size."""
    patch_size: int = 16
    """Side of one square patch, in pixels."""
    channels: int = setting(3, "--in-chans")
    """Colour channels of a picture."""
    num_classes: int = 1000
    """Number of classes; a training takes it from the data."""
    dim: int = setting(384, "--embed-dim")
    """Width of a token."""
    depth: int = 12
    """Number of encoder blocks."""
    num_heads: int = 6
    """Attention heads; divides dim."""
    hidden_dim: int | None = None
    """Inner width of the feed-forward part; 4 x dim when left empty."""
    class_token: bool = True
    """Prepend a learned class token."""
    registers: int = setting(0, "--reg-tokens")
    """Extra learned tokens without a position (Darcet et al., arXiv:2309.16588)."""
    position: Literal["learned", "sinusoidal_1d", "sinusoidal_2d", "none"] = "learned"
    """How tokens know their place in the picture."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation layer."""
    norm_order: Literal["pre", "post"] = "pre"
    """Normalise before each part of a block (pre) or after its residual sum (post)."""
    qk_norm: bool = False
    """Normalise queries and keys in each head (Dehghani et al., arXiv:2302.05442)."""
    feedforward: Literal["mlp", "swiglu"] = "mlp"
    """Feed-forward part of a block."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu"] = "gelu"
    """Activation of the mlp."""
    layer_scale: float = setting(0.0, "--init-values")
    """Initial value of a learned scale on each residual branch; 0 builds none."""
    pooling: Literal["class_token", "mean"] = "class_token"
    """What the head reads: the class token, or the mean of the patch tokens."""
    dropout: float = setting(0.0, "--drop")
    """Probability of dropping an activation after positions, attention and feed-forward."""
    attention_dropout: float = setting(0.0, "--attn-drop")
    """Probability of dropping an attention weight."""
    drop_path: float = 0.0
    """Probability of skipping the last block's branches; grows linearly from 0 at the first."""

    def __post_init__(self) -> None:
        self.check_least(
            1, "image_size", "patch_size", "channels", "num_classes", "dim", "depth", "num_heads"
        )
        self.check_least(0, "registers", "layer_scale")
        self.check_share("dropout", "attention_dropout", "drop_path")
        if self.hidden_dim is not None:
            self.check_least(1, "hidden_dim")
        if self.image_size % self.patch_size:
            down = max(self.image_size // self.patch_size, 1) * self.patch_size
            up = (self.image_size // self.patch_size + 1) * self.patch_size
            self.refuse(
                "image_size",
                f"not a multiple of patch_size={self.patch_size}; the nearest are {down} and {up}",
            )
        if self.dim % self.num_heads:
            self.refuse("dim", f"does not split into num_heads={self.num_heads} equal heads")
        if self.position == "sinusoidal_2d" and self.dim % 4:
            self.refuse("dim", "position=sinusoidal_2d needs a multiple of 4")
        if self.position == "sinusoidal_1d" and self.dim % 2:
            self.refuse("dim", "position=sinusoidal_1d needs an even number")
        if self.pooling == "class_token" and not self.class_token:
            self.refuse("pooling", "there is no class token to read; use pooling=mean")
        if self.feedforward == "swiglu" and self.activation != "gelu":
            self.refuse("activation", "swiglu brings its own; leave it at gelu")

    @property
    def feedforward_dim(self) -> int:
        """Inner width of the feed-forward part."""
        return 4 * self.dim if self.hidden_dim is None else self.hidden_dim

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, cols) of patches in one picture."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: class token and registers."""
        return int(self.class_token) + self.registers


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Which pictures, and how they are read, batched and evaluated."""

    data: str = ""
    """A folder of images, or the name of a built-in set."""
    val_share: float = 0.2
    """Share of each class held out for validation where the data has no split of its own."""
    on_bad_image: Literal["stop", "skip"] = "stop"
    """What a picture that cannot be read does: stop the run, or be left out and counted."""
    workers: int | None = setting(None, "-j")
    """Loader processes per device; one a core, at most 8, when left empty."""
    batch_size: int = setting(128, "-b")
    """Pictures in one optimiser step, over all devices and micro-batches."""
    accumulate: int = setting(1, "--grad-accum-steps")
    """Micro-batches whose gradients make one optimiser step."""
    resize: Literal["crop", "squash"] = "crop"
    """Evaluation: centre crop after resizing the short side, or squeeze the whole picture."""
    crop_share: float = setting(0.9, "--crop-pct")
    """Evaluation: share of the resized short side that the centre crop keeps."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    """How pictures are resized."""
    mean: Triple = (0.5, 0.5, 0.5)
    """Mean of each colour channel, as a share of full brightness, subtracted from pictures."""
    std: Triple = (0.5, 0.5, 0.5)
    """Standard deviation of each colour channel, by which pictures are divided."""

    def __post_init__(self) -> None:
        self.check_least(1, "batch_size", "accumulate")
        if self.workers is not None:
            self.check_least(0, "workers")
        if not 0 < self.val_share < 1:
            self.refuse("val_share", "must be between 0 and 1, both excluded")
        if not 0 < self.crop_share <= 1:
            self.refuse("crop_share", "must be more than 0 and at most 1")
        if min(self.std) <= 0:
            self.refuse("std", "must be more than 0 in every channel")
        if self.batch_size % self.accumulate:
            self.refuse("accumulate", f"does not divide batch_size={self.batch_size}")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Section):
    """How training pictures are varied."""

    min_crop: float = 0.08
    """Smallest share of a picture's area that a random crop keeps; 1 switches crops off."""
    crop_ratio: float = 4 / 3
    """Largest change of aspect ratio in a random crop."""
    hflip: float = 0.5
    """Probability of a left-right flip."""
    vflip: float = 0.0
    """Probability of an upside-down flip."""
    rotate: float = 0.0
    """Largest random rotation, in degrees."""
    translate: float = 0.0
    """Largest random shift, as a share of the picture's side."""
    color_jitter: float = 0.0
    """Strength of random brightness, contrast and saturation."""
    auto_augment: Literal["none", "randaugment", "trivialaugment"] = setting("none", "--aa")
    """A policy of random operations (arXiv:1909.13719, arXiv:2103.10158)."""
    randaugment_layers: int = 2
    """Operations on a picture under randaugment."""
    randaugment_magnitude: int = 9
    """Strength of each operation under randaugment, from 0 to 30."""
    erase: float = setting(0.0, "--reprob")
    """Probability of erasing a random rectangle (arXiv:1708.04896)."""
    mixup: float = 0.0
    """Alpha of MixUp's Beta distribution (arXiv:1710.09412); 0 is off."""
    cutmix: float = 0.0
    """Alpha of CutMix's Beta distribution (arXiv:1905.04899); 0 is off."""
    mix_probability: float = setting(1.0, "--mixup-prob")
    """Probability that a pair of pictures is mixed at all, where mixup or cutmix is on."""

    def __post_init__(self) -> None:
        self.check_share("hflip", "vflip", "translate", "erase", "mix_probability", one=True)
        self.check_least(0, "rotate", "color_jitter", "mixup", "cutmix", "randaugment_magnitude")
        self.check_least(1, "crop_ratio", "randaugment_layers")
        if not 0 < self.min_crop <= 1:
            self.refuse("min_crop", "must be more than 0 and at most 1")
        if self.randaugment_magnitude > 30:
            self.refuse("randaugment_magnitude", "must be at most 30")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """What is trained, for how long, and by which optimiser."""

    task: Literal["classify"] = "classify"
    """What the network learns."""
    model: str = "vit_tiny_patch16_224"
    """Preset that gives the model settings not set otherwise; `vit models` lists them."""
    epochs: int = 30
    """Passes over the training pictures."""
    lr: float = 1e-3
    """Peak learning rate, for the whole batch."""
    min_lr: float = 1e-6
    """Learning rate at the end of the cosine."""
    warmup_epochs: float | None = None
    """Epochs of linear warm-up; a tenth of all, at most 5, when left empty."""
    optimizer: str = setting("adamw", "--opt")
    """adamw, or the name of any optimiser in timm's factory."""
    weight_decay: float = 0.05
    """Decay of weight matrices; biases, norms, positions and tokens have none."""
    betas: tuple[float, float] | None = setting(None, "--opt-betas")
    """Momentum decays of the optimiser; its own default when left empty."""
    layer_decay: float = 1.0
    """Factor on the learning rate from each block to the one before it; 1 is off."""
    clip_grad: float = 1.0
    """Largest norm of the gradient of all parameters; 0 is off."""
    smoothing: float = 0.1
    """Share of a label that is spread over all classes."""
    ema: float = setting(0.0, "--model-ema-decay")
    """Decay per step of the moving average of the weights; 0 keeps none."""
    start_image_size: int | None = None
    """Side of pictures in the first epochs, growing to image_size; image_size when left empty."""
    seed: int = 0
    """Decides initial weights, order and augmentation of pictures, dropout and our own split."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the network; auto is bf16 where the hardware has it, else fp32."""
    compile: bool = setting(False, "--torchcompile")
    """Compile the network; pays for runs of more than some minutes."""
    checkpoint_minutes: float = 10.0
    """Longest time between two checkpoints; there is one after each epoch anyhow."""

    def __post_init__(self) -> None:
        self.check_least(1, "epochs")
        self.check_above(0, "lr", "layer_decay", "checkpoint_minutes")
        self.check_least(0, "min_lr", "weight_decay", "clip_grad", "seed")
        self.check_share("smoothing", "ema")
        if self.min_lr > self.lr:
            self.refuse("min_lr", f"is more than lr={self.lr}")
        if self.warmup_epochs is not None:
            self.check_least(0, "warmup_epochs")
            if self.warmup_epochs >= self.epochs:
                self.refuse("warmup_epochs", f"must be less than epochs={self.epochs}")

    @property
    def warmup(self) -> float:
        """Epochs of linear warm-up."""
        return min(self.epochs / 10, 5) if self.warmup_epochs is None else self.warmup_epochs


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run: what to build, what to feed it, how to train it."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        start, patch_size = self.training.start_image_size, self.model.patch_size
        if start is None:
            return
        if start % patch_size or not patch_size <= start <= self.model.image_size:
            raise ConfigError(
                f"start_image_size={start}: must be a multiple of patch_size={patch_size} "
                f"from {patch_size} to image_size={self.model.image_size}"
            )


SECTIONS: dict[str, type] = {field.name: field.type for field in fields(Config)}  # type: ignore[misc]
