"""Parameters, FLOPs and bytes are those of the network, of operators by hand, and of torch."""

import dataclasses
from functools import cache
from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.slow_cases import mostly_slow
from vit.config import ModelConfig
from vit.config.presets import PRESETS
from vit.evaluation.model_summary import (
    Cost,
    FlopCounter,
    MemoryMeter,
    cost_of,
    forward_flops,
    record_calls,
)
from vit.model import layers
from vit.model.build import build_classifier

SMALL = ModelConfig(image_size=24, patch_size=8, dim=32, depth=2, num_heads=4, num_classes=5)
OPTIONS = [
    {},
    {"position": "rotary", "norm": "rmsnorm", "qk_norm": True},
    {"position": "sinusoidal_2d", "pooling": "mean", "registers": 3},
    {"position": "learned_rotary", "pooling": "attention", "layer_scale": 0.1},
    {"position": "none", "class_token": False, "pooling": "mean", "norm_order": "post"},
    {"feedforward": "swiglu", "hidden_dim": 40, "pooling": "class_token_mean", "norm_pre": True},
    {"norm_order": "sandwich", "num_kv_heads": 2, "repeat_blocks": 2},
    {"parallel_blocks": True, "feedforward": "swiglu_packed"},
    {"stem": "conv", "pooling": "mean"},
    {"stem": "conv", "stem_norm": "layernorm", "stem_depth": 4, "stem_width": 6, "channels": 4},
    {"num_classes": 0, "dropout": 0.1, "drop_path": 0.1, "channels": 5},
]


def changed(**options) -> ModelConfig:
    return dataclasses.replace(SMALL, **options)


@pytest.fixture(params=mostly_slow(OPTIONS), ids=lambda options: "-".join(options) or "usual")
def config(request) -> ModelConfig:
    return changed(**request.param)


@cache
def counted(config: ModelConfig) -> Cost:
    """The cost of a batch of two, counted once for all tests."""
    return cost_of(config, batch_size=2)


def products(network: nn.Module, images: torch.Tensor, monkeypatch) -> int:
    """Multiply-adds of a network at work: what its matrices and its attention are really given."""
    found = []

    def by_linear(module: nn.Linear, _given, made: torch.Tensor) -> None:
        found.append(made.numel() * module.in_features)

    def by_convolution(module: nn.Conv2d, _given, made: torch.Tensor) -> None:
        found.append(made.numel() * module.in_channels * prod(module.kernel_size))

    def by_attention(query, key, value, **options):
        scores = prod(query.shape[:-1]) * key.shape[-2]
        found.append(scores * (query.shape[-1] + value.shape[-1]))
        return real(query, key, value, **options)

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", by_attention)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(by_linear)
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(by_convolution)
    with torch.no_grad():
        network.eval()(images)
    assert len(found) > 5 * len(network.blocks)
    return sum(found)


def test_counts_what_a_real_network_does(config, monkeypatch):
    network = build_classifier(config)
    images = torch.randn(1, config.channels, config.image_size, config.image_size)
    cost = counted(config)
    assert cost.flops == 2 * products(network, images, monkeypatch)
    assert cost.parameters == sum(parameter.numel() for parameter in network.parameters())


def test_parts_add_up(config):
    cost = counted(config)
    blocks = next(part for part in cost.parts if part.name == "blocks").parts
    assert len(blocks) == config.depth
    for whole, parts in [(cost, cost.parts), *((block, block.parts) for block in blocks)]:
        assert whole.parameters == sum(part.parameters for part in parts)
        assert whole.flops == sum(part.flops for part in parts)
        assert "other" not in [part.name for part in parts]


@pytest.mark.usefixtures("flops_alone")
@pytest.mark.parametrize(
    ("name", "published"),
    [("vit_tiny_patch16_224", 1.3), ("vit_small_patch16_224", 4.6), ("vit_base_patch16_224", 17.6)],
)
def test_multiply_adds_are_those_of_the_papers(name, published):
    """Touvron et al., DeiT, arXiv:2012.12877, and its model zoo."""
    cost = cost_of(ModelConfig(**PRESETS[name]), batch_size=1)
    assert round(cost.flops / 2 / 1e9, 1) == published


def test_attention_and_feed_forward_by_hand():
    tokens, dim = 10, 32  # 3 x 3 patches and the class token
    cost = cost_of(SMALL, batch_size=1)
    names = ["patch embedding", "prefix tokens", "positions", "blocks", "last norm"]
    assert [part.name for part in cost.parts] == [*names, "pooling", "head"]
    shapes = [(9, 32), (10, 32), (10, 32), (10, 32), (10, 32), (32,), (5,)]
    assert [part.shape for part in cost.parts] == shapes
    attention, feedforward, norms = cost.parts[3].parts[0].parts
    assert attention.flops == 2 * (4 * tokens * dim**2 + 2 * tokens**2 * dim)
    assert feedforward.flops == 2 * 8 * tokens * dim**2
    assert attention.parameters == 4 * (dim**2 + dim)
    assert feedforward.parameters == 8 * dim**2 + 5 * dim
    assert norms.parameters == 4 * dim
    assert norms.flops == 0
    assert feedforward.kinds == ("MLP",)


class Chooser(nn.Module):
    """Asks its values which of two matrices to use, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[int(x.sum().item() > 0)]

    def forward_by_shape(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[0]


def test_a_part_that_asks_for_values_says_what_it_computes(monkeypatch):
    made = iter([nn.Identity, Chooser] * 2)
    monkeypatch.setitem(layers.FEEDFORWARDS, "mlp", lambda _: next(made)())
    blocks = cost_of(changed(depth=4), batch_size=2).parts[3].parts
    assert blocks[0] == blocks[2] != blocks[1] == blocks[3]
    chooser = next(part for part in blocks[1].parts if part.name == "feed-forward")
    assert chooser.kinds == ("Chooser",)
    assert chooser.parameters == 2 * 32 * 32
    assert chooser.flops == 2 * 10 * 32 * 32
    assert "feed-forward" not in [part.name for part in blocks[0].parts]


def kept_by_autograd(network: nn.Module, images: torch.Tensor) -> int:
    """Bytes that the backward pass needs, weights excluded, of tensors with real values."""
    kept, known = {}, {tensor.data_ptr() for tensor in network.state_dict().values()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        answers = network(images)
        loss = F.cross_entropy(answers, torch.zeros(len(images), dtype=torch.long))
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("options", [{}, {"feedforward": "swiglu", "position": "rotary"}])
def test_kept_is_what_autograd_keeps(options):
    config = changed(num_classes=5, **options)
    network, images = build_classifier(config).train(), torch.randn(8, 3, 24, 24)
    memory = cost_of(config, batch_size=8).memory
    assert memory.kept == pytest.approx(kept_by_autograd(network, images), rel=0.02)


def test_memory_adds_up():
    cost = cost_of(SMALL, batch_size=4)
    memory = cost.memory
    assert memory.weights == memory.gradients == 4 * cost.parameters
    assert memory.weights_bf16 == 2 * cost.parameters
    assert memory.moments == 8 * cost.parameters
    assert memory.weights < memory.inference < memory.training
    least = memory.weights + memory.moments + max(memory.gradients, memory.kept)
    assert least <= memory.training <= 1.5 * (least + memory.gradients)
    fixed = cost_of(changed(position="sinusoidal_2d"), batch_size=1)  # a weight, not a parameter
    assert fixed.memory.weights == 4 * (fixed.parameters + 10 * 32)


@pytest.mark.slow
def test_fused_attention_keeps_no_scores():
    """Kept bytes are linear in tokens with the fused kernel, and quadratic with dropout inside."""

    def kept(patches: int, **options) -> int:
        config = changed(image_size=8 * patches, depth=1, **options)
        return cost_of(config, batch_size=1).memory.kept

    assert kept(32) / kept(16) < 4.1
    assert kept(32, attention_dropout=0.1) / kept(16, attention_dropout=0.1) > 10


def test_the_largest_needs_no_memory():
    config = ModelConfig(**{**PRESETS["vit_huge_patch14_224"], "image_size": 5600, "depth": 1})
    assert cost_of(config, batch_size=4096).memory.training > 1e12


@pytest.mark.slow
def test_memory_of_training_is_that_of_the_smallest_patches():
    options = {"image_size": 48, "num_classes": 5}
    multilabel = cost_of(changed(**options, patch_sizes=(4, 16)), batch_size=3).memory
    small = cost_of(changed(**options, patch_size=4), batch_size=3).memory
    usual = cost_of(changed(**options), batch_size=3).memory
    assert multilabel.kept == pytest.approx(small.kept, rel=0.02)
    assert small.kept > 3 * usual.kept
    assert multilabel.inference < small.inference


def test_flops_alone_are_those_of_the_summary(config):
    assert forward_flops(build_classifier(config).eval(), config) == counted(config).flops


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.zeros(5, 7) @ torch.zeros(7, 3),
        lambda: F.linear(torch.zeros(2, 5, 7), torch.zeros(3, 7), torch.zeros(3)),
        lambda: torch.zeros(4, 5, 7) @ torch.zeros(4, 7, 3),
        lambda: torch.einsum("bhnd,bhmd->bhnm", torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 6, 5)),
        lambda: torch.baddbmm(torch.zeros(4, 5, 3), torch.zeros(4, 5, 7), torch.zeros(4, 7, 3)),
        lambda: F.conv2d(torch.zeros(2, 6, 9, 8), torch.zeros(4, 3, 3, 2), stride=2, groups=2),
    ],
)
def test_flops_are_those_of_torch(compute):
    with torch.no_grad(), FlopCounterMode(display=False) as theirs:
        compute()
    with torch.no_grad(), FlopCounter() as ours:
        compute()
    assert ours.total == theirs.get_total_flops() > 0


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="a newer torch has it")
def test_a_row_of_a_grouped_product_meets_one_matrix():
    rows, matrices = torch.zeros(16, 32).bfloat16(), torch.zeros(3, 32, 64).bfloat16()
    with FlopCounter() as counter:
        F.grouped_mm(rows, matrices, offs=torch.tensor([4, 8, 16], dtype=torch.int32))
    assert counter.total == 2 * 16 * 32 * 64


def test_the_meter_sees_what_is_freed():
    network = nn.Linear(2, 2)
    with torch.no_grad(), MemoryMeter(network) as meter:
        x = torch.zeros(256)
        for _ in range(10):
            x = x + 1
        y = x.view(16, 16)
        assert meter.live == x.nbytes
        del x, y
    assert meter.live == 0
    assert meter.peak == 2 * 1024


def test_calls_are_counted_and_have_shapes_without_the_batch():
    network = build_classifier(SMALL).eval()
    with torch.no_grad(), FlopCounter() as counter, record_calls(network, counter) as calls:
        network(torch.zeros(2, 3, 24, 24))
    head = calls[network.head]
    assert (head.input_shape, head.output_shape, head.count) == ((32,), (5,), 1)
    assert (head.flops, head.identity) == (2 * 2 * 32 * 5, False)
