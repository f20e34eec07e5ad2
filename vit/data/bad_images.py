"""Finds images that cannot be read before a training spends time on the others."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from vit.data.dataset_types import Sample, Splits
from vit.data.image_io import check_header
from vit.data.multilabel_targets import labels_of
from vit.errors import BadImage, DataError, printable
from vit.text import join_names, plural

THREADS = 8
CHUNK = 64


def check_samples(samples: Sequence[Sample], workers: int = THREADS) -> list[BadImage]:
    """The samples whose file is clearly no image, by its header, in the order of `samples`.

    Args:
        samples: What to look at.
        workers: Threads; more of them hide a slow disk or network.
    """
    chunks = [samples[at : at + CHUNK] for at in range(0, len(samples), CHUNK)]
    with ThreadPoolExecutor(workers) as pool:
        return [bad for found in pool.map(_check_chunk, chunks) for bad in found]


def without(splits: Splits, bad: Sequence[BadImage]) -> Splits:
    """`splits` without the images in `bad`, which are named in its notes.

    Raises:
        DataError: A class has no other training images, or validation no others at all.
    """
    if not bad:
        return splits
    names = join_names([str(image) for image in bad], 3)
    paths = {image.path for image in bad}
    train, val = (
        tuple(sample for sample in part if sample.path not in paths)
        for part in (splits.train, splits.val)
    )
    left = {label for sample in train for label in labels_of(sample)}
    gone = [printable(name) for label, name in enumerate(splits.classes) if label not in left]
    if gone:
        raise DataError(f"no training image of class {join_names(gone)} can be read: {names}")
    if not val:
        raise DataError(f"no validation image can be read: {names}")
    notes = (*splits.notes, f"left out {plural(len(bad), 'image')} that cannot be read: {names}")
    return dataclasses.replace(splits, train=train, val=val, notes=notes)


def _check_chunk(samples: Sequence[Sample]) -> list[BadImage]:
    return [bad for sample in samples if (bad := _bad(sample.path)) is not None]


def _bad(path: str) -> BadImage | None:
    try:
        check_header(path)
    except BadImage as bad:
        return BadImage(bad.path, bad.reason)  # without the traceback, which holds memory
    return None
