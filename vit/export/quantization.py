"""int8 quantization of an ONNX graph: matrix products in 8-bit integers.

    weights               one scale a column:          w ~ s q,        q in -127 ... 127
    activations before    one scale and zero a tensor: x ~ s (q - z),  q in 0 ... 255
    queries, keys, values one scale a tensor:          x ~ s q,        q in -127 ... 127
    attention weights     one scale a tensor:          x ~ s q,        q in 0 ... 255

Static: the range of each activation is what the calibration images reach (Jacob et al., section
3, arXiv:1712.05877), and the graph holds QuantizeLinear and DequantizeLinear in front of products,
which onnxruntime, OpenVINO and others fuse. Where a LayerNorm alone feeds products with weights,
channels with large values first hand them over to the weights (SmoothQuant, section 4,
arXiv:2211.10438). Dynamic: each batch is measured as it comes, and only products with weights are
in integers.

What fits the images, softmaxes, norms and the head stay in float32: they have few operations, or
the last word.

The packed projection of queries, keys and values is split into three products first:

    Split(Transpose(Reshape(x W + b)))   becomes   Transpose(Reshape(x W_i + b_i)) for each part i

and a number that a part is multiplied with goes into W_i and b_i. The same numbers come out, and
each part can be written in 8 bits by the product that makes it, which engines do in one pass.
What looks different stays as it is.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vit.errors import ConfigError, DataError
from vit.export.onnx_builder import MOVES, Graph, attribute, node
from vit.export.onnx_graph import libraries
from vit.exported.onnx_session import Array, OnnxSession

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


def split_qkv(graph: Graph) -> int:
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
        built_graph = [graph.maker(nodes[0].input[place], kind) for place in places]
        maker = next((each for each in built_graph if each is not None), None)
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
    built_graph, width, start = [], int(packed.shape[3]), 0
    for name, heads in zip(packed.nodes[-1].output, packed.parts, strict=True):
        columns = slice(start * width, (start + heads) * width)
        start += heads
        factor = _factor(graph, name, gone)
        weights = graph.constant(f"{name}/weights", packed.weights[:, columns] * factor)
        last = f"{name}/product"
        built_graph.append(node("MatMul", [packed.source, weights], [last]))
        if packed.bias is not None:
            bias = graph.constant(f"{name}/bias", packed.bias[columns] * factor)
            built_graph.append(node("Add", [last, bias], [f"{name}/flat"]))
            last = f"{name}/flat"
        shape = packed.shape.copy()
        shape[HEADS] = heads
        built_graph.append(
            node("Reshape", [last, graph.constant(f"{name}/shape", shape)], [f"{name}/heads"])
        )
        built_graph.append(node("Transpose", [f"{name}/heads"], [name], perm=HEADS_FIRST))
    return built_graph


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


FEWEST = 16
"""Calibration images below which the ranges are luck."""
SMOOTHING = 0.5
"""Share of an activation's range that goes to the weights, as an exponent; alpha of SmoothQuant."""
SMALLEST = 1e-8
"""Stands for a range or a weight of zero."""
SCORES = ("Add", "Mul", "Div", "Where", "Reshape")
"""What may stand between the product of queries and keys and its softmax."""


@dataclass
class Spot:
    """A tensor that is to be in integers in front of some products.

    Args:
        name: Of the tensor.
        readers: Nodes that take it in integers.
        products: MatMuls with weights that it gets to, as it is or moved; none in attention.
        signed: Symmetric around 0, instead of from its least to its greatest value.
        channels: Of its last axis where they are measured apart, else 1.
    """

    name: str
    readers: list[Any]
    products: list[Any] = field(default_factory=list)
    signed: bool = False
    channels: int = 1
    low: Array = field(default_factory=lambda: np.zeros(1, np.float32))
    high: Array = field(default_factory=lambda: np.zeros(1, np.float32))

    def widen(self, low: Array, high: Array) -> None:
        """Take in what another image reaches; 0 is always inside."""
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)

    def scale_and_zero(self) -> tuple[Array, Array]:
        low, high = float(self.low.min()), float(self.high.max())
        if self.signed:
            return _scalar(max(-low, high) / 127), np.zeros((), np.int8)
        scale = _scalar((high - low) / 255)
        return scale, np.clip(np.round(-low / scale), 0, 255).astype(np.uint8)


def quantize(
    content: bytes,
    images: Sequence[Array],
    *,
    dynamic: bool = False,
) -> bytes:
    """`content` with its products in 8-bit integers, and the same inputs and outputs.

    Args:
        content: An ONNX graph of float32, of `vit export`.
        images: For calibration, uint8 (height, width, 3) of any size; at least FEWEST. Dynamic
            quantisation looks at none.
        dynamic: Measure the range of each activation while it is computed.

    Raises:
        ConfigError: The graph is not of float32, or has no products with weights.
        DataError: There are too few images, or one is none.
        VitError: A library is missing.
    """
    graph = Graph(content)
    metadata = {value.key: value.value for value in graph.proto.metadata_props}
    precision = metadata.get("precision", "fp32")
    split_qkv(graph)
    spots = _before_weights(graph)
    if precision != "fp32" or not spots:
        raise ConfigError(
            f"precision={precision!r}, activations that weights of float32 multiply: "
            f"{len(spots)}; int8 is made of a graph of fp32"
        )
    calibration: dict[str, Any] = {"dynamic": dynamic}
    if dynamic:
        _integers_as_they_come(graph, spots)
    else:
        _check(images)
        for spot in spots:
            _move_back(graph, spot)
        spots += _in_attention(graph, {spot.name for spot in spots})
        _calibrate(graph, spots, images)
        _integers(graph, spots, [_smooth(graph, spot) for spot in spots])
        calibration |= {"samples": len(images), "smoothing": SMOOTHING}
    return graph.finish({**metadata, "precision": "int8", "calibration": json.dumps(calibration)})


def _before_weights(graph: Graph) -> list[Spot]:
    """Activations that a matrix of weights multiplies."""
    found: dict[str, Spot] = {}
    for each in graph.nodes:
        if each.op_type == "MatMul" and len(shape := graph.shape(each.input[1]) or ()) == 2:
            (name, _), channels = each.input, shape[0]
            spot = found.setdefault(name, Spot(name, [], channels=channels))
            spot.readers.append(each)
            spot.products.append(each)
    return list(found.values())


def _move_back(graph: Graph, spot: Spot) -> None:
    """To where the tensor is made, so that it is moved in integers, if nobody else takes it."""
    while len(graph.takers[spot.name]) == len(spot.readers):
        maker = graph.makers.get(spot.name)
        if maker is None or maker.op_type not in MOVES:
            return
        spot.name, spot.readers, spot.channels = maker.input[0], [maker], 1


def _in_attention(graph: Graph, known: set[str]) -> list[Spot]:
    """Queries, keys and values where they are made, and attention weights."""
    found = []
    for each in graph.nodes:
        if each.op_type != "MatMul" or any(name in graph.constants for name in each.input):
            continue
        mixes = graph.maker(each.input[0], "Softmax") is not None
        if not mixes and not _scores(graph, each):
            continue
        for place, name in enumerate(each.input):
            spot = Spot(name, [each], signed=not mixes or place == 1)
            _move_back(graph, spot)
            if spot.name not in known and len(graph.takers[spot.name]) == 1:
                found.append(spot)
    return found


def _scores(graph: Graph, product: Any) -> bool:
    """Whether a softmax is all that looks at `product`."""
    taker = graph.only_taker(product.output[0])
    while taker is not None and taker.op_type in SCORES:
        taker = graph.only_taker(taker.output[0])
    return taker is not None and taker.op_type == "Softmax"


def _check(images: Sequence[Array]) -> None:
    if len(images) < FEWEST:
        raise DataError(
            f"{len(images)} images for calibration: at least {FEWEST} are needed; give more, "
            "or quantise dynamically"
        )
    for number, image in enumerate(images):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise DataError(
                f"calibration image {number} is {image.dtype} of shape {image.shape}; it "
                "must be uint8 of (height, width, 3)"
            )


def _calibrate(graph: Graph, spots: Sequence[Spot], images: Sequence[Array]) -> None:
    """Find what the spots reach; one image is in memory at a time."""
    measured = Graph(graph.proto.SerializeToString())
    measured.nodes, measured.constants = [*graph.nodes], dict(graph.constants)
    del measured.proto.graph.output[:]
    first = measured.constant("range/first", np.array([0]))
    for spot in spots:
        key = f"range/{spot.name}"
        shape = measured.constant(f"{key}/shape", np.array([-1, spot.channels]))
        measured.nodes.append(node("Reshape", [spot.name, shape], [f"{key}/rows"]))
        for end in ("Min", "Max"):
            taken = [f"{key}/rows", first]
            measured.nodes.append(node(f"Reduce{end}", taken, [f"{key}/{end}"], keepdims=0))
            value = libraries().helper.make_tensor_value_info(f"{key}/{end}", 1, [spot.channels])
            measured.proto.graph.output.append(value)
    session = OnnxSession(measured.finish({}))
    for image in images:
        found = iter(session({session.inputs[0]: image[None]}))
        for spot in spots:
            spot.widen(next(found), next(found))


def _smooth(graph: Graph, spot: Spot) -> Array:
    """What the rows of weights are multiplied by; the norm in front is divided by it here."""
    factors = np.ones_like(spot.low)
    norm = graph.maker(spot.name, "LayerNormalization")
    if norm is None or spot.readers != spot.products:
        return factors
    if len(graph.takers[spot.name]) != len(spot.readers):
        return factors
    if any(graph.shape(name) != factors.shape for name in norm.input[1:]):
        return factors
    rows = [np.abs(graph.array(each.input[1])).max(axis=1) for each in spot.products]
    values, weights = np.maximum(-spot.low, spot.high), np.max(rows, axis=0)
    used = (values > SMALLEST) & (weights > SMALLEST)
    factors[used] = values[used] ** SMOOTHING / weights[used] ** (1 - SMOOTHING)
    for place, name in list(enumerate(norm.input))[1:]:
        divided = graph.array(name) / factors
        norm.input[place] = graph.constant(f"{spot.name}/smoothed/{place}", divided)
    spot.low, spot.high = spot.low / factors, spot.high / factors
    return factors


def _integers(graph: Graph, spots: Sequence[Spot], factors: Sequence[Array]) -> None:
    """QuantizeLinear and DequantizeLinear at each spot and at its weights."""
    before: dict[str, list[Any]] = {}
    for spot, factor in zip(spots, factors, strict=True):
        key = f"{spot.name}/int8"
        scale, zero = spot.scale_and_zero()
        how = [graph.constant(f"{key}/scale", scale), graph.constant(f"{key}/zero", zero)]
        built_graph = before.setdefault(spot.readers[0].output[0], [])
        built_graph.append(node("QuantizeLinear", [spot.name, *how], [key]))
        built_graph.append(node("DequantizeLinear", [key, *how], [f"{key}/back"]))
        for reader in spot.readers:
            for place, name in enumerate(reader.input):
                if name == spot.name:
                    reader.input[place] = f"{key}/back"
        for product in spot.products:
            weights = _weights(graph, product, factor)
            back = f"{weights[0]}/back"
            built_graph = before.setdefault(product.output[0], [])
            built_graph.append(node("DequantizeLinear", weights, [back], axis=1))
            product.input[1] = back
    graph.nodes = [
        new
        for each in graph.nodes
        for new in (*before.get(each.output[0] if each.output else "", ()), each)
    ]


def _integers_as_they_come(graph: Graph, spots: Sequence[Spot]) -> None:
    """The range of each spot is measured each time, and its products are of integers."""
    instead: dict[str, list[Any]] = {}
    for spot in spots:
        key = f"{spot.name}/int8"
        now = [key, f"{key}/scale", f"{key}/zero"]
        built_graph = [node("DynamicQuantizeLinear", [spot.name], now)]
        for product in spot.products:
            (output,) = product.output
            weights, scales, zeros = _weights(graph, product, np.ones(1, np.float32))
            whole, floats, scale = (f"{output}/{word}" for word in ("whole", "floats", "scale"))
            built_graph.append(node("MatMulInteger", [key, weights, now[2], zeros], [whole]))
            built_graph.append(node("Cast", [whole], [floats], to=1))
            built_graph.append(node("Mul", [now[1], scales], [scale]))
            built_graph.append(node("Mul", [floats, scale], [output]))
            instead[output], built_graph = built_graph, []
    graph.nodes = [
        new
        for each in graph.nodes
        for new in instead.get(each.output[0] if each.output else "", [each])
    ]


def _weights(graph: Graph, product: Any, factors: Array) -> list[str]:
    """Names of the weights of `product` in integers, of their scales and of their zeros."""
    rows = graph.array(product.input[1]) * factors[:, None]
    scales = np.maximum(np.abs(rows).max(axis=0), SMALLEST).astype(np.float32) / np.float32(127)
    whole = np.clip(np.round(rows / scales), -127, 127).astype(np.int8)
    key = f"{product.output[0]}/weights/int8"
    values = {"": whole, "/scale": scales, "/zero": np.zeros_like(whole[0])}
    return [graph.constant(f"{key}{word}", value) for word, value in values.items()]


def _scalar(value: float) -> Array:
    return np.asarray(max(value, SMALLEST), np.float32)
