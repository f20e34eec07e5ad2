"""Tables of options, and what each layer reads of the settings.

Networks and attention take the config, other layers plain numbers. To add an option: write the
class, add its line below, and add its name to the Literal in vit/config/ (a test compares the two).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from vit.config import ModelConfig
from vit.model.attention import CrossAttention, SelfAttention
from vit.model.blocks import (
    Block,
    DecoderBlock,
    LayerScale,
    ParallelBlock,
    PostNormBlock,
    PostNormDecoderBlock,
    PreNormBlock,
    PreNormDecoderBlock,
    ResidualPostNormBlock,
    SandwichNormBlock,
)
from vit.model.decoder import (
    LearnedTextPositions,
    RelativeTextPositions,
    RotaryTextPositions,
    SinusoidalTextPositions,
    TextPositions,
)
from vit.model.mlp import MLP, PackedSwiGLU, QuickGELU, SwiGLU
from vit.model.moe import (
    Experts,
    MixtureOfExperts,
    drop_over_capacity,
    renormalised_weights,
    score_order,
    softmax_weights,
    token_order,
)
from vit.model.normalization import BatchNorm, ChannelLayerNorm, build_norm
from vit.model.patch_embed import (
    ConvStem,
    FlexiblePatchEmbedding,
    ImageEmbedding,
    NormedPatchEmbedding,
    PatchEmbedding,
)
from vit.model.pooling import (
    AttentionPooling,
    ClassTokenMeanPooling,
    ClassTokenPooling,
    ClassTokenRegistersPooling,
    MeanPooling,
    NoPooling,
)
from vit.model.position_embedding import (
    LearnedPositions,
    SinusoidalPositions,
    sinusoidal_1d,
    sinusoidal_2d,
)
from vit.model.relative_position_bias import RelativePositionBias
from vit.model.rotary_embedding import (
    MixedFrequencies,
    MixedRotaryEmbedding,
    RotaryEmbedding,
    centred_coordinates,
    index_coordinates,
)
from vit.model.token_merging import MergingBlock

Builder = Callable[[ModelConfig], nn.Module]

STEMS: dict[str, Callable[[ModelConfig], ImageEmbedding]] = {
    "linear": lambda c: _build_patch_embed(c),
    "linear_norm": lambda c: NormedPatchEmbedding(
        c.channels, c.patch_size, c.dim, norm=build_norm(c), bias=c.patch_bias
    ),
    "conv": lambda c: ConvStem(
        c.channels,
        c.stem_widths,
        stride=c.first_stride,
        pools=c.stem_pools,
        norm=STEM_NORMS[c.stem_norm](c),
    ),
}

STEM_NORMS: dict[str, Callable[[ModelConfig], Callable[[int], nn.Module]]] = {
    "layernorm": lambda c: partial(ChannelLayerNorm, eps=c.norm_eps),
    "batchnorm": lambda _: BatchNorm,
}

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
}

FEEDFORWARDS: dict[str, Builder] = {
    "mlp": lambda c: _build_mlp(c, **_inner_parts(c)),
    "swiglu": lambda c: SwiGLU(c.dim, c.feedforward_dim, **_inner_parts(c)),
    "swiglu_packed": lambda c: PackedSwiGLU(c.dim, c.feedforward_dim, **_inner_parts(c)),
    "moe": lambda c: _build_moe(c),
}

ROUTER_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": softmax_weights,
    "renormalised": renormalised_weights,
}

ROUTER_PRIORITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "order": token_order,
    "score": score_order,
}

POSITIONS: dict[str, Callable[[ModelConfig], LearnedPositions | None]] = {
    "learned": lambda c: LearnedPositions(c.grid, c.dim, **_position_rows(c)),
    "sinusoidal_1d": lambda c: SinusoidalPositions(
        c.grid, c.dim, encode=sinusoidal_1d, **_position_rows(c)
    ),
    "sinusoidal_2d": lambda c: SinusoidalPositions(
        c.grid, c.dim, encode=sinusoidal_2d, **_position_rows(c)
    ),
    "rotary": lambda _: None,
    "learned_rotary": lambda c: LearnedPositions(c.grid, c.dim, **_position_rows(c)),
    "relative": lambda _: None,
    "none": lambda _: None,
}

ROTARY_GRIDS: dict[str, Callable[[ModelConfig], Callable[[int], Tensor]]] = {
    "index": lambda c: partial(index_coordinates, reference=c.rotary_reference),
    "index_1": lambda c: partial(index_coordinates, reference=c.rotary_reference, first=1),
    "centred": lambda _: centred_coordinates,
    "mixed": lambda _: index_coordinates,
}

BLOCKS: dict[str, type[Block]] = {
    "pre": PreNormBlock,
    "post": PostNormBlock,
    "sandwich": SandwichNormBlock,
    "res_post": ResidualPostNormBlock,
    "sub": PreNormBlock,
    "sub_mlp": PreNormBlock,
}

POOLINGS: dict[str, Builder] = {
    "class_token": lambda _: ClassTokenPooling(),
    "mean": lambda c: MeanPooling(c.num_prefix_tokens),
    "class_token_mean": lambda c: ClassTokenMeanPooling(c.num_prefix_tokens),
    "class_token_registers": lambda c: ClassTokenRegistersPooling(c.num_prefix_tokens),
    "none": lambda _: NoPooling(),
    "attention": lambda c: AttentionPooling(
        c.dim,
        c.num_heads,
        prefix=c.num_prefix_tokens,
        norm=build_norm(c),
        mlp=_build_mlp(c, dropout=c.dropout),
    ),
    # of the size that Perception Encoder has, whatever the blocks'
    "attention_all": lambda c: AttentionPooling(
        c.dim, 8, prefix=0, norm=build_norm(c), mlp=MLP(c.dim, 4 * c.dim)
    ),
}


def build_block(config: ModelConfig, index: int) -> Block:
    """Block number `index` of an encoder, from 0."""
    kind: Callable[..., Block] = BLOCKS[config.norm_order]
    if config.merge_tokens:
        kind = partial(MergingBlock, count=config.merge_tokens, prefix=config.num_prefix_tokens)
    elif config.parallel_blocks:
        kind = ParallelBlock
    return kind(**_block_parts(config, index), scales=_build_layer_scales(config, 2))


def _block_parts(config: ModelConfig, index: int) -> dict[str, Any]:
    """Arguments of a Block besides the scales of its branches."""
    return {
        "attn": SelfAttention(
            config, rel_pos=_build_relative_bias(config), rope=_build_frequencies(config)
        ),
        "mlp": FEEDFORWARDS[config.feedforward_of(index + 1)](config),
        "norm": partial(build_norm, config),
        "drop_path": drop_path_rate(config, index),
    }


def drop_path_rate(config: ModelConfig, index: int) -> float:
    """Drop-path rate of block number `index`, from 0; it grows linearly with depth."""
    return config.drop_path * index / max(config.depth - 1, 1)


def _inner_parts(config: ModelConfig) -> dict[str, Any]:
    """Norm, biases and dropout inside a feed-forward part."""
    inside = config.norm_order.startswith("sub")
    norm = build_norm(config, config.feedforward_dim) if inside else None
    return {"norm": norm, "bias": config.proj_bias, "dropout": config.dropout}


def _build_mlp(config: ModelConfig, **parts: Any) -> MLP:
    activation = ACTIVATIONS[config.activation]()
    return MLP(config.dim, config.feedforward_dim, activation=activation, **parts)


def _build_moe(config: ModelConfig) -> MixtureOfExperts:
    capacity = partial(
        drop_over_capacity,
        num_experts=config.num_experts,
        factor=config.capacity_factor,
        order=ROUTER_PRIORITIES[config.router_priority],
    )
    experts = Experts(
        config.dim,
        config.feedforward_dim,
        config.num_experts,
        activation=ACTIVATIONS[config.activation](),
        bias=config.proj_bias,
        dropout=config.dropout,
    )
    return MixtureOfExperts(
        experts,
        top_k=config.top_k,
        weight_fn=ROUTER_WEIGHTS[config.expert_weights],
        capacity_fn=capacity if config.capacity_factor else None,
        jitter=config.router_jitter,
        shared=_build_mlp(config, **_inner_parts(config)) if config.shared_expert else None,
    )


def _build_layer_scales(config: ModelConfig, count: int) -> tuple[nn.Module, ...]:
    if not config.layer_scale:
        return tuple(nn.Identity() for _ in range(count))
    return tuple(LayerScale(config.dim, config.layer_scale) for _ in range(count))


def _build_patch_embed(config: ModelConfig) -> PatchEmbedding:
    kind: Callable[..., PatchEmbedding] = PatchEmbedding
    if config.patch_sizes:
        kind = partial(FlexiblePatchEmbedding, patch_sizes=config.training_patch_sizes)
    return kind(config.channels, config.patch_size, config.dim, bias=config.patch_bias)


def build_rotary(config: ModelConfig) -> RotaryEmbedding | None:
    if not config.is_rotary:
        return None
    kind = MixedRotaryEmbedding if config.rotary_grid == "mixed" else RotaryEmbedding
    return kind(
        config.dim // config.num_heads,
        coordinates=ROTARY_GRIDS[config.rotary_grid](config),
        temperature=config.rotary_temperature,
        prefix=config.num_prefix_tokens,
    )


def _build_frequencies(config: ModelConfig) -> MixedFrequencies | None:
    if not config.is_rotary or config.rotary_grid != "mixed":
        return None
    return MixedFrequencies(config.num_heads, config.dim // config.num_heads)


def _build_relative_bias(config: ModelConfig) -> RelativePositionBias | None:
    if config.position != "relative":
        return None
    prefix = config.num_prefix_tokens
    return RelativePositionBias(config.grid, config.num_heads, prefix=prefix)


def _position_rows(config: ModelConfig) -> dict[str, int]:
    positioned = config.num_positioned_prefix_tokens
    return {"prefix": positioned, "unpositioned": config.num_prefix_tokens - positioned}


TEXT_POSITIONS: dict[str, Callable[[int, ModelConfig], TextPositions]] = {
    "learned": lambda most, c: LearnedTextPositions(most, c.dim),
    "sinusoidal": lambda most, c: SinusoidalTextPositions(most, c.dim),
    "rotary": lambda most, c: RotaryTextPositions(most, c.dim // c.num_heads),
    "relative": lambda most, c: RelativeTextPositions(most, c.dim, num_heads=c.num_heads),
}

DECODER_BLOCKS: dict[str, type[DecoderBlock]] = {
    "pre": PreNormDecoderBlock,
    "post": PostNormDecoderBlock,
}


def build_decoder_block(config: ModelConfig, index: int, *, memory_dim: int) -> Block:
    return DECODER_BLOCKS[config.norm_order](
        **_block_parts(config, index),
        cross_attn=CrossAttention(config, memory_dim=memory_dim),
        scales=_build_layer_scales(config, 3),
    )
