"""ONNX graphs: traced from a torch module, compared with it, and edited.

Attention is decomposed into the operators that inference engines optimise best. The graph contains
no path of the machine that wrote it.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit.errors import ConfigError, VitError, error_text
from vit.exported.onnx_session import LIBRARIES, Array, OnnxSession
from vit.model.attention import apply_mask, weighted_values


def decomposed_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """`vit.model.attention.dot_product_attention` with plain operators, for torch.onnx.

    torch exports its own function as a dozen operators, which quantisation cannot match.
    """
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    return weighted_values(apply_mask(scores, mask).softmax(dim=-1), value, dropout=dropout)


OPSET = 18
MAX_GRAPH_BYTES = 2**31 - 2**26
"""Weights in one file: a protobuf message holds less than 2 GiB, and the nodes take some."""
TOLERANCE = 1e-4
"""Largest difference to torch, as a share of the largest value (of at least 1) of an output."""
DISTANCE_TOLERANCE = 1e-2
"""The same of a distance from the training images, a logarithm: of flat images rounding is more."""

Axes = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module to export as one graph, with the dynamic axes of each input by name.

    Args:
        examples: Inputs for the comparison; the first one is traced, with at least 2 elements
            along dynamic axes, because torch takes a length of 0 or 1 for fixed.
        multiple: Pixels of which height and width are multiples, where they are dynamic.
    """

    name: str
    module: nn.Module
    inputs: Axes
    outputs: Axes
    examples: Sequence[tuple[Tensor, ...]]
    multiple: int = 1


def check_size(part: Part) -> None:
    """Raise ConfigError if the weights take 2 GB or more, which one ONNX file cannot hold."""
    tensors = [*part.module.parameters(), *part.module.buffers()]
    size = sum(tensor.nbytes for tensor in tensors)
    if size > MAX_GRAPH_BYTES:
        raise ConfigError(
            f"the {part.name} has {size / 1e9:.2f} GB of weights, and one ONNX file holds less "
            f"than {MAX_GRAPH_BYTES / 1e9:.2f}; export a smaller network"
        )


def to_onnx(part: Part, metadata: Mapping[str, str]) -> Any:
    """The graph of `part` as an onnx.ModelProto, checked by onnx's checker."""
    check_size(part)
    proto = trace_module(part, OPSET)
    onnx = libraries()
    onnx.helper.set_model_props(proto, dict(sorted(metadata.items())))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def libraries() -> Any:
    """The library onnx; raises VitError if it or onnxscript is not installed."""
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError as error:
        raise VitError(f"{error.name} is not installed: {LIBRARIES}") from None
    return onnx


@torch.no_grad()
def trace_module(part: Part, opset: int) -> Any:
    """The graph of `part` as an onnx.ModelProto."""
    libraries()
    # copied: of a view, torch would make the underlying tensor an input
    examples = tuple(x.clone(memory_format=torch.contiguous_format) for x in part.examples[0])
    known = {"batch": torch.export.Dim("batch", min=1)}
    known["height"], known["width"] = (
        part.multiple * torch.export.Dim(name, min=1) for name in ("rows", "cols")
    )
    dynamic = tuple(
        {axis: known.get(name, torch.export.Dim.DYNAMIC) for axis, name in axes.items()}
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
            first: BaseException = error
            while first.__cause__ is not None:  # torch wraps it in advice for its developers
                first = first.__cause__
            words = error_text(first)
            raise VitError(f"torch cannot export the {part.name}: {words}") from error
    assert program is not None, "an exporter without a file gives a program"
    proto = program.model_proto
    _tidy(proto, part)
    return proto


def _tidy(proto: Any, part: Part) -> None:
    """Name the dynamic axes; remove stack traces, which have paths of this machine."""
    for value in (*proto.graph.input, *proto.graph.output):
        axes = {**part.inputs, **part.outputs}[value.name]
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            assert dim.HasField("dim_param") == (axis in axes), f"{value.name}, axis {axis}"
            if axis in axes:
                dim.dim_param = axes[axis]
    del proto.graph.value_info[:]  # with other names of the axes
    del proto.metadata_props[:]
    for item in (proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output):
        del item.metadata_props[:]
    for node in proto.graph.node:
        node.doc_string = ""


def check_equal(part: Part, content: bytes) -> float:
    """Largest difference of the graph to torch on the examples; see `difference`."""
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
    """Largest difference of outputs to torch's, as a share of the largest value (at least 1)."""
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
        most = max(allowed, DISTANCE_TOLERANCE) if name == "distance" else allowed
        if not share <= most:  # also where it is not a number
            raise VitError(
                f"the exported {part.name} differs from torch: {name} by {share:.2g} of its "
                f"largest value, and {most:g} is allowed; nothing was written"
            )
        largest = max(largest, share)
    return largest


FLOAT = 1  # of onnx.TensorProto
MOVES = ("Reshape", "Transpose")
"""Operators that move elements without changing them."""


class Graph:
    """Editor of an onnx.ModelProto: producers and consumers of tensors, and constants by name."""

    def __init__(self, content: bytes) -> None:
        self.proto = libraries().load_from_string(content)
        self.constants = {value.name: value for value in self.proto.graph.initializer}
        self.nodes: list[Any] = [*self.proto.graph.node]
        self.index()

    def index(self) -> None:
        """Update producers and consumers after a change of the nodes."""
        self.producers = {name: node for node in self.nodes for name in node.output}
        self.consumers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in (
                *node.input,
                *(name for child in inner_nodes(node) for name in child.input),
            ):
                self.consumers.setdefault(name, []).append(node)
        for value in self.proto.graph.output:
            self.consumers.setdefault(value.name, []).append(None)

    def producer(self, name: str, kind: str) -> Any:
        """The node of `kind` that produces `name`, or None."""
        node = self.producers.get(name)
        return node if node is not None and node.op_type == kind else None

    def only_consumer(self, name: str) -> Any:
        """The node that reads `name`, if it is the only one and reads it once; else None."""
        consumers = self.consumers.get(name, [])
        return consumers[0] if len(consumers) == 1 else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a float32 constant; None for other tensors."""
        value = self.constants.get(name)
        return None if value is None or value.data_type != FLOAT else tuple(value.dims)

    def array(self, name: str) -> Array:
        """Value of a constant."""
        value: Array = libraries().numpy_helper.to_array(self.constants[name])
        return value

    def constant(self, name: str, value: Array) -> str:
        """Add a constant; returns its name."""
        self.constants[name] = libraries().numpy_helper.from_array(
            np.ascontiguousarray(value), name
        )
        return name

    def finish(self, metadata: dict[str, str]) -> bytes:
        """The serialized graph with `metadata`, checked, without unused constants."""
        graph = self.proto.graph
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(self.nodes)
        self.index()
        graph.initializer.extend(x for name, x in self.constants.items() if name in self.consumers)
        libraries().helper.set_model_props(self.proto, dict(sorted(metadata.items())))
        libraries().checker.check_model(self.proto, full_check=True)
        content: bytes = self.proto.SerializeToString()
        return content


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    """A node, named after its first output."""
    return libraries().helper.make_node(kind, inputs, outputs, name=outputs[0], **attributes)


def inner_nodes(node: Any) -> Iterator[Any]:
    """Nodes of the subgraphs of `node`, at any depth."""
    for attribute in node.attribute:
        for child in attribute.g.node:
            yield child
            yield from inner_nodes(child)


def attribute(node: Any, name: str) -> Any:
    """Value of an attribute, or None."""
    values = {value.name: value for value in node.attribute}
    return libraries().helper.get_attribute_value(values[name]) if name in values else None
