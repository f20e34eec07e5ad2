"""`Preprocessing.resize_and_crop` as nodes of an ONNX graph, for images of any size.

Pillow resizes in two passes, first along the rows, each rounded to bytes:

    centre_i = start + (i + 1/2) scale               scale = length before / length after
    w_ij     = filter((j + 1/2 - centre_i) / max(scale, 1)),  as shares of their sum over j
    y_i      = floor(sum of round(2^22 w_ij) x_j / 2^22 + 1/2), at least 0 and at most 255

The same is done here, to the last bit wherever the graph is computed in the types that it says:
places and weights in float64, the sums in float32. A float32 holds integers up to 2^24 exactly, so
a weight is summed as two numbers of 11 bits. In half precision the places are wrong.

Only pixels of the crop are computed. They come in groups of neighbours, for each of which the part
of the image that it looks at is copied and multiplied by a small matrix.

Pillow 13 begins with the columns where an image gets lower by more than twice what it gets
narrower, and so does this; earlier ones do not.

The operator Resize, with antialias=1, is not used: OpenVINO computes it without (2026.4), and
onnxruntime rounds another way.
"""

import math
from typing import Any

import numpy as np

from vit.data.preprocessing import MAX_RESIZED_PIXELS, Preprocessing
from vit.export.onnx_builder import Nodes, Value

PREFIX = "pixels/"
"""Of all names of nodes and tensors here."""
FITTED = f"{PREFIX}fitted"
"""Name of the result."""
ONE = 1 << 22  # what a weight of 1 is
HALF = 1 << 11
GROUP = 16
SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}
SMALLEST = 1e-9  # stands for the sum of no weights, of neighbours that are cut off


def fitting(preprocessing: Preprocessing) -> Nodes:
    """Nodes from `images` to `FITTED`.

    images: uint8, (batch, any height, any width, 3); result: uint8, (batch, height, width, 3).
    """
    nodes = Nodes(PREFIX)
    tall, wide = axes_of(Value(nodes, "images", np.uint8), preprocessing)
    lower, narrower = (axis.size - axis.asked for axis in (tall, wide))
    columns_first = lower.holds("Greater", (narrower * 2).op("Max", 0))
    branches = {
        name: branch(nodes, f"{PREFIX}{name}/", preprocessing, columns_first=first)
        for name, first in (("then_branch", True), ("else_branch", False))
    }
    nodes.add("If", columns_first, kind=np.uint8, name=FITTED, **branches)
    return nodes


def branch(outer: Nodes, prefix: str, preprocessing: Preprocessing, *, columns_first: bool) -> Any:
    """Both passes, in one of the two orders, as a graph inside that of `outer`."""
    nodes = Nodes(prefix, outer.constants)
    images = Value(nodes, "images", np.uint8)
    tall, wide = axes_of(images, preprocessing)
    kind = preprocessing.interpolation
    turned = [0, 2, 1, 3]
    if columns_first:
        x = pass_along(images.reshape(0, tall.size, -1), tall, kind)
        x = x.reshape(0, tall.target, -1, 3).op("Transpose", perm=turned)
        x = pass_along(x.reshape(0, wide.size, -1), wide, kind)
        x = x.reshape(0, wide.target, -1, 3).op("Transpose", perm=turned)
    else:
        x = images.op("Transpose", perm=turned)
        x = pass_along(x.reshape(0, wide.size, -1), wide, kind)
        x = x.reshape(0, wide.target, -1, 3).op("Transpose", perm=turned)
        x = pass_along(x.reshape(0, tall.size, -1), tall, kind)
    x = x.reshape(0, tall.target, wide.target, 3)
    return nodes.as_graph(x, ["batch", tall.target, wide.target, 3])


def axes_of(images: Value, preprocessing: Preprocessing) -> tuple["Axis", "Axis"]:
    """The columns' axis and that of the rows."""
    height, width = side_of(images, 1), side_of(images, 2)
    rows, cols = preprocessing.image_size
    full_height, full_width = resized(preprocessing, height, width)
    cropped = (full_height * full_width).holds("Greater", MAX_RESIZED_PIXELS)
    return Axis(height, full_height, rows, cropped), Axis(width, full_width, cols, cropped)


def side_of(images: Value, axis: int) -> Value:
    """Length of an axis."""
    nodes = images.nodes
    shape = nodes.add("Shape", images, kind=np.int64, start=axis, end=axis + 1)
    return nodes.add("Squeeze", shape, kind=np.int64)


def resized(preprocessing: Preprocessing, height: Value, width: Value) -> tuple[Value, Value]:
    """(height, width) of the whole image before the crop, as `Preprocessing` rounds them."""
    rows, cols = (math.floor(side / preprocessing.crop_share) for side in preprocessing.image_size)
    if preprocessing.resize == "squash":
        return height.of(rows), width.of(cols)
    if rows == cols:
        long = height.op("Max", width) * rows / height.op("Min", width)
        upright = width.holds("LessOrEqual", height)
        return upright.where(long, rows), upright.where(height.of(rows), long)
    sides = height.cast(np.float64), width.cast(np.float64)
    ratio = (sides[0] / rows).op("Min", sides[1] / cols)
    tall, wide = ((side / ratio).op("Round").cast(np.int64) for side in sides)
    return tall, wide


class Axis:
    """Where the pixels of the result lie along one axis of the image.

    Args:
        size: Pixels of the image.
        full: Pixels of the whole resized image.
        target: Pixels of its crop.
        cropped: Whether Pillow is given the crop, which it takes in float32.
    """

    def __init__(self, size: Value, full: Value, target: int, cropped: Value) -> None:
        self.size, self.target = size, target
        self.asked = cropped.where(full.of(target), full)  # of Pillow
        before = ((full - target).cast(np.float64) * 0.5).op("Round")
        ratio = size.cast(np.float64) / full.cast(np.float64)
        ends = [(edge * ratio).cast(np.float32) for edge in (before, before + target)]
        self.start = cropped.where(ends[0].cast(np.float64), 0.0)
        self.offset = cropped.where(before.of(0.0), before)
        self.scale = cropped.where((ends[1] - ends[0]).cast(np.float64) / target, ratio)

    def centre(self, number: Value) -> Value:
        """Where the pixels of these numbers have their centre in the image."""
        return (number + self.offset + 0.5) * self.scale + self.start


def pass_along(x: Value, axis: Axis, interpolation: str) -> Value:
    """Resize the first axis of images, bytes (batch, size, rest) -> (batch, target, rest)."""
    nodes, groups = x.nodes, -(-axis.target // GROUP)
    evenly_spaced = axis.scale.op("Max", 1.0)
    reach = SUPPORT[interpolation]
    first = nodes.constant(np.arange(groups)[:, None] * GROUP, np.float64)
    begin = (axis.centre(first) - evenly_spaced * reach).op("Floor")
    length = (axis.scale * (GROUP - 1.0) + evenly_spaced * (2 * reach)).op("Ceil") + 2.0
    steps = nodes.add("Range", *(length.of(0.0), length, length.of(1.0)), kind=np.float64)
    place = begin + steps  # (groups, window)
    inside = place.op("Clip", place.of(0.0), axis.size.cast(np.float64) - 1.0)
    exists = nodes.add("Equal", place, inside, kind=np.bool_).unsqueeze(1).cast(np.float64)
    numbers = np.arange(groups * GROUP).reshape(groups, GROUP, 1)
    centre = axis.centre(nodes.constant(numbers, np.float64))
    distance = (place.unsqueeze(1) - centre + 0.5) * (evenly_spaced.of(1.0) / evenly_spaced)
    weights = FILTERS[interpolation](distance.op("Abs")) * exists  # (groups, GROUP, window)
    total = weights.op("ReduceSum", nodes.constant([2], np.int64), keepdims=1)
    whole = (weights / total.op("Max", SMALLEST) * float(ONE)).op("Round")
    seen = x.op("Gather", inside.cast(np.int64), axis=1)  # (batch, groups, window, rest)
    mixed = weighed(whole, seen).reshape(0, groups * GROUP, -1)
    return mixed if groups * GROUP == axis.target else mixed.first(axis.target, axis=1)


def weighed(weights: Value, pixels: Value) -> Value:
    """floor(weights pixels / ONE + 1/2) as bytes, where weights are integers."""
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
    return t.holds("Less", 1.0).where(near, t.holds("Less", 2.0).where(far, 0.0))


FILTERS = {"bilinear": bilinear, "bicubic": bicubic}
