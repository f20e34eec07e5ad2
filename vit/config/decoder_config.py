"""Settings of the caption decoder and its tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vit.config.model_config import EXPERT_SETTINGS, ModelConfig
from vit.config.settings import CAPTION_TASKS, Other, Section, setting


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Section):
    """The caption decoder and its tokenizer; only with --task caption."""

    shared: ClassVar[Mapping[str, Any]] = {"tasks": CAPTION_TASKS}

    decoder_dim: int | None = setting(None, least=1)
    """Width of a token; the encoder's when left empty."""
    decoder_depth: int = setting(4, least=1)
    """Number of blocks."""
    decoder_heads: int | None = setting(None, least=1)
    """Attention heads; when empty, the encoder's, or decoder_dim // 64 for another width."""
    decoder_kv_heads: int | None = setting(None, least=1)
    """Key and value heads; decoder_heads when left empty."""
    decoder_hidden_dim: int | None = setting(None, least=1)
    """Hidden width of the feed-forward layer; 4 x decoder_dim when left empty."""
    decoder_position: Literal["learned", "sinusoidal", "rotary", "relative"] = "learned"
    """Position embedding of the words."""
    decoder_norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation layer."""
    decoder_norm_order: Literal["pre", "post"] = "pre"
    """Normalise the input of each branch, or the residual sum."""
    decoder_qk_norm: bool = False
    """Normalise queries and keys in each head."""
    decoder_feedforward: Literal["mlp", "swiglu", "swiglu_packed", "moe"] = "mlp"
    """Feed-forward layer; moe: experts like those of the encoder, which must have some."""
    decoder_activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu"] = setting(
        "gelu", read_by=({"decoder_feedforward": ("mlp", "moe")},)
    )
    """Activation of the mlp."""
    decoder_layer_scale: float = setting(0.0, least=0)
    """Initial value of LayerScale on each residual branch (arXiv:2103.17239); 0 builds none."""
    decoder_dropout: float = setting(0.1, least=0, below=1)
    """Dropout after the position embedding, attention and feed-forward layers."""
    decoder_drop_path: float = setting(
        0.0, read_by=({"decoder_depth": Other((1,))},), least=0, below=1
    )
    """Stochastic depth: probability at the last block, growing linearly from 0 at the first."""
    caption_dropout: float = setting(0.0, "--word-dropout", least=0, below=1)
    """Share of the words hidden from the decoder in training, so that it relies on the image."""
    caption_tokens: int | None = setting(None, "--max-caption-tokens", least=3, decided_by="data")
    """Maximum length of a caption in tokens, with begin and end; by the data when left empty."""
    tokenizer: str = "bpe"
    """bpe, trained on the captions; or a file tokenizer.json, or a folder with one."""
    vocab_size: int | None = setting(None, least=4, decided_by="data")
    """Maximum vocabulary of a trained tokenizer; chosen from the data when left empty."""

    def check_with(self, encoder: ModelConfig) -> None:
        dim, heads = self.resolve_dim(encoder), self.resolve_num_heads(encoder)
        if dim % heads:
            self.refuse("decoder_heads", f"decoder_dim={dim} does not split into {heads} heads")
        if heads % (self.decoder_kv_heads or heads):
            self.refuse("decoder_kv_heads", f"does not divide decoder_heads={heads}")
        if self.decoder_position == "rotary" and dim // heads % 2:
            self.refuse("decoder_position", f"needs an even number of channels in {heads} heads")
        if self.decoder_position == "sinusoidal" and dim % 2:
            self.refuse("decoder_position", f"decoder_dim={dim} must be even")
        if self.decoder_feedforward == "moe" and encoder.feedforward != "moe":
            self.refuse("decoder_feedforward", "experts are set up by feedforward=moe: choose both")
        if self.decoder_feedforward == "moe" and encoder.capacity_factor:
            self.refuse(
                "decoder_feedforward",
                "with a capacity_factor a word would depend on those after it; leave that at 0",
            )
        if self.decoder_feedforward == "moe" and encoder.moe_every > self.decoder_depth:
            self.refuse("decoder_depth", f"moe_every={encoder.moe_every}: no block has experts")

    def resolve_dim(self, encoder: ModelConfig) -> int:
        """Width of a token."""
        return self.decoder_dim or encoder.dim

    def resolve_num_heads(self, encoder: ModelConfig) -> int:
        if self.decoder_heads is not None:
            return self.decoder_heads
        dim = self.resolve_dim(encoder)
        return encoder.num_heads if dim == encoder.dim else max(dim // 64, 1)

    def block_config(self, encoder: ModelConfig) -> ModelConfig:
        shared = EXPERT_SETTINGS if self.decoder_feedforward == "moe" else ()
        return ModelConfig(
            dim=self.resolve_dim(encoder),
            depth=self.decoder_depth,
            num_heads=self.resolve_num_heads(encoder),
            num_kv_heads=self.decoder_kv_heads,
            hidden_dim=self.decoder_hidden_dim,
            position="none",
            norm=self.decoder_norm,
            norm_eps=encoder.norm_eps,
            norm_order=self.decoder_norm_order,
            qk_norm=self.decoder_qk_norm,
            feedforward=self.decoder_feedforward,
            activation=self.decoder_activation,
            layer_scale=self.decoder_layer_scale,
            dropout=self.decoder_dropout,
            attention_dropout=self.decoder_dropout,
            drop_path=self.decoder_drop_path,
            **{name: getattr(encoder, name) for name in shared},
        )
