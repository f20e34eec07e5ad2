"""Registers `vit_conv_stem` with timm: its VisionTransformer with our convolutional stem.

`vit/weights/library_registration.py` imports this module when timm is imported.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from timm.layers import Format, to_2tuple
from timm.models import model_entrypoint, register_model
from torch import Tensor, nn

from vit.config import ModelConfig
from vit.model.initialization import patch_projection
from vit.model.layers import STEM_NORMS
from vit.model.patch_embed import ConvStem
from vit.weights.formats.timm_network import STEM_ARGUMENTS


class TimmConvStem(ConvStem):
    """Our stem with the attributes and arguments of timm's PatchEmbed.

    Args:
        img_size: Side of the images, or (height, width).
        patch_size: Side of a patch, in pixels.
        output_fmt: NHWC or NCHW for a grid of tokens; None for a sequence.
    """

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        patch_size: int | Sequence[int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        *,
        bias: bool = True,  # noqa: ARG002
        strict_img_size: bool = True,
        output_fmt: str | None = None,
        dynamic_img_pad: bool = False,
        stem_depth: int = 3,
        stem_width: int | None = None,
        stem_stride: int | None = None,
        stem_norm: str = "batchnorm",
        stem_eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        side = to_2tuple(patch_size)[0]
        if to_2tuple(patch_size) != (side, side) or dynamic_img_pad:
            raise ValueError("a convolutional stem has square patches, and pads no images")
        config = ModelConfig(
            image_size=side, patch_size=side, channels=in_chans, dim=embed_dim, num_heads=1,
            stem="conv", stem_depth=stem_depth, stem_width=stem_width, norm_eps=stem_eps,
            stem_stride=stem_stride,
            stem_norm=stem_norm,  # type: ignore[arg-type]
        )  # fmt: skip
        super().__init__(
            in_chans,
            config.stem_widths,
            stride=config.first_stride,
            pools=config.stem_pools,
            norm=STEM_NORMS[stem_norm](config),
        )
        for conv in (*self.convs, self.proj):
            assert isinstance(conv, nn.Conv2d)
            with torch.no_grad():
                patch_projection(conv.weight)
        self.to(device=device, dtype=dtype)
        self.stem = {
            "stem_depth": stem_depth,
            "stem_width": stem_width,
            "stem_stride": stem_stride,
            "stem_norm": stem_norm,
        }
        self.stem_eps = stem_eps
        self.strict_img_size = strict_img_size
        self.output_fmt = Format.NHWC if output_fmt == "NHWC" else Format.NCHW
        self.flatten = output_fmt is None
        self.side = side
        self.patch_size = (side, side)  # type: ignore[assignment]
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

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Pixels per token along each axis."""
        return self.side if as_scalar else (self.side, self.side)

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
        grid = "batch (rows cols) dim -> batch rows cols dim"
        if self.output_fmt == Format.NCHW:
            grid = "batch (rows cols) dim -> batch dim rows cols"
        return rearrange(tokens, grid, rows=rows)


@register_model  # type: ignore[untyped-decorator]
def vit_conv_stem(pretrained: bool = False, **kwargs: Any) -> Any:
    """timm's Vision Transformer with a stem of 3x3 convolutions (arXiv:2106.14881)."""
    if pretrained and kwargs.get("pretrained_cfg") is None:
        raise RuntimeError("vit_conv_stem has no weights of its own; give local-dir:FOLDER")
    base = kwargs.pop("base", "vit_tiny_patch16_224")
    if base == "vit_conv_stem":
        raise ValueError("base=vit_conv_stem: name an architecture of timm, which has no stem")
    stem = {name: kwargs.pop(name) for name in STEM_ARGUMENTS if name in kwargs}
    layer = partial(TimmConvStem, **stem)
    return model_entrypoint(base)(pretrained=pretrained, embed_layer=layer, **kwargs)
