"""Builds networks from configs."""

from functools import partial
from typing import Any

from torch import nn

from vit.config import DecoderConfig, ModelConfig, PretrainingConfig
from vit.config.parser import model_settings
from vit.config.presets import preset
from vit.errors import ConfigError
from vit.model.captioner import Captioner
from vit.model.decoder import TextDecoder, WordDropout
from vit.model.initialization import init_weights
from vit.model.layers import TEXT_POSITIONS, build_block, build_decoder_block
from vit.model.normalization import build_norm
from vit.model.pixel_decoder import MaskedAutoencoder, PixelDecoder
from vit.model.projection_head import JointEmbedding, ProjectionHead
from vit.model.vision_transformer import VisionTransformer


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
    return VisionTransformer(config)


def build_captioner(config: ModelConfig, decoder: DecoderConfig) -> Captioner:
    """Build encoder and decoder, with freshly initialised weights; num_classes=0 gives no head."""
    return init_weights(assemble_captioner(config, decoder))


def assemble_captioner(config: ModelConfig, decoder: DecoderConfig) -> Captioner:
    """Encoder and decoder, with uninitialised weights."""
    return Captioner(config, assemble_decoder(decoder, config))


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
    make = build_block if language_model else partial(build_decoder_block, memory_dim=encoder.dim)
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
        blocks=[build_block(blocks, index) for index in range(blocks.depth)],
        norm=build_norm(blocks),
        prefix=config.num_prefix_tokens,
        patch_values=config.channels * config.patch_size**2,
    )
    return init_weights(MaskedAutoencoder(config, decoder, mask_ratio=pretraining.mask_ratio))


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
    return init_weights(JointEmbedding(config, projector))
