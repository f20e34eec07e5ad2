"""Small images and folders of them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit.data.dataset_types import Sample

Tree = dict[str, int]


def draw(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth random image: coarse noise, enlarged."""
    noise = np.random.RandomState(seed).randint(0, 256, (5, 6, 3)).astype(np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def pil_image() -> Callable[..., Image.Image]:
    """Draws an image: (width, height, seed)."""
    return draw


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    """Twenty PNG files of two classes."""
    found = []
    for number in range(20):
        path = tmp_path / f"{number:02d}.png"
        draw(12, 10, number).save(path)
        found.append(Sample(str(path), number % 2))
    return found


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[[Tree], Path]:
    """Writes folders with so many different images each."""
    seeds = iter(range(10_000))

    def make(tree: Tree) -> Path:
        root = tmp_path / "data"
        root.mkdir(exist_ok=True)
        for name, count in tree.items():
            (root / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                draw(6, 6, next(seeds)).save(root / name / f"{number}.png")
        return root

    return make
