"""Small data of several sources, and what is found in opened data."""

import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from PIL import Image

from vit.data.dataset_types import Sample, Splits
from vit.data.image_archives import open_binary, relative
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_splits
from vit.data.sources.train_val_split import Fold


def png(value: int) -> bytes:
    """A grey image of 4 x 4 pixels."""
    content = io.BytesIO()
    Image.new("L", (4, 4), value).save(content, "PNG")
    return content.getvalue()


def coco(captions: dict[str, list[str]]) -> str:
    """Captions of each file as COCO has them."""
    files = [*captions]
    annotations = [
        {"image_id": files.index(name), "caption": text}
        for name, texts in captions.items()
        for text in texts
    ]
    images = [{"id": number, "file_name": name} for number, name in enumerate(files)]
    return json.dumps({"images": images, "annotations": annotations})


def tar_of(members: Mapping[str, str | bytes], style: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar with these members, written by Python."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=style, encoding="utf-8") as tar:
        for name, content in members.items():
            held = content.encode() if isinstance(content, str) else content
            about = tarfile.TarInfo(name)
            about.size = len(held)
            tar.addfile(about, io.BytesIO(held))
    return file.getvalue()


def pack(path: Path, members: Mapping[str, str | bytes], style: int = tarfile.GNU_FORMAT) -> Path:
    plant(path.parent, {path.name: tar_of(members, style)})
    return path


def plant(root: Path, files: Mapping[str, bytes | str | Path | None]) -> None:
    """Files of these bytes or this text, links to these paths, and pipes."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            os.mkfifo(root / name)
        elif isinstance(content, Path):
            (root / name).symlink_to(content)
        else:
            (root / name).write_bytes(content.encode() if isinstance(content, str) else content)


def opened(
    data: str | Path,
    *,
    val_share: float = 0.25,
    seed: int = 0,
    fold: Fold | None = None,
    **settings: object,
) -> Splits:
    return open_splits(
        DatasetSpec(str(data), **settings), val_share=val_share, seed=seed, fold=fold
    )


def noted(splits: Splits, text: str) -> bool:
    return any(text in note for note in splits.notes)


def names(samples: Iterable[Sample], root: str | Path) -> list[str]:
    return [relative(sample.path, root) for sample in samples]


def read_samples(samples: Iterable[Sample]) -> list[tuple[bytes, int]]:
    found = []
    for sample in samples:
        with open_binary(sample.path) as file:
            found.append((file.read(), sample.label))
    return found


@pytest.fixture
def isolated_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library `datasets` with a cache of its own, no network, and no bars."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
