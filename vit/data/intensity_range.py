"""Range of the values of deep images (more than 8 bits per channel), measured on training images.

    low   = quantile 0.01 over images of (quantile 0.001 of an image's values)
    high  = quantile 0.99 over images of (quantile 0.999 of an image's values)

One range for all images keeps their absolute intensities comparable. The inner quantiles leave out
damaged pixels, the outer ones failed exposures.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from vit.config.data_config import DataConfig
from vit.data.image_io import IntensityRange, StoredValues, intensity_quantiles, read_intensities
from vit.data.instrument_images import VALUE_TYPES, ValueType
from vit.errors import BadImage, ConfigError, DataError
from vit.text import Notify, plural, printable

T = TypeVar("T")

MAX_MEASURED = 256
"""Images that are measured, evenly spaced over the training images."""
MAX_PIXELS_OF_IMAGE = 2**14
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


def measure_channels(
    data: DataConfig, paths: Sequence[str], stored: Mapping[str, StoredValues], notify: Notify
) -> dict[str, Any]:
    """The settings of `vit.config.DataConfig` that say how the values of images are read.

    The range of each channel is measured as that of grey images, its mean and standard deviation
    within the range, on at most MAX_MEASURED images.
    """
    count, names = stored[paths[0]].channels, stored[paths[0]].names
    if other := next((path for path, one in stored.items() if one.names != names), None):
        ours, theirs = (", ".join(one) or "no names" for one in (names, stored[other].names))
        differ = f"{printable(paths[0])} names its channels {ours}, and {printable(other)} {theirs}"
        if not all(word.isdecimal() for word in data.channel_order):
            raise DataError(f"{differ}: name them alike, or choose by number")
        notify(f"note: {differ}: they are taken by number")
        names = ()
    order, names = choose_channels(data.channel_order, count, names)
    dtypes = {one.dtype for one in stored.values()}
    holding = (kind for kind in VALUE_TYPES if all(np.can_cast(dtype, kind) for dtype in dtypes))
    value_type: ValueType = next(holding, "float32")  # the narrowest that holds all values
    chosen = evenly_spaced(paths, MAX_MEASURED)
    with ThreadPoolExecutor(THREADS) as pool:
        measured = list(pool.map(lambda path: _channel_sample(path, order, data.axes), chosen))
    samples = [one for one in measured if one is not None]
    if not samples:
        raise DataError(f"not one of {len(chosen)} images can be read, such as {chosen[0]}")
    ranges, means, deviations = [], [], []
    for number, channel in enumerate(order):
        known = [sample[~np.isnan(sample[:, number]), number] for sample in samples]
        columns = [column for column in known if len(column)]
        found = data.intensity_range or common_range(
            [intensity_quantiles(column) for column in columns], whole=value_type != "float32"
        )
        if found is None or not columns:
            others = ",".join(str(one) for one in order if one != channel)
            remedy = f"leave it out by --channels {others}" if others else "nothing to learn from"
            raise DataError(f"channel {channel} has the same value in all images: {remedy}")
        low, high = found
        shares = (np.concatenate(columns).astype(np.float64).clip(low, high) - low) / (high - low)
        ranges += [low, high]
        means.append(round(float(shares.mean()), 6))
        deviations.append(round(max(float(shares.std()), 1e-3), 6))
    shown = ", ".join(
        f"{channel}: {ranges[2 * n]:g} to {ranges[2 * n + 1]:g}"
        for n, channel in enumerate(names or order)
    )
    notify(
        f"note: {plural(len(order), 'channel')} of {value_type}, which become 0 to 1 (channel: "
        f"values, measured on {len(samples):,} images): {shown}"
    )
    return {
        "channels": len(order),
        "channel_order": tuple(map(str, order)),
        "channel_names": names or data.channel_names,  # of config.yaml, where files have none
        "value_type": value_type,
        "file_channels": count,
        "channel_ranges": tuple(ranges),
        "channel_mean": tuple(means),
        "channel_std": tuple(deviations),
    }


def choose_channels(
    words: Sequence[str], count: int, names: tuple[str, ...]
) -> tuple[list[int], tuple[str, ...]]:
    """The numbers of `--channels` in files with `count` channels, and their names; where a file has
    no `names`, `words` may name all channels."""
    if not words:
        return list(range(count)), names
    if not names and len({*words}) == count and not any(word.isdecimal() for word in words):
        return list(range(count)), tuple(words)
    known = {name: n for n, name in enumerate(names)} | {str(n): n for n in range(count)}
    numbers = [known.get(word, count) for word in words]
    if max(numbers) >= count or len({*numbers}) < len(numbers):
        rest = f"some of {', '.join(names)}" if names else f"names for all {count} channels"
        raise ConfigError(
            f"--channels {','.join(words)}: give different numbers from 0 to {count - 1}, or {rest}"
        )
    return numbers, tuple(names[number] for number in numbers) if names else ()


def _channel_sample(path: str, order: Sequence[int], axes: str) -> np.ndarray[Any, Any] | None:
    """Some pixels of an image, (pixels, channels); None if unreadable."""
    try:
        values = read_intensities(path, axes)[..., list(order)]
    except BadImage:  # reported when training reads it
        return None
    pixels = values.reshape(-1, len(order))
    return pixels[:: max(len(pixels) // MAX_PIXELS_OF_IMAGE, 1) | 1]


def common_range(ranges: Sequence[IntensityRange], *, whole: bool = True) -> IntensityRange | None:
    """The range of several images from the range of each; None if all their values are equal."""
    table = np.array(ranges or [(0, 0)])
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
