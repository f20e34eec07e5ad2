"""Pooling: reduces the tokens of an image to the vector that the head reads.

Source: Dosovitskiy et al., section 3.1 and appendix D.3, arXiv:2010.11929 (class token); Beyer et
al., arXiv:2205.01580 (mean); Zhai et al., "Scaling Vision Transformers", section 3.2,
arXiv:2106.04560 (attention); Oquab et al., "DINOv2", section 7.1, arXiv:2304.07193 (both).
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from vit.model.attention import AttentionContext, proportional_attention_bias


class NoPooling(nn.Module):
    """Returns all tokens, for a network without a head."""

    def forward(self, tokens: Tensor, _context: AttentionContext) -> Tensor:
        """(batch, tokens, dim) -> the same"""
        return tokens


class ClassTokenPooling(nn.Module):
    """Returns the class token, which is the first."""

    def forward(self, tokens: Tensor, _context: AttentionContext) -> Tensor:
        """(batch, tokens, dim) -> (batch, dim)"""
        return tokens[:, 0]


class MeanPooling(nn.Module):
    """Averages the patch tokens, without class token and registers; merged tokens by size.

    Args:
        prefix: Tokens in front of the patches.
    """

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """(batch, tokens, dim) -> (batch, dim)"""
        patches = tokens[:, self.prefix :]
        if context.token_sizes is None:
            return patches.mean(dim=1)
        sizes = context.token_sizes[:, self.prefix :, None]
        shares = (sizes / sizes.sum(dim=1, keepdim=True)).to(patches.dtype)
        return (patches * shares).sum(dim=1)


class ClassTokenMeanPooling(MeanPooling):
    """Concatenates the class token and the mean of the patch tokens."""

    def forward(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """(batch, tokens, dim) -> (batch, 2 * dim)"""
        return torch.cat([tokens[:, 0], super().forward(tokens, context)], dim=1)


class ClassTokenRegistersPooling(nn.Module):
    """Concatenates the class token and the registers; a distilled DeiT has a head for each.

    Args:
        prefix: Tokens in front of the patches.
    """

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tensor, _context: AttentionContext) -> Tensor:
        """(batch, tokens, dim) -> (batch, prefix * dim)"""
        return tokens[:, : self.prefix].flatten(1)


class AttentionPooling(nn.Module):
    """Attention of a learned query to the patches, and an MLP on a residual branch (MAP head).

    Args:
        dim: Width of a token.
        num_heads: Heads that share `dim` equally.
        prefix: Tokens at the beginning that are not pooled.
        norm: Normalises the input of `mlp`.
        mlp: Applied to the attention output.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        prefix: int,
        norm: nn.Module,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.num_heads, self.prefix = num_heads, prefix
        self.latent = nn.Parameter(torch.zeros(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm, self.mlp = norm, mlp

    def forward(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """(batch, tokens, dim) -> (batch, dim)"""
        query = rearrange(
            self.q(self.latent), "1 query (heads dim) -> 1 heads query dim", heads=self.num_heads
        )
        key, value = rearrange(
            self.kv(tokens[:, self.prefix :]),
            "batch tokens (kv heads dim) -> kv batch heads tokens dim",
            kv=2,
            heads=self.num_heads,
        ).unbind(0)
        sizes = context.token_sizes
        mask = (
            None
            if sizes is None
            else proportional_attention_bias(sizes[:, self.prefix :], tokens.dtype)
        )
        mixed = context.attention_fn(
            query.expand(tokens.shape[0], -1, -1, -1), key, value, mask=mask
        )
        x = self.proj(rearrange(mixed, "batch heads 1 dim -> batch (heads dim)"))
        y: Tensor = x + self.mlp(self.norm(x))
        return y
