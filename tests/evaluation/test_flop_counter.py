"""FLOPs and bytes of operators, counted by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vit.config import ModelConfig
from vit.evaluation.flop_counter import FlopCounter, MemoryMeter, record_calls, shape_of
from vit.model.build import build_classifier


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


def test_calls_have_shapes_without_the_batch_and_flops():
    config = ModelConfig(image_size=16, patch_size=8, dim=32, depth=1, num_heads=2, num_classes=5)
    network = build_classifier(config).eval()
    with (
        torch.no_grad(),
        FlopCounter() as counter,
        record_calls(network, counter) as calls,
    ):
        network(torch.zeros(2, 3, 16, 16))
    head = calls[network.head]
    assert (head.input_shape, head.output_shape, head.count) == ((32,), (5,), 1)
    assert head.flops == 2 * 2 * 32 * 5
    assert not head.identity
    assert calls[network.blocks].output_shape == (5, 32)


def test_the_shape_of_a_nested_value_is_that_of_its_first_tensor():
    assert shape_of((None, [torch.zeros(2, 3, 4)])) == (3, 4)
    assert shape_of(None) is None
