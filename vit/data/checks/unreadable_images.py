"""Finds unreadable and deep images by their headers before training, and excludes the former."""

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from vit.data.dataset_types import Sample, Splits, labels_of
from vit.data.image_io import check_header
from vit.errors import BadImage, DataError
from vit.text import join_names, plural, printable

THREADS = 8
"""Where the disk is what takes time; where reading takes the processor's, more are slower."""
CHUNK = 256
WAITING_SHARE = 0.5
"""Share of the time of a chunk without the processor from which on threads read the others."""


class HeaderScan(NamedTuple):
    """What the headers of images show, in the order of the images."""

    bad: list[BadImage]
    """Images that cannot be read."""
    deep: list[str]
    """Paths of the images with more than 8 bits per channel."""


def scan_headers(samples: Sequence[Sample], threads: int = THREADS) -> HeaderScan:
    """Check the headers of `samples`, from where a disk or network is slow in `threads` threads."""
    chunks = iter([samples[at : at + CHUNK] for at in range(0, len(samples), CHUNK)])
    scans = []
    for chunk in chunks:
        began, busy = time.perf_counter(), time.thread_time()
        scans.append(_check_chunk(chunk))
        waited = time.perf_counter() - began - (time.thread_time() - busy)
        if waited > WAITING_SHARE * (time.perf_counter() - began):
            break
    with ThreadPoolExecutor(threads) as pool:
        scans += pool.map(_check_chunk, chunks)
    bad = [image for scan in scans for image in scan.bad]
    return HeaderScan(bad, [path for scan in scans for path in scan.deep])


def exclude_images(splits: Splits, bad: Sequence[BadImage]) -> Splits:
    """`splits` without the images in `bad`, which a note names."""
    if not bad:
        return splits
    names = join_names(bad, limit=3)
    paths = {image.path for image in bad}
    train, val, test = (
        tuple(sample for sample in part if sample.path not in paths)
        for part in (splits.train, splits.val, splits.test)
    )
    present = {label for sample in train for label in labels_of(sample)}
    missing = [printable(name) for label, name in enumerate(splits.classes) if label not in present]
    if missing:
        raise DataError(f"no training image of class {join_names(missing)} can be read: {names}")
    if not val:
        raise DataError(f"no validation image can be read: {names}")
    notes = (*splits.notes, f"left out {plural(len(bad), 'image')} that cannot be read: {names}")
    return dataclasses.replace(splits, train=train, val=val, test=test, notes=notes)


def _check_chunk(samples: Sequence[Sample]) -> HeaderScan:
    found = HeaderScan([], [])
    for sample in samples:
        try:
            if check_header(sample.path):
                found.deep.append(sample.path)
        except BadImage as bad:  # noqa: PERF203
            # without the traceback, which holds memory
            found.bad.append(BadImage(bad.path, bad.reason))
    return found
