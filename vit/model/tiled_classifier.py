"""TiledClassifier: a bag of tiles to class logits, by multiple-instance learning.

    h_i    = encoder(tile_i)
    a_i    = softmax over the tiles of  wᵀ (tanh(V g_i) * sigmoid(U g_i))       gated attention
    logits = W sum_i(a_i h_i) + b

with g_i = h_i less its mean over the tiles, by its deviation (in the paper h_i itself). Instead of
a_i, mean pooling has equal shares, and max pooling all of a value from the tile with the largest.

In training all tiles are encoded and pooled, and the encoder learns from LEARNED of a bag: those
with the largest shares, and a few random ones. Memory thus does not grow with the tiles.

Source: Ilse et al., "Attention-based Deep Multiple Instance Learning", section 2.4, equation 9,
arXiv:1802.04712; learning from the highest-ranked tiles: Campanella et al., "Clinical-grade
computational pathology", doi:10.1038/s41591-019-0508-1.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vit.config import ModelConfig
from vit.model.vision_transformer import VisionTransformer

HIDDEN, EPSILON = 128, 1e-5
OUTLIER_SCALE = 20.0
"""The initial score of a tile that differs very much from the others is half of this."""
LEARNED, RANDOM = 32, 8
"""Tiles of a bag that the encoder learns from in a step, and those of them that are random."""
CHUNK = 64
"""Tiles that are encoded at once without a gradient."""


class TilePooling(nn.Module):
    """Averages tiles equally."""

    def __init__(self, dim: int) -> None:  # noqa: ARG002
        super().__init__()

    def scores(self, features: Tensor, there: Tensor) -> Tensor:  # noqa: ARG002
        """(batch, tiles, dim) -> unnormalised log shares, (batch, tiles, 1)"""
        return torch.zeros_like(features[..., :1])

    def shares(self, features: Tensor, there: Tensor) -> Tensor:
        """The part of each tile in the sum, (batch, tiles, 1 or dim); `there`, (batch, tiles), is
        which of them are no padding."""
        scores = self.scores(features, there)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return scores.masked_fill(~there[..., None], -torch.inf).softmax(dim=1)

    def forward(self, features: Tensor, there: Tensor | None = None) -> Tensor:
        """(batch, tiles, dim) -> (batch, dim); all tiles are there by default."""
        there = torch.ones_like(features[..., 0]).bool() if there is None else there
        return (self.shares(features, there).to(features.dtype) * features).sum(dim=1)


class GatedTileAttention(TilePooling):
    """Averages tiles by gated attention, which sees how a tile differs from those beside it."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.v = nn.Linear(dim, HIDDEN, bias=False)
        self.u = nn.Linear(dim, HIDDEN, bias=False)
        self.w = nn.Linear(HIDDEN, 1, bias=False)

    def scores(self, features: Tensor, there: Tensor) -> Tensor:
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        count = there.sum(1)[:, None, None]
        mean = (features * there[..., None]).sum(1, keepdim=True) / count
        apart = (features - mean) * there[..., None]
        h = apart / ((apart**2).sum(1, keepdim=True) / count + EPSILON).sqrt()
        scores: Tensor = self.w(self.v(h).tanh() * self.u(h).sigmoid())
        return scores

    @torch.no_grad()
    def begin_at_outliers(self) -> None:
        """Initial weights with which the score of a tile grows with its distance from the others:
        where V = U, tanh(x) * sigmoid(x) is nearly max(tanh(x), 0)."""
        self.u.weight.copy_(self.v.weight)
        self.w.weight.fill_(OUTLIER_SCALE / HIDDEN)


class MaxTilePooling(TilePooling):
    """Takes the largest of each value."""

    def shares(self, features: Tensor, there: Tensor) -> Tensor:
        best = features.masked_fill(~there[..., None], -torch.inf).argmax(dim=1, keepdim=True)
        return torch.zeros_like(features).scatter(1, best, 1)


TILE_POOLINGS = {"attention": GatedTileAttention, "mean": TilePooling, "max": MaxTilePooling}


class TiledClassifier(VisionTransformer):
    """Encoder of a tile, pooling of tiles, and head; the encoder's parameters have the names that
    they have in a VisionTransformer, the pooling's start with `tile_pool.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.tile_pooling is not None
        self.tile_pool = TILE_POOLINGS[config.tile_pooling](self.num_features)

    def forward(self, images: Tensor, sizes: object = None) -> Tensor:  # noqa: ARG002
        """(batch, tiles, channels, height, width) -> logits (batch, classes).

        Also of the features of tiles, (batch, tiles, dim), where padding is 0, and of images of one
        tile, (batch, channels, height, width). Tiles have one size, and `sizes` is None.
        """
        if images.ndim == 5:
            features, there = self.encode_bags(images)
        else:
            features = images if images.ndim == 3 else self.features(images)[:, None]
            there = features.any(-1)
        logits: Tensor = self.head(self.tile_pool(features, there))
        return logits

    def encode_tiles(self, images: Tensor, normalise: Callable[[Tensor], Tensor]) -> Tensor:
        """Bytes (batch, tiles, channels, height, width) -> features (batch, tiles, dim)."""
        chunks = torch.split(images.flatten(0, 1), CHUNK)
        features = torch.cat([self.features(normalise(some)) for some in chunks])
        return features.view(*images.shape[:2], -1)

    @torch.inference_mode()
    def relevance(self, features: Tensor, classes: Sequence[int], *, exclusive: bool) -> Tensor:
        """(tiles, dim) -> the part of each tile in the logits of `classes`, (classes, tiles), where
        positive: its share in the pooling times its own logit, of `exclusive` classes less the mean
        of all."""
        there = torch.ones(1, len(features), dtype=torch.bool, device=features.device)
        shares = self.tile_pool.shares(features[None], there)[0]
        assert isinstance(self.head, nn.Linear)
        weight = self.head.weight - (self.head.weight.mean(dim=0) if exclusive else 0)
        parts: Tensor = weight[classes] @ (shares * features).T
        return parts.clamp(min=0)

    def encode_bags(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, tiles, channels, height, width) -> features (batch, tiles, dim), and which tiles
        are there, (batch, tiles): one of a single value is padding, unless all are."""
        pixels = images.flatten(3)
        there = (pixels.amax(-1) > pixels.amin(-1)).any(-1)
        there = there | ~there.any(1, keepdim=True)
        some = self.training and there.shape[1] > LEARNED
        with torch.set_grad_enabled(torch.is_grad_enabled() and not some):
            chunks = torch.split(images[there], CHUNK)
            encoded = torch.cat([self.features(chunk) for chunk in chunks])
            features = encoded.new_zeros(*there.shape, encoded.shape[1])
            features[there] = encoded
        if some:
            chosen = self.choose_learned(features, there)
            rows = torch.arange(len(chosen), device=chosen.device)[:, None]
            learned = self.features(images[rows, chosen].flatten(0, 1))
            features[rows, chosen] = learned.view(*chosen.shape, -1)
        return features, there

    @torch.no_grad()
    def choose_learned(self, features: Tensor, there: Tensor) -> Tensor:
        """The tiles that the encoder learns from, (batch, LEARNED)."""
        random = torch.rand(there.shape, device=there.device)
        shares = self.tile_pool.shares(features, there).float().mean(-1)
        best = (shares * (1 + 1e-3 * random)).topk(LEARNED - RANDOM).indices
        others = (random * there).scatter(1, best, -1.0).topk(RANDOM).indices
        return torch.cat([best, others], dim=1)
