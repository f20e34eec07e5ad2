"""FLOP and memory counter: FLOPs and shapes of the modules of a network, bytes of its tensors."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vit.model.vision_transformer import VisionTransformer


def weight_tensors(network: nn.Module) -> list[Tensor]:
    """Parameters and buffers of `network`."""
    return [*network.parameters(), *network.buffers()]


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operators allocate: in use, and at their peak."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in weight_tensors(network)}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:  # a view, or written in place
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, size).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def product_flops(*operands: Any, out: Tensor, **_: Any) -> int:
    """The last two operands multiplied, (..., n, k) and (..., k, m), with or without a bias."""
    return 2 * out.numel() * int(operands[-2].shape[-1])


def convolution_flops(_input: Tensor, weight: Tensor, *_: Any, out: Tensor, **__: Any) -> int:
    """Each number of `out`, not transposed, from (in / groups, height, width) others."""
    return 2 * out.numel() * math.prod(weight.shape[1:])


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Q Kᵀ and the weighted sum of the values; shapes are (batch, heads, tokens, head_dim)."""
    batch, heads, tokens, head_dim = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (head_dim + value.shape[-1])


def grouped_flops(rows: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Each row of (rows, in) times one of the matrices (groups, out, in)."""
    return 2 * rows.shape[0] * weight.shape[-2] * weight.shape[-1]


# Those of torch.utils.flop_counter for what these networks use, and operators that some supported
# version of torch does not count; importing that module imports triton, which costs 0.3 s, and a
# second when the process ends.
FORMULAS: dict[tuple[str, str], Callable[..., int]] = {
    ("aten", "mm"): product_flops,
    ("aten", "addmm"): product_flops,
    ("aten", "bmm"): product_flops,
    ("aten", "baddbmm"): product_flops,
    ("aten", "convolution"): convolution_flops,
    ("aten", "_scaled_dot_product_flash_attention_for_cpu"): attention_flops,
    ("aten", "_scaled_dot_product_flash_attention"): attention_flops,
    ("aten", "_scaled_dot_product_efficient_attention"): attention_flops,
    ("aten", "_scaled_dot_product_cudnn_attention"): attention_flops,
    ("aten", "_grouped_mm"): grouped_flops,
    ("vit", "looped_linear"): grouped_flops,
}


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts convolutions, matrix products, and attention in every fused form.

    Unlike torch's FlopCounterMode it does not import the compiler, which takes a second. It does
    not see what torch composes of other operators in inference mode: use `torch.no_grad`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.formulas: dict[Any, Callable[..., int]] = {}
        for (space, name), formula in FORMULAS.items():
            if hasattr(getattr(torch.ops, space), name):
                self.formulas[getattr(getattr(torch.ops, space), name)] = formula

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps the function below, for which it imports the compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if (formula := self.formulas.get(func._overloadpacket)) is not None:
            self.total += formula(*args, **kwargs, out=made)
        return made


@dataclass
class Calls:
    """The calls of one module: shapes without the batch, and FLOPs over all of them."""

    input_shape: tuple[int, ...] | None = None
    output_shape: tuple[int, ...] | None = None
    flops: int = 0
    count: int = 0
    identity: bool = True
    """Whether it returned its input every time."""
    start: int = field(default=0, repr=False)
    """Total FLOPs before the present call."""


@contextmanager
def record_calls(
    network: VisionTransformer, counter: FlopCounter
) -> Iterator[dict[nn.Module, Calls]]:
    """Record the calls of the network's parts, its blocks and their parts, inside the `with`."""
    blocks = [*dict.fromkeys(network.blocks)]
    modules = [*network.children(), *blocks]
    modules += [part for block in blocks for part in block.children()]
    seen = {module: Calls() for module in modules}

    def before(module: nn.Module, given: tuple[Any, ...]) -> None:
        seen[module].input_shape, seen[module].start = shape_of(given), counter.total

    def after(module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        calls = seen[module]
        calls.output_shape = shape_of(made)
        calls.flops += counter.total - calls.start
        calls.count += 1
        calls.identity &= first_tensor(made) is first_tensor(given)

    with ExitStack() as hooks:
        for module in seen:
            hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        yield seen
    seen[network.blocks] = Calls(  # a list is never called itself
        seen[blocks[0]].input_shape,
        seen[blocks[-1]].output_shape,
        sum(seen[block].flops for block in blocks),
        seen[blocks[0]].count,
        identity=False,
    )


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a nested structure."""
    return next((leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), None)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Shape of the first tensor in `value`, without the batch; None if there is none."""
    tensor = first_tensor(value)
    return None if tensor is None else tuple(tensor.shape[1:])
