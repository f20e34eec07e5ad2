"""The same images from archives give the same training: split, first batches and losses."""

import json
from pathlib import Path

import pytest
import torch

from tests.data.conftest import draw
from vit.config.setting_layers import make_config
from vit.data.sources.dataset_export import export_data
from vit.training.distributed.devices import make_accelerator
from vit.training.settings_from_data import prepare_data
from vit.training.setup import make_training
from vit.training.train import train
from vit.training.training_loaders import training_loader

NETWORK = {"image_size": 16, "patch_size": 8, "dim": 16, "depth": 2, "num_heads": 2}
TRAINING = {"epochs": 2, "batch_size": 8, "mixup": 0.2, "device": "cpu", "precision": "fp32"}
CLASSES = ("cat", "dog.1", "éß")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The images as everybody has them: CLASS/*.png."""
    root = tmp_path_factory.mktemp("everywhere") / "folder"
    for number in range(30):
        place = root / CLASSES[number % 3] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        draw(20, 18, number).save(place)
    return root


def as_shards(folder: Path, place: Path) -> Path:
    export_data(str(folder), str(place / "shards"), to="shards")
    return place / "shards"


def as_parquet(folder: Path, place: Path) -> str:
    """Rows hold an image's last name alone, as the library writes them, in another order."""
    datasets = pytest.importorskip("datasets")
    paths = sorted(folder.rglob("*.png"), key=lambda path: path.stem[::-1])
    cells = {
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in paths],
        "label": [CLASSES.index(path.parent.name) for path in paths],
    }
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=[*CLASSES])}
    dataset = datasets.Dataset.from_dict(cells, features=datasets.Features(kinds))
    dataset.to_parquet(str(place / "train.parquet"))
    return f"hf:{place / 'train.parquet'}"


def train_on(data: str | Path, out: Path, *, workers: int = 0):
    """Names and labels of both splits, the first batches, and the loss of each step."""
    config = make_config({**NETWORK, **TRAINING, "data": str(data), "workers": workers})
    accelerator = make_accelerator(config.run)
    full, splits, _ = prepare_data(config, accelerator, lambda _: None)
    sides = [
        [(Path(sample.path).name, sample.label) for sample in part]
        for part in (splits.train, splits.val)
    ]
    run = make_training(full, accelerator, total_steps=10, splits=splits)
    batches = list(training_loader(run, splits.train).epoch(0))
    train(config, out)
    events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [event["loss"] for event in events if event["event"] == "step"]
    return splits.classes, sides, batches, losses


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    return train_on(folder, tmp_path_factory.mktemp("run") / "run")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [as_shards, as_parquet])
def test_the_same_images_from_any_source_give_the_same_training(
    make, workers, folder, expected, tmp_path, isolated_cache
):
    classes, sides, batches, losses = expected
    found = train_on(make(folder, tmp_path), tmp_path / "run", workers=workers)
    assert (found[0], found[1], found[3]) == (classes, sides, losses)
    assert (len(batches), len(losses)) == (3, 6)
    for batch, other in zip(found[2], batches, strict=True):
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch.labels, other.labels)
