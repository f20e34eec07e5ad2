"""Conversion of a torch module to an ONNX graph that is verified to compute the same.

Attention is decomposed into the operators that inference engines optimise best. The graph contains
no path of the machine that wrote it.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit.errors import ConfigError, VitError, printable
from vit.exported.onnx_session import LIBRARIES, Array, OnnxSession
from vit.model.attention import apply_mask, weighted_values
from vit.weights.safetensors_io import atomic_write


def decomposed_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """`vit.model.attention.dot_product_attention` of plain operators, for torch.onnx.

    It writes torch's own function as a dozen operators, which hide from quantisation that keys are
    only rotated.
    """
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    return weighted_values(apply_mask(scores, mask).softmax(dim=-1), value, dropout=dropout)


OPSET = 18
MOST_BYTES = 2**31 - 2**26
"""A protobuf message holds less than 2 GiB; the nodes beside the weights take some of it."""
TOLERANCE = 1e-4
"""Largest difference to torch, as a share of the largest value (of at least 1) of an output."""

Axes = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One graph that is to be written.

    Args:
        name: What people call it.
        module: Takes tensors, gives a tuple of tensors; in evaluation mode, on the CPU.
        inputs: Of each input in order, its axes of any length and their names.
        outputs: The same of each output.
        examples: Inputs on which both must agree; the first is traced, and its axes of any length
            have at least 2 elements, because torch takes a length of 0 or 1 for fixed.
    """

    name: str
    module: nn.Module
    inputs: Axes
    outputs: Axes
    examples: Sequence[tuple[Tensor, ...]]


def check_size(part: Part) -> None:
    """Refuse what one ONNX file cannot hold.

    Raises:
        ConfigError: The weights take 2 GB or more.
    """
    tensors = [*part.module.parameters(), *part.module.buffers()]
    size = sum(tensor.nbytes for tensor in tensors)
    if size > MOST_BYTES:
        raise ConfigError(
            f"the {part.name} has {size / 1e9:.2f} GB of weights, and one ONNX file holds less "
            f"than {MOST_BYTES / 1e9:.2f}; export a smaller network"
        )


def to_onnx(part: Part, metadata: Mapping[str, str]) -> Any:
    """The graph of `part` as an onnx.ModelProto, checked by onnx's checker.

    Raises:
        VitError: A library is missing, or torch has no ONNX operators for the network.
    """
    check_size(part)
    proto = trace_module(part, OPSET)
    onnx = libraries()
    onnx.helper.set_model_props(proto, dict(sorted(metadata.items())))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def libraries() -> Any:
    """The library onnx, where it and what torch needs beside it are installed.

    Raises:
        VitError: One is not.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError as error:
        raise VitError(f"{error.name} is not installed: {LIBRARIES}") from None
    return onnx


@torch.no_grad()
def trace_module(part: Part, opset: int) -> Any:
    """The graph of `part` as an onnx.ModelProto.

    Raises:
        VitError: A library is missing, or torch has no ONNX operators for the network.
    """
    libraries()
    # copied: of a view, torch would ask the graph for the tensor behind it
    examples = tuple(x.clone(memory_format=torch.contiguous_format) for x in part.examples[0])
    batch, other = torch.export.Dim("batch", min=1), torch.export.Dim.DYNAMIC
    dynamic = tuple(
        {place: batch if name == "batch" else other for place, name in axes.items()}
        for axes in part.inputs.values()
    )
    with warnings.catch_warnings():  # torch.onnx warns of names of its own
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        try:
            program = torch.onnx.export(
                torch.export.export(part.module, examples, dynamic_shapes=dynamic, strict=False),
                input_names=[*part.inputs],
                output_names=[*part.outputs],
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # of torch's compiler, ONNX's or ours
            words = printable(" ".join(str(_first(error)).split())[:200])
            raise VitError(f"torch cannot export the {part.name}: {words}") from error
    assert program is not None, "an exporter without a file gives a program"
    proto = program.model_proto
    _tidy(proto, part)
    return proto


def _first(error: BaseException) -> BaseException:
    """What led to `error`; torch wraps it in advice for its own developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _tidy(proto: Any, part: Part) -> None:
    """Name the axes of any length; leave out stack traces, which hold paths of this machine."""
    for value in (*proto.graph.input, *proto.graph.output):
        axes = {**part.inputs, **part.outputs}[value.name]
        for place, dim in enumerate(value.type.tensor_type.shape.dim):
            assert dim.HasField("dim_param") == (place in axes), f"{value.name}, axis {place}"
            if place in axes:
                dim.dim_param = axes[place]
    del proto.graph.value_info[:]  # they know the axes by other names
    del proto.metadata_props[:]
    for item in (proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output):
        del item.metadata_props[:]
    for node in proto.graph.node:
        node.doc_string = ""


def check_equal(part: Part, content: bytes) -> float:
    """Largest difference of the graph to torch on the examples, as TOLERANCE counts it.

    Raises:
        VitError: It is more than TOLERANCE, or a shape differs.
    """
    session, largest = OnnxSession(content), 0.0
    for example in part.examples:
        arrays = {name: x.numpy() for name, x in zip(part.inputs, example, strict=True)}
        with torch.no_grad():
            expected = part.module(*example)
        largest = max(largest, difference(part, expected, session(arrays)))
    return largest


def difference(
    part: Part, expected: Sequence[Tensor], found: Sequence[Array], tolerance: float | None = None
) -> float:
    """Largest difference of an answer to torch's, as a share of the largest value (at least 1).

    Args:
        part: Whose outputs they are.
        expected: Of torch.
        found: Of the graph.
        tolerance: What is allowed; TOLERANCE when left out.

    Raises:
        VitError: It is more, or a shape differs.
    """
    largest, allowed = 0.0, TOLERANCE if tolerance is None else tolerance
    for name, ours, theirs in zip(part.outputs, expected, found, strict=True):
        if tuple(ours.shape) != theirs.shape:
            raise VitError(
                f"the exported {part.name} gives {name} the shape {theirs.shape}, torch "
                f"{tuple(ours.shape)}; nothing was written"
            )
        scale = max(1.0, float(ours.abs().max()))
        if not np.isfinite(theirs).all() and ours.isfinite().all():
            raise VitError(
                f"the exported {part.name} overflows where torch does not: {name} has numbers "
                "that are none; nothing was written; choose precision fp32"
            )
        share = float((torch.from_numpy(theirs) - ours).abs().max()) / scale
        if not share <= allowed:  # also where it is not a number
            raise VitError(
                f"the exported {part.name} differs from torch: {name} by {share:.2g} of its "
                f"largest value, and {allowed:g} is allowed; nothing was written"
            )
        largest = max(largest, share)
    return largest


def write(path: Path, content: bytes) -> None:
    """Write a graph beside its place, then rename it.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    atomic_write(path, lambda beside: beside.write_bytes(content), len(content))
