"""How unlike the training images an image is: Mahalanobis distances of its features.

    u_l      = m_l / |m_l|, m_l: mean of the tokens before the first block (l = 0) and after each
               block; standardised
    p        = f / |f|, f: input of the head; standardised
    d²(x)    = xᵀ S⁻¹ x / dim      S: covariance on training images, of which the largest
                                   eigenvalues are kept and the others are their mean
    a        = mean over l of log d²(u_l)        b = log d²(p)
    distance = max(w z(a), z(b))                 z: standardised on held-out images

a finds images of another kind, b those of other classes of the same kind. The length of a vector
varies with contrast and confidence, and hides the direction.

Source: Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples and
Adversarial Attacks", section 2.2, arXiv:1807.03888 (here without classes); unit length: Mueller and
Hein, "Mahalanobis++", arXiv:2505.18032; covariance: Tipping and Bishop, "Probabilistic Principal
Component Analysis", 1999.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from vit.model.attention import AttentionContext, AttentionFunction, dot_product_attention
from vit.model.sequence_packing import group_by_size

if TYPE_CHECKING:
    from vit.model.vision_transformer import VisionTransformer

COMPONENTS = 64
"""Eigenvalues of a covariance that are kept."""
LEAST_VARIANCE = 1e-3
"""Smallest mean of the other eigenvalues, of standardised vectors."""
LEAST = 1e-6
"""Smallest variance, as a share of the mean, and smallest squared distance."""
KIND_WEIGHT = 1.5
"""w: the distances of the head's input have the longer tail, which would set the limit alone."""


class DistanceFeatures(NamedTuple):
    """What the distance of images is measured on."""

    means: Tensor
    """Mean tokens before the first block and after each, (batch, blocks + 1, dim)."""
    pooled: Tensor
    """Input of the head, (batch, pooled_dim)."""

    def float_cpu(self) -> "DistanceFeatures":
        """The same in float32 on the CPU."""
        return DistanceFeatures(self.means.float().cpu(), self.pooled.float().cpu())

    @staticmethod
    def cat(parts: "list[DistanceFeatures]") -> "DistanceFeatures":
        """Those of several batches."""
        return DistanceFeatures(*(torch.cat(part) for part in zip(*parts, strict=True)))


def encode_with_features(
    model: "VisionTransformer",
    images: Tensor,
    *,
    attention_fn: AttentionFunction = dot_product_attention,
) -> tuple[Tensor, AttentionContext, DistanceFeatures]:
    """As `VisionTransformer.encode`, and what the distance is measured on."""
    tokens, context = model.embed(images)
    context = context.replace(attention_fn=attention_fn)
    means = [tokens.mean(dim=1)]
    for block in [*model.blocks] * model.repeats:
        tokens, context = block(tokens, context)
        means.append(tokens.mean(dim=1))
    tokens = model.norm(tokens)
    pooled = model.pool(tokens, context)
    return tokens, context, DistanceFeatures(torch.stack(means, dim=1), pooled)


def features_of_sizes(model: "VisionTransformer", images: Sequence[Tensor]) -> DistanceFeatures:
    """What the distance is measured on of images of any sizes, each (channels, height, width)."""
    groups = group_by_size(images)
    batches = [torch.stack([images[index] for index in group]) for group in groups]
    found = DistanceFeatures.cat([encode_with_features(model, batch)[2] for batch in batches])
    order = torch.tensor([index for group in groups for index in group]).argsort()
    return DistanceFeatures(*(part[order.to(part.device)] for part in found))


class MahalanobisDistance(nn.Module):
    """Mean over layers of the logarithm of the distance from the vectors of training images.

    Args:
        layers: Vectors of an image.
        dim: Their width.
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
    def fit(vectors: Tensor) -> "MahalanobisDistance":
        """The distance from `vectors` of training images, (images, layers, dim), at least 2."""
        images, layers, dim = vectors.shape
        kept = min(COMPONENTS, dim // 2, images // 2)
        found = MahalanobisDistance(layers, dim, kept)
        vectors = directions(vectors.double())
        centre, spread = vectors.mean(dim=0), vectors.std(dim=0)
        spread = spread.clamp(min=LEAST * float(spread.mean()) + 1e-12)
        for layer in range(layers):
            x = (vectors[:, layer] - centre[layer]) / spread[layer]
            values, axes = torch.linalg.eigh(x.T @ x / images)
            rest = values[: dim - kept].mean().clamp(min=LEAST_VARIANCE)
            top = values[dim - kept :].clamp(min=float(rest))
            found.components[layer] = axes[:, dim - kept :] * (1 / rest - 1 / top).sqrt()
            found.precision[layer] = 1 / rest
        found.mean.copy_(centre)
        found.scale.copy_(spread)
        return found

    def forward(self, vectors: Tensor) -> Tensor:
        """(batch, layers, dim) -> (batch,)"""
        x = ((directions(vectors) - self.mean) / self.scale).transpose(0, 1)
        inside = (x @ self.components).square().sum(dim=-1)
        squares = x.square().sum(dim=-1) * self.precision[:, None] - inside
        return (squares / x.shape[-1]).clamp(min=LEAST).log().mean(dim=0)


def directions(vectors: Tensor) -> Tensor:
    """The vectors divided by their length."""
    unit: Tensor = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=LEAST)
    return unit


class FeatureDistance(nn.Module):
    """Distance of an image from those of training.

    Args:
        tokens: Distance of the mean tokens.
        pooled: Distance of the head's input.
    """

    def __init__(self, tokens: MahalanobisDistance, pooled: MahalanobisDistance) -> None:
        super().__init__()
        self.tokens, self.pooled = tokens, pooled
        self.centre: Tensor
        self.spread: Tensor
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("spread", torch.ones(2))

    @staticmethod
    def fit(features: DistanceFeatures) -> "FeatureDistance":
        """The distance from training images, at least 2; `standardise` completes it."""
        pooled = MahalanobisDistance.fit(features.pooled[:, None])
        return FeatureDistance(MahalanobisDistance.fit(features.means), pooled)

    @staticmethod
    def load(state: Mapping[str, Tensor]) -> "FeatureDistance":
        """The distance with these buffers."""
        shapes = (state[f"{part}.components"].shape for part in ("tokens", "pooled"))
        found = FeatureDistance(*(MahalanobisDistance(*shape) for shape in shapes))
        found.load_state_dict(state)
        return found

    def parts(self, features: DistanceFeatures) -> Tensor:
        """The distance of the mean tokens, and that of the head's input, (batch, 2)."""
        found = [self.tokens(features.means), self.pooled(features.pooled[:, None])]
        return torch.stack(found, dim=1)

    def standardise(self, parts: Tensor) -> None:
        """Make both parts comparable, by those of at least 2 held-out images, (images, 2)."""
        self.centre.copy_(parts.mean(dim=0))
        self.spread.copy_(parts.std(dim=0).clamp(min=LEAST))

    def combine(self, parts: Tensor) -> Tensor:
        """What `parts` returns -> (batch,)"""
        kind, classes = ((parts - self.centre) / self.spread).unbind(dim=1)
        return torch.maximum(KIND_WEIGHT * kind, classes)

    def forward(self, features: DistanceFeatures) -> Tensor:
        """Features of `encode_with_features` -> (batch,)"""
        return self.combine(self.parts(features))
