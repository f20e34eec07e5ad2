"""Images that belong together, for `--group auto`: scenes, and what tells sources apart.

Two images are of one scene if they are nearly the same (crops, other sizes, frames of a film; see
`duplicates`), or if the EXIF data of one camera are at most BURST_SECONDS apart. So are those that
are connected by others. Sources: see `image_sources`.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data.checks.duplicates import MAX_MOVED, find_near_duplicates
from vit.data.checks.image_stats import THUMBNAIL_SIDE, downscaled, encode_thumbnail
from vit.data.dataset_types import ImageRecord
from vit.data.image_io import Origin, read_image, read_origin
from vit.data.sources.image_sources import background, find_sources
from vit.data.sources.scene_groups import NOT_SEARCHED, FoundGroups
from vit.data.sources.train_val_split import connected
from vit.errors import BadImage
from vit.process_resources import usable_cores

BURST_SECONDS = 10.0
"""Largest time between photographs of one camera that are of one scene."""
FIRST = 256
"""Images after which the time of all is estimated."""


class ImageFacts(NamedTuple):
    """What tells which images an image belongs with."""

    thumbnail: bytes
    """As `ImageStats.thumbnail`."""
    background: NDArray[np.float16]
    """As `image_sources.background`."""
    origin: Origin


def find_groups(
    records: Sequence[ImageRecord], root: Path, *, seconds: float | None = None
) -> FoundGroups:
    """The scenes with two images or more, and the sources; unreadable images are in none.

    NOT_SEARCHED where it would take more than `seconds`.
    """
    facts: dict[str, ImageFacts] = {}
    paths = [record.path for record in records]
    began = time.monotonic()
    with ThreadPoolExecutor(usable_cores()) as pool:
        for start in range(0, len(paths), FIRST):
            some = paths[start : start + FIRST]
            found = zip(some, pool.map(read_facts, some), strict=True)
            facts |= {path: one for path, one in found if one is not None}
            expected = (time.monotonic() - began) * len(paths) / (start + len(some))
            if seconds is not None and expected > seconds:
                return NOT_SEARCHED
    names, known = [*facts], [*facts.values()]
    pairs = find_near_duplicates(
        [one.thumbnail for one in known],
        [min(one.origin.size) for one in known],
        max_overhang=MAX_MOVED,
    )
    origins = {path: one.origin for path, one in facts.items()}
    return FoundGroups(
        connected_scenes([[names[pair.first], names[pair.second]] for pair in pairs], origins),
        find_sources(records, root, origins),
        {path: one.background for path, one in facts.items()},
    )


def connected_scenes(
    alike: Iterable[Sequence[str]], origins: Mapping[str, Origin]
) -> list[list[str]]:
    """Scenes of images that are `alike`, or photographs of one camera directly after each other."""
    bursts = burst_pairs([*origins.values()])
    paths = [*origins]
    links = [pair for group in alike for pair in itertools.pairwise(group)]
    return connected(links + [(paths[first], paths[second]) for first, second in bursts])


def read_facts(path: str) -> ImageFacts | None:
    """Read what tells which images that at `path` belongs with; None if it cannot be read."""
    try:
        side = 2 * THUMBNAIL_SIDE
        image = read_image(path, intensity_range="own", min_size=lambda *_size: (side, side))
        thumbnail = encode_thumbnail(np.asarray(downscaled(image), dtype=np.int16))
        return ImageFacts(thumbnail, background(np.asarray(image)), read_origin(path))
    except (BadImage, OSError):  # reported when headers are checked
        return None


def burst_pairs(origins: Sequence[Origin]) -> list[tuple[int, int]]:
    """Indices of photographs that one camera took directly after each other."""
    cameras: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for at, one in enumerate(origins):
        if one.camera and one.seconds is not None:
            cameras[one.camera].append((one.seconds, at))
    return [
        (at, after)
        for taken in cameras.values()
        for (moment, at), (later, after) in itertools.pairwise(sorted(taken))
        if later - moment <= BURST_SECONDS
    ]
