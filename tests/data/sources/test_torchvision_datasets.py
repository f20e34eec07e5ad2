"""`torchvision:NAME`: what torchvision's own classes give, kept without loss."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from vit.commands.main import main
from vit.data.archives import open_binary
from vit.data.image_io import read_image
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_splits
from vit.data.sources.torchvision_datasets import read_torchvision
from vit.errors import DataError, RunError


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vit-toolkit/torchvision"


def write_mnist(folder: Path) -> None:
    """Files in MNIST's own format, with 30 and 10 images."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", 30), ("t10k", 10)):
        pixels = random.integers(0, 256, size=(count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape)
            content = header + array.tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(content)
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_datasets_of_arrays_are_stored_losslessly(cache, name):
    write_mnist(cache / name / "raw")
    splits = open_splits(f"torchvision:{name}", val_share=0.2, seed=0)
    assert splits.made
    assert (len(splits.train) + len(splits.val), len(splits.test)) == (30, 10)
    own = getattr(datasets, name)(str(cache), train=True)
    assert {*splits.classes} == {*own.classes}  # "T-shirt/top" too, which is no folder's name
    trained = [*splits.train, *splits.val]
    found = sorted((splits.classes[s.label], read_image(s.path).tobytes()) for s in trained)
    assert found == sorted((own.classes[y], x.convert("RGB").tobytes()) for x, y in own)
    again = open_splits(f"torchvision:{name}", val_share=0.2, seed=0)
    assert again.train == splits.train


class Drawn(datasets.VisionDataset):
    """A set of files with a split that torchvision calls trainval."""

    classes = ("b b", "a")

    def __init__(self, root, split="trainval", transform=None, download=False):
        super().__init__(root, transform=transform)
        if split not in ("trainval", "test"):
            raise ValueError(f"Unknown value {split!r} for argument split.")
        assert download
        folder = Path(root) / "drawn" / split
        folder.mkdir(parents=True, exist_ok=True)
        self._images = [folder / f"{number}.png" for number in range(6)]
        self._labels = [number % 2 for number in range(6)]
        for number, path in enumerate(self._images):
            Image.new("RGB", (5, 5), (40 * number, len(split), 0)).save(path)

    def __len__(self):
        return len(self._images)

    def __getitem__(self, index):
        return Image.open(self._images[index]), self._labels[index]


def test_datasets_of_files_are_read_in_place(monkeypatch, cache):
    monkeypatch.setattr(datasets, "Drawn", Drawn, raising=False)
    splits = open_splits("torchvision:Drawn", val_share=0.2, seed=0)
    assert splits.classes == ("a", "b b")
    trained = [*splits.train, *splits.val]
    names = {Path(sample.path).relative_to(cache / "drawn").as_posix() for sample in trained}
    assert names == {f"trainval/{number}.png" for number in range(6)}
    assert [sample.label for sample in splits.test] == [0, 0, 0, 1, 1, 1]
    assert not (cache / "png").exists()
    with open_binary(splits.val[0].path) as file:
        assert file.read(4) == b"\x89PNG"


@pytest.mark.auto_precision
def test_unavailable_datasets_are_refused_in_one_line(monkeypatch, tmp_path, capsys):
    def offline(*_args, **_settings):
        raise RuntimeError("Error downloading train-images:\nTried https://...")

    for name, what in (
        ("CIFAR", r"no dataset of that name; is it torchvision:CIFAR10?"),
        ("FakeData", "torchvision does not download this dataset"),
        ("os", "no dataset of that name"),
    ):
        assert main(["train", f"torchvision:{name}", "--out", str(tmp_path / "r")]) == 2
        stderr = capsys.readouterr().err
        assert stderr.count("\n") == 1
        assert what in stderr
    monkeypatch.setattr(datasets.CIFAR10, "download", offline)
    with pytest.raises(DataError, match=r"cannot be downloaded \(Error downloading .*go online"):
        read_torchvision(DatasetSpec("torchvision:CIFAR10"))


def test_an_interrupted_export_leaves_no_file(monkeypatch, cache):
    write_mnist(cache / "MNIST" / "raw")
    real = datasets.MNIST.__getitem__

    def breaks(self, index):
        if index == 20:
            raise OSError(28, "No space left on device")
        return real(self, index)

    monkeypatch.setattr(datasets.MNIST, "__getitem__", breaks)
    with pytest.raises(RunError, match="could not be written"):
        read_torchvision(DatasetSpec("torchvision:MNIST"))
    assert [*(cache / "png").iterdir()] == []
