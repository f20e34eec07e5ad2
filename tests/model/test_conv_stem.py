"""The convolutional stem is the network that torch's own layers and timm's blocks make."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tests.slow_cases import mostly_slow
from vit.config import ModelConfig
from vit.model.build import build_classifier
from vit.model.normalization import BatchNorm

SMALL = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
NORMS = ("batchnorm", "layernorm")
# patch_size, stem_depth -> stride of the first convolution, convolutions with a pooling after them
PLACES = [
    (1, 1, 1, ()),
    (1, 3, 1, ()),
    (2, 1, 1, (0,)),
    (2, 3, 1, (2,)),
    (4, 2, 1, (0, 1)),
    (4, 3, 1, (1, 2)),
    (8, 2, 2, (0, 1)),
    (8, 3, 2, (1, 2)),
    (16, 3, 2, (0, 1, 2)),
    (16, 4, 2, (1, 2, 3)),
    (32, 4, 2, (0, 1, 2, 3)),
    (8, 4, 1, (1, 2, 3), 1),  # stem_stride is given
    (4, 2, 2, (1,), 2),
]


class LayerNorm2d(nn.GroupNorm):
    """torch's LayerNorm on the last axis, by moving the axes to and fro."""

    def __init__(self, width: int) -> None:
        super().__init__(1, width, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.layer_norm(
            x.movedim(1, -1), x.shape[1:2], self.weight, self.bias, self.eps
        )
        return rows.movedim(-1, 1)


class Reference(nn.Module):
    """What timm takes as `embed_layer`, of torch's layers in a row."""

    def __init__(self, *, norm, stride, pools, widths, patch_size, img_size=32, **_) -> None:
        super().__init__()
        layers = []
        for index, (before, after) in enumerate(zip((3, *widths), widths, strict=False)):
            by = stride if index == 0 else 1
            layers.append(nn.Conv2d(before, after, 3, by, 1, bias=False))
            layers += [nn.BatchNorm2d(after) if norm == "batchnorm" else LayerNorm2d(after)]
            layers += [nn.GELU(), *[nn.MaxPool2d(2, 2)] * (index in pools)]
        self.body = nn.Sequential(*layers)
        self.num_patches = (img_size // patch_size) ** 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images).flatten(2).transpose(1, 2)


def image_size(patch_size: int) -> int:
    """No more than 64 patches."""
    return min(32, 8 * patch_size)


def pair(norm, patch_size, depth, stride, pools, given=None):
    """Our network and timm's with random weights, the same in both, in float64."""
    torch.manual_seed(0)
    size = image_size(patch_size)
    options = {**SMALL, "image_size": size, "patch_size": patch_size, "stem_depth": depth}
    ours = build_classifier(
        ModelConfig(**options, stem="conv", stem_norm=norm, stem_stride=given)
    ).double()
    widths = [*[8, 16, 32][: depth - 1], 32]

    def embed(**given):
        return Reference(norm=norm, stride=stride, pools=pools, widths=widths, **given)

    theirs = VisionTransformer(
        img_size=size, patch_size=patch_size, embed_dim=32, depth=2, num_heads=4, num_classes=3,
        embed_layer=embed,
    ).double()  # fmt: skip
    own = [(n, p) for n, p in ours.named_parameters() if not n.startswith("patch_embed.")]
    rest = {n: p for n, p in theirs.named_parameters() if not n.startswith("patch_embed.")}
    assert {name for name, _ in own} == rest.keys()
    stem = ours.patch_embed
    order = [part for two in zip((*stem.convs, stem.proj), stem.norms, strict=True) for part in two]
    kinds = (nn.Conv2d, nn.BatchNorm2d, LayerNorm2d)
    layers = [layer for layer in theirs.patch_embed.body if isinstance(layer, kinds)]
    with torch.no_grad():
        for layer, mine in zip(layers, order, strict=True):
            for name, tensor in mine.state_dict().items():
                tensor.add_(torch.rand_like(tensor) * 0.3)
                layer.state_dict()[name].copy_(tensor)
        for name, parameter in own:
            parameter.add_(torch.randn_like(parameter) * 0.1)
            rest[name].copy_(parameter)
    return ours, theirs


@pytest.mark.parametrize("norm", mostly_slow(NORMS))
@pytest.mark.parametrize("context", PLACES, ids=lambda p: f"patch{p[0]}-depth{p[1]}-stride{p[2]}")
@pytest.mark.parametrize("training", [True, False])
def test_the_conv_stem_equals_torch_s_layers(norm, context, training):
    ours, theirs = pair(norm, *context)
    side = image_size(context[0])
    images = torch.randn(3, 3, side, side, dtype=torch.float64)
    ours.train(training), theirs.train(training)
    logits, expected = ours(images), theirs(images)
    torch.testing.assert_close(logits, expected)
    logits.square().sum().backward(), expected.square().sum().backward()
    stem = ours.patch_embed
    first = (*stem.convs, stem.proj)[0].weight.grad
    assert first.any()
    torch.testing.assert_close(first, theirs.patch_embed.body[0].weight.grad)
    statistics = [b for n, b in theirs.named_buffers() if "running" in n]
    mine = [b for n, b in ours.named_buffers() if "running" in n]
    assert bool(mine) == (norm == "batchnorm")
    for one, other in zip(mine, statistics, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("norm", NORMS)
def test_the_conv_stem_accepts_any_memory_format(norm):
    model = build_classifier(ModelConfig(**SMALL, stem="conv", stem_norm=norm)).double()
    images = torch.randn(2, 3, 32, 64, dtype=torch.float64)
    expected, grid = model.patch_embed(images)
    assert grid == (4, 8)
    strided = torch.randn(2, 32, 3, 128, dtype=torch.float64)[..., ::2].transpose(1, 2)
    strided.copy_(images)
    for other in (images.contiguous(memory_format=torch.channels_last), strided):
        torch.testing.assert_close(model.patch_embed(other)[0], expected)


def test_distributed_batch_statistics_equal_torch_s():
    torch.manual_seed(0)
    x = torch.randn(4, 5, 3, 3, dtype=torch.float64, requires_grad=True)
    ours, by_sums = BatchNorm(5).double(), BatchNorm(5).double()
    by_sums.sum_over_processes = lambda mine: 1 * mine
    weights = torch.randn(4, 5, 3, 3, dtype=torch.float64)
    first, second = ours(x), by_sums(x)
    torch.testing.assert_close(first, second)
    (gradient,) = torch.autograd.grad((first * weights).sum(), x)
    (other,) = torch.autograd.grad((second * weights).sum(), x)
    torch.testing.assert_close(gradient, other)
    torch.testing.assert_close(ours.running_mean, by_sums.running_mean)
    torch.testing.assert_close(ours.running_var, by_sums.running_var)


@pytest.mark.parametrize("total", [None, lambda mine: 1 * mine])
@pytest.mark.parametrize("count", [0, 2])
def test_an_empty_batch_or_a_placeholder_image_does_not_change_the_statistics(total, count):
    torch.manual_seed(0)
    norm = BatchNorm(5)
    norm.sum_over_processes = total
    norm.updates_statistics = count == 0
    x = torch.randn(count, 5, 3, 3, requires_grad=True)
    norm(x)[:0].sum().backward()
    assert not x.grad.any()
    assert not norm.running_mean.any()
    assert torch.equal(norm.running_var, torch.ones(5))
    norm.updates_statistics = True
    norm(torch.randn(2, 5, 3, 3))
    assert norm.running_mean.all()


def test_the_statistics_of_a_frozen_stem_do_not_change():
    model = build_classifier(ModelConfig(**SMALL, stem="conv"))
    model.patch_embed.requires_grad_(False)
    model.train()
    images = torch.randn(2, 3, 32, 32)
    tokens = model.patch_embed(images)[0]
    assert torch.equal(tokens, model.eval().patch_embed(images)[0])
    assert not any(norm.running_mean.any() for norm in model.patch_embed.norms)
    model.patch_embed.requires_grad_(True)
    model.train().patch_embed(images)
    assert all(norm.running_mean.any() for norm in model.patch_embed.norms)
