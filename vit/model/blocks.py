"""Transformer blocks: attention and feed-forward, each on a residual branch.

    pre:        x + f(norm(x))
    post:       norm(x + f(x))
    sandwich:   x + norm(f(norm(x)))
    res_post:   x + norm(f(x))
    parallel:   x + attention(norm(x)) + feedforward(norm(x))

A decoder block has cross-attention to the image in between (Vaswani et al., section 3.1,
arXiv:1706.03762).

Source: Xiong et al., "On Layer Normalization in the Transformer Architecture", figure 1,
arXiv:2002.04745; Ding et al., "CogView", section 2.4, arXiv:2105.13290 (sandwich); Liu et al.,
"Swin Transformer V2", section 3.2, arXiv:2111.09883 (res_post); Dehghani et al.,
"Scaling Vision Transformers to 22 Billion Parameters", section 2.1, arXiv:2302.05442 (parallel).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vit.model.attention import AttentionContext, CrossAttention, SelfAttention


class LayerScale(nn.Module):
    """Learned per-channel scale of a residual branch, initialised to a small value.

    Args:
        dim: Width of a token.
        initial_value: Initial value of every channel.

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
    """Stochastic depth: skips a residual branch for random images of a training batch.

    The kept branches are scaled by 1 / (1 - rate).

    Args:
        rate: Probability of skipping, in [0, 1).

    Source: Huang et al., "Deep Networks with Stochastic Depth", arXiv:1603.09382.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        # a tensor, not a number: blocks that differ in nothing else share one compiled graph
        self.keep = torch.tensor(1 - rate, device="cpu")

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        if not self.training:
            return x
        if torch.compiler.is_compiling():
            kept = torch.rand(x.shape[0], 1, 1, device=x.device) < self.keep
            return x * (kept / self.keep).to(x.dtype)
        keep, lengths = 1 - self.rate, None if context is None else context.lengths
        if lengths is None:
            return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(keep).div_(keep)
        kept = x.new_empty(len(lengths), 1).bernoulli_(keep).div_(keep)
        return x * kept.repeat_interleave(lengths, dim=0, output_size=x.shape[1])


class KeepPath(nn.Module):
    """No stochastic depth."""

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:  # noqa: ARG002
        """(batch, tokens, dim) -> the same"""
        return x


class Block(nn.Module):
    """Base class of the blocks, one subclass for each order of normalisation.

    A block also returns the context of its output tokens, because token merging changes it. The
    context is immutable and not updated in place: activation checkpointing runs a block again
    with the context of its first run.

    Args:
        attn: Self-attention.
        mlp: Feed-forward part.
        norm: Builds one norm layer.
        scales: LayerScale, or identity, of the two branches.
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
        scales: Sequence[nn.Module],
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        for name in self.norms:
            self.add_module(name, norm())
        self.attn, self.mlp = attn, mlp
        self.ls1, self.ls2 = scales
        self.drop_path = DropPath(drop_path) if drop_path else KeepPath()

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, tokens, dim), and the context of these tokens"""
        raise NotImplementedError


class PreNormBlock(Block):
    """x + f(norm(x)), for attention and then for the feed-forward part."""

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, AttentionContext]:
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), context)), context)
        x = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))), context)
        return x, context


class PostNormBlock(Block):
    """norm(x + f(x)), for attention and then for the feed-forward part."""

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, AttentionContext]:
        x = self.norm1(x + self.drop_path(self.ls1(self.attn(x, context)), context))
        x = self.norm2(x + self.drop_path(self.ls2(self.mlp(x)), context))
        return x, context


class SandwichNormBlock(Block):
    """x + norm(f(norm(x))), for attention and then for the feed-forward part."""

    norms = ("norm1", "norm1_post", "norm2", "norm2_post")
    norm1_post: nn.Module
    norm2_post: nn.Module

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, AttentionContext]:
        x = x + self.drop_path(
            self.ls1(self.norm1_post(self.attn(self.norm1(x), context))), context
        )
        x = x + self.drop_path(self.ls2(self.norm2_post(self.mlp(self.norm2(x)))), context)
        return x, context


class ResidualPostNormBlock(Block):
    """x + norm(f(x)), for attention and then for the feed-forward part."""

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, AttentionContext]:
        x = x + self.drop_path(self.ls1(self.norm1(self.attn(x, context))), context)
        x = x + self.drop_path(self.ls2(self.norm2(self.mlp(x))), context)
        return x, context


class ParallelBlock(Block):
    """x + attention(norm(x)) + feedforward(norm(x)): both read the same input."""

    norms = ("norm1",)

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, AttentionContext]:
        y = self.norm1(x)
        x = x + self.drop_path(self.ls1(self.attn(y, context)) + self.ls2(self.mlp(y)), context)
        return x, context


class DecoderBlock(Block):
    """Base class of the decoder blocks, which add cross-attention.

    Args:
        attn, mlp, norm, drop_path: As in Block; self-attention is causal.
        cross_attn: Attention to the tokens of the image.
        scales: LayerScale, or identity, of attention, feed-forward and cross-attention.
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
        scales: Sequence[nn.Module],
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(attn, mlp, norm=norm, scales=scales[:2], drop_path=drop_path)
        self.cross_attn = cross_attn
        self.ls_cross = scales[2]


class PreNormDecoderBlock(DecoderBlock):
    """x + f(norm(x)), for attention, cross-attention and the feed-forward part."""

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, AttentionContext]:
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), context)))
        x = x + self.drop_path(self.ls_cross(self.cross_attn(self.norm_cross(x), context)))
        x = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))
        return x, context


class PostNormDecoderBlock(DecoderBlock):
    """norm(x + f(x)), for attention, cross-attention and the feed-forward part."""

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, AttentionContext]:
        x = self.norm1(x + self.drop_path(self.ls1(self.attn(x, context))))
        x = self.norm_cross(x + self.drop_path(self.ls_cross(self.cross_attn(x, context))))
        x = self.norm2(x + self.drop_path(self.ls2(self.mlp(x))))
        return x, context
