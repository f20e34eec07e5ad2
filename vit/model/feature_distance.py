"""How unlike the training images an image is: Mahalanobis distances of mean tokens of each block.

    m_l      = mean of the tokens before the first block (l = 0) and after each block, standardised
    d_l²     = m_lᵀ S_l⁻¹ m_l / dim        S_l: covariance on training images, of which the largest
                                           eigenvalues are kept and the others are their mean
    distance = mean over l of log d_l²

The input of the head is normalised and serves to tell the classes apart; the means before that show
better that an image is of another kind.

Source: Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples and
Adversarial Attacks", section 2.2, arXiv:1807.03888 (here without classes); covariance: Tipping and
Bishop, "Probabilistic Principal Component Analysis", 1999.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vit.model.attention import AttentionContext, AttentionFunction, dot_product_attention

if TYPE_CHECKING:
    from vit.model.vision_transformer import VisionTransformer

COMPONENTS = 64
"""Eigenvalues of a covariance that are kept."""
LEAST = 1e-6
"""Smallest variance, as a share of the mean, and smallest squared distance."""


def encode_with_means(
    model: "VisionTransformer",
    images: Tensor,
    *,
    attention_fn: AttentionFunction = dot_product_attention,
) -> tuple[Tensor, AttentionContext, Tensor]:
    """As `VisionTransformer.encode`, and the mean tokens, (batch, blocks + 1, dim)."""
    tokens, context = model.embed(images)
    context = context._replace(attention_fn=attention_fn)
    means = [tokens.mean(dim=1)]
    for block in [*model.blocks] * model.repeats:
        tokens, context = block(tokens, context)
        means.append(tokens.mean(dim=1))
    return model.norm(tokens), context, torch.stack(means, dim=1)


class FeatureDistance(nn.Module):
    """Distance of an image from those of training.

    Args:
        layers: Blocks and one.
        dim: Width of a token.
        components: Eigenvectors of each covariance.
    """

    def __init__(self, layers: int, dim: int, components: int) -> None:
        super().__init__()
        self.mean: Tensor
        self.scale: Tensor
        self.components: Tensor
        self.precision: Tensor
        self.register_buffer("mean", torch.zeros(layers, dim))
        self.register_buffer("scale", torch.ones(layers, dim))
        # eigenvectors times sqrt(1/rest - 1/eigenvalue), and 1/rest
        self.register_buffer("components", torch.zeros(layers, dim, components))
        self.register_buffer("precision", torch.ones(layers))

    @staticmethod
    def fit(means: Tensor) -> "FeatureDistance":
        """The distance from `means` of training images, (images, layers, dim), at least 2."""
        images, layers, dim = means.shape
        kept = min(COMPONENTS, dim // 2, images // 2)
        found = FeatureDistance(layers, dim, kept)
        means = means.double()
        centre, spread = means.mean(dim=0), means.std(dim=0)
        spread = spread.clamp(min=LEAST * float(spread.mean()) + 1e-12)
        for layer in range(layers):
            x = (means[:, layer] - centre[layer]) / spread[layer]
            values, vectors = torch.linalg.eigh(x.T @ x / images)
            rest = values[: dim - kept].mean().clamp(min=LEAST)
            top = values[dim - kept :].clamp(min=float(rest))
            found.components[layer] = vectors[:, dim - kept :] * (1 / rest - 1 / top).sqrt()
            found.precision[layer] = 1 / rest
        found.mean.copy_(centre)
        found.scale.copy_(spread)
        return found

    def forward(self, means: Tensor) -> Tensor:
        """Mean tokens of `encode_with_means`, (batch, layers, dim) -> (batch,)"""
        x = ((means - self.mean) / self.scale).transpose(0, 1)
        inside = (x @ self.components).square().sum(dim=-1)
        squares = x.square().sum(dim=-1) * self.precision[:, None] - inside
        return (squares / x.shape[-1]).clamp(min=LEAST).log().mean(dim=0)
