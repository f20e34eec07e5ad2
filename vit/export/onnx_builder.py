"""ONNX graph editing: building nodes from formulas, and searching and replacing nodes.

A `Value` names a tensor of the graph and supports Python's operators.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vit.export.onnx_graph import libraries
from vit.exported.onnx_session import Array

Number = int | float


class Nodes:
    """Nodes and constants of a graph that is being written.

    Args:
        prefix: What all names start with.
        constants: Those of the graph around this one, which then holds the new ones too.
    """

    def __init__(self, prefix: str, constants: dict[bytes, Any] | None = None) -> None:
        self.prefix = prefix
        self.onnx = libraries()
        self.nodes: list[Any] = []
        self.constants: dict[bytes, Any] = {} if constants is None else constants

    def add(
        self, operator: str, *inputs: "Value", kind: DTypeLike, name: str = "", **settings: Any
    ) -> "Value":
        """The output of a new node.

        Args:
            operator: One of ONNX's own.
            inputs: What it reads.
            kind: Type of its output.
            name: Of its output; numbered when left out.
            settings: Its attributes.
        """
        label = f"{self.prefix}{len(self.nodes)}_{operator}"
        output = name or label
        names = [value.name for value in inputs]
        built_graph = self.onnx.helper.make_node(operator, names, [output], name=label, **settings)
        self.nodes.append(built_graph)
        return Value(self, output, kind)

    def constant(self, value: Number | Sequence[int] | NDArray[Any], kind: DTypeLike) -> "Value":
        """A tensor that is in the file; one for all that are equal."""
        array = np.asarray(value, kind)
        found = self.onnx.numpy_helper.from_array(array)
        known = self.constants.setdefault(found.SerializeToString(), found)
        known.name = known.name or f"{self.prefix}constant_{len(self.constants)}"
        return Value(self, known.name, kind)

    def as_graph(self, result: "Value", shape: Sequence[str | int]) -> Any:
        """A graph to be a branch of another one, whose tensors it reads."""
        code = self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(result.kind))
        output = self.onnx.helper.make_tensor_value_info(result.name, code, shape)
        return self.onnx.helper.make_graph(self.nodes, self.prefix.strip("/"), [], [output])


class Value:
    """A tensor of the graph; numbers beside an operator become constants of its type.

    Args:
        nodes: Where further nodes go.
        name: Of the tensor.
        kind: Its type.
    """

    def __init__(self, nodes: Nodes, name: str, kind: DTypeLike) -> None:
        self.nodes, self.name, self.kind = nodes, name, kind

    def op(self, operator: str, *others: "Value | Number", **settings: Any) -> "Value":
        """What `operator` makes of this and the `others`, in the type of this."""
        inputs = [self.of(other) for other in others]
        return self.nodes.add(operator, self, *inputs, kind=self.kind, **settings)

    def of(self, number: "Value | Number") -> "Value":
        """A number in the type of this; a tensor as it is."""
        return number if isinstance(number, Value) else self.nodes.constant(number, self.kind)

    def cast(self, kind: DTypeLike) -> "Value":
        """The same numbers in another type."""
        code = self.nodes.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        return self.nodes.add("Cast", self, kind=kind, to=code)

    def holds(self, operator: str, other: "Value | Number") -> "Value":
        """Where a comparison is true."""
        return self.nodes.add(operator, self, self.of(other), kind=np.bool_)

    def where(self, yes: "Value", no: "Value | Number") -> "Value":
        """`yes` where this is true, `no` elsewhere."""
        return self.nodes.add("Where", self, yes, yes.of(no), kind=yes.kind)

    def reshape(self, *shape: "int | Value") -> "Value":
        """In another shape: 0 keeps an axis, -1 is what is left."""
        sides = [
            self.nodes.constant([side], np.int64) if isinstance(side, int) else side.unsqueeze(0)
            for side in shape
        ]
        sizes = self.nodes.add("Concat", *sides, kind=np.int64, axis=0)
        return self.nodes.add("Reshape", self, sizes, kind=self.kind)

    def unsqueeze(self, axis: int) -> "Value":
        """With an axis of length 1 more."""
        return self.op("Unsqueeze", self.nodes.constant([axis], np.int64))

    def first(self, count: int, *, axis: int) -> "Value":
        """The first `count` along an axis."""
        ends = [self.nodes.constant([x], np.int64) for x in (0, count, axis)]
        return self.op("Slice", *ends)

    def __add__(self, other: "Value | Number") -> "Value":
        return self.op("Add", other)

    def __sub__(self, other: "Value | Number") -> "Value":
        return self.op("Sub", other)

    def __mul__(self, other: "Value | Number") -> "Value":
        return self.op("Mul", other)

    def __truediv__(self, other: "Value | Number") -> "Value":
        return self.op("Div", other)

    def __matmul__(self, other: "Value") -> "Value":
        return self.op("MatMul", other)


FLOAT = 1  # of onnx.TensorProto
MOVES = ("Reshape", "Transpose")
"""What changes the places of numbers, and no number."""


class Graph:
    """What is looked up in an onnx.ModelProto, which is changed in place.

    Args:
        content: The bytes of it.

    Raises:
        VitError: The library onnx is not installed.
    """

    def __init__(self, content: bytes) -> None:
        self.proto = libraries().load_from_string(content)
        self.constants = {value.name: value for value in self.proto.graph.initializer}
        self.nodes: list[Any] = [*self.proto.graph.node]
        self.look_up()

    def look_up(self) -> None:
        """Find anew who makes and who takes what, after nodes have changed."""
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.takers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in (*node.input, *(name for child in inner(node) for name in child.input)):
                self.takers.setdefault(name, []).append(node)
        for value in self.proto.graph.output:
            self.takers.setdefault(value.name, []).append(None)

    def maker(self, name: str, kind: str) -> Any:
        """The node of `kind` that makes `name`, or None."""
        node = self.makers.get(name)
        return node if node is not None and node.op_type == kind else None

    def only_taker(self, name: str) -> Any:
        """The node that takes `name`, where it is the only one and takes it once, or None."""
        takers = self.takers.get(name, [])
        return takers[0] if len(takers) == 1 else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a constant of float32; None for whatever else."""
        value = self.constants.get(name)
        return None if value is None or value.data_type != FLOAT else tuple(value.dims)

    def array(self, name: str) -> Array:
        """The constant `name`."""
        value: Array = libraries().numpy_helper.to_array(self.constants[name])
        return value

    def constant(self, name: str, value: Array) -> str:
        """Add a constant; its name."""
        self.constants[name] = libraries().numpy_helper.from_array(
            np.ascontiguousarray(value), name
        )
        return name

    def finish(self, metadata: dict[str, str]) -> bytes:
        """Everything, without constants that nobody takes.

        Raises:
            VitError: onnx's checker finds fault with it.
        """
        graph = self.proto.graph
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(self.nodes)
        self.look_up()
        graph.initializer.extend(x for name, x in self.constants.items() if name in self.takers)
        libraries().helper.set_model_props(self.proto, dict(sorted(metadata.items())))
        libraries().checker.check_model(self.proto, full_check=True)
        content: bytes = self.proto.SerializeToString()
        return content


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    """A node that is called like its first output."""
    return libraries().helper.make_node(kind, inputs, outputs, name=outputs[0], **attributes)


def inner(node: Any) -> Iterator[Any]:
    """Nodes of the graphs inside `node`, at any depth."""
    for attribute in node.attribute:
        for child in attribute.g.node:
            yield child
            yield from inner(child)


def attribute(node: Any, name: str) -> Any:
    """Value of an attribute, or None."""
    values = {value.name: value for value in node.attribute}
    return libraries().helper.get_attribute_value(values[name]) if name in values else None
