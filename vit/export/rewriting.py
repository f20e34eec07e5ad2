"""An ONNX graph that is looked up and changed, node by node."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit.export.graph import libraries
from vit.runtime.greedy import Array

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
