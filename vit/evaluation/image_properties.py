"""Properties of images that accuracy may depend on: size, shape, brightness, sharpness, origin.

    grey       = (red + green + blue) / 3
    brightness = mean of grey / 255
    sharpness  = standard deviation of the Laplacian of grey

Both are those of the image as the network sees it, resized and cropped: blur that disappears in
resizing does not matter. Nothing is decoded for them.

Source: Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy: a comparative study",
ICPR 2000 (variance of the Laplacian).
"""

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from vit.data.image_io import JPEG_FORMATS, read_header
from vit.errors import BadImage
from vit.evaluation.accuracy_slices import Feature, Value

ASPECTS = (2 / 3, 9 / 10, 10 / 9, 3 / 2)
"""Limits between slices of width / height."""
CHUNK = 64
"""Images of a batch that are measured at a time."""
EMPTY = "(empty)"


class ImageProperties:
    """Collects the properties of images by their path; thread-safe."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int, str]] = {}
        """Width, height and file format, the two in pixels."""
        self.pixels: dict[str, tuple[float, float]] = {}
        """Brightness and sharpness."""

    def add(self, path: str, size: tuple[int, int], file_format: str, pixels: Tensor) -> None:
        """Add a decoded image.

        Args:
            size: Width and height of the whole image, in pixels.
            pixels: As the network sees it, uint8 (3, height, width), or (crops, 3, height, width),
                of which the first is measured.
        """
        self.files[path] = (*size, file_format)
        (self.pixels[path],) = pixel_statistics(pixels[:1] if pixels.ndim == 4 else pixels[None])

    def add_pixels(self, paths: Sequence[str], batch: Tensor) -> None:
        """Add images as the network sees them, uint8 (images, 3, height, width)."""
        for first in range(0, len(paths), CHUNK):
            found = pixel_statistics(batch[first : first + CHUNK])
            self.pixels.update(zip(paths[first : first + CHUNK], found, strict=True))

    def add_headers(self, paths: Sequence[str]) -> None:
        """Read size and format of files from their headers; unreadable ones are left out."""
        for path in paths:
            try:
                header = read_header(path)
            except BadImage:
                continue
            self.files[path] = (header.width, header.height, header.format)

    def features(
        self,
        paths: Sequence[str],
        *,
        classes: Sequence[str] | None = None,
        training_counts: Mapping[str, int] | None = None,
        columns: Mapping[str, Mapping[str, str]] | None = None,
    ) -> list[Feature]:
        """The features of the images of an evaluation.

        Args:
            classes: The class of each; None of a multi-label network.
        """
        files = [self.files.get(path) for path in paths]
        pixels = [self.pixels.get(path, (None, None)) for path in paths]
        sides = [None if one is None else float(min(one[:2])) for one in files]
        aspects = [None if one is None else one[0] / one[1] for one in files]
        formats = [None if one is None else _format_name(one[2]) for one in files]
        found = [
            Feature(key="size", title="the short side", values=sides, unit=" px"),
            Feature(key="aspect", title="width / height", values=aspects, edges=ASPECTS),
            Feature(key="brightness", title="brightness", values=[one for one, _ in pixels]),
            Feature(key="sharpness", title="sharpness", values=[one for _, one in pixels]),
            Feature(key="file_type", title="the file type", values=formats),
        ]
        if classes is not None:
            where = "here" if training_counts is None else "in training"
            counts = Counter(classes) if training_counts is None else training_counts
            frequency = [float(counts.get(name, 0)) for name in classes]
            title = f"the number of images of the class {where}"
            found.append(Feature(key="class_frequency", title=title, values=frequency))
        folders = origin_folders(paths, classes)
        found.append(Feature(key="folder", title="the folder", values=folders))
        for column, cells in (columns or {}).items():
            values = column_values([cells.get(path, "") for path in paths])
            title = f"column {column}"
            found.append(Feature(key=f"column:{column}", title=title, values=values))
        return found


def pixel_statistics(images: Tensor) -> list[tuple[float, float]]:
    """Brightness in [0, 1] and sharpness in grey levels of each image.

    In integers by numpy, since the calls cost more than the pixels of a small image.

    Args:
        images: uint8, (images, 3, height, width). Of less than 3 pixels a side the sharpness is 0.
    """
    red, green, blue = images.numpy().swapaxes(0, 1)
    sums = np.add(red, green, dtype=np.int16)  # three times the grey value
    sums += blue
    brightness = sums.mean(axis=(1, 2)) / (3 * 255)
    if min(sums.shape[1:]) < 3:
        return [(share, 0.0) for share in brightness.tolist()]
    laplacian = sums[:, 1:-1, 1:-1] * np.int16(-4)
    laplacian += sums[:, :-2, 1:-1]
    laplacian += sums[:, 2:, 1:-1]
    laplacian += sums[:, 1:-1, :-2]
    laplacian += sums[:, 1:-1, 2:]
    spread = laplacian.reshape(len(sums), -1).astype(np.float32)
    squares = np.einsum("ij,ij->i", spread, spread) / spread.shape[1]
    variance = np.maximum(squares - spread.mean(axis=1) ** 2, 0)
    return list(zip(brightness.tolist(), (np.sqrt(variance) / 3).tolist(), strict=True))


def origin_folders(paths: Sequence[str], classes: Sequence[str] | None = None) -> list[str]:
    """The folder of each image below the one that all share, without that of its class."""
    parents = [os.path.dirname(path).split(os.sep) for path in paths]
    levels = zip(*parents, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
    names = [None] * len(paths) if classes is None else classes
    return [
        "/".join(part for part in parts[shared:] if part != name) or "."
        for parts, name in zip(parents, names, strict=True)
    ]


def column_values(cells: Sequence[str]) -> list[Value]:
    """Cells of a column as numbers where all of them are some, else as words."""
    try:
        numbers = [float(cell) if cell else None for cell in cells]
    except ValueError:
        return [cell or EMPTY for cell in cells]
    finite = all(one is None or abs(one) < float("inf") for one in numbers)
    return [*numbers] if finite else [cell or EMPTY for cell in cells]


def _format_name(name: str) -> str | None:
    return "JPEG" if name in JPEG_FORMATS else name or None
