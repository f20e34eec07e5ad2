"""Queries, keys and values as products of their own in an ONNX graph.

    Split(Transpose(Reshape(x W + b)))   becomes   Transpose(Reshape(x W_i + b_i)) for each part i

and a number that a part is multiplied with goes into W_i and b_i. The same numbers come out, and
each part can be written in 8 bits by the product that makes it, which engines do in one pass.
What looks different stays as it is.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vit.export.rewriting import MOVES, Graph, attribute, node
from vit.runtime.greedy import Array

HEADS_FIRST = [0, 2, 1, 3]
HEADS = 2
"""Axis of the heads in (batch, tokens, heads, head_dim), as it is reshaped."""


@dataclass(frozen=True)
class Packed:
    """What makes several parts at once.

    Args:
        nodes: MatMul, perhaps Add, Reshape, Transpose and Split, in order.
        source: What is multiplied.
        weights: (dim, heads x head_dim)
        bias: (heads x head_dim,), or None.
        shape: That is reshaped to.
        parts: Heads of each part.
    """

    nodes: list[Any]
    source: str
    weights: Array
    bias: Array | None
    shape: Array
    parts: list[int]


def take_apart(graph: Graph) -> int:
    """Do it wherever it can be done; in how many places that was."""
    instead: dict[str, list[Any]] = {}
    gone: set[str] = set()
    found = [packed for split in graph.nodes if (packed := _packed(graph, split)) is not None]
    for packed in found:
        instead[packed.nodes[-1].output[0]] = _parts(graph, packed, gone)
        gone |= {name for each in packed.nodes[:-1] for name in each.output}
    graph.nodes = [
        new
        for each in graph.nodes
        if not gone & {*each.output}
        for new in instead.get(each.output[0] if each.output else "", [each])
    ]
    graph.look_up()
    return len(found)


def _packed(graph: Graph, split: Any) -> Packed | None:
    """What `split` ends, where it is such a node."""
    if split.op_type != "Split" or attribute(split, "axis") != 1 or len(split.input) != 2:
        return None
    nodes = [split]
    for kind in ("Transpose", "Reshape", "Add", "MatMul"):
        places = (0, 1) if kind == "Add" or nodes[0].op_type == "Add" else (0,)
        made = [graph.maker(nodes[0].input[place], kind) for place in places]
        maker = next((each for each in made if each is not None), None)
        if maker is not None and graph.only_taker(maker.output[0]) is not None:
            nodes.insert(0, maker)
        elif kind != "Add":
            return None
    product, (reshape, transpose) = nodes[0], nodes[-3:-1]
    biases = [name for name in nodes[1].input if name in graph.constants] if len(nodes) == 5 else []
    names = [product.input[1], reshape.input[1], split.input[1], *biases]
    known = all(name in graph.constants for name in names) and len(biases) == len(nodes) - 4
    if not known or attribute(transpose, "perm") != HEADS_FIRST:
        return None
    weights, shape, parts, *bias = map(graph.array, names)
    if len(shape) != 4 or shape[HEADS] != parts.sum():
        return None
    if any(each.shape[-1:] != (shape[HEADS] * shape[3],) for each in (weights, *bias)):
        return None
    return Packed(nodes, product.input[0], weights, bias[0] if bias else None, shape, [*parts])


def _parts(graph: Graph, packed: Packed, gone: set[str]) -> list[Any]:
    """Nodes of the parts; what the factors were multiplied by is added to `gone`."""
    made, width, start = [], int(packed.shape[3]), 0
    for name, heads in zip(packed.nodes[-1].output, packed.parts, strict=True):
        columns = slice(start * width, (start + heads) * width)
        start += heads
        factor = _factor(graph, name, gone)
        weights = graph.constant(f"{name}/weights", packed.weights[:, columns] * factor)
        last = f"{name}/product"
        made.append(node("MatMul", [packed.source, weights], [last]))
        if packed.bias is not None:
            bias = graph.constant(f"{name}/bias", packed.bias[columns] * factor)
            made.append(node("Add", [last, bias], [f"{name}/flat"]))
            last = f"{name}/flat"
        shape = packed.shape.copy()
        shape[HEADS] = heads
        made.append(
            node("Reshape", [last, graph.constant(f"{name}/shape", shape)], [f"{name}/heads"])
        )
        made.append(node("Transpose", [f"{name}/heads"], [name], perm=HEADS_FIRST))
    return made


def _factor(graph: Graph, name: str, gone: set[str]) -> Array:
    """The number that all of `name` is multiplied by behind it, or 1; who takes the product then
    takes what went into it."""
    taker = graph.only_taker(name)
    while taker is not None and taker.op_type in MOVES and taker.input[0] == name:
        (name,) = taker.output
        taker = graph.only_taker(name)
    others = [] if taker is None else [other for other in taker.input if other != name]
    if taker is None or taker.op_type != "Mul" or not _is_number(graph, others):
        return np.ones((), np.float32)
    (product,) = taker.output
    takers = graph.takers[product]
    if any(each is None or product not in each.input for each in takers):
        return np.ones((), np.float32)
    for each in takers:
        for place, given in enumerate(each.input):
            if given == product:
                each.input[place] = name
    gone.add(product)
    return graph.array(others[0]).reshape(())


def _is_number(graph: Graph, names: list[str]) -> bool:
    return len(names) == 1 and graph.shape(names[0]) in ((), (1,))
