"""Names meet classes here for the decoder, as in build.py for the encoder."""

from collections.abc import Callable
from functools import partial

from torch import nn

from vit.config import DecoderConfig, ModelConfig
from vit.model.blocks import Block, DecoderBlock, PostNormDecoderBlock, PreNormDecoderBlock
from vit.model.build import (
    BLOCKS,
    FEEDFORWARDS,
    drop_path_of,
    norm_of,
    parts_of,
    qk_norm_of,
    scale_of,
    self_attention,
)
from vit.model.captioner import Captioner
from vit.model.cross_attention import CrossAttention
from vit.model.decoder import HideWords, TextDecoder
from vit.model.initialise import initialise
from vit.model.text_positions import (
    LearnedTextPositions,
    RotaryTextPositions,
    SinusoidalTextPositions,
    TextPositions,
)

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
    """Build encoder and decoder, with freshly initialised weights.

    Args:
        config: The encoder; num_classes=0 gives it no head.
        decoder: Completed: `vocab_size` and `caption_tokens` are known.

    Raises:
        ConfigError: The settings contradict each other.
    """
    model = assemble_captioner(config, decoder)
    initialise(model)
    return model


def assemble_captioner(config: ModelConfig, decoder: DecoderConfig) -> Captioner:
    """The network of both, whose weights are still to be set."""
    return Captioner(decoder=assemble_decoder(decoder, config), **parts_of(config))


def assemble_decoder(
    config: DecoderConfig, encoder: ModelConfig, *, language_model: bool = False
) -> TextDecoder:
    """The decoder alone.

    Args:
        config: Completed.
        encoder: Whose tokens it looks at.
        language_model: Whether it looks at nothing instead.
    """
    config.check_with(encoder)
    assert config.vocab_size is not None, "the data completes vocab_size"
    assert config.caption_tokens is not None, "the data completes caption_tokens"
    blocks = config.blocks_beside(encoder)
    # tokens whose last norm comes after pooling have grown over the blocks
    grown = not language_model and encoder.last_norm != "tokens" and encoder.norm_order != "post"
    make = _reading_block if language_model else partial(_looking_block, memory_dim=encoder.dim)
    return TextDecoder(
        vocab_size=config.vocab_size,
        dim=blocks.dim,
        positions=TEXT_POSITIONS[config.decoder_position](config.caption_tokens, blocks),
        blocks=[make(blocks, index) for index in range(blocks.depth)],
        norm_memory=norm_of(blocks, encoder.dim) if grown else nn.Identity(),
        norm=norm_of(blocks) if blocks.norm_order == "pre" else nn.Identity(),
        hide=HideWords(config.caption_dropout),
        dropout=config.decoder_dropout,
    )


def _reading_block(config: ModelConfig, index: int) -> Block:
    return BLOCKS[config.norm_order](
        self_attention(config),
        FEEDFORWARDS[config.feedforward_of(index + 1)](config),
        norm=partial(norm_of, config),
        scales=(scale_of(config), scale_of(config)),
        drop_path=drop_path_of(config, index),
    )


def _looking_block(config: ModelConfig, index: int, *, memory_dim: int) -> Block:
    return DECODER_BLOCKS[config.norm_order](
        self_attention(config),
        FEEDFORWARDS[config.feedforward_of(index + 1)](config),
        cross_attn=CrossAttention(
            config.dim,
            config.num_heads,
            memory_dim=memory_dim,
            num_kv_heads=config.num_kv_heads,
            q_norm=qk_norm_of(config),
            k_norm=qk_norm_of(config),
            attention_dropout=config.attention_dropout,
            dropout=config.dropout,
        ),
        norm=partial(norm_of, config),
        scales=(scale_of(config), scale_of(config), scale_of(config)),
        drop_path=drop_path_of(config, index),
    )
