"""Built-in datasets, generated as image folders in the user's cache.

`digits`: 1,797 handwritten digits of 8 x 8 grey pixels: the test part of "Optical Recognition of
Handwritten Digits" (Alpaydin and Kaynak, UCI, 1998, doi:10.24432/C50P49, CC BY 4.0), as
scikit-learn ships it. The package stores it as one sheet, digits.png, in which a pixel of value v
in 0 to 16 is the byte round(255 v / 16), and the labels in row-major order in digits.json.

`shapes`: drawn scenes of two objects with two captions each, which can be checked for truth:

    a small red circle left of a large blue square
    a large blue square right of a small red circle

Scenes are drawn in integer arithmetic, so their pixels are the same on every machine and with every
version of Pillow.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from vit.atomic_files import atomic_folder, locked
from vit.data.random_seed import random_seed
from vit.errors import DataError
from vit.paths import user_cache

SHAPES_SIDE = 64
SUBPIXELS = 4
"""Subpixels a pixel, on each axis. Lengths below are in subpixels unless noted."""
SIZES = {"small": (20, 28), "large": (44, 56)}
"""Smallest and largest radius of the circle around an object."""
COLOURS = {
    "red": (215, 35, 45),
    "green": (40, 150, 60),
    "blue": (40, 80, 215),
    "yellow": (240, 215, 30),
    "purple": (140, 50, 180),
    "orange": (245, 130, 20),
}
OPPOSITES = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
GAP = (12, 48)
"""Smallest and largest distance between the objects, along the axis of their relation."""
MAX_OFFSET = 12
"""Largest offset across that axis."""
MARGIN = 4

SCALE = 1000
SHAPES: dict[str, tuple[int, int, tuple[tuple[int, int], ...]]] = {
    "circle": (900, 1, ()),
    "square": (800, 4, ((0, -1000), (1000, 0), (0, 1000), (-1000, 0))),
    "triangle": (500, 3, ((0, 1000), (866, -500), (-866, -500))),
    "star": (309, 4, ((0, -1000), (951, -309), (588, 809), (-588, 809), (-951, -309))),
}
"""Distance of the sides from the centre, in thousandths of the radius; number of sides that a point
must be inside of; normals of the sides, in thousandths, y down. A circle has no sides. A point is
in a five-pointed star if it is inside of at least four of its five lines."""

UNSEEN_COMBINATIONS = frozenset(
    (("red", "circle"), ("green", "square"), ("blue", "triangle"), ("yellow", "star"))
)
"""Combinations of colour and shape that are only in the split `unseen`."""
COUNTS = {"train": 8000, "val": 800, "unseen": 400}
"""Number of scenes of each split."""


@dataclass(frozen=True)
class SceneObject:
    """An object of a scene."""

    size: str
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """Two objects, and the relation of the first one to the second."""

    first: SceneObject
    relation: str
    second: SceneObject

    @property
    def captions(self) -> tuple[str, str]:
        """The two true captions; the first begins with the first object."""
        return (
            f"{self.first} {self.relation} {self.second}",
            f"{self.second} {OPPOSITES[self.relation]} {self.first}",
        )

    @property
    def pair(self) -> str:
        """Class of the image: both shapes in the order of `SHAPES`."""
        return " and ".join(name for name in SHAPES for one in self.objects if one.shape == name)

    @property
    def objects(self) -> tuple[SceneObject, SceneObject]:
        return self.first, self.second


def scenes(split: str) -> Iterator[tuple[Scene, Image.Image]]:
    """Generate the scenes of a split and their images, 64 x 64 RGB; deterministic."""
    pairs = list(combinations_with_replacement(SHAPES, 2))
    for number in range(COUNTS[split]):
        rng = _SceneRandom(random_seed("shapes-v1", split, number))
        scene = _sample_scene(rng, pairs[number % len(pairs)], unseen=split == "unseen")
        yield scene, _render(rng, scene)


def write_scenes(folder: Path) -> None:
    """Write train/, val/ and unseen/, each with a folder a pair of shapes and metadata.jsonl."""
    for split in COUNTS:
        for pair in combinations_with_replacement(SHAPES, 2):
            (folder / split / " and ".join(pair)).mkdir(parents=True)
        lines = []
        for number, (scene, image) in enumerate(scenes(split)):
            name = f"{scene.pair}/{number:04d}.png"
            image.save(folder / split / name, compress_level=1)
            lines.append(json.dumps({"file_name": name, "captions": scene.captions}) + "\n")
        # Bytes: in text mode, line ends on Windows differ.
        (folder / split / "metadata.jsonl").write_bytes("".join(sorted(lines)).encode("ascii"))


class _SceneRandom:
    """Random numbers of one scene; only `random()` is the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def integer(self, least: int, most: int) -> int:
        """A random integer in [least, most]."""
        return least + int(self._random() * (most - least + 1))

    def choice(self, names: Sequence[str]) -> str:
        return names[self.integer(0, len(names) - 1)]


def _sample_scene(rng: _SceneRandom, shapes: tuple[str, str], *, unseen: bool) -> Scene:
    """A random scene of these shapes; `unseen`: with a combination of `UNSEEN_COMBINATIONS`."""
    while True:
        order = shapes if rng.integer(0, 1) else shapes[::-1]
        first, second = (
            SceneObject(rng.choice([*SIZES]), rng.choice([*COLOURS]), shape) for shape in order
        )
        scene = Scene(first, rng.choice([*OPPOSITES]), second)
        combinations = {(one.colour, one.shape) for one in scene.objects}
        if len(combinations) == 2 and bool(combinations & UNSEEN_COMBINATIONS) == unseen:
            return scene


def _render(rng: _SceneRandom, scene: Scene) -> Image.Image:
    grey = rng.integer(232, 252)
    light = [grey + rng.integer(-6, 3) for _ in range(3)]
    pixels: npt.NDArray[np.int64] = np.tile(np.array(light), (SHAPES_SIDE, SHAPES_SIDE, 1))
    for one, (x, y, radius) in zip(scene.objects, _place_objects(rng, scene), strict=True):
        covered = _coverage(one.shape, x, y, radius)[:, :, None]
        whole = SUBPIXELS * SUBPIXELS
        colour = np.array(COLOURS[one.colour], np.int64)
        pixels = (pixels * (whole - covered) + colour * covered + whole // 2) // whole
    return Image.fromarray(pixels.astype(np.uint8))


def _place_objects(rng: _SceneRandom, scene: Scene) -> list[tuple[int, int, int]]:
    """Centre (x, y) and radius of both objects: separate on one axis, aligned on the other."""
    radii = [rng.integer(*SIZES[one.size]) for one in scene.objects]
    before, after = radii if scene.relation in ("left of", "above") else radii[::-1]
    free = SHAPES_SIDE * SUBPIXELS - 2 * (MARGIN + before + after)
    gap = rng.integer(GAP[0], min(GAP[1], free))
    start = MARGIN + before + rng.integer(0, free - gap)
    along = [start, start + before + gap + after]
    widest = max(radii) + MAX_OFFSET + MARGIN
    middle = rng.integer(widest, SHAPES_SIDE * SUBPIXELS - widest)
    across = [middle, middle + rng.integer(-MAX_OFFSET, MAX_OFFSET)]
    if scene.relation in ("right of", "below"):
        along.reverse()
    if scene.relation in ("above", "below"):
        along, across = across, along
    return list(zip(along, across, radii, strict=True))


def _coverage(shape: str, x: int, y: int, radius: int) -> npt.NDArray[np.int64]:
    """Number of subpixels that the shape covers in each pixel, (64, 64), 0 to 16."""
    reach, needed, sides = SHAPES[shape]
    left, top = (x - radius) // SUBPIXELS, (y - radius) // SUBPIXELS
    right, bottom = math.ceil((x + radius) / SUBPIXELS), math.ceil((y + radius) / SUBPIXELS)
    # Centres of subpixels lie between integers, so distances are doubled.
    across = 2 * (np.arange(left * SUBPIXELS, right * SUBPIXELS) - x) + 1
    down = 2 * (np.arange(top * SUBPIXELS, bottom * SUBPIXELS) - y)[:, None] + 1
    if sides:
        limit = 2 * radius * reach
        inside = sum((nx * across + ny * down <= limit).astype(np.int64) for nx, ny in sides)
        covered = np.asarray(inside >= needed)
    else:
        covered = (across**2 + down**2) * SCALE**2 <= (2 * radius * reach) ** 2
    counts = covered.reshape(bottom - top, SUBPIXELS, right - left, SUBPIXELS).sum((1, 3))
    whole = np.zeros((SHAPES_SIDE, SHAPES_SIDE), np.int64)
    whole[top:bottom, left:right] = counts
    return whole


DIGIT_SIDE = 8
VAL_STRIDE = 5
"""One in this many digits of a class is a validation image."""


def digits_folder(cache: Path | None = None) -> Path:
    """The folder digits-v1, train/CLASS/NNNN.png and val/CLASS/NNNN.png; written if missing."""
    return _cached("digits", _write_digits, cache)


def shapes_folder(cache: Path | None = None) -> Path:
    """The folder shapes-v1: train/, val/ and unseen/ with PAIR/NNNN.png and captions; writing it
    takes some seconds."""
    return _cached("shapes", write_scenes, cache)


def _cached(name: str, write: Callable[[Path], None], cache: Path | None) -> Path:
    """The folder of the dataset `name`, which `write` fills; it appears complete or not at all."""
    cache = user_cache() if cache is None else cache
    folder = cache / f"{name}-v1"
    try:
        if not folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / ".lock"):
                if not folder.is_dir():  # another process was not faster
                    with atomic_folder(folder) as new:
                        write(new)
    except OSError as error:
        raise DataError(
            f"{folder}: the built-in {name} cannot be written ({error.strerror}); "
            f"set XDG_CACHE_HOME to a folder that can"
        ) from error
    return folder


def _write_digits(folder: Path) -> None:
    here = Path(__file__).parent
    labels: list[int] = json.loads((here / "digits.json").read_text(encoding="ascii"))
    with Image.open(here / "digits.png") as sheet:
        sheet.load()
    cols, seen = sheet.width // DIGIT_SIDE, [0] * 10
    for number, label in enumerate(labels):
        top, left = number // cols * DIGIT_SIDE, number % cols * DIGIT_SIDE
        seen[label] += 1
        path = (
            folder / ("train" if seen[label] % VAL_STRIDE else "val") / f"{label}/{number:04d}.png"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.crop((left, top, left + DIGIT_SIDE, top + DIGIT_SIDE)).save(path)


DATASETS: dict[str, Callable[[], Path]] = {"digits": digits_folder, "shapes": shapes_folder}
