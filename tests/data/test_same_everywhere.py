"""The same pictures from any source are the same training: split, first batches, losses.

A source has one line in MAKERS: it writes the pictures of a folder in its own form.
"""

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.data.conftest import draw
from vit.settings import make_config
from vit.training.batches import training_loader
from vit.training.devices import make_accelerator
from vit.training.looking import look_at_data
from vit.training.setup import make_training
from vit.training.train import train

SETTINGS = {
    "image_size": 16,
    "patch_size": 8,
    "dim": 16,
    "depth": 2,
    "num_heads": 2,
    "epochs": 2,
    "batch_size": 8,
    "device": "cpu",
    "precision": "fp32",
    "workers": 0,
    "mixup": 0.2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The pictures as everybody has them: CLASS/*.png, some in deeper folders."""
    root = tmp_path_factory.mktemp("everywhere") / "folder"
    for number in range(30):
        label = ["cat", "dog.1", "éß"][number % 3]
        place = root / label / ("day 2" if number % 5 == 0 else "") / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        draw(20, 18, number).save(place)
    return root


def rows(folder: Path) -> Iterator[tuple[str, str]]:
    """Each picture's name and class, in an order that is not that of the folder."""
    paths = sorted(folder.rglob("*.png"), key=lambda path: path.stem[::-1])
    return ((path.relative_to(folder).as_posix(), path.parts[len(folder.parts)]) for path in paths)


def as_folder(folder: Path, _: Path) -> Path:
    return folder


def as_csv(folder: Path, place: Path) -> Path:
    with open(place / "list.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("image", "label"), *rows(folder)])
    shutil.copytree(folder, place / "pictures")
    return place / "list.csv"


def as_jsonl(folder: Path, place: Path) -> Path:
    shutil.copytree(folder, place / "x", dirs_exist_ok=True)
    lines = [json.dumps({"file_name": name, "labels": [said]}) for name, said in rows(folder)]
    (place / "x/all.jsonl").write_text("\n".join(lines))
    return place / "x/all.jsonl"


MAKERS: tuple[Callable[[Path, Path], Path], ...] = (as_folder, as_csv, as_jsonl)


def seen(data: Path, out: Path):
    """Names and labels of both sides, the first batches, and the loss of each step."""
    config = make_config({**SETTINGS, "data": str(data)})
    accelerator = make_accelerator(config.run)
    full, splits, _ = look_at_data(config, (), accelerator, lambda _: None)
    sides = [
        [(Path(sample.path).name, sample.label) for sample in part]
        for part in (splits.train, splits.val)
    ]
    run = make_training(full, accelerator, total_steps=10, splits=splits)
    batches = list(training_loader(run, splits.train).epoch(0))
    train(config, out)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    return splits.classes, sides, batches, losses


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    return seen(folder, tmp_path_factory.mktemp("run") / "run")


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_the_same_pictures_are_the_same_training(make, folder, expected, tmp_path):
    classes, sides, batches, losses = seen(make(folder, tmp_path), tmp_path / "run")
    assert (classes, sides) == expected[:2]
    assert len(batches) == len(expected[2]) == 3
    for batch, other in zip(batches, expected[2], strict=True):
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch.labels, other.labels)
    assert losses == expected[3]
    assert len(losses) == 6
