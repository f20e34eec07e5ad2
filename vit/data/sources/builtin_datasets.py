"""Small data sets that come with the package and are written out as image folders.

`digits`: 1,797 handwritten digits of 8 x 8 grey pixels, the test part of the UCI data set "Optical
Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998, doi:10.24432/C50P49, CC BY 4.0) as
scikit-learn ships it. Here it is one sprite, digits.png, whose pixel of value v in 0 to 16 is the
byte round(255 v / 16), and the labels in row-major order in digits.json.

`shapes`: drawn scenes of two objects with their captions; see vit.data.sources.builtin_datasets.

Draws scenes of two objects, and says in words what is to be seen: captions that can be checked.

    a small red circle left of a large blue square
    a large blue square right of a small red circle

A scene has these two true sentences, one from each object's side. Everything is drawn in whole
numbers, so that a scene has the same pixels on every machine and with every version of Pillow.
"""

import contextlib
import hashlib
import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from vit.data.random_seed import random_seed
from vit.errors import DataError, printable
from vit.paths import user_cache

SHAPES_SIDE = 64
"""Pixels of an image, each way."""
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
        """Both shapes in the order of `SHAPES`: the class of the image."""
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
    """The scenes of a split with their images, (64, 64) RGB; the same ones at every call.

    Args:
        split: A name in `COUNTS`.
    """
    pairs = list(combinations_with_replacement(SHAPES, 2))
    for number in range(COUNTS[split]):
        draw = _Draw(random_seed("shapes-v1", split, number))
        scene = _compose(draw, pairs[number % len(pairs)], unseen=split == "unseen")
        yield scene, _image(draw, scene)


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


def _image(draw: _Draw, scene: Scene) -> Image.Image:
    grey = draw.between(232, 252)
    light = [grey + draw.between(-6, 3) for _ in range(3)]
    pixels: npt.NDArray[np.int64] = np.tile(np.array(light), (SHAPES_SIDE, SHAPES_SIDE, 1))
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
    room = SHAPES_SIDE * FINE - 2 * (MARGIN + before + after)
    gap = draw.between(GAP[0], min(GAP[1], room))
    start = MARGIN + before + draw.between(0, room - gap)
    along = [start, start + before + gap + after]
    widest = max(radii) + ASIDE + MARGIN
    middle = draw.between(widest, SHAPES_SIDE * FINE - widest)
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
    whole = np.zeros((SHAPES_SIDE, SHAPES_SIDE), np.int64)
    whole[top:bottom, left:right] = counts
    return whole


DIGIT_SIDE = 8
DIGEST = ".digest"
FOLD = 5
"""Every fifth digit of a class is for validation."""


def digits_folder(cache: Path | None = None) -> Path:
    """The folder digits-v1 with train/CLASS/NNNN.png and val/CLASS/NNNN.png; written where missing.

    Args:
        cache: Where to keep it; the user's cache folder when left empty.

    Raises:
        DataError: It cannot be written.
    """
    return _kept("digits", _write_digits, cache)


def shapes_folder(cache: Path | None = None) -> Path:
    """The folder shapes-v1 with train/, val/ and unseen/, each with PAIR/NNNN.png and captions.

    Writing it takes some seconds. Arguments and errors are those of `digits_folder`.
    """
    return _kept("shapes", write_scenes, cache)


def _kept(name: str, fill: Callable[[Path], None], cache: Path | None) -> Path:
    """The folder of the set `name`, which `fill` writes.

    It appears whole or not at all, and is written again where a file was changed or lost.
    """
    cache = user_cache() if cache is None else cache
    folder = cache / f"{name}-v1"
    try:
        if not is_whole(folder):
            cache.mkdir(parents=True, exist_ok=True)
            _write(folder, fill)
    except OSError as error:
        raise DataError(
            f"{printable(folder)}: the built-in {name} cannot be written ({error.strerror}); "
            f"set XDG_CACHE_HOME to a folder that can"
        ) from error
    return folder


def is_whole(folder: Path) -> bool:
    """Whether `folder` holds exactly what was written into it."""
    try:
        return (folder / DIGEST).read_text(encoding="ascii") == _digest(folder)
    except (OSError, ValueError):
        return False


def _write(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside `folder`, then put it in its place."""
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(fresh)
        (fresh / DIGEST).write_text(_digest(fresh), encoding="ascii")
        fresh.chmod(0o755)
        _replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _replace(fresh: Path, folder: Path) -> None:
    """Rename `fresh` to `folder`, unless another process was faster."""
    if is_whole(folder):
        return
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(Path(aside) / "damaged")
        try:
            fresh.rename(folder)
        except OSError:
            if not is_whole(folder):
                raise


def _write_digits(folder: Path) -> None:
    for name, image in _digits():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / name)


def _digits() -> list[tuple[str, Image.Image]]:
    """Each digit with its place in the folder."""
    here = Path(__file__).parent
    labels: list[int] = json.loads((here / "digits.json").read_text(encoding="ascii"))
    with Image.open(here / "digits.png") as sheet:
        sheet.load()
    cols, seen, digits = sheet.width // DIGIT_SIDE, [0] * 10, []
    for number, label in enumerate(labels):
        top, left = number // cols * DIGIT_SIDE, number % cols * DIGIT_SIDE
        seen[label] += 1
        split = "train" if seen[label] % FOLD else "val"
        image = sheet.crop((left, top, left + DIGIT_SIDE, top + DIGIT_SIDE))
        digits.append((f"{split}/{label}/{number:04d}.png", image))
    return digits


def _digest(folder: Path) -> str:
    """A hash of the names and contents of all files in `folder` but the digest itself."""
    digest = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        if path.name != DIGEST and path.is_file():
            content = hashlib.blake2b(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


SETS: dict[str, Callable[[], Path]] = {"digits": digits_folder, "shapes": shapes_folder}
