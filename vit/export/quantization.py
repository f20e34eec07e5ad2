"""int8 quantization of an ONNX graph: matrix products with weights in 8-bit integers.

    weights               one scale a column: w ~ s q,        q in -127 ... 127
    activations before    one scale a token, a row of the input of a product (ZeroQuant, section
                          4.1, arXiv:2206.01861): x ~ s (q - z),  q in 0 ... 255

The token x is divided by its largest value, x = max |x| · r, and (r W) max |x| is x W: r has the
scale 1/127 in all images, as QuantizeLinear and DequantizeLinear need it, which onnxruntime,
OpenVINO and others fuse with the product. Outputs of GELU and ReLU have a smallest value, from
which their range begins; the product with that constant is taken off. Weights are rounded by GPTQ
if there are calibration images, and if only products with weights read a LayerNorm, part of the
size of each channel is first moved to the weights (SmoothQuant, section 4, arXiv:2211.10438).

Static quantization has one scale a tensor, that of the calibration images (Jacob et al., section 3,
arXiv:1712.05877), and 8 bits in attention too:

    queries, keys, values one scale a tensor: x ~ s q,        q in -127 ... 127
    attention weights     one scale a row:    x ~ s q,        q in 0 ... 255

Attention weights are divided by the largest of a query, as tokens are: most of them are a few
255ths of the largest in the network. The packed projection of queries, keys and values is first
split:

    Split(Transpose(Reshape(x W + b)))   becomes   Transpose(Reshape(x W_i + b_i)) for each part i

and a scalar factor of a part is moved into W_i and b_i. The outputs are equal, and the product of
each part can write 8 bits, which engines do in one pass. Other patterns are left unchanged.

Preprocessing, softmaxes, norms and the head stay in float32: they have few operations, or decide
the result.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vit.errors import DataError
from vit.export.onnx_tracing import MOVES, Graph, attribute, libraries, node
from vit.exported.onnx_session import Array, OnnxSession

HEADS_FIRST = [0, 2, 1, 3]
HEADS = 2
"""Axis of the heads in (batch, tokens, heads, head_dim)."""
MIN_IMAGES = 16
"""Calibration images below which ranges are too random."""
IMAGES_AT_ONCE = 8
"""Calibration images whose activations are multiplied at once, which takes a third of the time."""
SMOOTHING = 0.5
"""Share of an activation's size that is moved to the weights, as an exponent; SmoothQuant's alpha.
The size of a channel is its largest value in static quantization, else its root mean square."""
DAMPING = 0.01
"""Added to the diagonal of XᵀX in GPTQ, as a share of its mean: the inverse is then stable."""
BLOCK = 64
"""Rows whose errors GPTQ moves to all later rows at once, in one product of matrices."""
MAX_INT8 = 127
SMALLEST = 1e-8
"""Replaces a range or a weight of zero."""
LARGEST, RELATIVE = "largest", "relative"
"""Last words of names: the largest of each row of a tensor, and what was divided by it."""
LOWEST = {"Gelu": -0.1701, "Relu": 0.0}
"""Operators with a smallest output: the range of a token begins there."""
SCORE_OPERATORS = ("Add", "Mul", "Div", "Where", "Reshape")
"""Operators between the product of queries and keys and its softmax."""


def quantize(content: bytes, images: Sequence[Array], *, static: bool = False) -> bytes:
    """Quantize the matrix products of a graph; inputs and outputs stay the same.

    Args:
        images: Calibration images, uint8 (height, width, 3) of any size, at least MIN_IMAGES.
            Without any, weights are rounded to the nearest; `static` needs them.
    """
    graph = Graph(content)
    metadata = {value.key: value.value for value in graph.proto.metadata_props}
    if (static or images) and len(images) < MIN_IMAGES:
        remedy = "give more" if static else "give more, or none (--dynamic)"
        raise DataError(
            f"{len(images)} images for calibration: at least {MIN_IMAGES} are needed; {remedy}"
        )
    if static:
        split_qkv(graph)
    activations = _product_inputs(graph)
    if static:
        _quantize_static(graph, activations, images)
    else:
        moments = _measure_moments(graph, activations, images) if images else {}
        _quantize_tokens(graph, activations, moments)
    calibration = {"static": static, "samples": len(images)}
    return graph.finish({**metadata, "precision": "int8", "calibration": json.dumps(calibration)})


def split_qkv(graph: Graph) -> int:
    """Split the packed projections of a graph; returns their number."""
    replacements: dict[str, list[Any]] = {}
    removed: set[str] = set()
    found = [nodes for split in graph.nodes if (nodes := _packed_projection(graph, split))]
    for nodes in found:
        replacements[nodes[-1].output[0]] = _split_parts(graph, nodes, removed)
        removed |= {name for each in nodes[:-1] for name in each.output}
    graph.nodes = [each for each in graph.nodes if not removed & {*each.output}]
    _replace(graph, replacements)
    graph.index()
    return len(found)


def _packed_projection(graph: Graph, split: Any) -> list[Any]:
    """MatMul, perhaps Add, Reshape, Transpose and `split`; empty if `split` is another one."""
    if split.op_type != "Split" or attribute(split, "axis") != 1:
        return []
    nodes = [split]
    for kind in ("Transpose", "Reshape", "Add", "MatMul"):
        inputs = nodes[0].input[: 2 if "Add" in (kind, nodes[0].op_type) else 1]
        producers = (graph.producer(name, kind) for name in inputs)
        producer = next((each for each in producers if each is not None), None)
        if producer is not None and graph.only_consumer(producer.output[0]) is not None:
            nodes.insert(0, producer)
        elif kind != "Add":
            return []
    return nodes


def _split_parts(graph: Graph, packed: list[Any], removed: set[str]) -> list[Any]:
    """Nodes of the separate products; the outputs of merged factors are added to `removed`."""
    product, second, *_ = packed
    reshape, _, split = packed[-3:]
    all_weights, shape = graph.array(product.input[1]), graph.array(reshape.input[1])
    biases = second.input if second.op_type == "Add" else ()
    all_biases = [graph.array(name) for name in biases if name in graph.constants]
    nodes, width, start = [], int(shape[3]), 0
    for name, heads in zip(split.output, graph.array(split.input[1]), strict=True):
        columns = slice(start * width, (start + heads) * width)
        start += heads
        factor = _merge_factor(graph, name, removed)
        weights = graph.constant(f"{name}/weights", all_weights[:, columns] * factor)
        last = f"{name}/product"
        nodes.append(node("MatMul", [product.input[0], weights], [last]))
        for values in all_biases:
            bias = graph.constant(f"{name}/bias", values[columns] * factor)
            nodes.append(node("Add", [last, bias], [f"{name}/flat"]))
            last = f"{name}/flat"
        shape = shape.copy()
        shape[HEADS] = heads
        shape_name = graph.constant(f"{name}/shape", shape)
        nodes.append(node("Reshape", [last, shape_name], [f"{name}/heads"]))
        nodes.append(node("Transpose", [f"{name}/heads"], [name], perm=HEADS_FIRST))
    return nodes


def _merge_factor(graph: Graph, name: str, removed: set[str]) -> Array:
    """The scalar that all of `name` is multiplied by later, or 1; the product is bypassed."""
    consumer = graph.only_consumer(name)
    while consumer is not None and consumer.op_type in MOVES and consumer.input[0] == name:
        (name,) = consumer.output
        consumer = graph.only_consumer(name)
    others = [] if consumer is None else [other for other in consumer.input if other != name]
    scalar = len(others) == 1 and graph.shape(others[0]) in ((), (1,))
    if consumer is None or consumer.op_type != "Mul" or not scalar:
        return np.ones((), np.float32)
    (product,) = consumer.output
    consumers = graph.consumers[product]
    if any(each is None or product not in each.input for each in consumers):
        return np.ones((), np.float32)
    for each in consumers:
        _replace_input(each, product, name)
    removed.add(product)
    return graph.array(others[0]).reshape(())


@dataclass
class Activation:
    """A tensor to quantize in front of some products.

    `signed`: symmetric around 0, instead of from its minimum to its maximum. `channels`: length of
    its last axis if channels are measured separately, else 1.
    """

    name: str
    readers: list[Any]
    products: list[Any] = field(default_factory=list)
    signed: bool = False
    channels: int = 1
    low: Array = field(default_factory=lambda: np.zeros(1, np.float32))
    high: Array = field(default_factory=lambda: np.zeros(1, np.float32))

    def scale_and_zero(self) -> tuple[Array, Array]:
        """Scale and zero point of the range."""
        low, high = float(self.low.min()), float(self.high.max())
        if self.signed:
            return _scalar(max(-low, high) / 127), np.zeros((), np.int8)
        scale = _scalar((high - low) / 255)
        return scale, np.clip(np.round(-low / scale), 0, 255).astype(np.uint8)


def _product_inputs(graph: Graph) -> list[Activation]:
    """Activations that are multiplied by a matrix of weights, except those of a router."""
    found: dict[str, Activation] = {}
    for each in graph.nodes:
        routes = getattr(graph.only_consumer(each.output[0]), "op_type", "") == "Softmax"
        matrix = each.op_type == "MatMul" and not routes
        if matrix and len(shape := graph.shape(each.input[1]) or ()) == 2:
            name = each.input[0]
            activation = found.setdefault(name, Activation(name, [], channels=shape[0]))
            activation.readers.append(each)
            activation.products.append(each)
    return list(found.values())


def _move_to_producer(graph: Graph, activation: Activation) -> None:
    """Quantize before Reshape and Transpose, if nothing else reads the tensor."""
    while len(graph.consumers[activation.name]) == len(activation.readers):
        producer = graph.producers.get(activation.name)
        if producer is None or producer.op_type not in MOVES:
            return
        activation.name, activation.readers = producer.input[0], [producer]
        activation.channels = 1


def _divide_by_largest(graph: Graph) -> None:
    """Divide each row of attention weights by its largest, and multiply the product with it."""
    replacements = {}
    for each in graph.nodes:
        if each.op_type != "MatMul" or graph.producer(each.input[0], "Softmax") is None:
            continue
        (weights, values), (output,) = each.input, each.output
        largest, relative, product = (f"{output}/{word}" for word in (LARGEST, RELATIVE, "raw"))
        last = graph.constant(f"{largest}/axis", np.array([-1]))
        replacements[output] = [
            node("ReduceMax", [weights, last], [largest], keepdims=1),
            node("Div", [weights, largest], [relative]),
            node("MatMul", [relative, values], [product]),
            node("Mul", [product, largest], [output]),
        ]
    _replace(graph, replacements)
    graph.index()


def _attention_inputs(graph: Graph, known: set[str]) -> list[Activation]:
    """Queries, keys, values and attention weights, besides the `known` activations."""
    found = []
    for each in graph.nodes:
        if each.op_type != "MatMul" or any(name in graph.constants for name in each.input):
            continue
        weighs_values = each.input[0].endswith(RELATIVE)
        if not weighs_values and not _feeds_softmax(graph, each):
            continue
        for position, name in enumerate(each.input):
            activation = Activation(name, [each], signed=not weighs_values or position == 1)
            _move_to_producer(graph, activation)
            if activation.name not in known and len(graph.consumers[activation.name]) == 1:
                found.append(activation)
    return found


def _feeds_softmax(graph: Graph, product: Any) -> bool:
    """Whether the output of `product` is read by a softmax only."""
    consumer = graph.only_consumer(product.output[0])
    while consumer is not None and consumer.op_type in SCORE_OPERATORS:
        consumer = graph.only_consumer(consumer.output[0])
    return consumer is not None and consumer.op_type == "Softmax"


def _activation_rows(
    graph: Graph, activations: Sequence[Activation], images: Sequence[Array]
) -> Iterator[list[Array]]:
    """The activations in one image after the other, each as (rows, channels)."""
    measured = Graph(graph.proto.SerializeToString())
    measured.nodes, measured.constants = [*graph.nodes], dict(graph.constants)
    del measured.proto.graph.output[:]
    for one in activations:
        rows, sizes = f"rows/{one.name}", np.array([-1, one.channels])
        shape = measured.constant(f"{rows}/shape", sizes)
        measured.nodes.append(node("Reshape", [one.name, shape], [rows]))
        value = libraries().helper.make_tensor_value_info(rows, 1, [None, one.channels])
        measured.proto.graph.output.append(value)
    session = OnnxSession(measured.finish({}))
    for image in images:
        yield session({session.inputs[0]: image[None]})


class Moments(NamedTuple):
    """Of the inputs X of a product."""

    matrix: Array
    """XᵀX, (channels, channels)."""
    sizes: Array
    """Root mean square of each channel, (channels,)."""


def _measure_moments(
    graph: Graph, activations: Sequence[Activation], images: Sequence[Array]
) -> dict[str, Moments]:
    """Moments of the activations over calibration images, by their names."""
    matrices = [np.zeros((one.channels, one.channels), np.float32) for one in activations]
    tokens = [0] * len(activations)
    rows_of_images = _activation_rows(graph, activations, images)
    while several := [*itertools.islice(rows_of_images, IMAGES_AT_ONCE)]:
        for number, rows in enumerate(map(np.concatenate, zip(*several, strict=True))):
            matrices[number] += rows.T @ rows
            tokens[number] += len(rows)
    return {
        one.name: Moments(matrix, np.sqrt(np.diag(matrix) / max(count, 1)))
        for one, matrix, count in zip(activations, matrices, tokens, strict=True)
    }


def _smooth(graph: Graph, activation: Activation, values: Array) -> Array:
    """Factors for the rows of the weights, from the size of the activation in each channel, both
    (channels,); the norm that produces the activation is divided."""
    factors = np.ones_like(values)
    norm = graph.producer(activation.name, "LayerNormalization")
    if norm is None or activation.readers != activation.products:
        return factors
    if len(graph.consumers[activation.name]) != len(activation.readers):
        return factors
    if any(graph.shape(name) != factors.shape for name in norm.input[1:]):
        return factors
    rows = [np.abs(graph.array(each.input[1])).max(axis=1) for each in activation.products]
    weights = np.max(rows, axis=0)
    used = (values > SMALLEST) & (weights > SMALLEST)
    factors[used] = values[used] ** SMOOTHING / weights[used] ** (1 - SMOOTHING)
    for position, name in list(enumerate(norm.input))[1:]:
        divided = graph.array(name) / factors
        norm.input[position] = graph.constant(f"{activation.name}/smoothed/{position}", divided)
    return factors


def _quantize_static(graph: Graph, activations: list[Activation], images: Sequence[Array]) -> None:
    """Quantize products with weights and in attention, with the ranges of the images."""
    for activation in activations:
        _move_to_producer(graph, activation)
    _divide_by_largest(graph)
    activations += _attention_inputs(graph, {one.name for one in activations})
    for rows_of_image in _activation_rows(graph, activations, images):
        for one, rows in zip(activations, rows_of_image, strict=True):  # ranges always contain 0
            one.low = np.minimum(one.low, rows.min(axis=0))
            one.high = np.maximum(one.high, rows.max(axis=0))
    inserted: dict[str, list[Any]] = {}
    for activation in activations:
        factors = _smooth(graph, activation, np.maximum(-activation.low, activation.high))
        activation.low, activation.high = activation.low / factors, activation.high / factors
        name, key = activation.name, f"{activation.name}/int8"
        scale, zero = activation.scale_and_zero()
        encoding = [graph.constant(f"{key}/scale", scale), graph.constant(f"{key}/zero", zero)]
        inserted.setdefault(activation.readers[0].output[0], []).extend(
            (
                node("QuantizeLinear", [name, *encoding], [key]),
                node("DequantizeLinear", [key, *encoding], [f"{key}/back"]),
            )
        )
        for reader in activation.readers:
            _replace_input(reader, name, f"{key}/back")
        for product in activation.products:
            weights = _quantize_weights(graph, product, factors)
            back = f"{weights[0]}/back"
            inserted.setdefault(product.output[0], []).append(
                node("DequantizeLinear", weights, [back], axis=1)
            )
            product.input[1] = back
    graph.nodes = [
        new
        for each in graph.nodes
        for new in (*inserted.get(each.output[0] if each.output else "", ()), each)
    ]


def _quantize_tokens(
    graph: Graph, activations: Sequence[Activation], moments: dict[str, Moments]
) -> None:
    """Quantize products with weights, and each token before them in the range that it has."""
    replacements: dict[str, list[Any]] = {}
    for activation in activations:
        measured, factors = moments.pop(activation.name, None), np.ones(1, np.float32)
        if measured is not None:
            factors = _smooth(graph, activation, measured.sizes)
        lowest, nodes = _relative_to_token(graph, activation.name)
        for product in activation.products:
            (output,) = product.output
            names = _quantize_weights(graph, product, factors, measured)
            weights, raw, scaled = (f"{output}/{word}" for word in ("weights", "raw", "scaled"))
            nodes.append(node("DequantizeLinear", names, [weights], axis=1))
            nodes.append(node("MatMul", [f"{activation.name}/int8/back", weights], [raw]))
            last = scaled if lowest else output
            nodes.append(node("Mul", [raw, f"{activation.name}/{LARGEST}"], [last]))
            if lowest:
                whole, scales = (graph.array(name) for name in names[:2])
                moved = lowest * whole.sum(axis=0, dtype=np.int64) * scales
                shift = graph.constant(f"{output}/shift", moved.astype(np.float32))
                nodes.append(node("Add", [scaled, shift], [output]))
            replacements[output], nodes = nodes, []
    _replace(graph, replacements)


def _relative_to_token(graph: Graph, name: str) -> tuple[float, list[Any]]:
    """The lower end of the range, 0 if it is symmetric, and the nodes that quantize a tensor."""
    producer = graph.producers.get(name)
    lowest = LOWEST.get(producer.op_type) if producer is not None else None
    ends, source, nodes = [f"{name}/max"], name, []
    if lowest:
        source = f"{name}/above"
        constant = graph.constant(f"{source}/lowest", _scalar(-lowest))
        nodes.append(node("Add", [name, constant], [source]))
    last = graph.constant(f"{name}/axis", np.array([-1]))
    nodes.append(node("ReduceMax", [source, last], [ends[0]], keepdims=1))
    if lowest is None:
        ends.append(f"{name}/-min")
        nodes.append(node("ReduceMin", [source, last], [f"{name}/min"], keepdims=1))
        nodes.append(node("Neg", [f"{name}/min"], [ends[1]]))
    ends.append(graph.constant(f"{name}/smallest", np.array([SMALLEST], np.float32)))
    largest, relative, key = (f"{name}/{word}" for word in (LARGEST, RELATIVE, "int8"))
    step, zero = (1 / 127, 128) if lowest is None else (1 / 255, 0)
    encoding = [
        graph.constant(f"{key}/scale", _scalar(step)),
        graph.constant(f"{key}/zero", np.array(zero, np.uint8)),
    ]
    return lowest or 0.0, [
        *nodes,
        node("Max", ends, [largest]),
        node("Div", [source, largest], [relative]),
        node("QuantizeLinear", [relative, *encoding], [key]),
        node("DequantizeLinear", [key, *encoding], [f"{key}/back"]),
    ]


def _quantize_weights(
    graph: Graph, product: Any, factors: Array, moments: Moments | None = None
) -> list[str]:
    """Names of the integer weights of `product`, of their scales and of their zero points."""
    rows = graph.array(product.input[1]) * factors[:, None]
    scales = np.maximum(np.abs(rows).max(axis=0), SMALLEST).astype(np.float32) / np.float32(127)
    if moments is None:
        whole = np.clip(np.round(rows / scales), -127, 127).astype(np.int8)
    else:
        whole = gptq(rows, scales, moments.matrix / np.outer(factors, factors))
    key = f"{product.output[0]}/weights/int8"
    values = {"": whole, "/scale": scales, "/zero": np.zeros_like(whole[0])}
    return [graph.constant(f"{key}{word}", value) for word, value in values.items()]


def _replace(graph: Graph, replacements: Mapping[str, list[Any]]) -> None:
    """Replace nodes, by the name of their first output."""
    graph.nodes = [
        new
        for each in graph.nodes
        for new in replacements.get(each.output[0] if each.output else "", [each])
    ]


def _replace_input(node: Any, old: str, new: str) -> None:
    for position, name in enumerate(node.input):
        if name == old:
            node.input[position] = new


def _scalar(value: float) -> Array:
    return np.asarray(max(value, SMALLEST), np.float32)


def gptq(weights: Array, scales: Array, moments: Array) -> Array:
    """GPTQ: weights rounded so that the errors of a product's inputs cancel each other.

        minimise |X W - X Q S|²     X: inputs (rows, in), W: weights (in, out), S: column scales

    Rows of W are rounded one after the other, and each error is moved to the rows that are left, as
    far as their inputs can make up for it: by the inverse of XᵀX. Returns int8 of (in, out), from
    -127 to 127.

    Args:
        moments: XᵀX of the inputs, (in, in); inputs that are always 0 are rounded to the nearest.

    Source: Frantar et al., section 3, arXiv:2210.17323 (with the largest inputs first).
    """
    matrix = moments.astype(np.float64)
    diagonal = np.diag_indices_from(matrix)
    unused = matrix[diagonal] <= 0
    matrix[diagonal] += DAMPING * matrix[diagonal].mean() + unused
    order = np.argsort(-matrix[diagonal], kind="stable")
    # row i: first row of the inverse of XᵀX without the inputs before i, over the root of its first
    feedback = np.linalg.cholesky(np.linalg.inv(matrix[np.ix_(order, order)])).T
    rest, rounded = weights[order].astype(np.float64), np.empty(weights.shape, np.int8)
    for start in range(0, len(rest), BLOCK):
        block = range(start, min(start + BLOCK, len(rest)))
        errors = np.empty((len(block), rest.shape[1]))
        for row in block:
            whole = np.clip(np.round(rest[row] / scales), -MAX_INT8, MAX_INT8)
            error = errors[row - start] = (rest[row] - whole * scales) / feedback[row, row]
            later = slice(row + 1, block.stop)
            rest[later] -= np.outer(feedback[row, later], error)
            rounded[order[row]] = whole
        rest[block.stop :] -= feedback[block.start : block.stop, block.stop :].T @ errors
    return rounded
