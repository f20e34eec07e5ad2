"""Range of the values of deep images (more than 8 bits per channel), measured on training images.

    low   = quantile 0.01 over images of (quantile 0.001 of an image's values)
    high  = quantile 0.99 over images of (quantile 0.999 of an image's values)

One range for all images keeps their absolute intensities comparable. The inner quantiles leave out
damaged pixels, the outer ones failed exposures.
"""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from vit.data.image_io import IntensityRange, intensity_quantiles, read_intensities
from vit.errors import BadImage
from vit.text import Notify, plural, printable

T = TypeVar("T")

MAX_MEASURED = 256
"""Images that are measured, evenly spaced over the training images."""
THREADS = 4
IMAGE_QUANTILES = (0.01, 0.99)


def measure_intensity_range(paths: Sequence[str], notify: Notify) -> IntensityRange | None:
    """Measure the range of values of deep images; None without any, if all values are equal, or if
    some are integers and others floating-point numbers."""
    chosen = evenly_spaced(paths, MAX_MEASURED)
    with ThreadPoolExecutor(THREADS) as pool:
        measured = [found for found in pool.map(_quantiles, chosen) if found is not None]
    if not measured:
        return None
    if len({is_float for *_, is_float in measured}) > 1:
        notify(
            "note: some images have integers of 16 bits or more and others floating-point "
            "numbers: each is read by the range of its type; --intensity-range LOW HIGH sets one "
            "for all"
        )
        return None
    found = common_range([(low, high) for low, high, _ in measured], whole=not measured[0][2])
    if found is None:
        return None
    low, high = found
    notify(
        f"note: {plural(len(paths), 'image')} with more than 8 bits per channel: values from "
        f"{low:g} to {high:g} become black to white (--intensity-range {low:g} {high:g}, measured "
        f"on {len(measured):,})"
    )
    return found


def common_range(ranges: Sequence[IntensityRange], *, whole: bool = True) -> IntensityRange | None:
    """The range of several images from the range of each; None if all their values are equal."""
    table = np.array(ranges)
    low = float(np.quantile(table[:, 0], IMAGE_QUANTILES[0]))
    high = float(np.quantile(table[:, 1], IMAGE_QUANTILES[1]))
    if not low < high:
        return None
    if whole:
        return float(math.floor(low)), float(math.ceil(high))
    return low, high


def evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of `items`, at equal distances: lists of images are sorted by class."""
    count = min(most, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def _quantiles(path: str) -> tuple[float, float, bool] | None:
    """The range of an image, and whether it has floating-point values; None if unreadable."""
    try:
        values = read_intensities(path)
    except BadImage:  # reported when training reads it
        return None
    return *intensity_quantiles(values), values.dtype.kind == "f"


class DarkImageNote:
    """Writes one note, in any thread, about the first image that is read nearly black."""

    def __init__(self, notify: Notify) -> None:
        self.notify = notify
        self.lock = threading.Lock()
        self.written = False

    def __call__(self, path: str, highest: int) -> None:
        """Report that `path`, whose values are up to `highest` of 65535, is read nearly black."""
        with self.lock:
            if self.written:
                return
            self.written = True
        top = (1 << highest.bit_length()) - 1
        self.notify(
            f"note: {printable(path)} has 16 bits per channel and values up to {highest:,} of "
            "65,535, and the network has no range for such images: it is read nearly black; "
            f"vit predict --intensity-range 0 {top} reads 0 to {top:,} as black to white, and vit "
            "train with it stores the range with the network"
        )
