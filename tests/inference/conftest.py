"""Images and a captioner that tests of inference share."""

import shutil
from pathlib import Path

import pytest

from tests.inference.captioners import SAID, save_captioner, write_captions


@pytest.fixture
def input_images(tiny_data: Path) -> list[str]:
    """The paths of the 27 images, in order."""
    return [str(path) for path in sorted((tiny_data / "val").rglob("*.*"))]


@pytest.fixture(scope="session")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of an untrained captioner; not to be written to."""
    return save_captioner(tmp_path_factory.mktemp("runs") / "captioner")


@pytest.fixture(scope="session")
def run_of_both_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the classes of `tiny_data`."""
    classes = ("apple", "class10", "class2")
    return save_captioner(tmp_path_factory.mktemp("runs") / "both", classes=classes)


@pytest.fixture(scope="session")
def captioned_data(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """27 images in class folders of train/ and val/, with one or two captions each."""
    root = tmp_path_factory.mktemp("captioned")
    for split in ("train", "val"):
        shutil.copytree(tiny_data / "val", root / split)
        paths = sorted((root / split).rglob("*.*"))
        names = [path.relative_to(root / split).as_posix() for path in paths]
        # most have the same first caption, which a short training learns
        firsts = [SAID[4] if n * n % 11 > 3 else "a dog on a red table" for n in range(len(names))]
        said = {name: [firsts[n], f"{SAID[4]} red"][: 1 + n % 2] for n, name in enumerate(names)}
        write_captions(root / split, said)
    return root
