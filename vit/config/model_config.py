"""Settings of the network."""

from dataclasses import dataclass
from typing import Literal

from vit.config.settings import LABEL_TASKS, ON, Other, Section, check_read, setting

ROTARY = ("rotary", "learned_rotary")
EXPERT_SETTINGS = (
    *("num_experts", "top_k", "moe_every", "capacity_factor", "shared_expert"),
    *("router_weights", "router_jitter", "router_priority"),
)
LINEAR_STEM, CONV_STEM = {"stem": ("linear",)}, {"stem": ("conv",)}
DEEP = {"depth": Other((1,))}  # it is 0 at the first block
BIASED = {"stem": ("linear", "linear_norm")}
MOE, ROTATED = {"feedforward": ("moe",)}, {"position": ROTARY}
PLACED = {"position": ("learned", "learned_rotary", "sinusoidal_1d", "sinusoidal_2d")}
HAS_MLP = {"feedforward": ("mlp", "moe"), "pooling": ("attention", "attention_all")}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The architecture of the network."""

    image_size: int = setting(224, "--img-size", least=1, decided_by="preset")
    """Side of the square input image, in pixels; a multiple of patch_size."""
    patch_size: int = setting(16, least=1, decided_by="preset")
    """Side of one square patch, in pixels."""
    patch_sizes: tuple[int, ...] = setting((), read_by=(LINEAR_STEM,), unused_by=("probe",))
    """Additional patch sizes, such as 8,32; each step draws one (FlexiViT, arXiv:2212.08013)."""
    stem: Literal["linear", "linear_norm", "conv"] = "linear"
    """Patch embedding: one linear projection, with a norm (AIMv2), or 3x3 convolutions
    (arXiv:2106.14881)."""
    stem_depth: int = setting(3, least=1, read_by=(CONV_STEM,))
    """Convolutional stem: number of 3x3 convolutions."""
    stem_width: int | None = setting(
        None, least=1, read_by=(CONV_STEM, {"stem_depth": Other((1,))})
    )
    """Convolutional stem: first channels, doubled by each layer up to dim; dim // 4 when empty."""
    stem_stride: int | None = setting(None, read_by=(CONV_STEM,))
    """Convolutional stem: stride of the first; when empty, 2 for patch_size >= 8, else 1."""
    stem_norm: Literal["layernorm", "batchnorm"] = setting("batchnorm", read_by=(CONV_STEM,))
    """Convolutional stem: normalisation after each convolution."""
    channels: int = setting(3, "--in-chans", named=False, least=1, decided_by="data")
    """Channels of an image; `vit train` reads images as RGB and accepts only 3."""
    num_classes: int = setting(
        1000,
        least=0,
        read_by=({"task": LABEL_TASKS},),
        off=(0,),
        decided_by="data",
        listed=False,
    )
    """Number of classes; training takes it from the data. 0 builds no head."""
    dim: int = setting(384, "--embed-dim", least=1, decided_by="preset")
    """Width of a token."""
    depth: int = setting(12, least=1, decided_by="preset")
    """Number of encoder blocks."""
    num_heads: int = setting(6, least=1, decided_by="preset")
    """Attention heads; divides dim."""
    num_kv_heads: int | None = setting(None, least=1)
    """Key and value heads (GQA, arXiv:2305.13245); num_heads when left empty."""
    repeat_blocks: int = setting(1, least=1)
    """Number of times the blocks are applied with shared weights (ALBERT, arXiv:1909.11942)."""
    hidden_dim: int | None = setting(None, least=1)
    """Hidden width of the feed-forward layer; 4 x dim when left empty."""
    class_token: bool = True
    """Prepend a learned class token."""
    registers: int = setting(0, "--reg-tokens", least=0)
    """Number of register tokens (Darcet et al., arXiv:2309.16588)."""
    position: Literal[
        "learned", "sinusoidal_1d", "sinusoidal_2d", "rotary", "learned_rotary", "relative", "none"
    ] = "learned"
    """Position embedding."""
    prefix_positions: Literal["auto", "none", "class_token", "all"] = setting(
        "auto", read_by=(PLACED,)
    )
    """Prefix tokens with a position embedding; auto: the class token, none with registers."""
    rotary_grid: Literal["index", "index_1", "centred", "mixed"] = setting(
        "index", read_by=(ROTATED,)
    )
    """Rotary: coordinates are patch indices, from 0 or 1, or -1 to 1 across the image (DINOv3);
    mixed: learned frequencies of rows and columns (arXiv:2403.13298)."""
    rotary_temperature: float = setting(100.0, above=0, read_by=(ROTATED,))
    """Rotary: base of the frequencies (theta)."""
    rotary_reference: int | None = setting(
        None, least=1, read_by=(ROTATED, {"rotary_grid": ("index", "index_1")})
    )
    """Rotary, index: grid side that coordinates are scaled to; no scaling when left empty."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation layer."""
    norm_eps: float = setting(1e-6, above=0)
    """Epsilon of the normalisation layers."""
    norm_order: Literal["pre", "post", "sandwich", "res_post", "sub", "sub_mlp"] = "pre"
    """Normalise the input of each branch, the residual sum, the branch's input and output, or its
    output; sub, sub_mlp: the input, and before the last layer of both or of the feed-forward."""
    parallel_blocks: bool = False
    """Attention and feed-forward in parallel, on the same tokens (ViT-22B, arXiv:2302.05442)."""
    norm_pre: bool = False
    """Normalise the tokens before the first block (CLIP)."""
    final_norm: Literal["auto", "tokens", "pooled", "none"] = "auto"
    """Input of the last norm; auto: all tokens, or with pooling=mean the pooled vector."""
    patch_bias: bool = setting(True, read_by=(BIASED,))
    """Bias of the patch projection."""
    qkv_bias: bool = True
    """Bias of the query, key and value projections in the blocks."""
    proj_bias: bool = True
    """Bias of the blocks' attention output projection and feed-forward layers."""
    qk_norm: bool = False
    """Normalise queries and keys in each head (Dehghani et al., arXiv:2302.05442)."""
    feedforward: Literal["mlp", "swiglu", "swiglu_packed", "moe"] = "mlp"
    """Feed-forward layer; swiglu_packed: gate and value in one matrix; moe: mixture of experts."""
    num_experts: int = setting(8, least=1, read_by=(MOE,))
    """MoE: number of experts in a block."""
    top_k: int = setting(2, "--experts-per-token", least=1, read_by=(MOE,))
    """MoE: number of experts per token."""
    moe_every: int = setting(2, least=1, read_by=(MOE,))
    """MoE: experts in every n-th block, counted from 1; the others have an mlp."""
    capacity_factor: float = setting(0.0, least=0, read_by=(MOE,))
    """MoE: capacity factor, relative to an equal share of tokens; 0 is no limit."""
    router_weights: Literal["auto", "softmax", "renormalised"] = setting("auto", read_by=(MOE,))
    """MoE: weights of the expert outputs; auto: renormalised, or softmax with top_k=1."""
    router_jitter: float = setting(0.0, least=0, below=1, read_by=(MOE,), unused_by=("probe",))
    """MoE: in training, router inputs are multiplied by random factors in 1 +- this."""
    router_priority: Literal["order", "score"] = setting(
        "order", read_by=(MOE, {"capacity_factor": ON})
    )
    """MoE with a capacity: the tokens kept first; score: those with the largest router scores."""
    shared_expert: bool = setting(False, read_by=(MOE,))
    """MoE: one more expert, applied to every token."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu"] = setting(
        "gelu", read_by=(HAS_MLP,)
    )
    """Activation of the mlp, also of attention pooling."""
    layer_scale: float = setting(0.0, "--init-values", least=0)
    """Initial value of LayerScale on each residual branch (arXiv:2103.17239); 0 builds none."""
    pooling: Literal[
        "class_token",
        "mean",
        "attention",
        "attention_all",
        "class_token_mean",
        "class_token_registers",
        "none",
    ] = "class_token"
    """Input of the head: class token, mean of patches, attention pooling (all: of the tokens before
    the patches too), token and mean, or token and registers."""
    tile_pooling: Literal["attention", "mean", "max"] | None = setting(
        None, named=False, read_by=({"tiles": ON},), decided_by="data", listed=False
    )
    """Pooling of the tiles of an image: gated attention (arXiv:1802.04712, default), mean, max."""
    dropout: float = setting(0.0, "--drop", least=0, below=1, unused_by=("probe",))
    """Dropout after the position embedding, attention and feed-forward layers."""
    attention_dropout: float = setting(0.0, "--attn-drop", least=0, below=1, unused_by=("probe",))
    """Dropout of the attention weights in the blocks."""
    drop_path: float = setting(0.0, read_by=(DEEP,), least=0, below=1, unused_by=("probe",))
    """Stochastic depth: probability at the last block, growing linearly from 0 at the first."""
    patch_dropout: float = setting(0.0, least=0, below=1, unused_by=("probe",))
    """Share of the patches dropped from each training image (arXiv:2212.00794)."""
    merge_tokens: int = setting(0, least=0)
    """Patches merged in each block, at most half of them (ToMe, arXiv:2210.09461)."""

    def __post_init__(self) -> None:
        self.check_ranges()
        self.check_together()

    def check_together(self) -> None:
        """Check that the values fit each other."""
        if self.image_size % self.patch_size:
            down = max(self.image_size // self.patch_size, 1) * self.patch_size
            up = (self.image_size // self.patch_size + 1) * self.patch_size
            self.refuse(
                "image_size",
                f"not a multiple of patch_size={self.patch_size}; the nearest are {down} and {up}",
            )
        self._check_patches()
        if self.dim % self.num_heads:
            self.refuse("dim", f"does not split into num_heads={self.num_heads} equal heads")
        if self.position == "sinusoidal_2d" and self.dim % 4:
            self.refuse("dim", "position=sinusoidal_2d needs a multiple of 4")
        if self.position == "sinusoidal_1d" and self.dim % 2:
            self.refuse("dim", "position=sinusoidal_1d needs an even number")
        self._check_rotary()
        self._check_experts()
        if self.pooling.startswith("class_token") and not self.class_token:
            self.refuse("pooling", "there is no class token to read; use pooling=mean")
        if self.pooling == "attention_all" and self.dim % 8:
            self.refuse("dim", "pooling=attention_all has 8 heads, which divide it")
        if self.pooling == "none" and self.num_classes:
            self.refuse(
                "pooling",
                f"the head of num_classes={self.num_classes} reads one vector; set num_classes=0, "
                "which builds no head, or leave pooling out",
            )
        if self.pooling == "none" and self.final_norm == "pooled":
            self.refuse("final_norm", "pooling=none leaves tokens as they are; use tokens")
        if self.prefix_positions == "class_token" and not self.class_token:
            self.refuse("prefix_positions", "there is no class token")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            self.refuse("num_kv_heads", f"does not divide num_heads={self.num_heads}")
        if self.parallel_blocks and self.norm_order != "pre":
            self.refuse("norm_order", "parallel_blocks has one norm, before both; use pre")
        if self.norm_order.startswith("sub") and self.feedforward == "moe":
            self.refuse("norm_order", "experts have no norm inside; use pre")
        self._check_tokens()
        check_read(vars(self), ModelConfig)

    def _check_patches(self) -> None:
        for size in self.patch_sizes:
            if size < 1 or self.image_size % size:
                why = (
                    f"{size} does not divide image_size={self.image_size}; give patch_sizes that "
                    "do, or an image_size that all divide"
                )
                self.refuse("patch_sizes", why)
        if self.patch_sizes and {*self.patch_sizes} == {self.patch_size}:
            self.refuse("patch_sizes", "is patch_size alone; name another size, or none")
        if self.stem == "conv":
            self._check_stem()

    def _check_stem(self) -> None:
        size, pools = self.patch_size, self.stem_pools
        if self.stem_stride not in (None, 1, 2):
            self.refuse(
                "stem_stride", "the first convolution takes every pixel, 1, or each second, 2"
            )
        if size & (size - 1):
            down = 1 << size.bit_length() - 1
            why = f"stem=conv halves the image; choose a power of two, such as {down} or {2 * down}"
            self.refuse("patch_size", why)
        if pools < 0:
            self.refuse("stem_stride", f"patch_size={size} has no room for it; use 1")
        if pools > self.stem_depth:
            least = f"needs stem_depth={pools} or more, since each convolution halves at most once"
            self.refuse("stem_depth", f"stem=conv with patch_size={size} {least}")
        if self.stem_width is not None and self.stem_width > self.dim:
            self.refuse("stem_width", f"the last convolution has dim={self.dim}; take at most that")

    def _check_tokens(self) -> None:
        for name in ("patch_dropout", "merge_tokens"):
            if getattr(self, name) and self.position == "relative":
                self.refuse(name, f"position={self.position} needs the whole grid; leave one out")
        if self.merge_tokens and (self.parallel_blocks or self.norm_order != "pre"):
            has = "parallel_blocks" if self.parallel_blocks else f"norm_order={self.norm_order}"
            self.refuse(
                "merge_tokens",
                f"tokens are merged between the parts of blocks with norm_order=pre, not {has}",
            )

    def _check_rotary(self) -> None:
        if self.is_rotary and self.dim // self.num_heads % 4:
            self.refuse("dim", f"position={self.position} needs a multiple of 4 in each head")

    def _check_experts(self) -> None:
        if self.feedforward != "moe":
            return
        if self.top_k > self.num_experts:
            self.refuse("top_k", f"there are num_experts={self.num_experts}; choose at most that")
        if self.moe_every > self.depth:
            self.refuse("moe_every", f"no block of depth={self.depth} has experts; take less")
        if self.top_k == 1 and self.router_weights == "renormalised":
            self.refuse("router_weights", "with top_k=1 it is always 1; use softmax")
        if self.repeat_blocks > 1:
            self.refuse("repeat_blocks", "routers would learn from the last time alone; use 1")

    def feedforward_of(self, block: int) -> str:
        """The feed-forward part of a block; blocks are counted from 1."""
        dense = self.feedforward == "moe" and block % self.moe_every != 0
        return "mlp" if dense else self.feedforward

    @property
    def expert_weights(self) -> str:
        """`router_weights` with auto resolved: softmax or renormalised."""
        if self.router_weights != "auto":
            return self.router_weights
        return "renormalised" if self.top_k > 1 else "softmax"

    @property
    def feedforward_dim(self) -> int:
        """Inner width of the feed-forward part."""
        return 4 * self.dim if self.hidden_dim is None else self.hidden_dim

    @property
    def first_stride(self) -> int:
        """`stem_stride` with its default resolved; the other convolutions have stride 1."""
        return self.stem_stride or (2 if self.patch_size >= 8 else 1)

    @property
    def stem_pools(self) -> int:
        """How many of the last convolutions of a stem are followed by a 2x2 pooling."""
        return self.patch_size.bit_length() - self.first_stride

    @property
    def stem_widths(self) -> tuple[int, ...]:
        """Output channels of each convolution of a stem; the last one's are the tokens'."""
        first = max(self.dim // 4, 1) if self.stem_width is None else self.stem_width
        inner = (min(first << index, self.dim) for index in range(self.stem_depth - 1))
        return (*inner, self.dim)

    @property
    def training_patch_sizes(self) -> tuple[int, ...]:
        """All patch sizes that training draws from, the smallest first."""
        return tuple(sorted({self.patch_size, *self.patch_sizes}))

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, cols) of patches in one image."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: class token and registers."""
        return int(self.class_token) + self.registers

    @property
    def num_positioned_prefix_tokens(self) -> int:
        """Prefix tokens that have a row in the position table."""
        placed = self.prefix_positions
        if placed == "auto":
            placed = "none" if self.registers else "all"
        return {"none": 0, "class_token": 1, "all": self.num_prefix_tokens}[placed]

    @property
    def is_rotary(self) -> bool:
        """Whether the network has a rotary position embedding."""
        return self.position in ROTARY

    @property
    def last_norm(self) -> str:
        """`final_norm` with auto resolved: tokens, pooled or none."""
        if self.final_norm != "auto":
            return self.final_norm
        if self.norm_order == "post":
            return "none"
        return "pooled" if self.pooling == "mean" else "tokens"

    @property
    def pooled_dim(self) -> int:
        """Width of the head's input."""
        tokens = {"class_token_mean": 2, "class_token_registers": 1 + self.registers}
        return tokens.get(self.pooling, 1) * self.dim


@dataclass(frozen=True, kw_only=True)
class PartialModelConfig(ModelConfig):
    """Model settings of the user; the others will come from pretrained weights.

    Values are checked one by one here, and together when all are known.
    """

    def __post_init__(self) -> None:
        self.check_ranges()
