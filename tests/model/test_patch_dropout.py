"""Patch dropout against timm's, and its context against that of a network that sees all patches."""

import pytest
import torch
from timm.layers import PatchDropoutWithIndices

from vit.config import ModelConfig
from vit.model.attention import AttentionContext
from vit.model.build import build_classifier
from vit.model.patch_dropout import PatchDropout, gather_tokens
from vit.model.rotary_embedding import RotaryEmbedding, index_coordinates

SMALL = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_patch_dropout_keeps_the_same_tokens_as_timm(prefix):
    theirs = PatchDropoutWithIndices(0.75, num_prefix_tokens=prefix)
    tokens = torch.randn(4, prefix + 16, 5)
    kept, index = theirs(tokens)
    ours = PatchDropout(0.75, prefix=prefix)
    drawn = ours.sample_indices(tokens)
    assert drawn.shape == (4, prefix + index.shape[1]) == kept.shape[:2]
    drawn[:, prefix:] = prefix + index
    assert torch.equal(gather_tokens(tokens, AttentionContext(), drawn)[0], kept)


def test_kept_patches_stay_in_order():
    drawn = PatchDropout(0.5, prefix=1).sample_indices(torch.zeros(20, 33, 1))
    assert torch.equal(drawn, drawn.sort(dim=1).values)
    whole = PatchDropout(0.01, prefix=1).sample_indices(torch.zeros(20, 33, 1))
    assert torch.equal(whole, torch.arange(33).expand(20, -1))


def test_each_image_and_step_drops_other_patches_and_evaluation_drops_none():
    layer, tokens = PatchDropout(0.5, prefix=2), torch.arange(18.0).repeat(3, 1)[..., None]
    first, second = (layer(tokens, AttentionContext())[0][..., 0] for _ in range(2))
    for row in (*first, *second):
        assert row[:2].tolist() == [0, 1]
        assert len(set(row.tolist())) == 10
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert layer.eval()(tokens, AttentionContext())[0] is tokens


def test_every_patch_is_kept_equally_often():
    torch.manual_seed(0)
    drawn = PatchDropout(0.75, prefix=1).sample_indices(torch.zeros(4000, 17, 1))
    often = drawn.flatten().bincount(minlength=17) / 4000
    assert often[0] == 1
    torch.testing.assert_close(often[1:], torch.full((16,), 0.25), atol=0.03, rtol=0)


@pytest.mark.parametrize(("share", "kept"), [(0.5, 8), (0.9, 2), (0.97, 1), (0.999, 1), (0.01, 16)])
def test_the_number_of_kept_patches_is_rounded_and_at_least_one(share, kept):
    assert PatchDropout(share, prefix=1).sample_indices(torch.zeros(1, 17, 1)).shape == (
        1,
        1 + kept,
    )


def test_kept_patches_are_rotated_by_their_own_positions():
    rotary = RotaryEmbedding(8, coordinates=index_coordinates, temperature=100.0, prefix=1)
    x = torch.randn(2, 3, 13, 8)
    rotate = rotary((3, 4), x)
    index = PatchDropout(0.5, prefix=1).sample_indices(x[:, 0])
    _, context = gather_tokens(x[:, 0], AttentionContext(rope=rotate), index)
    kept = torch.stack([x[i, :, index[i]] for i in range(2)])
    whole = torch.stack([rotate(x)[i, :, index[i]] for i in range(2)])
    assert torch.equal(context.rope(kept), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "merge_tokens"),
    [("rotary", 2), ("learned", 0)],
)
def test_patch_dropout_compiles_as_one_graph_and_uses_torch_s_generator(position, merge_tokens):
    settings = {
        **SMALL,
        "depth": 1,
        "patch_dropout": 0.5,
        "position": position,
        "merge_tokens": merge_tokens,
    }
    model = build_classifier(ModelConfig(**settings))
    torch.nn.init.normal_(model.head.weight)
    compiled, images = (
        torch.compile(model, backend="eager", fullgraph=True),
        torch.randn(2, 3, 32, 32),
    )
    outputs = []
    for network in (model, compiled, model):
        torch.manual_seed(1)
        outputs.append(network(images))
    torch.testing.assert_close(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])
    assert not torch.equal(model(images), outputs[0])
    assert model.forward_features(images).shape == (2, 1 + 8 - merge_tokens, 32)
