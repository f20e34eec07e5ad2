"""Grouped linear layer: each group of consecutive rows has its own weight matrix.

    y_i = x_i W_gᵀ + b_g        for the rows i of group g

The group lengths vary from batch to batch.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """One linear layer for each group, by the faster of two equivalent implementations.

    In bfloat16 torch's `grouped_mm` runs all groups at once on newer GPUs, without synchronising
    for the lengths. Elsewhere it is a loop over the groups; `looped_linear` is one too, but fuses
    the bias and writes gradients in place: on a CPU it takes as long as one product of all rows,
    forward and backward, and torch's takes 4% longer.

    Args:
        x: Rows, sorted by group, (rows, in); those after the last group give any finite value.
        weight: (groups, out, in).
        bias: (groups, out), or None.
        counts: Rows of each group, (groups,).

    Returns:
        (rows, out).
    """
    linear = fused_linear if _is_fused(x, weight) else looped_linear
    return linear(x, autocasted(weight), None if bias is None else autocasted(bias), counts)


def _is_fused(x: Tensor, weight: Tensor) -> bool:
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0  # 16 bytes
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


def is_exporting() -> bool:
    """Whether torch.export traces; torch 2.8 reports it for torch.compile too."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def autocast_device(tensor: Tensor) -> str:
    """Device type whose autocast applies to `tensor`; the meta device has none."""
    device = tensor.device.type
    return "cpu" if device == "meta" else device


def autocasted(tensor: Tensor) -> Tensor:
    """`tensor` in the type of autocast, where one is on."""
    device = autocast_device(tensor)
    on = torch.is_autocast_enabled(device)
    return tensor.to(torch.get_autocast_dtype(device)) if on else tensor


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """`grouped_linear` by torch's kernel; rows after the last group use its weights."""
    ends = F.pad(counts[:-1].cumsum(0), (0, 1), value=x.shape[0])
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    if bias is None:
        return y
    rows = torch.arange(x.shape[0], device=x.device)
    group = F.one_hot(torch.searchsorted(ends, rows, right=True), len(counts))
    return torch.addmm(y, group.to(y.dtype), bias)  # the gradient is a product too, not a scatter


@torch.library.custom_op("vit::looped_linear", mutates_args=())
def looped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """`grouped_linear` group by group; rows after the last group give zeros.

    A custom operator, since torch.compile cannot trace loops of unknown lengths.
    """
    lengths: list[int] = counts.tolist()
    y = x.new_empty(x.shape[0], weight.shape[1])
    y[sum(lengths) :] = 0
    for group, (rows, out) in enumerate(zip(_parts(x, lengths), _parts(y, lengths), strict=True)):
        if bias is None:
            torch.mm(rows, weight[group].T, out=out)
        else:
            torch.addmm(bias[group], rows, weight[group].T, out=out)
    return y


@torch.library.custom_op("vit::looped_outer", mutates_args=())
def looped_outer(y: Tensor, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Σ y_i x_iᵀ (groups, out, in) and Σ y_i (groups, out), over the rows of each group."""
    lengths: list[int] = counts.tolist()
    products = x.new_empty(len(lengths), y.shape[1], x.shape[1])
    sums = x.new_empty(len(lengths), y.shape[1])
    for group, (left, right) in enumerate(zip(_parts(y, lengths), _parts(x, lengths), strict=True)):
        torch.mm(left.T, right, out=products[group])
        torch.sum(left, 0, out=sums[group])
    return products, sums


def _parts(rows: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    return torch.split(rows[: sum(lengths)], lengths)


@looped_linear.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor | None, _counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@looped_outer.register_fake
def _(y: Tensor, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    groups = counts.shape[0]
    return x.new_empty(groups, y.shape[1], x.shape[1]), x.new_empty(groups, y.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], **_: Any) -> None:
    x, weight, bias, counts = inputs
    ctx.save_for_backward(x, weight, counts)
    ctx.has_bias = bias is not None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, counts = ctx.saved_tensors
    grad_x = looped_linear(grad, weight.transpose(1, 2), None, counts)
    if not any(ctx.needs_input_grad[1:3]):
        return grad_x, None, None, None
    products, sums = looped_outer(grad, x, counts)
    return grad_x, products, sums if ctx.has_bias else None, None


@cache
def register_flops() -> None:
    """Register FLOP formulas of our operators; its import takes 0.3 s, so it is not at the top."""
    from torch.utils.flop_counter import register_flop_formula

    @register_flop_formula([torch.ops.vit.looped_linear, torch.ops.vit.looped_outer])
    def flops(rows: tuple[int, int], others: tuple[int, int], *_: Any, **__: Any) -> int:
        return 2 * rows[0] * rows[1] * others[1]  # `others` is (groups, out, in), or rows as well


looped_linear.register_autograd(_gradients, setup_context=_keep)


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, index // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = grad.index_select(0, inverse)
        return back.view(-1, ctx.copies, back.shape[1]).sum(1), None, None, None


def permute_rows(x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Repeat each row of `x` `copies` times and permute the result, (rows * copies, width).

    The gradient is a gather too: a scatter-add has no deterministic order on a GPU.

    Args:
        x: (rows, width).
        index: Permutation of the copies; those of row 0 come first, then those of row 1.
        inverse: The inverse permutation.
        copies: Copies of each row.
    """
    rows: Tensor = _PermuteRows.apply(x, index, inverse, copies)
    return rows
