"""Encoder blocks: attention, then feed-forward, each on a residual branch.

    pre:   x + f(norm(x))        post:   norm(x + f(x))

Source: Xiong et al., "On Layer Normalization in the Transformer Architecture", figure 1,
arXiv:2002.04745.
"""

import torch
from torch import Tensor, nn

from vit.model.attention import SelfAttention
from vit.model.rotary import Rotate, unturned


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
    """What both orders of normalisation share.

    Args:
        attn: Mixes the tokens of an image.
        mlp: Treats each token alone.
        norms: The norms of the two branches.
        scales: The layer scales of the two branches; identities where there are none.
        drop_path: Probability of skipping a branch during training.
    """

    def __init__(
        self,
        attn: SelfAttention,
        mlp: nn.Module,
        *,
        norms: tuple[nn.Module, nn.Module],
        scales: tuple[nn.Module, nn.Module],
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn, self.mlp = attn, mlp
        self.ls1, self.ls2 = scales
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def attention_map(self, x: Tensor, rotate: Rotate = unturned) -> Tensor:
        """Attention weights on the tokens `x`, (batch, heads, tokens, tokens)."""
        raise NotImplementedError


class PreNormBlock(Block):
    """x + f(norm(x)), for attention and then for the feed-forward part."""

    def forward(self, x: Tensor, rotate: Rotate = unturned) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), rotate)))
        y: Tensor = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))
        return y

    def attention_map(self, x: Tensor, rotate: Rotate = unturned) -> Tensor:
        """Attention weights on the tokens `x`, (batch, heads, tokens, tokens)."""
        return self.attn.weights(self.norm1(x), rotate)


class PostNormBlock(Block):
    """norm(x + f(x)), for attention and then for the feed-forward part."""

    def forward(self, x: Tensor, rotate: Rotate = unturned) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        x = self.norm1(x + self.drop_path(self.ls1(self.attn(x, rotate))))
        y: Tensor = self.norm2(x + self.drop_path(self.ls2(self.mlp(x))))
        return y

    def attention_map(self, x: Tensor, rotate: Rotate = unturned) -> Tensor:
        """Attention weights on the tokens `x`, (batch, heads, tokens, tokens)."""
        return self.attn.weights(x, rotate)
