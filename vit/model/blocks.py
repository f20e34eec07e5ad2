"""Blocks: attention, then feed-forward, each on a residual branch.

    pre:        x + f(norm(x))
    post:       norm(x + f(x))
    sandwich:   x + norm(f(norm(x)))
    parallel:   x + attention(norm(x)) + feedforward(norm(x))

A decoder's block looks at the image in between (Vaswani et al., section 3.1, arXiv:1706.03762).

Source: Xiong et al., "On Layer Normalization in the Transformer Architecture", figure 1,
arXiv:2002.04745; Ding et al., "CogView", section 2.4, arXiv:2105.13290 (sandwich); Dehghani et al.,
"Scaling Vision Transformers to 22 Billion Parameters", section 2.1, arXiv:2302.05442 (parallel).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vit.model.attention import AttentionContext, SelfAttention
from vit.model.cross_attention import CrossAttention


class LayerScale(nn.Module):
    """Multiplies each channel of a residual branch by a learned number that starts small.

    Args:
        dim: Width of a token.
        initial_value: What every number starts from.

    Source: Touvron et al., "Going deeper with Image Transformers", section 2, arXiv:2103.17239.
    """

    def __init__(self, dim: int, initial_value: float) -> None:
        super().__init__()
        self.initial_value = initial_value
        self.gamma = nn.Parameter(torch.full((dim,), initial_value))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        return x * self.gamma


class DropPath(nn.Module):
    """Skips a residual branch for some images of the batch; the others are scaled up in return.

    Args:
        rate: Probability of skipping, in [0, 1).

    Source: Huang et al., "Deep Networks with Stochastic Depth", arXiv:1603.09382.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        if not self.training:
            return x
        keep = 1 - self.rate
        return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(keep).div_(keep)


class Block(nn.Module):
    """What all orders of normalisation share.

    A block returns the places of its tokens too, since one that merges tokens changes them.

    Args:
        attn: Mixes the tokens of an image.
        mlp: Treats each token alone.
        norm: Makes one norm.
        scales: The layer scales of the two branches; identities where there are none.
        drop_path: Probability of skipping a branch during training.
    """

    norms: tuple[str, ...] = ("norm1", "norm2")
    norm1: nn.Module
    norm2: nn.Module

    def __init__(
        self,
        attn: SelfAttention,
        mlp: nn.Module,
        *,
        norm: Callable[[], nn.Module],
        scales: tuple[nn.Module, nn.Module],
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        for name in self.norms:
            self.add_module(name, norm())
        self.attn, self.mlp = attn, mlp
        self.ls1, self.ls2 = scales
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, places: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, tokens, dim), and the places of these tokens"""
        raise NotImplementedError


class PreNormBlock(Block):
    """x + f(norm(x)), for attention and then for the feed-forward part."""

    def forward(self, x: Tensor, places: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, tokens, dim), and the places of these tokens"""
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), places)))
        x = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))
        return x, places


class PostNormBlock(Block):
    """norm(x + f(x)), for attention and then for the feed-forward part."""

    def forward(self, x: Tensor, places: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, tokens, dim), and the places of these tokens"""
        x = self.norm1(x + self.drop_path(self.ls1(self.attn(x, places))))
        x = self.norm2(x + self.drop_path(self.ls2(self.mlp(x))))
        return x, places


class SandwichNormBlock(Block):
    """x + norm(f(norm(x))), for attention and then for the feed-forward part."""

    norms = ("norm1", "norm1_post", "norm2", "norm2_post")
    norm1_post: nn.Module
    norm2_post: nn.Module

    def forward(self, x: Tensor, places: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, tokens, dim), and the places of these tokens"""
        x = x + self.drop_path(self.ls1(self.norm1_post(self.attn(self.norm1(x), places))))
        x = x + self.drop_path(self.ls2(self.norm2_post(self.mlp(self.norm2(x)))))
        return x, places


class ParallelBlock(Block):
    """x + attention(norm(x)) + feedforward(norm(x)): both parts read the same."""

    norms = ("norm1",)

    def forward(self, x: Tensor, places: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, tokens, dim), and the places of these tokens"""
        y = self.norm1(x)
        x = x + self.drop_path(self.ls1(self.attn(y, places)) + self.ls2(self.mlp(y)))
        return x, places


class DecoderBlock(Block):
    """What both orders of normalisation in a decoder share.

    Args:
        attn: Mixes the words so far.
        mlp: Treats each token alone.
        cross_attn: Looks at the tokens of the image.
        norm: Makes one norm.
        scales: The layer scales of the branches: attention, feed-forward, cross-attention.
        drop_path: Probability of skipping a branch during training.
    """

    norms = ("norm1", "norm_cross", "norm2")
    norm_cross: nn.Module

    def __init__(
        self,
        attn: SelfAttention,
        mlp: nn.Module,
        *,
        cross_attn: CrossAttention,
        norm: Callable[[], nn.Module],
        scales: tuple[nn.Module, nn.Module, nn.Module],
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(attn, mlp, norm=norm, scales=scales[:2], drop_path=drop_path)
        self.cross_attn = cross_attn
        self.ls_cross = scales[2]


class PreNormDecoderBlock(DecoderBlock):
    """x + f(norm(x)), for attention, cross-attention and the feed-forward part."""

    def forward(self, x: Tensor, places: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, tokens, dim), and the places of these tokens"""
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), places)))
        x = x + self.drop_path(self.ls_cross(self.cross_attn(self.norm_cross(x), places)))
        x = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))
        return x, places


class PostNormDecoderBlock(DecoderBlock):
    """norm(x + f(x)), for attention, cross-attention and the feed-forward part."""

    def forward(self, x: Tensor, places: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, tokens, dim), and the places of these tokens"""
        x = self.norm1(x + self.drop_path(self.ls1(self.attn(x, places))))
        x = self.norm_cross(x + self.drop_path(self.ls_cross(self.cross_attn(x, places))))
        x = self.norm2(x + self.drop_path(self.ls2(self.mlp(x))))
        return x, places
