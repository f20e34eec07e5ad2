"""Masked autoencoder: an encoder sees some patches of an image, a light decoder predicts the rest.

    kept    the patches with the smallest noise
    tokens  = encoder(kept patches)
    decoded = decoder([tokens E; mask tokens] + positions)
    loss    = mean over the hidden patches of |decoded - pixels|²

Each kept patch is embedded as an image of its own. A convolutional stem would otherwise see the
neighbours: hidden pixels would leak into the tokens of kept patches, and the task would be to copy
them.

Source: He et al., "Masked Autoencoders Are Scalable Vision Learners", section 3, arXiv:2111.06377.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F

from vit.config import ModelConfig
from vit.model.attention import AttentionContext
from vit.model.blocks import Block
from vit.model.patch_dropout import gather_tokens, take_tokens
from vit.model.position_embedding import Grid, GridTables, sinusoidal_2d
from vit.model.vision_transformer import VisionTransformer

VARIANCE_EPS = 1e-6


class Reconstruction(NamedTuple):
    """Output of `MaskedAutoencoder.reconstruct`."""

    patches: Tensor
    """Predicted pixels, (batch, patches, channels * patch_size²), ordered as in PatchEmbedding."""
    hidden: Tensor
    """1 where a patch was hidden from the encoder, 0 elsewhere, (batch, patches)."""


class PixelDecoder(nn.Module):
    """Predicts the pixels of all patches from the tokens of the kept ones.

    Args:
        dim: Width of its tokens.
        encoder_dim: Width of the encoder's tokens.
        blocks: Transformer blocks of width `dim`.
        norm: Normalises the tokens after the last block.
        prefix: Tokens in front of the patches.
        patch_values: Numbers of a patch, channels * patch_size².
    """

    def __init__(
        self,
        dim: int,
        *,
        encoder_dim: int,
        blocks: Sequence[Block],
        norm: nn.Module,
        prefix: int,
        patch_values: int,
    ) -> None:
        super().__init__()
        self.dim, self.prefix, self.tables = dim, prefix, GridTables()
        self.embed = nn.Linear(encoder_dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.pred = nn.Linear(dim, patch_values)

    def forward(self, tokens: Tensor, restore: Tensor, grid: Grid) -> Tensor:
        """Pixels of all patches, (batch, patches, values).

        Args:
            tokens: Prefix tokens and kept patches of the encoder, (batch, prefix + kept, dim).
            restore: For each patch its place among the kept patches followed by the hidden ones,
                (batch, patches).
            grid: Rows and columns of the patches.
        """
        x = self.embed(tokens)
        prefix, kept = x[:, : self.prefix], x[:, self.prefix :]
        count = restore.shape[1] - kept.shape[1]
        masks = self.mask_token.to(x).expand(len(x), count, -1)
        patches = take_tokens(torch.cat([kept, masks], dim=1), restore)
        # sines, and none for the prefix, as in the paper's code
        positions = self.tables.get(
            grid, patches.device, patches.dtype, lambda: sinusoidal_2d(grid, self.dim)
        )
        patches = patches + positions
        x, context = torch.cat([prefix, patches], dim=1), AttentionContext(grid)
        for block in self.blocks:
            x, context = block(x, context)
        decoded: Tensor = self.pred(self.norm(x)[:, self.prefix :])
        return decoded


class MaskedAutoencoder(VisionTransformer):
    """An encoder without a head, and a PixelDecoder that only pretraining uses.

    The encoder's parameters have the names that they have in a VisionTransformer; the decoder's
    start with `decoder.`.

    Args:
        decoder: The decoder.
        mask_ratio: Share of the patches that is hidden, between 0 and 1; one is kept at least.
    """

    def __init__(self, config: ModelConfig, decoder: PixelDecoder, *, mask_ratio: float) -> None:
        super().__init__(config)
        self.decoder = decoder
        self.mask_ratio = mask_ratio

    def forward(  # type: ignore[override]
        self, images: Tensor, noise: Tensor | None = None
    ) -> "Tensor | Reconstruction":
        """Features, (batch, pooled_dim), or with `noise` the `reconstruct`ion.

        Args:
            images: (batch, channels, height, width).
            noise: As for `reconstruct`.
        """
        return super().forward(images) if noise is None else self.reconstruct(images, noise)

    def reconstruct(self, images: Tensor, noise: Tensor) -> Reconstruction:
        """Predict all patches from those with the smallest noise.

        Args:
            images: (batch, channels, height, width).
            noise: A random number for each patch, (batch, patches).
        """
        kept, restore, hidden = choose_patches(noise, self.mask_ratio)
        tokens, context = self.embed_kept(images, kept)
        grid, count = context.grid, self.num_prefix_tokens
        prefix = torch.arange(count, device=kept.device).expand(len(kept), -1)
        index = torch.cat([prefix, count + kept], dim=1)
        tokens, _ = self.forward_blocks(*gather_tokens(tokens, context, index))
        return Reconstruction(self.decoder(tokens, restore, grid), hidden)

    def embed_kept(self, images: Tensor, kept: Tensor) -> tuple[Tensor, AttentionContext]:
        """`embed`, in which no token of the `kept` patches, (batch, kept), sees another patch.

        All other patches are zeros before the positions are added.
        """
        size = self.patch_embed.patch_size
        rows, cols = grid = self.patch_embed.grid(images, size)
        cells = rearrange(
            images,
            "batch channels (rows patch_h) (cols patch_w)"
            " -> batch rows cols channels patch_h patch_w",
            rows=rows,
            cols=cols,
        )
        image = torch.arange(len(kept), device=kept.device).unsqueeze(1)
        alone, _ = self.patch_embed(cells[image, kept // cols, kept % cols].flatten(0, 1))
        tokens = rearrange(alone, "(batch kept) 1 dim -> batch kept dim", kept=kept.shape[1])
        patches = tokens.new_zeros(len(kept), rows * cols, tokens.shape[-1])
        index = kept.unsqueeze(-1).expand_as(tokens)
        return self.embed_patches(patches.scatter(1, index, tokens), grid)


def choose_patches(noise: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """The patches with the smallest noise, in the order of the image.

    Args:
        noise: (batch, patches).
        mask_ratio: Share of the patches that is hidden.

    Returns:
        Indices of the kept patches, (batch, kept); for each patch its place among the kept patches
        followed by the hidden ones, (batch, patches); and 1 for hidden patches, (batch, patches).
    """
    count = max(int(noise.shape[1] * (1 - mask_ratio)), 1)
    kept = noise.argsort(dim=1, stable=True)[:, :count].sort(dim=1).values
    hidden = torch.ones_like(noise).scatter(1, kept, 0.0)
    restore = hidden.argsort(dim=1, stable=True).argsort(dim=1)
    return kept, restore, hidden


def hide_pixels(images: Tensor, hidden: Tensor, patch_size: int) -> Tensor:
    """`images` with 0, the mean colour, in the hidden patches.

    Args:
        images: Normalised, (batch, channels, height, width).
        hidden: 1 for hidden patches, (batch, patches).
        patch_size: Side of a patch.
    """
    cols = images.shape[-1] // patch_size
    shown = repeat(
        1 - hidden.to(images),
        "batch (rows cols) -> batch 1 (rows patch_h) (cols patch_w)",
        cols=cols,
        patch_h=patch_size,
        patch_w=patch_size,
    )
    return images * shown


def pixel_targets(images: Tensor, patch_size: int, *, normalise: bool) -> Tensor:
    """Pixels of each patch, (batch, patches, channels * patch_size²), ordered as in PatchEmbedding.

    Args:
        images: Normalised, (batch, channels, height, width).
        patch_size: Side of a patch.
        normalise: Give each patch mean 0 and variance 1, as in section 4.1 of the paper.
    """
    patches = rearrange(
        images,
        "batch channels (rows patch_h) (cols patch_w)"
        " -> batch (rows cols) (channels patch_h patch_w)",
        patch_h=patch_size,
        patch_w=patch_size,
    )
    if not normalise:
        return patches
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + VARIANCE_EPS).sqrt()


def join_patches(patches: Tensor, rows: int, patch_size: int) -> Tensor:
    """The inverse of `pixel_targets` without normalisation.

    Args:
        patches: (batch, patches, channels * patch_size²).
        rows: Rows of patches.
        patch_size: Side of a patch.
    """
    return rearrange(
        patches,
        "batch (rows cols) (channels patch_h patch_w)"
        " -> batch channels (rows patch_h) (cols patch_w)",
        rows=rows,
        patch_h=patch_size,
        patch_w=patch_size,
    )


def reconstruction_losses(found: Reconstruction, targets: Tensor) -> Tensor:
    """Mean squared error of the hidden patches of each image, (batch,), in float32 or wider."""
    predicted = found.patches.to(targets)
    errors = F.mse_loss(predicted, targets, reduction="none").mean(dim=-1)
    hidden = found.hidden.to(errors)
    return (errors * hidden).sum(dim=1) / hidden.sum(dim=1)
