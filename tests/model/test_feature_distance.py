"""Distances from training images against numpy, and the features that they are made of."""

import numpy as np
import pytest
import torch
from torch import nn

import vit
from vit.model.feature_distance import (
    KIND_WEIGHT,
    DistanceFeatures,
    FeatureDistance,
    MahalanobisDistance,
    encode_with_features,
)


def draw(images: int, seed: int = 0) -> torch.Tensor:
    """Vectors of two layers of eight channels that are correlated."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(9))
    return torch.einsum("nld,lde->nle", torch.randn(images, 2, 8, generator=generator), mixing) + 3


def features(images: int, seed: int = 0) -> DistanceFeatures:
    return DistanceFeatures(draw(images, seed), draw(images, seed + 100).flatten(1))


def complete(train: DistanceFeatures, held_out: DistanceFeatures) -> FeatureDistance:
    distance = FeatureDistance.fit(train)
    distance.standardise(distance.parts(held_out))
    return distance


def test_the_distance_is_numpys():
    vectors, others = draw(400), draw(20, seed=1)
    found = MahalanobisDistance.fit(vectors)(others)
    expected = np.zeros(20)
    for layer in range(2):
        train, test = vectors[:, layer].double().numpy(), others[:, layer].double().numpy()
        train, test = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train, test))
        centre, spread = train.mean(axis=0), train.std(axis=0, ddof=1)
        x, y = (train - centre) / spread, (test - centre) / spread
        values, axes = np.linalg.eigh(x.T @ x / 400)
        values[:4] = values[:4].mean()  # half of the eigenvalues are kept
        inverse = np.linalg.inv(axes @ np.diag(values) @ axes.T)
        expected += np.log(np.einsum("ni,ij,nj->n", y, inverse, y) / 8) / 2
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_the_farther_of_both_parts_counts_in_units_of_held_out_images():
    train, held_out, others = features(400), features(200, 1), features(50, 2)
    distance = complete(train, held_out)
    parts = [MahalanobisDistance.fit(train.means), MahalanobisDistance.fit(train.pooled[:, None])]
    scores = []
    for part, ours, theirs in zip(parts, held_out, others, strict=True):
        known, found = (part(x if x.ndim == 3 else x[:, None]) for x in (ours, theirs))
        scores.append((found - known.mean()) / known.std())
    expected = torch.maximum(KIND_WEIGHT * scores[0], scores[1])
    torch.testing.assert_close(distance(others), expected)
    assert (expected == scores[1]).any()
    assert (expected != scores[1]).any()


def test_a_channel_without_variance_does_not_make_it_infinite():
    train, others = features(50), features(9, 1)
    for part in (train.means, train.pooled):
        part[..., 0] = 1.0
    others.means[0], others.pooled[0] = 0.0, 0.0
    assert complete(train, features(20, 2))(others).isfinite().all()


def test_a_loaded_distance_is_the_same():
    distance = complete(features(400), features(100, 3))
    loaded, others = FeatureDistance.load(distance.state_dict()), features(20, 1)
    assert torch.equal(loaded(others), distance(others))


@pytest.mark.parametrize("repeats", [1, 2])
def test_features_are_those_of_the_network(repeats):
    sizes = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 2}
    model = vit.create_model("vit_tiny_patch16_224", **sizes, num_classes=3, repeat_blocks=repeats)
    nn.init.normal_(model.eval().head.weight)
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        tokens, context, found = encode_with_features(model, images)
        expected, _ = model.encode(images)
        assert torch.equal(tokens, expected)
        assert torch.equal(model.forward_head(tokens, context), model(images))
        assert torch.equal(model.head(found.pooled), model(images))
        assert found.means.shape == (3, 2 * repeats + 1, 32)
        assert torch.equal(found.means[:, 0], model.embed(images)[0].mean(dim=1))
