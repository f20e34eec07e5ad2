"""Draws scenes of two objects, and says in words what is to be seen: captions that can be checked.

    a small red circle left of a large blue square
    a large blue square right of a small red circle

A scene has these two true sentences, one from each object's side. Everything is drawn in whole
numbers, so that a scene has the same pixels on every machine and with every version of Pillow.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from vit.data.seeding import random_seed

SIDE = 64
"""Pixels of a picture, each way."""
FINE = 4
"""Fine pixels in a pixel, each way; lengths below are in fine pixels where not said otherwise."""
SIZES = {"small": (20, 28), "large": (44, 56)}
"""Least and most radius of the circle around an object."""
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
"""Least and most distance between the objects, along the axis of their relation."""
ASIDE = 12
"""Most offset across that axis."""
MARGIN = 4

THOUSAND = 1000
SHAPES: dict[str, tuple[int, int, tuple[tuple[int, int], ...]]] = {
    "circle": (900, 1, ()),
    "square": (800, 4, ((0, -1000), (1000, 0), (0, 1000), (-1000, 0))),
    "triangle": (500, 3, ((0, 1000), (866, -500), (-866, -500))),
    "star": (309, 4, ((0, -1000), (951, -309), (588, 809), (-588, 809), (-951, -309))),
}
"""How far from its centre a shape ends (in thousandths of its radius), on how many sides a point
must be inside, and where the sides face (thousandths; y points down). A circle has no sides. A
point is in a five-pointed star where it is inside at least four of its five lines."""

UNSEEN = frozenset(
    (("red", "circle"), ("green", "square"), ("blue", "triangle"), ("yellow", "star"))
)
"""Colours of shapes that neither training nor validation has."""
COUNTS = {"train": 8000, "val": 800, "unseen": 400}
"""Scenes of each split."""


@dataclass(frozen=True)
class Thing:
    """One object."""

    size: str
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """Two objects, and where the first one is, seen from the second."""

    first: Thing
    relation: str
    second: Thing

    @property
    def captions(self) -> tuple[str, str]:
        """The two true sentences, that of the first object in front."""
        return (
            f"{self.first} {self.relation} {self.second}",
            f"{self.second} {OPPOSITES[self.relation]} {self.first}",
        )

    @property
    def pair(self) -> str:
        """Both shapes in the order of `SHAPES`: the class of the picture."""
        return " and ".join(name for name in SHAPES for thing in self.things if thing.shape == name)

    @property
    def things(self) -> tuple[Thing, Thing]:
        """Both objects."""
        return self.first, self.second


def parse_scene(caption: str) -> Scene | None:
    """The scene that `caption` tells of, or None where it is no sentence of the grammar.

    White space may be any; letters must be lower case.
    """
    words = caption.split()
    for relation in OPPOSITES:
        parts = relation.split()
        if words[4 : 4 + len(parts)] == parts:
            first, second = _thing(words[:4]), _thing(words[4 + len(parts) :])
            return Scene(first, relation, second) if first and second else None
    return None


def is_true(caption: str, references: Sequence[str]) -> bool:
    """Whether `caption` is one of `references`, word for word."""
    return caption.split() in [reference.split() for reference in references]


def _thing(words: list[str]) -> Thing | None:
    match words:
        case ["a", size, colour, shape] if size in SIZES and colour in COLOURS and shape in SHAPES:
            return Thing(size, colour, shape)
    return None


def scenes(split: str) -> Iterator[tuple[Scene, Image.Image]]:
    """The scenes of a split with their pictures, (64, 64) RGB; the same ones at every call.

    Args:
        split: A name in `COUNTS`.
    """
    pairs = list(combinations_with_replacement(SHAPES, 2))
    for number in range(COUNTS[split]):
        draw = _Draw(random_seed("shapes-v1", split, number))
        scene = _compose(draw, pairs[number % len(pairs)], unseen=split == "unseen")
        yield scene, _picture(draw, scene)


def write_scenes(folder: Path) -> None:
    """Write train/, val/ and unseen/ with a folder for each pair of shapes and metadata.jsonl.

    Raises:
        OSError: They cannot be written.
    """
    for split in COUNTS:
        for pair in combinations_with_replacement(SHAPES, 2):
            (folder / split / " and ".join(pair)).mkdir(parents=True)
        lines = []
        for number, (scene, image) in enumerate(scenes(split)):
            name = f"{scene.pair}/{number:04d}.png"
            image.save(folder / split / name, compress_level=1)
            lines.append(json.dumps({"file_name": name, "captions": scene.captions}) + "\n")
        # Bytes, because text would have other line ends on Windows.
        (folder / split / "metadata.jsonl").write_bytes("".join(sorted(lines)).encode("ascii"))


class _Draw:
    """Random draws of one scene; only `random()` is the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def between(self, least: int, most: int) -> int:
        """A whole number, both ends included."""
        return least + int(self._random() * (most - least + 1))

    def one_of(self, names: Sequence[str]) -> str:
        return names[self.between(0, len(names) - 1)]


def _compose(draw: _Draw, shapes: tuple[str, str], *, unseen: bool) -> Scene:
    """A scene with these shapes; with an unseen colour of at least one of them, or with none."""
    while True:
        order = shapes if draw.between(0, 1) else shapes[::-1]
        first, second = (
            Thing(draw.one_of([*SIZES]), draw.one_of([*COLOURS]), shape) for shape in order
        )
        scene = Scene(first, draw.one_of([*OPPOSITES]), second)
        looks = {(thing.colour, thing.shape) for thing in scene.things}
        if len(looks) == 2 and bool(looks & UNSEEN) == unseen:
            return scene


def _picture(draw: _Draw, scene: Scene) -> Image.Image:
    grey = draw.between(232, 252)
    light = [grey + draw.between(-6, 3) for _ in range(3)]
    pixels: npt.NDArray[np.int64] = np.tile(np.array(light), (SIDE, SIDE, 1))
    for thing, (x, y, radius) in zip(scene.things, _places(draw, scene), strict=True):
        covered = _coverage(thing.shape, x, y, radius)[:, :, None]
        whole = FINE * FINE
        colour = np.array(COLOURS[thing.colour], np.int64)
        pixels = (pixels * (whole - covered) + colour * covered + whole // 2) // whole
    return Image.fromarray(pixels.astype(np.uint8))


def _places(draw: _Draw, scene: Scene) -> list[tuple[int, int, int]]:
    """Centre (x, y) and radius of both objects: clearly apart on one axis, in line on the other."""
    radii = [draw.between(*SIZES[thing.size]) for thing in scene.things]
    before, after = radii if scene.relation in ("left of", "above") else radii[::-1]
    room = SIDE * FINE - 2 * (MARGIN + before + after)
    gap = draw.between(GAP[0], min(GAP[1], room))
    start = MARGIN + before + draw.between(0, room - gap)
    along = [start, start + before + gap + after]
    widest = max(radii) + ASIDE + MARGIN
    middle = draw.between(widest, SIDE * FINE - widest)
    across = [middle, middle + draw.between(-ASIDE, ASIDE)]
    if scene.relation in ("right of", "below"):
        along.reverse()
    if scene.relation in ("above", "below"):
        along, across = across, along
    return list(zip(along, across, radii, strict=True))


def _coverage(shape: str, x: int, y: int, radius: int) -> npt.NDArray[np.int64]:
    """How many of each pixel's fine pixels the shape covers, (64, 64) of 0 to 16."""
    reach, needed, sides = SHAPES[shape]
    left, top = (x - radius) // FINE, (y - radius) // FINE
    right, bottom = math.ceil((x + radius) / FINE), math.ceil((y + radius) / FINE)
    # Centres of fine pixels lie between whole numbers, so distances are counted in halves.
    across = 2 * (np.arange(left * FINE, right * FINE) - x) + 1
    down = 2 * (np.arange(top * FINE, bottom * FINE) - y)[:, None] + 1
    if sides:
        limit = 2 * radius * reach
        inside = sum((nx * across + ny * down <= limit).astype(np.int64) for nx, ny in sides)
        covered = np.asarray(inside >= needed)
    else:
        covered = (across**2 + down**2) * THOUSAND**2 <= (2 * radius * reach) ** 2
    counts = covered.reshape(bottom - top, FINE, right - left, FINE).sum((1, 3))
    whole = np.zeros((SIDE, SIDE), np.int64)
    whole[top:bottom, left:right] = counts
    return whole
