"""Settings of training: length, optimiser, fine-tuning, pretraining; device, checkpoints."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from vit.config.settings import (
    CAPTION_TASKS,
    LABEL_TASKS,
    ON,
    ONE_CLASS,
    PRETRAINING_TASKS,
    Other,
    Section,
    setting,
)
from vit.errors import ConfigError

DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([smh])")
SECONDS = {"s": 1, "m": 60, "h": 3600}
TASKS: dict[str, str] = {
    "classify": "vit.tasks.classification:Classification",
    "multilabel": "vit.tasks.multilabel:MultiLabel",
    "ordinal": "vit.tasks.ordinal:Ordinal",
    "taxonomy": "vit.tasks.taxonomy:Taxonomy",
    "regression": "vit.tasks.regression:Regression",
    "attributes": "vit.tasks.attributes:Attributes",
    "caption": "vit.tasks.captioning:Captioning",
    "classify,caption": "vit.tasks.captioning:CaptioningWithClasses",
    "simclr": "vit.tasks.simclr:SimCLR",
    "dino": "vit.tasks.dino:DINO",
    "lejepa": "vit.tasks.lejepa:LeJEPA",
    "mae": "vit.tasks.masked_autoencoder:MaskedAutoencoding",
}
"""Value of the setting `task` -> module and class that implements it."""
PROBE, FROZEN, PARTIAL = ("probe",), ("probe", "linear"), ("probe", "linear", "lora")
"""Methods that make no steps, none of the encoder's parameters, or not of all."""
NO_PROBE = ("weight_column", "freeze_epochs")
"""Settings beside which a training does not begin with a probe, unless asked."""
ROUTERS = ({"feedforward": ("moe",)},)
AUTO_WEIGHTS, AUTO_SIZE = "auto", re.compile(r"auto:(\d+(?:\.\d+)?) ?([MG]B)")
"""Values of `weights`: choose from those at hand, and from that many bytes of downloads."""
TAUGHT, CLASSIFIED = {"teacher": ON}, ("classify", "multilabel")
LORA, PRETRAINED = ({"method": ("lora",)},), ({"weights": ON},)
SMOOTHED = (*CLASSIFIED, "ordinal", "taxonomy", "attributes", *CAPTION_TASKS)
VIEWS = ("simclr", "lejepa", "dino")
"""Tasks that compare views of an image."""
LOCAL = ({"local_views": ON},)


def download_limit(weights: object) -> int | None:
    """Bytes that weights=auto:SIZE may download, 0 of auto; None of weights that are named."""
    if not isinstance(weights, str) or weights.partition(":")[0] != AUTO_WEIGHTS:
        return None
    size = AUTO_SIZE.fullmatch(weights)
    if size is None and weights != AUTO_WEIGHTS:
        raise ConfigError(f"weights={weights}: write a size in MB or GB, such as auto:500MB")
    return 0 if size is None else int(float(size[1]) * {"MB": 1e6, "GB": 1e9}[size[2]])


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """Task, length, optimiser and regularisation of training."""

    task: Annotated[str, TASKS] = setting("classify", before_plan=True)
    """Task: one class an image, any number, a tree of classes, captions, both, grades, numbers,
    several questions; or no labels."""
    model: str = setting("vit_tiny_patch16_224", listed=False)
    """Preset of the model settings; settings given otherwise win. `vit models` lists them."""
    epochs: int = setting(30, least=1, decided_by="time", unused_by=PROBE)
    """Passes over the training images, or multiples of epoch_steps; each ends in a validation."""
    epoch_steps: int | None = setting(None, least=1, decided_by="time", unused_by=PROBE)
    """Optimiser steps per epoch; one pass over the training images when left empty."""
    steps: int | None = setting(None, least=1, decided_by="time", unused_by=PROBE)
    """Optimiser steps of the training, instead of epochs; the last epoch may be shorter."""
    time: str | None = setting(None, decided_by="plan", unused_by=PROBE, before_plan=True)
    """Duration of the training, such as 90s, 30m or 2h; the number of steps is chosen to fit."""
    lr: float = setting(1e-3, above=0, unused_by=PROBE)
    """Peak learning rate, for the whole batch."""
    encoder_lr: float | None = setting(None, above=0, tasks=CAPTION_TASKS, unused_by=("linear",))
    """Captions: peak learning rate of the encoder; lr when left empty."""
    schedule: Literal["cosine", "wsd"] = setting("cosine", "--sched", unused_by=PROBE)
    """Learning rate after the warm-up: cosine, or constant with a cooldown (arXiv:2404.06395)."""
    cooldown_epochs: float | None = setting(
        None,
        least=0,
        read_by=({"schedule": ("wsd",)},),
        decided_by="time",
        unused_by=PROBE,
        unit="epochs",
    )
    """wsd: epochs of the linear cooldown; 0.7 of all when left empty."""
    cooldown_shares: tuple[float, ...] = setting(
        (), decided_by="time", unused_by=PROBE, listed=False
    )
    """wsd: fractions of lr during the cooldown, between which it is linear; set by a run with a
    time."""
    cooldown_steps: tuple[int, ...] = setting((), decided_by="time", unused_by=PROBE, listed=False)
    """wsd: steps of the cooldown after which lr has these fractions; its epochs when left empty."""
    fallback_lr: float | None = setting(
        None, above=0, read_by=({"optimizer": ("muon",)},), unused_by=PROBE
    )
    """Muon: peak learning rate of all but the blocks' matrices; lr when left empty."""
    min_lr: float = setting(1e-6, least=0, unused_by=PROBE)
    """Learning rate at the end."""
    warmup_epochs: float | None = setting(
        None, least=0, decided_by="time", unused_by=PROBE, unit="epochs"
    )
    """Epochs of linear warm-up; a tenth of all, at most 5, when left empty."""
    optimizer: str = setting("adamw", "--opt", unused_by=PROBE)
    """adamw, muon, or the name of any optimiser in timm's factory."""
    weight_decay: float = setting(0.05, least=0, unused_by=PROBE)
    """Weight decay of matrices; biases, norms, position embeddings and tokens have none."""
    betas: tuple[float, float] | None = setting(
        None, "--opt-betas", least=0, below=1, unused_by=PROBE
    )
    """Betas of the optimiser (of Muon: its AdamW); the optimiser's defaults when left empty."""
    layer_decay: float = setting(1.0, above=0, unused_by=FROZEN)
    """Layer-wise learning rate decay, from each block to the one before it; 1 is off."""
    freeze_epochs: int | None = setting(
        None, least=1, read_by=PRETRAINED, tasks=LABEL_TASKS, unused_by=PARTIAL, unit="epochs"
    )
    """First epochs, in which the head alone is trained; then all parameters are."""
    clip_grad: float = setting(1.0, least=0, unused_by=PROBE)
    """Maximum norm of the gradient of all parameters; 0 is off."""
    smoothing: float = setting(0.1, least=0, below=1, tasks=SMOOTHED, off=(0.0,), unused_by=PROBE)
    """Label smoothing: share of a label that is spread over all classes."""
    balance: Literal["none", "loss", "sampler", "logit-adjust"] = setting(
        "none", tasks=ONE_CLASS, unused_by=PROBE, before_plan=True
    )
    """Class imbalance: weighted loss, oversampled rare classes, or logits shifted by frequency."""
    balance_loss: float = setting(0.01, least=0, read_by=ROUTERS, unused_by=FROZEN)
    """MoE: weight of the load balancing loss (Switch, arXiv:2101.03961)."""
    router_z_loss: float = setting(0.001, least=0, read_by=ROUTERS, unused_by=FROZEN)
    """MoE: weight of the router z-loss (ST-MoE, arXiv:2202.08906)."""
    ema: float = setting(0.0, "--model-ema-decay", least=0, below=1, unused_by=PROBE)
    """Decay per step of the moving average of the weights; 0 keeps none (DINO: 0.95)."""
    start_image_size: int | None = setting(None, unused_by=PROBE)
    """Progressive resizing: image side in the first epochs; image_size when left empty."""
    growth_epochs: float | None = setting(
        None,
        above=0,
        read_by=({"start_image_size": ON},),
        decided_by="time",
        unused_by=PROBE,
        unit="epochs",
    )
    """Progressive resizing: epochs until image_size; three quarters of all when left empty."""
    seed: int = setting(0, least=0, before_plan=True)
    """Seed of initial weights, data order, augmentation, dropout and train-validation split."""
    patience: int | None = setting(None, least=1, tasks=LABEL_TASKS, unused_by=PROBE, unit="epochs")
    """Early stopping: epochs without an improvement; off when left empty."""
    soup: bool = setting(
        False, read_by=({"keep_best": Other((1,))},), tasks=LABEL_TASKS, unused_by=PROBE
    )
    """Model soup: average the keep_best epochs that improve the average (arXiv:2203.05482)."""

    caption_samples: int = setting(2000, least=1, tasks=CAPTION_TASKS)
    """Captions: validation images captioned after each epoch, for BLEU and CIDEr."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time is not None and not DURATION.fullmatch(self.time):
            self.refuse("time", "write a number and s, m or h, such as 90s, 30m or 1.5h")
        if self.seconds == 0:
            self.refuse("time", "no time is left to train in: give more")
        if self.min_lr > self.lr:
            self.refuse("min_lr", f"is more than lr={self.lr}")
        if self.steps is not None and self.time is not None:
            self.refuse("steps", f"time={self.time} chooses the number of steps; give one of them")
        shares, at = len(self.cooldown_shares), self.cooldown_steps
        if not at and shares > (self.cooldown_epochs or 0):
            self.refuse("cooldown_shares", f"are more than cooldown_epochs={self.cooldown_epochs}")
        if at and (len(at) != shares or any(low >= high for low, high in pairwise((0, *at)))):
            self.refuse("cooldown_steps", f"must be {shares} increasing steps, as cooldown_shares")
        if self.time is None and (self.warmup_epochs or 0) >= self.epochs:
            remedy = "lower it, such as --warmup-epochs 0, or train longer"
            self.refuse("warmup_epochs", f"must be less than epochs={self.epochs}; {remedy}")
        timed = self.time is not None or self.steps is not None  # which choose the epochs later
        if not timed and (self.freeze_epochs or 0) >= self.epochs:
            self.refuse("freeze_epochs", f"must be less than epochs={self.epochs}")

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.task.split(","))

    @property
    def captions(self) -> bool:
        """Whether the network learns to write captions."""
        return "caption" in self.tasks

    @property
    def classifies(self) -> bool:
        """Whether the network learns classes."""
        return self.multilabel or self.single_label or "classify" in self.tasks

    @property
    def single_label(self) -> bool:
        """Whether the network learns exactly one class an image, and nothing else."""
        return self.task in ONE_CLASS

    @property
    def multilabel(self) -> bool:
        """Whether an image may have several classes, or none."""
        return self.task == "multilabel"

    @property
    def pretrains(self) -> bool:
        """Whether the network learns without labels."""
        return self.task in PRETRAINING_TASKS

    @property
    def seconds(self) -> float | None:
        """`time` in seconds; None if it is not set."""
        found = DURATION.fullmatch(self.time or "")
        return float(found[1]) * SECONDS[found[2]] if found else None

    @property
    def warmup(self) -> float:
        """Epochs of linear warm-up."""
        return min(self.epochs / 10, 5) if self.warmup_epochs is None else self.warmup_epochs


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Section):
    """Pretrained weights, and how they are fine-tuned."""

    weights: str | None = setting(None, "--pretrained", decided_by="plan")
    """Pretrained weights: auto, auto:2GB, timm/NAME, hf/OWNER/NAME, a run, a library's folder."""
    method: Literal["full", "linear", "lora", "probe"] | None = setting(
        None, read_by=PRETRAINED, tasks=LABEL_TASKS, off=("full",), decided_by="weights"
    )
    """Trained parameters: all, head or LoRA; probe fits a head alone; empty: LP-FT or the plan."""
    probe_first: bool | None = setting(
        None, read_by=PRETRAINED, tasks=ONE_CLASS, off=(False,), decided_by="weights"
    )
    """Initialise the head with a linear probe; when left empty, if no method is chosen."""
    lora_rank: int = setting(8, least=1, read_by=LORA)
    """Rank of LoRA's update of a weight matrix."""
    lora_alpha: float = setting(16.0, above=0, read_by=LORA)
    """Scale of LoRA's update, which is divided by the rank."""
    lora_targets: str = setting("qkv,proj", read_by=LORA)
    """Matrices with a LoRA update, of qkv, proj, fc1, fc2 (swiglu: fc1_g, fc1_x, fc2)."""
    license: str | None = setting(None, decided_by="weights")
    """License of the trained weights; that of the pretrained weights when left empty."""
    feature_cache: str | None = setting(None, resumable=True)
    """Folder of cached probe features; in the user's cache folder when left empty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        download_limit(self.weights)
        if self.probe_first and self.method == "probe":
            self.refuse("probe_first", "method=probe does that already")

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.lora_targets.split(",") if name.strip())


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section):
    """A teacher, whose answers for the training images are learned beside their labels."""

    teacher: str | None = setting(
        None, before_plan=True, read_by=({"method": Other(("probe",))},), tasks=CLASSIFIED
    )
    """Classifier to learn from: a run, timm/NAME, hf/OWNER/NAME, or a file."""
    distillation_type: Literal["soft", "hard"] = setting(
        "soft", read_by=(TAUGHT,), tasks=("classify",)
    )
    """Learn its probabilities (arXiv:1503.02531), or its best class (arXiv:2012.12877)."""
    distillation_alpha: float = setting(0.5, above=0, most=1, read_by=(TAUGHT,))
    """Share of the loss that compares with the teacher; the labels have the rest."""
    distillation_tau: float = setting(
        2.0, above=0, read_by=(TAUGHT, {"distillation_type": ("soft",)})
    )
    """soft: temperature of both answers; higher shows more of the classes that are not the best."""


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(Section):
    """Pretraining without labels; only with --task simclr, lejepa, dino or mae."""

    global_views: int = setting(2, least=1, tasks=VIEWS)
    """SimCLR, LeJEPA, DINO: views of an image of full size."""
    local_views: int = setting(0, least=0, tasks=VIEWS)
    """SimCLR, LeJEPA, DINO: smaller views of an image."""
    local_size: int | None = setting(None, least=1, read_by=LOCAL, tasks=VIEWS)
    """SimCLR, LeJEPA, DINO: side of local views in pixels; empty: about half of image_size."""
    local_crop: tuple[float, float] = setting(
        (0.05, 0.3), above=0, most=1, read_by=LOCAL, tasks=VIEWS
    )
    """SimCLR, LeJEPA, DINO: smallest and largest share of the image area in a local view."""
    projector_dim: int = setting(128, least=1, tasks=VIEWS)
    """SimCLR, LeJEPA, DINO: width of the embeddings."""
    projector_hidden_dim: int = setting(512, least=1, tasks=VIEWS)
    """SimCLR, LeJEPA, DINO: width of the two hidden layers of the projector."""
    contrastive_temperature: float = setting(0.2, above=0, tasks=("simclr",))
    """SimCLR: what similarities are divided by (arXiv:2002.05709)."""
    sigreg_weight: float = setting(0.05, least=0, most=1, tasks=("lejepa",))
    """LeJEPA: weight of SIGReg, from 0 to 1; the prediction of views has the rest."""
    sigreg_projections: int = setting(256, least=1, tasks=("lejepa",))
    """LeJEPA: random directions in which embeddings are compared with a normal distribution."""
    prototypes: int = setting(4096, least=2, tasks=("dino",))
    """DINO: vectors that embeddings are compared with (arXiv:2104.14294)."""
    teacher_temperature: float = setting(0.03, above=0, tasks=("dino",))
    """DINO: what the teacher's cosines are divided by; the student's are by 0.1."""
    mask_ratio: float = setting(0.75, above=0, below=1, tasks=("mae",))
    """MAE: share of the patches that is hidden (arXiv:2111.06377)."""
    mae_decoder_dim: int | None = setting(None, least=1, tasks=("mae",))
    """MAE: width of the decoder's tokens; about half of dim when left empty."""
    mae_decoder_depth: int = setting(2, least=1, tasks=("mae",))
    """MAE: blocks of the decoder."""
    normalise_pixels: bool = setting(True, tasks=("mae",))
    """MAE: predict the pixels of each patch with mean 0 and variance 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mae_decoder_dim is not None and self.mae_decoder_dim % 32:
            self.refuse("mae_decoder_dim", "must be a multiple of 32, the width of a head")
        if self.global_views + self.local_views < 2:
            self.refuse("local_views", "one view predicts nothing; use two views or more in all")
        if self.local_crop[0] > self.local_crop[1]:
            self.refuse("local_crop", "must be two shares of the area, the first not the larger")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Device, precision, checkpoints and tracking."""

    shared: ClassVar[Mapping[str, Any]] = {"before_plan": True}

    device: str = setting("auto", resumable=True)
    """Device: auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = "auto"
    """Arithmetic of the network; auto: bf16 if the hardware supports it, else fp32 (not tf32)."""
    deterministic: bool = False
    """Deterministic algorithms on GPUs, which are slower; CPUs are always deterministic."""
    compile: bool = setting(False, "--torchcompile", resumable=True)
    """Compile by torch.compile: half a minute, or seconds for each size of images that grow."""
    checkpoint_activations: bool = setting(False, "--grad-checkpointing", resumable=True)
    """Recompute activations of encoder blocks in the backward pass: less memory, more work."""
    checkpoint_minutes: float = setting(10.0, above=0, resumable=True)
    """Maximum time between two checkpoints, a minute to the first; each epoch also saves one."""
    checkpoint_steps: int | None = setting(None, least=1, resumable=True)
    """Optimiser steps between two checkpoints; only by time and epoch when left empty."""
    keep_best: int = setting(1, least=1)
    """Number of best epochs whose weights are kept; the best is model.safetensors."""
    track: Literal["tensorboard", "wandb", "mlflow"] | None = setting(None, resumable=True)
    """Experiment tracker that losses and scores are sent to."""

    report: Literal["full", "fast"] = "full"
    """Report of the run: fast opens no image again, so it has no thumbnails and fewer slices."""
