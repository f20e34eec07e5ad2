"""Model summary: parameters, FLOPs and memory of each part of a network, before it is trained.

The network runs once on tensors that have shapes and no values, so the largest takes seconds and no
memory, and new parts count by themselves. A FLOP is a multiplication or an addition in a product of
matrices or in attention, 2 for each multiply-add, of which papers often count 1: DeiT's "4.6 G" are
9.2 GFLOPs here. Norms, softmax, activations and sums are left out: about one in a hundred.

Each expert's work is counted for the tokens that it gets. An operator of our own has its formula
in FORMULAS below. A module that reads values, and is no operator, has a method `forward_by_shape`:
the arguments of its `forward`, the same shapes and the same work, without values.

Memory is that of float32. Tensors are followed from the operator that makes them until they are
freed, with the CPU's fused attention, which keeps no scores. Buffers inside kernels, gaps of the
allocator and libraries are not in it: measured, a process took 0.94 to 1.05 times the estimate
beside libraries and weights (docs/network.md).
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vit.config import ModelConfig
from vit.errors import ConfigError
from vit.model.build import assemble_model
from vit.model.patch_embed import FlexiblePatchEmbedding
from vit.model.vision_transformer import VisionTransformer
from vit.text import align_columns, format_bytes, format_count, printable

MAX_NUMBERS = 2**60
"""Elements of a tensor: more bytes cannot be counted in 64 bits."""
Member = nn.Module | nn.Parameter

# names of modules and parameters -> the rows of a table, in its order; others have their own name
NETWORK = {
    "patch_embed": "patch embedding",
    "cls_token": "prefix tokens",
    "reg_token": "prefix tokens",
    "pos_embed": "positions",
    "positions": "positions",
    "rotary": "positions",
    "norm_pre": "norm before the blocks",
    "blocks": "blocks",
    "norm": "last norm",
    "attn_pool": "pooling",
    "fc_norm": "norm of what is pooled",
    "head": "head",
}
BLOCK = {
    "attn": "attention",
    "mlp": "feed-forward",
    **dict.fromkeys(("norm1", "norm1_post", "norm2", "norm2_post"), "norms"),
    **dict.fromkeys(("ls1", "ls2"), "layer scales"),
}


def weight_tensors(network: nn.Module) -> list[Tensor]:
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


CallsOf = dict[nn.Module, Calls]


@contextmanager
def record_calls(network: VisionTransformer, counter: FlopCounter) -> Iterator[CallsOf]:
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
    """Shape of the first tensor in `value`, without the batch, or None."""
    tensor = first_tensor(value)
    return None if tensor is None else tuple(tensor.shape[1:])


@dataclass(frozen=True)
class Part:
    """One row of the table, for one image; `shape` is without the batch, None of several tensors,
    and a multiply-add is 2 FLOPs."""

    name: str
    kinds: tuple[str, ...]
    shape: tuple[int, ...] | None
    parameters: int
    flops: int
    calls: int = 1
    parts: tuple["Part", ...] = ()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Estimated bytes, in float32 unless named otherwise."""

    weights: int
    weights_bf16: int
    inference: int
    batch_size: int
    gradients: int
    moments: int
    kept: int
    training: int


@dataclass(frozen=True)
class Cost:
    """Cost of a whole network; its part "blocks" has a part for each block."""

    parts: tuple[Part, ...]
    parameters: int
    flops: int
    memory: Memory


def cost_of(config: ModelConfig, *, batch_size: int) -> Cost:
    """Count what the network of `config` costs, without building it in memory."""
    _check_countable(config, batch_size)
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = assemble_model(config)
        for module in network.modules():
            if (by_shape := getattr(module, "forward_by_shape", None)) is not None:
                setattr(module, "forward", by_shape)  # noqa: B010
        with (
            torch.no_grad(),
            MemoryMeter(network) as meter,
            FlopCounter() as counter,
            record_calls(network.eval(), counter) as calls,
        ):
            network(images(config, 1))
        weights = sum(tensor.nbytes for tensor in weight_tensors(network))
        numbers = [*network.parameters()]
        learned = sum(parameter.numel() for parameter in numbers)
        kept, peak = step_memory(network, config, batch_size)
    moments = 2 * sum(parameter.nbytes for parameter in numbers)
    memory = Memory(
        weights=weights,
        weights_bf16=weights // 2,
        inference=weights + meter.peak,
        batch_size=batch_size,
        gradients=moments // 2,
        moments=moments,
        kept=kept,
        training=weights + moments + peak,
    )
    total = counter.total
    parts = part_rows(network, NETWORK, calls)
    return Cost(with_remainder(parts, learned, total), learned, total, memory)


def forward_flops(network: VisionTransformer, config: ModelConfig) -> int:
    """FLOPs of one image, forward, as `cost_of` counts them: of a network with its weights.

    It computes one blank image. Without numbers, as there, torch has to import its compiler, which
    takes longer.
    """
    weight = next(network.parameters())
    blank = images(config, 1).to(weight)
    with torch.no_grad(), FlopCounter() as counter:
        network.forward_head(*network.encode(blank))
    return int(counter.total)


def _check_countable(config: ModelConfig, batch_size: int) -> None:
    rows, cols = config.grid
    tokens = rows * cols + config.num_prefix_tokens
    widest = max(config.dim, config.feedforward_dim, config.patch_size**2 * config.channels)
    numbers = max(
        batch_size * tokens * max(3 * widest, config.num_heads * tokens),
        widest * max(3 * widest, config.num_classes),
    )
    if numbers > MAX_NUMBERS:
        raise ConfigError(
            f"a tensor of this network has about {numbers:.0e} numbers for a batch of "
            f"{batch_size}; choose smaller sizes"
        )


def images(config: ModelConfig, count: int) -> Tensor:
    """Images of the network's size, (count, channels, image_size, image_size)."""
    return torch.zeros(count, config.channels, config.image_size, config.image_size)


def step_memory(network: VisionTransformer, config: ModelConfig, size: int) -> tuple[int, int]:
    """Bytes beside weights and moments: kept for the backward pass, and the peak of a step."""
    patches = network.patch_embed
    if isinstance(patches, FlexiblePatchEmbedding):
        patches.current_patch_size = min(patches.resize_matrices)  # which makes the most tokens
    with MemoryMeter(network) as meter:
        answers = network.train()(images(config, size))
        labels = torch.zeros(size, dtype=torch.long)
        loss = F.cross_entropy(answers, labels) if config.num_classes else answers.mean()
        kept = meter.live
        loss.backward()
    return kept, meter.peak


def part_rows(owner: nn.Module, labels: Mapping[str, str], calls: CallsOf) -> tuple[Part, ...]:
    """The parts of `owner` in the order of `labels`, those of one label together."""
    groups: dict[str, list[Member]] = {label: [] for label in labels.values()}
    own: list[tuple[str, Member]] = [*owner.named_parameters(recurse=False)]
    for name, member in [*own, *owner.named_children()]:
        groups.setdefault(labels.get(name, name), []).append(member)
    parts: list[Part] = []
    next_input = None  # which is the output of a row without a module
    for label, members in reversed(groups.items()):
        modules = [member for member in members if isinstance(member, nn.Module)]
        active = [module for module in modules if not calls[module].identity]
        if active or len(modules) < len(members):
            shapes = [calls[module].output_shape for module in active]
            blocks = [*chain.from_iterable(m for m in active if isinstance(m, nn.ModuleList))]
            parts.append(
                Part(
                    name=label,
                    kinds=tuple(dict.fromkeys(type(each).__name__ for each in blocks or active)),
                    shape=next((shape for shape in reversed(shapes) if shape), next_input),
                    parameters=count_learned(members),
                    flops=sum(calls[module].flops for module in active),
                    calls=max((calls[module].count for module in active), default=1),
                    parts=tuple(block_row(block, calls) for block in dict.fromkeys(blocks)),
                )
            )
        inputs = [calls[module].input_shape for module in modules]
        next_input = next((shape for shape in inputs if shape), next_input)
    return tuple(reversed(parts))


def block_row(block: nn.Module, calls: CallsOf) -> Part:
    seen, learned = calls[block], count_learned([block])
    return Part(
        name="block",
        kinds=(type(block).__name__,),
        shape=seen.output_shape,
        parameters=learned,
        flops=seen.flops,
        calls=seen.count,
        parts=with_remainder(part_rows(block, BLOCK, calls), learned, seen.flops),
    )


def count_learned(members: Sequence[Member]) -> int:
    return sum(
        parameter.numel()
        for member in members
        for parameter in ([member] if isinstance(member, nn.Parameter) else member.parameters())
    )


def with_remainder(parts: tuple[Part, ...], parameters: int, flops: int) -> tuple[Part, ...]:
    """`parts`, and one more if they do not add up to the whole."""
    rest = (
        parameters - sum(part.parameters for part in parts),
        flops - sum(part.flops for part in parts),
    )
    return (*parts, Part("other", (), None, *rest)) if any(rest) else parts


HEADER = ("part", "made of", "output", "parameters", "share", "FLOPs", "share")
NOTE = (
    "FLOPs: of one image, forward; products of matrices and attention, 2 for each multiply-add "
    "(papers often count 1)."
)


def summary_lines(name: str, config: ModelConfig, cost: Cost) -> list[str]:
    """Text of a summary: a table with a row for each part, and the memory."""
    size = f"{config.channels} x {config.image_size} x {config.image_size}"
    head = (
        f"{printable(name)}: {format_count(cost.parameters, '.2f')} parameters, "
        f"{format_count(cost.flops, '.2f')} FLOPs for an image of {size}"
    )
    rows = [HEADER, *table_rows(cost)]
    return [head, "", *align_columns(rows, left=range(3)), "", NOTE, "", *memory_lines(cost.memory)]


def table_rows(cost: Cost) -> list[tuple[str, ...]]:
    """A row for each part; equal blocks share one row, with their sums."""
    rows = []
    for part in cost.parts:
        if not part.parts:
            rows.append(table_row(part, part.name, cost))
        for numbers in equal_blocks(part.parts):
            block, times = part.parts[numbers[0] - 1], len(numbers)
            again = f", each {block.calls} times" if block.calls > 1 else ""
            label = f"blocks {number_ranges(numbers)} (x {times}{again})"
            rows.append(table_row(block, label, cost, times))
            rows += [table_row(inside, f"  {inside.name}", cost, times) for inside in block.parts]
    total = (
        "total",
        "",
        "",
        format_count(cost.parameters, ".2f"),
        "",
        format_count(cost.flops, ".2f"),
        "",
    )
    return [*rows, total]


def table_row(part: Part, name: str, cost: Cost, times: int = 1) -> tuple[str, ...]:
    """Cells of `times` equal parts."""
    parameters, flops = part.parameters * times, part.flops * times
    return (
        name,
        ", ".join(part.kinds),
        " x ".join(map(str, part.shape or ())),
        format_count(parameters, ".2f"),
        _percentage(parameters, cost.parameters),
        format_count(flops, ".2f"),
        _percentage(flops, cost.flops),
    )


def equal_blocks(blocks: Sequence[Part]) -> list[list[int]]:
    """Numbers of the blocks, from 1, grouped by equality."""
    groups: dict[Part, list[int]] = {}
    for number, block in enumerate(blocks, 1):
        groups.setdefault(block, []).append(number)
    return [*groups.values()]


def number_ranges(numbers: Sequence[int]) -> str:
    """`1-12` for neighbours, `2, 4 .. 12` for equal steps, `1-2, 4-5` for others."""
    step = numbers[1] - numbers[0] if len(numbers) > 3 else 1
    if step > 1 and [*numbers] == [*range(numbers[0], numbers[-1] + 1, step)]:
        return f"{numbers[0]}, {numbers[1]} .. {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def memory_lines(memory: Memory) -> list[str]:
    images = "1 image" if memory.batch_size == 1 else f"{memory.batch_size} images"
    return [
        "Memory, estimated without what libraries, kernels and gaps take; fp32 if not said:",
        f"  weights                  {format_bytes(memory.weights)}, "
        f"in bf16 {format_bytes(memory.weights_bf16)}",
        f"  inference, 1 image     {format_bytes(memory.inference)}, weights included",
        f"  training, {images:<14} {format_bytes(memory.training)} at most at once; "
        "during the step",
        f"    weights                {format_bytes(memory.weights)}",
        f"    gradients              {format_bytes(memory.gradients)}",
        f"    AdamW's two moments    {format_bytes(memory.moments)}",
        f"    kept for the backward  {format_bytes(memory.kept)} of images and activations",
    ]


def _percentage(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if part else ""
