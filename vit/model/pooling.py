"""All tokens of an image become the one vector that the head reads.

Source: Dosovitskiy et al., section 3.1 and appendix D.3, arXiv:2010.11929 (class token); Beyer et
al., arXiv:2205.01580 (mean).
"""

from torch import Tensor, nn


class ClassTokenPooling(nn.Module):
    """Takes the class token, which is the first."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, dim)"""
        return tokens[:, 0]


class MeanPooling(nn.Module):
    """Averages the patch tokens; class token and registers have no part in it.

    Args:
        prefix: Tokens in front of the patches.
    """

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, dim)"""
        return tokens[:, self.prefix :].mean(dim=1)
