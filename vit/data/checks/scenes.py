"""Scenes: images that show one moment, which `--group auto` keeps in one split.

Two images are of one scene if they are nearly the same (crops, other sizes, frames of a film; see
`duplicates`), or if the EXIF data of one camera are at most BURST_SECONDS apart. So are those that
are connected by others.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from vit.data.checks.duplicates import MAX_MOVED, find_near_duplicates
from vit.data.checks.image_stats import THUMBNAIL_SIDE, downscaled, encode_thumbnail
from vit.data.image_io import read_capture, read_image, read_size
from vit.data.sources.train_val_split import connected
from vit.errors import BadImage
from vit.process_resources import usable_cores

BURST_SECONDS = 10.0
"""Largest time between photographs of one camera that are of one scene."""
FIRST = 256
"""Images after which the time of all is estimated."""


class SceneFacts(NamedTuple):
    """What tells whether images are of one scene."""

    thumbnail: bytes
    """As `ImageStats.thumbnail`."""
    short_side: int
    """In pixels."""
    camera: str
    """Maker, model and serial number in the EXIF data; empty without."""
    seconds: float
    """Time of the photograph in the EXIF data."""


def find_scenes(paths: Sequence[str], *, seconds: float | None = None) -> list[list[str]] | None:
    """The scenes with two images or more; unreadable images are in none.

    Args:
        paths: Files of the images, each once.
        seconds: Most time that the search may take; None: any.

    Returns:
        None if it would take longer.
    """
    facts: dict[str, SceneFacts] = {}
    began = time.monotonic()
    with ThreadPoolExecutor(usable_cores()) as pool:
        for start in range(0, len(paths), FIRST):
            some = paths[start : start + FIRST]
            found = zip(some, pool.map(read_facts, some), strict=True)
            facts |= {path: one for path, one in found if one is not None}
            expected = (time.monotonic() - began) * len(paths) / (start + len(some))
            if seconds is not None and expected > seconds:
                return None
    names, known = [*facts], [*facts.values()]
    pairs = find_near_duplicates(
        [one.thumbnail for one in known],
        [one.short_side for one in known],
        max_overhang=MAX_MOVED,
    )
    links = [pair[:2] for pair in pairs] + burst_pairs(known)
    return [[names[at] for at in group] for group in connected(links)]


def read_facts(path: str) -> SceneFacts | None:
    """Read what tells the scene of the image at `path`; None if it cannot be read."""
    try:
        side = 2 * THUMBNAIL_SIDE
        image = read_image(path, intensity_range="own", min_size=lambda *_size: (side, side))
        thumbnail = encode_thumbnail(np.asarray(downscaled(image), dtype=np.int16))
        return SceneFacts(thumbnail, min(read_size(path)), *read_capture(path))
    except (BadImage, OSError):  # reported when headers are checked
        return None


def burst_pairs(facts: Sequence[SceneFacts]) -> list[tuple[int, int]]:
    """Indices of photographs that one camera took directly after each other."""
    cameras: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for at, one in enumerate(facts):
        if one.camera:
            cameras[one.camera].append((one.seconds, at))
    return [
        (at, after)
        for taken in cameras.values()
        for (moment, at), (later, after) in itertools.pairwise(sorted(taken))
        if later - moment <= BURST_SECONDS
    ]
