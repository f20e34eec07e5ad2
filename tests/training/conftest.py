"""A folder of images that a tiny network can learn, and the settings to do so in seconds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.training.runs import ON_CPU, SIZES
from vit.config import Config
from vit.config.setting_layers import make_config

COLOURS = {"blue": (30, 40, 200), "green": (40, 190, 50), "red": (200, 40, 30)}
TRAIN, VAL = 12, 7  # images of each class


@pytest.fixture(scope="session")
def colour_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ and val/ with noisy images of three colours."""
    root, random = tmp_path_factory.mktemp("colours"), np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("val", VAL)):
        for name, colour in COLOURS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.array(colour) + random.integers(-90, 90, size=(18, 20, 3))
                image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
                image.save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(scope="session")
def tiny_config(colour_data: Path) -> Callable[..., Config]:
    """Settings of a run of two blocks, with every random part of training switched on."""

    def build(**changes: Any) -> Config:
        usual = {"data": str(colour_data), **SIZES, **ON_CPU, "epochs": 3, "lr": 3e-3}
        usual |= {"warmup_epochs": 1, "dropout": 0.1, "drop_path": 0.1}
        usual |= {"mixup": 0.2, "cutmix": 1.0, "ema": 0.9}
        return make_config({**usual, **changes})

    return build


@pytest.fixture
def data_with_a_bad_image(colour_data: Path, tmp_path: Path) -> Path:
    """The colours, one image of which is damaged in the middle: its header is right."""
    copy = tmp_path / "bad data"
    shutil.copytree(colour_data, copy)
    victim = copy / "train/red/3.png"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes(content)
    return copy


@pytest.fixture(scope="session")
def caption_data(colour_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three colours in class folders, with two captions each."""
    root = shutil.copytree(colour_data, tmp_path_factory.mktemp("captions") / "data")
    for split in ("train", "val"):
        lines = []
        images = (root / split).rglob("*.png")
        for path in sorted(images, key=lambda path: (path.parent.name, int(path.stem))):
            name = path.parent.name
            captions = [f"a {name} thing", f"this is something that looks {name}"]
            lines.append({"file_name": f"{name}/{path.name}", "captions": captions})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (root / split / "metadata.jsonl").write_text(text)
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of landscape images in colours and portraits in grey, two classes."""
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            shape = (60, 90, 3) if number % 2 else (90, 60)
            pixels = random.integers(0, 255, shape).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture(scope="session")
def caption_config(caption_data: Path, tiny_config: Callable[..., Config]) -> Callable[..., Config]:
    """Settings of a tiny captioner, with every random part of training switched on."""

    def build(**changes: Any) -> Config:
        captions = {"data": str(caption_data), "task": "caption", "mixup": 0.0, "cutmix": 0.0}
        decoder = {"decoder_depth": 2, "decoder_drop_path": 0.1, "caption_dropout": 0.1}
        return tiny_config(**{**captions, **decoder, **changes})

    return build
