"""Settings of the network."""

from dataclasses import dataclass
from typing import Literal

from vit.config.section import Section, setting


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
