"""Builds networks from configs: tables of options, and what each layer reads of the settings.

A layer takes plain numbers and never sees the config. To add an option: write the class, add its
line below, and add its name to the Literal in vit/config/ (a test compares the two).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vit.config import DecoderConfig, ModelConfig, PretrainingConfig
from vit.config.parser import model_settings
from vit.config.presets import preset
from vit.errors import ConfigError, WeightsError
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
from vit.model.captioner import Captioner
from vit.model.decoder import (
    LearnedTextPositions,
    RotaryTextPositions,
    SinusoidalTextPositions,
    TextDecoder,
    TextPositions,
    WordDropout,
)
from vit.model.initialization import init_weights
from vit.model.mlp import MLP, PackedSwiGLU, QuickGELU, SwiGLU
from vit.model.moe import (
    MixtureOfExperts,
    drop_over_capacity,
    renormalised_weights,
    score_order,
    softmax_weights,
    token_order,
)
from vit.model.normalization import BatchNorm, ChannelLayerNorm, RMSNorm
from vit.model.patch_dropout import PatchDropout
from vit.model.patch_embed import (
    ConvStem,
    FlexiblePatchEmbedding,
    ImageEmbedding,
    NormedPatchEmbedding,
    PatchEmbedding,
)
from vit.model.pixel_decoder import MaskedAutoencoder, PixelDecoder
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
from vit.model.projection_head import JointEmbedding, ProjectionHead
from vit.model.relative_position_bias import RelativePositionBias
from vit.model.rotary_embedding import (
    MixedFrequencies,
    MixedRotaryEmbedding,
    RotaryEmbedding,
    centred_coordinates,
    index_coordinates,
)
from vit.model.token_merging import MergingBlock
from vit.model.vision_transformer import VisionTransformer
from vit.text import join_names

Builder = Callable[[ModelConfig], nn.Module]

NORMS: dict[str, Callable[..., nn.Module]] = {
    "layernorm": nn.LayerNorm,
    "rmsnorm": RMSNorm,
}

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
    "swiglu": lambda c: SwiGLU(c.dim, c.feedforward_dim, **_inner_parts(c), dropout=c.dropout),
    "swiglu_packed": lambda c: PackedSwiGLU(
        c.dim, c.feedforward_dim, **_inner_parts(c), dropout=c.dropout
    ),
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
        c.dim, c.num_heads, prefix=c.num_prefix_tokens, norm=build_norm(c), mlp=_build_mlp(c)
    ),
    # of the size that Perception Encoder has, whatever the blocks'
    "attention_all": lambda c: AttentionPooling(
        c.dim, 8, prefix=0, norm=build_norm(c), mlp=MLP(c.dim, 4 * c.dim)
    ),
}


def create_model(name: str, **settings: Any) -> VisionTransformer:
    """Build the preset called `name`, with freshly initialised weights.

    Args:
        name: A preset, such as vit_small_patch16_224.
        settings: Fields of ModelConfig that differ from the preset's, or timm's names
            of them (`img_size`).

    Raises:
        ConfigError: The name or a setting is unknown, or the settings contradict each other. It
            is a ValueError.
    """
    if not isinstance(name, str):
        raise ConfigError(f"name={name!r}: give a preset, such as vit_small_patch16_224")
    chosen = model_settings(settings)
    return build_classifier(ModelConfig(**{**preset(name), **chosen}))


def build_classifier(config: ModelConfig) -> VisionTransformer:
    """Build the network that `config` describes, with freshly initialised weights."""
    return init_weights(assemble_model(config))


def assemble_model(config: ModelConfig) -> VisionTransformer:
    """The network of `config`, with uninitialised weights."""
    return VisionTransformer(**model_parts(config))


def model_parts(config: ModelConfig) -> dict[str, Any]:
    """Arguments of VisionTransformer."""
    last, kind = config.last_norm, _block_class(config)
    return {
        "patch_embed": STEMS[config.stem](config),
        "positions": POSITIONS[config.position](config),
        "rotary": _build_rotary(config),
        "patch_drop": _build_patch_dropout(config),
        "norm_pre": build_norm(config) if config.norm_pre else nn.Identity(),
        "blocks": [_build_block(config, index, kind) for index in range(config.depth)],
        "norm": build_norm(config) if last == "tokens" else nn.Identity(),
        "pool": POOLINGS[config.pooling](config),
        "fc_norm": build_norm(config, config.pooled_dim) if last == "pooled" else nn.Identity(),
        "dim": config.dim,
        "pooled_dim": config.pooled_dim,
        "num_classes": config.num_classes,
        "class_token": config.class_token,
        "registers": config.registers,
        "repeats": config.repeat_blocks,
        "dropout": config.dropout,
    }


def _build_block(config: ModelConfig, index: int, kind: Callable[..., Block]) -> Block:
    return kind(**_block_parts(config, index), scales=_build_layer_scales(config, 2))


def _block_parts(config: ModelConfig, index: int) -> dict[str, Any]:
    """Arguments of a Block besides the scales of its branches."""
    return {
        "attn": build_attention(config),
        "mlp": FEEDFORWARDS[config.feedforward_of(index + 1)](config),
        "norm": partial(build_norm, config),
        "drop_path": drop_path_rate(config, index),
    }


def build_attention(config: ModelConfig) -> SelfAttention:
    """The attention of one block."""
    return SelfAttention(
        config.dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        rel_pos=_build_relative_bias(config),
        q_norm=build_qk_norm(config),
        k_norm=build_qk_norm(config),
        norm=build_norm(config) if config.norm_order == "sub" else None,
        rope=_build_frequencies(config),
        qkv_bias=config.qkv_bias,
        proj_bias=config.proj_bias,
        attention_dropout=config.attention_dropout,
        dropout=config.dropout,
    )


def drop_path_rate(config: ModelConfig, index: int) -> float:
    """Drop-path rate of block number `index`, from 0; it grows linearly with depth."""
    return config.drop_path * index / max(config.depth - 1, 1)


def _block_class(config: ModelConfig) -> Callable[..., Block]:
    if config.merge_tokens:
        return partial(MergingBlock, count=config.merge_tokens, prefix=config.num_prefix_tokens)
    return ParallelBlock if config.parallel_blocks else BLOCKS[config.norm_order]


def build_norm(config: ModelConfig, dim: int | None = None) -> nn.Module:
    return NORMS[config.norm](dim or config.dim, eps=config.norm_eps)


def build_qk_norm(config: ModelConfig) -> nn.Module:
    return build_norm(config, config.dim // config.num_heads) if config.qk_norm else nn.Identity()


def _inner_parts(config: ModelConfig) -> dict[str, Any]:
    """Norm and biases inside a feed-forward part."""
    inside = config.norm_order.startswith("sub")
    norm = build_norm(config, config.feedforward_dim) if inside else None
    return {"norm": norm, "bias": config.proj_bias}


def _build_mlp(config: ModelConfig, *, bias: bool = True, norm: nn.Module | None = None) -> MLP:
    return MLP(
        config.dim,
        config.feedforward_dim,
        activation=ACTIVATIONS[config.activation](),
        norm=norm,
        bias=bias,
        dropout=config.dropout,
    )


def _build_moe(config: ModelConfig) -> MixtureOfExperts:
    capacity = partial(
        drop_over_capacity,
        num_experts=config.num_experts,
        factor=config.capacity_factor,
        order=ROUTER_PRIORITIES[config.router_priority],
    )
    return MixtureOfExperts(
        config.dim,
        config.feedforward_dim,
        num_experts=config.num_experts,
        top_k=config.top_k,
        weight_fn=ROUTER_WEIGHTS[config.expert_weights],
        capacity_fn=capacity if config.capacity_factor else None,
        activation=ACTIVATIONS[config.activation](),
        bias=config.proj_bias,
        dropout=config.dropout,
        jitter=config.router_jitter,
        shared=_build_mlp(config, bias=config.proj_bias) if config.shared_expert else None,
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


def _build_patch_dropout(config: ModelConfig) -> PatchDropout | None:
    if not config.patch_dropout:
        return None
    return PatchDropout(config.patch_dropout, prefix=config.num_prefix_tokens)


def _build_rotary(config: ModelConfig) -> RotaryEmbedding | None:
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
}

DECODER_BLOCKS: dict[str, type[DecoderBlock]] = {
    "pre": PreNormDecoderBlock,
    "post": PostNormDecoderBlock,
}


def build_captioner(config: ModelConfig, decoder: DecoderConfig) -> Captioner:
    """Build encoder and decoder, with freshly initialised weights; num_classes=0 gives no head."""
    return init_weights(assemble_captioner(config, decoder))


def assemble_captioner(config: ModelConfig, decoder: DecoderConfig) -> Captioner:
    """Encoder and decoder, with uninitialised weights."""
    return Captioner(decoder=assemble_decoder(decoder, config), **model_parts(config))


def assemble_decoder(
    config: DecoderConfig, encoder: ModelConfig, *, language_model: bool = False
) -> TextDecoder:
    """The decoder, with uninitialised weights; a language model has no cross-attention."""
    config.check_with(encoder)
    assert config.vocab_size is not None, "the data completes vocab_size"
    assert config.caption_tokens is not None, "the data completes caption_tokens"
    blocks = config.block_config(encoder)
    # with the last norm after pooling, the tokens of the encoder are not normalised
    unnormalised = (
        not language_model and encoder.last_norm != "tokens" and encoder.norm_order != "post"
    )
    make = (
        partial(_build_block, kind=BLOCKS[blocks.norm_order])
        if language_model
        else partial(_build_decoder_block, memory_dim=encoder.dim)
    )
    return TextDecoder(
        vocab_size=config.vocab_size,
        dim=blocks.dim,
        positions=TEXT_POSITIONS[config.decoder_position](config.caption_tokens, blocks),
        blocks=[make(blocks, index) for index in range(blocks.depth)],
        norm_memory=build_norm(blocks, encoder.dim) if unnormalised else nn.Identity(),
        norm=build_norm(blocks) if blocks.norm_order == "pre" else nn.Identity(),
        word_dropout=WordDropout(config.caption_dropout),
        dropout=config.decoder_dropout,
    )


def _build_decoder_block(config: ModelConfig, index: int, *, memory_dim: int) -> Block:
    return DECODER_BLOCKS[config.norm_order](
        **_block_parts(config, index),
        cross_attn=CrossAttention(
            config.dim,
            config.num_heads,
            memory_dim=memory_dim,
            num_kv_heads=config.num_kv_heads,
            q_norm=build_qk_norm(config),
            k_norm=build_qk_norm(config),
            attention_dropout=config.attention_dropout,
            dropout=config.dropout,
        ),
        scales=_build_layer_scales(config, 3),
    )


def build_masked_autoencoder(
    config: ModelConfig, pretraining: PretrainingConfig
) -> MaskedAutoencoder:
    """Build encoder, without a head, and pixel decoder, with freshly initialised weights."""
    dim = pretraining.mae_decoder_dim or max(round(config.dim / 64), 1) * 32
    blocks = ModelConfig(
        dim=dim,
        depth=pretraining.mae_decoder_depth,
        num_heads=dim // 32,
        norm=config.norm,
        norm_eps=config.norm_eps,
        position="none",
    )
    decoder = PixelDecoder(
        dim,
        encoder_dim=config.dim,
        blocks=[_build_block(blocks, index, PreNormBlock) for index in range(blocks.depth)],
        norm=build_norm(blocks),
        prefix=config.num_prefix_tokens,
        patch_values=config.channels * config.patch_size**2,
    )
    parts = model_parts(config)
    return init_weights(
        MaskedAutoencoder(decoder=decoder, mask_ratio=pretraining.mask_ratio, **parts)
    )


def build_joint_embedding(
    config: ModelConfig, pretraining: PretrainingConfig, *, prototypes: int = 0
) -> JointEmbedding:
    """Build encoder, without a head, and projector, with freshly initialised weights."""
    projector = ProjectionHead(
        config.pooled_dim,
        hidden_dim=pretraining.projector_hidden_dim,
        out_dim=pretraining.projector_dim,
        prototypes=prototypes,
    )
    return init_weights(JointEmbedding(projector=projector, **model_parts(config)))


def check_fit(state: Mapping[str, Tensor], model: nn.Module) -> None:
    """Check that `state` has exactly the tensors of `model`, of their shapes, and finite values."""
    expected = model.state_dict()
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    faults = {
        "missing": [name for name in expected if name not in state],
        "unknown": [name for name in state if name not in expected],
        "of another shape": shapes,
        "not finite": [
            name for name, t in state.items() if not (t.is_meta or torch.isfinite(t).all())
        ],
    }
    found = [f"{what}: {join_names(names, 3)}" for what, names in faults.items() if names]
    if found:
        raise WeightsError(f"the weights do not fit the network; {'; '.join(found)}")


def meta_model(config: ModelConfig, decoder: DecoderConfig | None = None) -> VisionTransformer:
    """The network of `config` on the meta device: shapes without memory."""
    with torch.device("meta"):
        return assemble_model(config) if decoder is None else assemble_captioner(config, decoder)
