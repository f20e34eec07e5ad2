"""Registers `vit_conv_stem` with timm when it is imported: its VisionTransformer with our stem."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from timm.layers import to_2tuple
from timm.models import model_entrypoint, register_model
from torch import Tensor, nn

from vit.config import ModelConfig
from vit.model.initialization import patch_projection
from vit.model.layers import STEM_NORMS
from vit.model.patch_embed import ConvStem
from vit.weights.formats.timm_network import STEM_SETTINGS


class TimmConvStem(ConvStem):
    """Our stem with the attributes of timm's PatchEmbed.

    Args:
        config: Settings of the stem, with the patch size as image size.
        output_fmt: NHWC for a grid of tokens; None for a sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        img_size: int | Sequence[int],
        strict_img_size: bool = True,
        output_fmt: str | None = None,
        **kind: Any,
    ) -> None:
        super().__init__(
            config.channels,
            config.stem_widths,
            stride=config.first_stride,
            pools=config.stem_pools,
            norm=STEM_NORMS[config.stem_norm](config),
        )
        for conv in (*self.convs, self.proj):
            assert isinstance(conv, nn.Conv2d)
            with torch.no_grad():
                patch_projection(conv.weight)
        self.to(**kind)
        self.config = config
        self.strict_img_size = strict_img_size
        assert output_fmt in (None, "NHWC"), "timm's networks take no other grid"
        self.flatten = output_fmt is None
        self.side = config.patch_size
        self.patch_size = (self.side, self.side)  # type: ignore[assignment]
        self.set_input_size(img_size)

    def set_input_size(
        self,
        img_size: int | Sequence[int] | None = None,
        patch_size: int | Sequence[int] | None = None,
    ) -> None:
        """Set the image size; the patch size is fixed."""
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            raise ValueError(f"a convolutional stem keeps its patches of {self.side} pixels")
        if img_size is not None:
            height, width = to_2tuple(img_size)
            self.img_size = (height, width)
            self.grid_size = (height // self.side, width // self.side)
            self.num_patches = self.grid_size[0] * self.grid_size[1]

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, cols) of the tokens of images of (height, width)."""
        return img_size[0] // self.side, img_size[1] // self.side

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        """(batch, channels, height, width) -> (batch, tokens, dim), or (batch, rows, cols, dim)"""
        rows, cols = self.grid(images, self.side)
        if self.strict_img_size and (rows, cols) != self.grid_size:
            given = tuple(images.shape[-2:])
            raise ValueError(f"images have {given} pixels; this network takes {self.img_size}")
        tokens = self.tokens(images)
        if self.flatten:
            return tokens
        return rearrange(tokens, "batch (rows cols) dim -> batch rows cols dim", rows=rows)


def conv_stem(
    settings: Mapping[str, Any],
    *,
    patch_size: int | Sequence[int] = 16,
    in_chans: int = 3,
    embed_dim: int = 768,
    bias: bool = True,  # noqa: ARG001
    dynamic_img_pad: bool = False,
    **others: Any,
) -> TimmConvStem:
    """The stem with `settings` of ours, from the arguments of timm's PatchEmbed."""
    side = to_2tuple(patch_size)[0]
    if to_2tuple(patch_size) != (side, side) or dynamic_img_pad:
        raise ValueError("a convolutional stem has square patches, and pads no images")
    sizes = {"image_size": side, "patch_size": side, "channels": in_chans, "dim": embed_dim}
    return TimmConvStem(ModelConfig(**sizes, num_heads=1, stem="conv", **settings), **others)


@register_model  # type: ignore[untyped-decorator]
def vit_conv_stem(pretrained: bool = False, **kwargs: Any) -> Any:
    """timm's Vision Transformer with a stem of 3x3 convolutions (arXiv:2106.14881)."""
    if pretrained and kwargs.get("pretrained_cfg") is None:
        raise RuntimeError("vit_conv_stem has no weights of its own; give local-dir:FOLDER")
    base = kwargs.pop("base", "vit_tiny_patch16_224")
    stem = {name: kwargs.pop(name) for name in STEM_SETTINGS if name in kwargs}
    stem["norm_eps"] = kwargs.pop("stem_eps", 1e-6)
    layer = partial(conv_stem, stem)
    return model_entrypoint(base)(pretrained=pretrained, embed_layer=layer, **kwargs)
