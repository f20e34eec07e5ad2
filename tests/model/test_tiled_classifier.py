"""Pooling of tiles: the paper's formula, padding, and what the encoder learns from."""

import pytest
import torch
from torch import nn

from vit.config import ModelConfig
from vit.model.build import build_classifier
from vit.model.tiled_classifier import HIDDEN, LEARNED, TILE_POOLINGS

SMALL = {"image_size": 8, "patch_size": 4, "dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}


def network(pooling: str = "attention") -> nn.Module:
    torch.manual_seed(0)
    made = build_classifier(ModelConfig(**SMALL, tile_pooling=pooling))
    nn.init.normal_(made.head.weight)
    return made.eval()


@torch.inference_mode()
def test_attention_is_the_formula_of_the_paper():
    model, images = network(), torch.randn(2, 5, 3, 8, 8)
    pool = model.tile_pool
    nn.init.normal_(pool.w.weight)
    nn.init.normal_(pool.u.weight)
    for bag, logits in zip(images, model(images), strict=True):
        h = model.features(bag)
        apart = nn.functional.batch_norm(h, None, None, training=True)
        v, u, w = (part.weight for part in (pool.v, pool.u, pool.w))
        scores = [w[0] @ (torch.tanh(v @ one) * torch.sigmoid(u @ one)) for one in apart]
        exponents = torch.stack(scores).exp()
        pooled = sum(a * one for a, one in zip(exponents / exponents.sum(), h, strict=True))
        torch.testing.assert_close(logits, model.head(pooled), atol=1e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("name", "pool"), [("mean", torch.mean), ("max", torch.amax)])
def test_mean_and_max(name, pool):
    model, images = network(name), torch.randn(2, 5, 3, 8, 8)
    pooled = torch.stack([pool(model.features(bag), dim=0) for bag in images])
    torch.testing.assert_close(model(images), model.head(pooled))


@torch.inference_mode()
@pytest.mark.parametrize("name", TILE_POOLINGS)
def test_padding_features_and_chunks_change_nothing(name):
    model, images = network(name), torch.randn(2, 5, 3, 8, 8)
    padded = torch.cat([images, images.new_full((2, 3, 3, 8, 8), -1.0)], dim=1)
    torch.testing.assert_close(model(padded), model(images))
    features = model.encode_tiles(images, lambda pixels: pixels)
    torch.testing.assert_close(model(features), model(images))
    blank = torch.zeros(1, 2, 3, 8, 8)  # nothing but padding: as it is
    assert model(blank).isfinite().all()


@pytest.mark.parametrize("name", TILE_POOLINGS)
def test_the_encoder_learns_from_some_tiles_and_the_pooling_from_all(name):
    model, images = network(name), torch.randn(1, LEARNED + 20, 3, 8, 8)
    images.requires_grad_()
    torch.manual_seed(1)
    model.train()
    logits = model(images)
    torch.testing.assert_close(logits, model.eval()(images))
    model.train()
    model(images)[0, 0].backward()
    learned = images.grad.flatten(2).abs().sum(-1)[0] > 0
    assert 0 < learned.sum() <= LEARNED
    if name == "attention":
        shares = model.tile_pool.shares(*model.encode_bags(images))[0, :, 0]
        assert learned[shares.argmax()]
        assert model.tile_pool.v.weight.grad.abs().sum() > 0


def test_attention_begins_at_a_tile_that_differs():
    model = network()
    h = torch.randn(1, 200, 16) * 0.1
    h[0, 17] += 2 * torch.randn(16)
    there = torch.ones(1, 200, dtype=torch.bool)
    shares = model.tile_pool.shares(h, there)[0, :, 0]
    assert shares.argmax() == 17
    assert shares[17] > 0.2
    assert model.tile_pool.v.weight.shape == (HIDDEN, 16)
