"""Pictures on which an exported network is compared with its run, where nobody gave any."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from vit.data.samples import Sample
from vit.data.sources.asked import Asked
from vit.errors import DataError, VitError, printable
from vit.inference.evaluate import captioned, labelled
from vit.runtime.greedy import Array
from vit.settings import make_config, read_settings
from vit.weights.folder import LoadedRun

MOST = 50
SIZES = (
    *((20, 20), (21, 34), (40, 25), (64, 64), (90, 61), (80, 120), (160, 160), (200, 150)),
    *((224, 224), (224, 301), (333, 222), (97, 480), (480, 97), (512, 384), (384, 512)),
    *((640, 480), (500, 751), (1024, 768), (768, 1025), (1500, 1001)),
)
"""Width and height of drawn pictures."""


@contextmanager
def pictures_for(
    folder: Path, run: LoadedRun, images: Sequence[str] | None, say: Callable[[str], object]
) -> Iterator[list[str]]:
    """Paths of pictures: those given, validation pictures of the run, or drawn ones.

    Args:
        folder: Of the run.
        run: What is in it.
        images: Given ones.
        say: Receives which were taken.

    Raises:
        DataError: Not one picture is given.
    """
    if images is not None:
        if not images:
            raise DataError("images: not one picture; leave them out for those of the training")
        yield list(images)
        return
    try:
        samples, data = validation_pictures(folder, run)
    except VitError as error:
        say(f"no validation pictures ({printable(error)}): drew {len(SIZES)} of many sizes")
        with tempfile.TemporaryDirectory(prefix="vit-verify-") as place:
            yield draw(Path(place))
        return
    chosen = [samples[place] for place in spread(len(samples), MOST)]
    say(f"{len(chosen)} of {len(samples):,} validation pictures of {printable(data)}")
    yield [sample.path for sample in chosen]


def validation_pictures(folder: Path, run: LoadedRun) -> tuple[tuple[Sample, ...], str]:
    """The pictures that the training validated on, and where its data are.

    Raises:
        VitError: They cannot be found; the message says why.
    """
    data = make_config(read_settings(folder / "config.yaml"), complete=True).data
    find = labelled if run.tokenizer is None else captioned
    asked = Asked(data.data, data.images, split="val")
    return find(folder, asked, run.classes, lambda _note: None), data.data


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, at equal distances: lists are sorted by class."""
    taken = min(count, most)
    return [place * count // taken for place in range(taken)]


def draw(folder: Path) -> list[str]:
    """Write a picture of each of SIZES, some of them turned; the same ones at every call."""
    paths = []
    for number, (width, height) in enumerate(SIZES):
        path = folder / f"drawn_{number:02}_{width}x{height}.png"
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 1 + number % 8
        picture = Image.fromarray(scene(width, height, number))
        picture.save(path, exif=exif, compress_level=1)
        paths.append(str(path))
    return paths


def scene(width: int, height: int, seed: int) -> Array:
    """Blots of colour on a gradient, with fine grain: uint8 (height, width, 3)."""
    random = np.random.default_rng(seed)
    y, x = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)
    tilt = (x + y).astype(np.float32)[..., None]
    pixels = tilt * np.float32(random.uniform(-90, 90, 3)) + np.float32(random.uniform(0, 255, 3))
    for _ in range(6):
        centre_x, centre_y = random.uniform(0, 1, 2)
        inside = (x - centre_x) ** 2 + (y - centre_y) ** 2 < random.uniform(0.01, 0.1)
        pixels[inside] = random.uniform(0, 255, 3)
    pixels += random.integers(-30, 31, pixels.shape, dtype=np.int8)
    found: Array = pixels.clip(0, 255).astype(np.uint8)
    return found
