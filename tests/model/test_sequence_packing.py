"""Packed images against each image by itself."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit.config import ModelConfig
from vit.errors import ConfigError
from vit.model import sequence_packing
from vit.model.attention import AttentionContext
from vit.model.blocks import DropPath, PreNormBlock
from vit.model.build import build_classifier
from vit.model.sequence_packing import PackedAttention, supports_varlen
from vit.model.vision_transformer import VisionTransformer

SMALL = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
# two alike, two of as many tokens, one of the usual size, one patch
SIZES = [(24, 16), (16, 16), (8, 40), (24, 16), (16, 24), (8, 8)]
KINDS = [
    {},
    {"registers": 2, "position": "sinusoidal_2d", "pooling": "mean"},
    {"position": "sinusoidal_1d", "norm_order": "post"},
    {"position": "rotary", "registers": 2, "qk_norm": True, "pooling": "class_token_mean"},
    {"position": "rotary", "rotary_grid": "centred", "class_token": False, "pooling": "mean"},
    {"position": "learned_rotary", "rotary_reference": 4, "num_kv_heads": 2},
    {"position": "none", "pooling": "attention", "feedforward": "swiglu"},
    {"parallel_blocks": True, "layer_scale": 0.1, "norm": "rmsnorm"},
    {"norm_order": "sandwich", "repeat_blocks": 2, "norm_pre": True},
    {"stem": "conv", "stem_width": 8, "position": "rotary", "rotary_grid": "mixed"},
]
half_on_cuda = pytest.mark.skipif(
    not supports_varlen(
        torch.empty(8, device="cuda" if torch.cuda.is_available() else "cpu").half()
    ),
    reason="needs torch 2.10 and a GPU that its variable-length kernel takes",
)


def network(**settings) -> VisionTransformer:
    torch.manual_seed(0)
    model = build_classifier(ModelConfig(**{**SMALL, **settings})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def input_images(sizes=SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *size, generator=generator) for size in sizes]


def alone(model: VisionTransformer, images: list[Tensor]) -> Tensor:
    return torch.cat([model(image[None]) for image in images])


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_packed_images_equal_each_image_by_itself(settings):
    model, images = network(**settings), input_images()
    torch.testing.assert_close(
        model.forward_packed(images), alone(model, images), rtol=1e-5, atol=1e-5
    )
    model, images = model.double(), [image.double() for image in images]
    packed, single = model.forward_packed(images), alone(model, images)
    torch.testing.assert_close(packed, single, rtol=1e-10, atol=1e-10)
    seed = torch.randn_like(packed)
    ours, theirs = (
        torch.autograd.grad(logits, list(model.parameters()), seed) for logits in (packed, single)
    )
    for (name, _), a, b in zip(model.named_parameters(), ours, theirs, strict=True):
        # a table of positions is stretched in float32
        loose = 1e3 if name == "pos_embed" else 1
        torch.testing.assert_close(a, b, rtol=1e-8 * loose, atol=1e-10 * loose)


def test_attention_is_called_once_for_each_run_of_equal_lengths(monkeypatch):
    calls = []
    monkeypatch.setattr(
        sequence_packing,
        "dot_product_attention",
        lambda q, *_, **__: calls.append(tuple(q.shape)) or q,
    )
    network(depth=1).forward_packed(input_images())
    assert calls == [(1, 4, 2, 8), (1, 4, 5, 8), (1, 4, 6, 8), (3, 4, 7, 8)]


def test_packed_attention_equals_a_block_diagonal_mask():
    lengths = [3, 5, 5, 1]
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, 4, 14, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    mask = torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    mixed = PackedAttention(lengths, query.device)(query, key, value)
    torch.testing.assert_close(mixed, expected)
    seed, inputs = torch.randn_like(mixed), (query, key, value)
    ours, theirs = (torch.autograd.grad(each, inputs, seed) for each in (mixed, expected))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ConfigError, match="packed images have no mask"):
        PackedAttention(lengths, query.device)(query, key, value, mask=mask)


def test_images_are_cut_out_of_a_batch_of_one_size():
    model, images = network(), input_images([(24, 8), (8, 8), (16, 16)])
    batch = torch.full((3, 3, 16, 16), torch.nan)
    for place, image in zip(batch, images, strict=True):
        place.flatten(1)[:, : image[0].numel()] = image.flatten(1)
    sizes = [(24, 8), (8, 8), (16, 16)]
    torch.testing.assert_close(model(batch, sizes), alone(model, images), rtol=1e-5, atol=1e-5)


def test_a_batch_norm_has_the_statistics_of_all_packed_images():
    model, images = network(stem="conv", stem_width=8).train(), input_images()
    model.encode_packed(images)
    found = model.patch_embed.norms[0].running_mean.clone()
    maps = [model.patch_embed.convs[0](image[None]).flatten(2) for image in images]
    torch.testing.assert_close(found, 0.1 * torch.cat(maps, dim=2).mean(dim=(0, 2)))


def test_drop_path_skips_whole_images_of_a_packed_row():
    torch.manual_seed(0)
    drop, lengths = DropPath(0.25), torch.tensor([2, 1, 4] * 500)
    kept = drop(torch.ones(1, int(lengths.sum()), 2), AttentionContext(lengths=lengths))
    images = torch.stack([part.mean() for part in kept[0].split(lengths.tolist())])
    expected = images.repeat_interleave(lengths)[:, None].expand(-1, 2)
    torch.testing.assert_close(kept[0], expected)
    assert {round(share, 3) for share in images.tolist()} == {0.0, 1.333}
    assert images.mean() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    "settings", [{"attention_dropout": 0.3, "dropout": 0.1}, {"drop_path": 0.2}]
)
def test_dropout_acts_only_in_training(settings):
    model, images = network(**settings), input_images()
    torch.testing.assert_close(model.forward_packed(images), alone(model, images))
    if "dropout" in settings:
        model.train()
        assert not torch.equal(model.forward_packed(images), model.forward_packed(images))


def test_packing_works_in_bfloat16_under_autocast():
    model, images = network(qk_norm=True), input_images()
    with torch.autocast("cpu", torch.bfloat16):
        packed = model.forward_packed(images)
    torch.testing.assert_close(packed.float(), alone(model, images), rtol=0.1, atol=0.15)


def test_networks_without_pooling_have_no_packed_features():
    model = network(pooling="none", num_classes=0)
    for method in (model.forward_packed, model.features_packed):
        with pytest.raises(ConfigError, match=r"pooling=none: .* encode_images_packed"):
            method(input_images())
    assert sum(len(tokens) for _, tokens, _ in model.encode_packed(input_images())) == len(
        input_images()
    )


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"position": "relative"}, "position=relative"),
        ({"feedforward": "moe", "capacity_factor": 1.0}, "capacity_factor"),
        ({}, "merge_tokens"),
    ],
)
def test_parts_that_would_mix_packed_images_are_refused(settings, part):
    model = network(**settings).train()
    if not settings:
        model.blocks[1].__class__ = type("Merging", (PreNormBlock,), {})
    with pytest.raises(ConfigError, match=f"cannot be packed with {part}"):
        model.forward_packed(input_images())


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], r"images of \[\]: give one or more of \(channels, height, width\)"),
        ([torch.zeros(1, 3, 16, 16)], r"images of \[\(1, 3, 16, 16\)\]"),
        ([torch.zeros(3, 16, 16), torch.zeros(3, 16, 20)], "width=20 is not a multiple"),
        ([torch.zeros(1, 16, 16)], "images have 1 channels"),
    ],
)
def test_images_that_cannot_be_packed_are_refused(images, message):
    with pytest.raises(ValueError, match=message):
        network().forward_packed(images)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"position": "rotary", "pooling": "mean"}], ids=str)
def test_packing_compiles_as_one_graph_for_a_set_of_sizes(settings):
    model, images = network(**settings), input_images()
    compiled = torch.compile(model.forward_packed, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model.forward_packed(images))


@pytest.mark.skipif(not sequence_packing.HAS_VARLEN, reason="torch has no variable-length kernel")
def test_the_variable_length_kernel_is_used_only_for_supported_inputs():
    assert not supports_varlen(torch.empty(1, 1, 4, 8, dtype=torch.bfloat16))
    assert not supports_varlen(torch.empty(1, 1, 4, 8))


@pytest.mark.gpu
@half_on_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_the_variable_length_kernel_equals_the_split(monkeypatch, dtype, head_dim):
    lengths = [200, 3, 3, 64, 1]
    query, key, value = (
        torch.randn(1, 4, sum(lengths), head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    attention = PackedAttention(lengths, query.device)
    fused = attention(query, key, value)
    monkeypatch.setattr(sequence_packing, "supports_varlen", lambda _: False)
    split = attention(query, key, value)
    torch.testing.assert_close(fused, split, rtol=0.02, atol=0.02)
    seed, inputs = torch.randn_like(split), (query, key, value)
    ours, theirs = (torch.autograd.grad(each, inputs, seed) for each in (fused, split))
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


@pytest.mark.gpu
@half_on_cuda
@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_packed_images_equal_each_image_by_itself_on_cuda(settings):
    model, images = network(**settings).cuda(), [image.cuda() for image in input_images()]
    torch.testing.assert_close(
        model.forward_packed(images), alone(model, images), rtol=1e-3, atol=1e-3
    )
    with torch.autocast("cuda", torch.bfloat16):
        packed, single = model.forward_packed(images), alone(model, images)
    torch.testing.assert_close(packed, single, rtol=0.1, atol=0.2)
