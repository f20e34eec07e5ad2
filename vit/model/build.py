"""Builds networks from configs."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vit.config import DecoderConfig, ModelConfig, PretrainingConfig
from vit.config.presets import preset
from vit.config.setting_layers import model_settings
from vit.errors import ConfigError, WeightsError
from vit.model.captioner import Captioner
from vit.model.decoder import TextDecoder, WordDropout
from vit.model.initialization import init_weights
from vit.model.layers import TEXT_POSITIONS, build_block, build_decoder_block
from vit.model.mae_network import MaskedAutoencoder, PixelDecoder
from vit.model.normalization import build_norm
from vit.model.projection_head import JointEmbedding, ProjectionHead
from vit.model.tiled_classifier import TiledClassifier
from vit.model.vision_transformer import VisionTransformer
from vit.text import join_names


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
    return TiledClassifier(config) if config.tile_pooling else VisionTransformer(config)


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
