"""Distances from training images against numpy, and the tokens that they are made of."""

import numpy as np
import pytest
import torch

import vit
from vit.model.feature_distance import FeatureDistance, encode_with_means


def draw(images: int, seed: int = 0) -> torch.Tensor:
    """Means of two layers of eight channels that are correlated."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(9))
    return torch.einsum("nld,lde->nle", torch.randn(images, 2, 8, generator=generator), mixing) + 3


def test_the_distance_is_numpys():
    means, others = draw(400), draw(20, seed=1)
    found = FeatureDistance.fit(means)(others)
    expected = np.zeros(20)
    for layer in range(2):
        train, test = means[:, layer].double().numpy(), others[:, layer].double().numpy()
        centre, spread = train.mean(axis=0), train.std(axis=0, ddof=1)
        x, y = (train - centre) / spread, (test - centre) / spread
        values, vectors = np.linalg.eigh(x.T @ x / 400)
        values[:4] = values[:4].mean()  # half of the eigenvalues are kept
        inverse = np.linalg.inv(vectors @ np.diag(values) @ vectors.T)
        expected += np.log(np.einsum("ni,ij,nj->n", y, inverse, y) / 8) / 2
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_other_images_are_farther_than_those_of_training():
    distance = FeatureDistance.fit(draw(400))
    ordinary, strange = distance(draw(100, seed=1)), distance(draw(100, seed=1).flip(-1))
    assert strange.median() > ordinary.quantile(0.9)


def test_a_channel_without_variance_does_not_make_it_infinite():
    means = draw(50)
    means[:, :, 0] = 1.0
    distance = FeatureDistance.fit(means)
    assert distance(draw(9, seed=1)).isfinite().all()


@pytest.mark.parametrize("repeats", [1, 2])
def test_tokens_are_those_of_the_network(repeats):
    model = vit.create_model(
        "vit_tiny_patch16_224",
        image_size=16,
        patch_size=8,
        dim=32,
        depth=2,
        num_heads=2,
        num_classes=3,
        repeat_blocks=repeats,
    ).eval()
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        tokens, context, means = encode_with_means(model, images)
        expected, _ = model.encode(images)
        assert torch.equal(tokens, expected)
        assert torch.equal(model.forward_head(tokens, context), model(images))
        assert means.shape == (3, 2 * repeats + 1, 32)
        assert torch.equal(means[:, 0], model.embed(images)[0].mean(dim=1))
