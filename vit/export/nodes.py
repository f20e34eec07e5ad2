"""Formulas as ONNX nodes: a `Value` names a tensor of the graph and takes Python's operators."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vit.export.graph import libraries

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
        made = self.onnx.helper.make_node(operator, names, [output], name=label, **settings)
        self.nodes.append(made)
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
