"""The pictures that a file is calibrated with, and those that it is compared with its run on."""

import os
from collections.abc import Callable, Sequence
from typing import overload

import numpy as np

from vit.data.decoding import check_header, read_image
from vit.data.samples import Sample
from vit.data.sources.opening import Asked, list_images, open_labelled
from vit.errors import BadImage, DataError, printable
from vit.export.options import SAMPLES, Options
from vit.inference.evaluate import labelled
from vit.runtime.greedy import Array


class Pictures(Sequence[Array]):
    """Pictures that are read when they are asked for, each uint8 (height, width, 3).

    Args:
        paths: Their files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> "Pictures": ...
    def __getitem__(self, index: int | slice) -> "Array | Pictures":
        if isinstance(index, slice):
            return Pictures(self.paths[index])
        return np.asarray(read_image(self.paths[index]))


def validation_samples(
    run: str | os.PathLike[str],
    data: str | None,
    classes: tuple[str, ...],
    say: Callable[[str], object],
    *,
    thresholds: tuple[float, ...] | None = None,
) -> tuple[Sample, ...]:
    """The pictures that `vit evaluate` would measure the run on; none without data.

    `thresholds` are those of its classes, where a picture may have several.

    Raises:
        DataError: There are data, but no such pictures in them.
        ConfigError: They have several classes, and the run gives each picture one.
    """
    if data is None:
        return ()
    return labelled(run, Asked(data, split="val"), classes, say, thresholds=thresholds)


def calibration_pictures(
    asked: Options, classes: tuple[str, ...], kept_apart: Sequence[Sample]
) -> Pictures:
    """Pictures from all over the training part of the data, as many as were asked for.

    Args:
        asked: Names the data.
        classes: Names of the classes of the model.
        kept_apart: Pictures that the file is measured on, which it is not calibrated with.

    Raises:
        DataError: There are none, or fewer than were asked for.
    """
    if asked.calibration is None:
        return Pictures([])
    apart = {sample.path for sample in kept_apart}
    try:
        found, _ = open_labelled(asked.calibration, split="train", classes=classes)
        paths = [sample.path for sample in found]
    except DataError:  # no train folder: a folder of pictures of any kind
        paths = list_images([asked.calibration])
    paths = [path for path in paths if path not in apart and is_readable(path)]
    if not paths or (asked.samples or 0) > len(paths):
        raise DataError(
            f"{printable(asked.calibration)}: {len(paths)} pictures can be calibrated with, beside "
            f"those for validation, and {asked.samples or 'some'} are needed; name other data"
        )
    count = min(asked.samples or SAMPLES, len(paths))
    places = np.linspace(0, len(paths) - 1, count).round().astype(int)
    return Pictures([paths[place] for place in places])


def is_readable(path: str) -> bool:
    """Whether the header of a picture is sound."""
    try:
        check_header(path)
    except BadImage:
        return False
    return True
