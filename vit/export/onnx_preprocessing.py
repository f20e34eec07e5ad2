"""`Preprocessing.resize_and_crop` as nodes of an ONNX graph, for images of any size.

Pillow resizes in two passes, first along the rows, each rounded to bytes:

    centre_i = start + (i + 1/2) scale               scale = length before / length after
    w_ij     = filter((j + 1/2 - centre_i) / max(scale, 1)),  as shares of their sum over j
    y_i      = floor(sum of round(2^22 w_ij) x_j / 2^22 + 1/2), at least 0 and at most 255

The graph computes the same, bit by bit if the engine keeps its types: positions and weights in
float64, sums in float32. A float32 holds integers up to 2^24 exactly, so a weight is summed as two
numbers of 11 bits. Half precision is too coarse for the positions.

Only the pixels of the crop are computed, in groups of neighbours: the window of the image that a
group depends on is gathered and multiplied by a small matrix.

The graph takes the order of the installed Pillow, whose pixels the network was trained on: from
version 13 on, the columns come first if the height shrinks by more than twice as many pixels as the
width.

The operator Resize with antialias=1 is not used: OpenVINO ignores antialias (2026.4), and
onnxruntime rounds differently.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL
from numpy.typing import DTypeLike, NDArray

from vit.data.preprocessing import MAX_RESIZED_PIXELS, Preprocessing
from vit.export.onnx_tracing import libraries

Number = int | float

PREFIX = "pixels/"
"""Prefix of the names of all nodes and tensors."""
FITTED = f"{PREFIX}fitted"
ONE = 1 << 22  # a weight of 1 in fixed point
HALF = 1 << 11
GROUP = 16
SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}
ROWS_FIRST = int(PIL.__version__.split(".")[0]) < 13  # whatever the shape
SMALLEST = 1e-9  # replaces a sum of no weights, of pixels that are cut off


class Nodes:
    """Builder of a graph: its nodes and constants."""

    def __init__(self, prefix: str, constants: dict[bytes, Any] | None = None) -> None:
        self.prefix = prefix
        self.onnx = libraries()
        self.nodes: list[Any] = []
        self.constants: dict[bytes, Any] = {} if constants is None else constants

    def add(
        self, operator: str, *inputs: "Value", kind: DTypeLike, name: str = "", **settings: Any
    ) -> "Value":
        """Add a node of an ONNX operator with attributes `settings`; returns its output."""
        label = f"{self.prefix}{len(self.nodes)}_{operator}"
        output = name or label
        names = [value.name for value in inputs]
        self.nodes.append(
            self.onnx.helper.make_node(operator, names, [output], name=label, **settings)
        )
        return Value(self, output, kind)

    def constant(self, value: Number | Sequence[float] | NDArray[Any], kind: DTypeLike) -> "Value":
        """A constant; equal ones are stored once."""
        array = np.asarray(value, kind)
        found = self.onnx.numpy_helper.from_array(array)
        known = self.constants.setdefault(found.SerializeToString(), found)
        known.name = known.name or f"{self.prefix}constant_{len(self.constants)}"
        return Value(self, known.name, kind)

    def as_graph(self, result: "Value", shape: Sequence[str | int]) -> Any:
        """The subgraph of a branch, which reads the tensors of the enclosing graph."""
        code = self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(result.kind))
        output = self.onnx.helper.make_tensor_value_info(result.name, code, shape)
        return self.onnx.helper.make_graph(self.nodes, self.prefix.strip("/"), [], [output])


class Value:
    """A tensor of the graph, with Python's operators; numbers become constants of its type."""

    def __init__(self, nodes: Nodes, name: str, kind: DTypeLike) -> None:
        self.nodes, self.name, self.kind = nodes, name, kind

    def op(self, operator: str, *others: "Value | Number", **settings: Any) -> "Value":
        """Output of `operator` on this and `others`, in the type of this."""
        inputs = [self.of(other) for other in others]
        return self.nodes.add(operator, self, *inputs, kind=self.kind, **settings)

    def of(self, number: "Value | Number") -> "Value":
        """A number as a constant in the type of this; a tensor unchanged."""
        return number if isinstance(number, Value) else self.nodes.constant(number, self.kind)

    def cast(self, kind: DTypeLike) -> "Value":
        code = self.nodes.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        return self.nodes.add("Cast", self, kind=kind, to=code)

    def compare(self, operator: str, other: "Value | Number") -> "Value":
        """Boolean output of the comparison `operator`."""
        return self.nodes.add(operator, self, self.of(other), kind=np.bool_)

    def where(self, yes: "Value", no: "Value | Number") -> "Value":
        """`yes` where this is true, `no` elsewhere."""
        return self.nodes.add("Where", self, yes, yes.of(no), kind=yes.kind)

    def reshape(self, *shape: "int | Value") -> "Value":
        """Reshape: 0 keeps an axis, -1 is inferred."""
        sides = [
            self.nodes.constant([side], np.int64) if isinstance(side, int) else side.unsqueeze(0)
            for side in shape
        ]
        sizes = self.nodes.add("Concat", *sides, kind=np.int64, axis=0)
        return self.nodes.add("Reshape", self, sizes, kind=self.kind)

    def unsqueeze(self, axis: int) -> "Value":
        """Insert an axis of length 1."""
        return self.op("Unsqueeze", self.nodes.constant([axis], np.int64))

    def first(self, count: int, *, axis: int) -> "Value":
        """The first `count` elements along an axis."""
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


def preprocessing_nodes(preprocessing: Preprocessing) -> Nodes:
    """Nodes that resize and crop or pad `images`.

    images: uint8, (batch, any height, any width, 3) -> FITTED: uint8, (batch, height, width, 3)
    """
    nodes = Nodes(PREFIX)
    tall, wide = axes_of(Value(nodes, "images", np.uint8), preprocessing)
    lower, narrower = (axis.size - axis.resized for axis in (tall, wide))
    least = 2**62 if ROWS_FIRST else (narrower * 2).op("Max", 0)
    columns_first = lower.compare("Greater", least)
    branches = {
        name: branch(nodes, f"{PREFIX}{name}/", preprocessing, columns_first=first)
        for name, first in (("then_branch", True), ("else_branch", False))
    }
    nodes.add("If", columns_first, kind=np.uint8, name=FITTED, **branches)
    return nodes


def branch(outer: Nodes, prefix: str, preprocessing: Preprocessing, *, columns_first: bool) -> Any:
    """Both passes, in one of the two orders, as a subgraph of `outer`."""
    nodes = Nodes(prefix, outer.constants)
    images = Value(nodes, "images", np.uint8)
    tall, wide = axes_of(images, preprocessing)
    kind = preprocessing.interpolation
    transposed = [0, 2, 1, 3]
    x = images if columns_first else images.op("Transpose", perm=transposed)
    for axis in (tall, wide) if columns_first else (wide, tall):
        x = resize_axis(x.reshape(0, axis.size, -1), axis, kind)
        if columns_first or axis is wide:
            x = x.reshape(0, axis.target, -1, 3).op("Transpose", perm=transposed)
    x = x.reshape(0, tall.target, wide.target, 3)
    if preprocessing.resize == "pad":
        inside = tall.covered().reshape(-1, 1, 1).op("And", wide.covered().reshape(1, -1, 1))
        x = inside.where(x, nodes.constant(preprocessing.mean_colour, np.uint8))
    return nodes.as_graph(x, ["batch", tall.target, wide.target, 3])


def axes_of(images: Value, preprocessing: Preprocessing) -> tuple["Axis", "Axis"]:
    """The vertical and the horizontal axis."""
    height, width = side_of(images, 1), side_of(images, 2)
    rows, cols = preprocessing.image_size
    full_height, full_width = resized(preprocessing, height, width)
    cropped = (full_height * full_width).compare("Greater", MAX_RESIZED_PIXELS)
    pads = preprocessing.resize == "pad"
    tall = Axis(height, full_height, rows, cropped, pads=pads)
    return tall, Axis(width, full_width, cols, cropped, pads=pads)


def side_of(images: Value, axis: int) -> Value:
    nodes = images.nodes
    shape = nodes.add("Shape", images, kind=np.int64, start=axis, end=axis + 1)
    return nodes.add("Squeeze", shape, kind=np.int64)


def resized(preprocessing: Preprocessing, height: Value, width: Value) -> tuple[Value, Value]:
    """(height, width) of the whole image before the crop, as `Preprocessing` rounds them."""
    rows, cols = (math.floor(side / preprocessing.crop_share) for side in preprocessing.image_size)
    if preprocessing.resize == "squash":
        return height.of(rows), width.of(cols)
    if rows == cols and preprocessing.resize == "crop":
        long = height.op("Max", width) * rows / height.op("Min", width)
        upright = width.compare("LessOrEqual", height)
        return upright.where(long, rows), upright.where(height.of(rows), long)
    sides = height.cast(np.float64), width.cast(np.float64)
    nearer = "Max" if preprocessing.resize == "pad" else "Min"
    ratio = (sides[0] / rows).op(nearer, sides[1] / cols)
    tall, wide = ((side / ratio).op("Round").op("Max", 1.0).cast(np.int64) for side in sides)
    return tall, wide


class Axis:
    """Positions of the pixels of the result along one axis of the image; with `cropped`, Pillow
    computes the crop only, whose borders it takes in float32."""

    def __init__(
        self, size: Value, full: Value, target: int, cropped: Value, *, pads: bool = False
    ) -> None:
        self.size, self.full, self.target = size, full, target
        self.resized = cropped.where(full.of(target), full)  # by Pillow
        half = (full - target).cast(np.float64) * 0.5
        before = half.op("Round")
        if pads:
            before = full.compare("Less", target).where(half.op("Ceil"), before)
        self.before = before
        ratio = size.cast(np.float64) / full.cast(np.float64)
        ends = [(edge * ratio).cast(np.float32) for edge in (before, before + target)]
        self.start = cropped.where(ends[0].cast(np.float64), 0.0)
        self.offset = cropped.where(before.of(0.0), before)
        self.scale = cropped.where((ends[1] - ends[0]).cast(np.float64) / target, ratio)

    def covered(self) -> Value:
        """Which pixels of the result are of the image, (target,)."""
        places = self.before.nodes.constant(np.arange(self.target), np.float64) + self.before
        ends = places.of(0.0), self.full.cast(np.float64) - 1.0
        return places.compare("Equal", places.op("Clip", *ends))

    def centre(self, number: Value) -> Value:
        """Centres of pixels in the image, by their indices in the result."""
        return (number + self.offset + 0.5) * self.scale + self.start


def resize_axis(x: Value, axis: Axis, interpolation: str) -> Value:
    """Resize the first axis of images, bytes (batch, size, rest) -> (batch, target, rest)."""
    nodes, groups = x.nodes, -(-axis.target // GROUP)
    stretch = axis.scale.op("Max", 1.0)
    reach = SUPPORT[interpolation]
    first = nodes.constant(np.arange(groups)[:, None] * GROUP, np.float64)
    begin = (axis.centre(first) - stretch * reach).op("Floor")
    length = (axis.scale * (GROUP - 1.0) + stretch * (2 * reach)).op("Ceil") + 2.0
    steps = nodes.add("Range", *(length.of(0.0), length, length.of(1.0)), kind=np.float64)
    index = begin + steps  # (groups, window)
    inside = index.op("Clip", index.of(0.0), axis.size.cast(np.float64) - 1.0)
    exists = nodes.add("Equal", index, inside, kind=np.bool_).unsqueeze(1).cast(np.float64)
    numbers = np.arange(groups * GROUP).reshape(groups, GROUP, 1)
    centre = axis.centre(nodes.constant(numbers, np.float64))
    distance = (index.unsqueeze(1) - centre + 0.5) * (stretch.of(1.0) / stretch)
    weights = FILTERS[interpolation](distance.op("Abs")) * exists  # (groups, GROUP, window)
    total = weights.op("ReduceSum", nodes.constant([2], np.int64), keepdims=1)
    whole = (weights / total.op("Max", SMALLEST) * float(ONE)).op("Round")
    pixels = x.op("Gather", inside.cast(np.int64), axis=1)  # (batch, groups, window, rest)
    mixed = weighted_sum(whole, pixels).reshape(0, groups * GROUP, -1)
    return mixed if groups * GROUP == axis.target else mixed.first(axis.target, axis=1)


def weighted_sum(weights: Value, pixels: Value) -> Value:
    """floor(weights pixels / ONE + 1/2) as bytes, for integer weights."""
    high = (weights / float(HALF)).op("Round")
    low = weights - high * float(HALF)
    floats = pixels.cast(np.float32)
    sums = [(part.cast(np.float32) @ floats).cast(np.int32) for part in (high, low)]
    together = sums[0] * HALF + sums[1] + ONE // 2
    return (together.op("Max", 0) / ONE).op("Min", 255).cast(np.uint8)


def bilinear(t: Value) -> Value:
    """max(1 - t, 0)"""
    return (t * -1.0 + 1.0).op("Max", 0.0)


def bicubic(t: Value) -> Value:
    """Keys' cubic with a = -1/2, for t >= 0."""
    near = (t * 1.5 - 2.5) * t * t + 1.0
    far = (((t - 5.0) * t + 8.0) * t - 4.0) * -0.5
    return t.compare("Less", 1.0).where(near, t.compare("Less", 2.0).where(far, 0.0))


FILTERS = {"bilinear": bilinear, "bicubic": bicubic}
