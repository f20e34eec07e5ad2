"""The same images from any source give the same training: split, first batches and losses.

Each source has a function that writes the images of a folder in its format.
"""

import csv
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.data.conftest import draw
from vit.commands.main import main
from vit.config.setting_layers import make_config
from vit.training.data_setup import prepare_data
from vit.training.distributed.devices import make_accelerator
from vit.training.setup import make_training
from vit.training.train import train
from vit.training.training_loaders import training_loader

Maker = Callable[[Path, Path], str | Path]
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
    "mixup": 0.2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The images as everybody has them: CLASS/*.png, some in deeper folders; beside it flat."""
    root = tmp_path_factory.mktemp("everywhere") / "folder"
    for number in range(30):
        label = ["cat", "dog.1", "éß"][number % 3]
        place = root / label / ("day 2" if number % 5 == 0 else "") / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        draw(20, 18, number).save(place)
        flat = root.with_name("flat") / label / place.name
        flat.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(place, flat)
    return root


def rows(folder: Path) -> Iterator[tuple[str, str]]:
    """Each image's name and class, in an order that is not that of the folder."""
    paths = sorted(folder.rglob("*.png"), key=lambda path: path.stem[::-1])
    return ((path.relative_to(folder).as_posix(), path.parts[len(folder.parts)]) for path in paths)


def as_csv(folder: Path, place: Path) -> Path:
    with open(place / "list.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("image", "label"), *rows(folder)])
    shutil.copytree(folder, place / "images")
    return place / "list.csv"


def as_jsonl(folder: Path, place: Path) -> Path:
    shutil.copytree(folder, place / "x", dirs_exist_ok=True)
    lines = [json.dumps({"file_name": name, "labels": [label]}) for name, label in rows(folder)]
    (place / "x/all.jsonl").write_text("\n".join(lines))
    return place / "x/all.jsonl"


def as_shards(folder: Path, place: Path) -> Path:
    arguments = ["data", str(folder), "--to", "shards", "--out", str(place / "shards")]
    assert main(arguments) == 0
    return place / "shards"


def as_tar_of_others(folder: Path, place: Path) -> Path:
    """One shard as tar itself writes it, in an order of its own."""
    with tarfile.open(place / "all.tar", "w") as shard:
        for name, _ in rows(folder):
            shard.add(folder / name, name)
    return place / "all.tar"


def as_parquet(folder: Path, place: Path) -> str:
    """Rows hold an image's last name alone, as the library writes them."""
    datasets = import_datasets(place)
    labelled = [*rows(folder)]
    names = sorted({label for _, label in labelled})
    cells = {
        "image": [
            {"bytes": (folder / name).read_bytes(), "path": Path(name).name} for name, _ in labelled
        ],
        "label": [names.index(label) for _, label in labelled],
    }
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    dataset = datasets.Dataset.from_dict(cells, features=datasets.Features(kinds))
    dataset.to_parquet(str(place / "train.parquet"))
    return f"hf:{place / 'train.parquet'}"


def as_imagefolder(folder: Path, place: Path) -> str:
    import_datasets(place)
    return f"hf:{folder}"


def import_datasets(place: Path):
    """The library, with a cache of its own and no bars."""
    datasets = pytest.importorskip("datasets")
    datasets.config.HF_DATASETS_CACHE = place / "hf"
    datasets.config.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    return datasets


DEEP: tuple[Maker, ...] = (as_csv, as_jsonl, as_shards, as_tar_of_others)
FLAT: tuple[Maker, ...] = (as_parquet, as_imagefolder)
"""Formats for which the library ignores deeper folders: the last one is the class."""


def train_on(data: str | Path, out: Path, *, workers: int = 0):
    """Names and labels of both splits, the first batches, and the loss of each step."""
    config = make_config({**SETTINGS, "data": str(data), "workers": workers})
    accelerator = make_accelerator(config.run)
    full, splits, _ = prepare_data(config, accelerator, lambda _: None)
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
    """The result of training on the deep folder and on the flat one."""
    return {
        place: train_on(place, tmp_path_factory.mktemp("run") / "run")
        for place in (folder, folder.with_name("flat"))
    }


@pytest.mark.parametrize(
    ("make", "workers"),
    [*((make, 0) for make in (*DEEP, *FLAT)), (as_shards, 2), (as_parquet, 2)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_same_images_from_any_source_give_the_same_training(
    make, workers, folder, expected, tmp_path
):
    if make in FLAT:
        folder = folder.with_name("flat")
    reference = expected[folder]
    data = make(folder, tmp_path)
    classes, sides, batches, losses = train_on(data, tmp_path / "run", workers=workers)
    assert (classes, sides) == reference[:2]
    assert len(batches) == len(reference[2]) == 3
    for batch, other in zip(batches, reference[2], strict=True):
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch.labels, other.labels)
    assert losses == reference[3]
    assert len(losses) == 6
