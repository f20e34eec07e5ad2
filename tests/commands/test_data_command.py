"""`vit data` writes any source as a folder or as shards, and the images stay what they are."""

import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from vit.commands.main import main
from vit.data.image_archives import open_binary
from vit.data.sources.dataset_export import MARKER_FILE
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_splits, read_source


def files_of(folder: Path) -> dict[str, bytes]:
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != MARKER_FILE
    )
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def written(source, to: str, out: Path, *more: str) -> Path:
    assert main(["data", str(source), "--to", to, "--out", str(out), *more]) == 0
    return out


def seen(data) -> dict:
    splits = open_splits(str(data), val_share=0.25, seed=0)
    found = {"train": [], "val": []}
    for split, samples in found.items():
        for sample in getattr(splits, split):
            with open_binary(sample.path) as file:
                samples.append((file.read(), splits.classes[sample.label]))
    return found


@pytest.fixture
def photos(tiny_data, tmp_path) -> Path:
    """train/ and val/, with a folder in a class folder."""
    root = tmp_path / "photos"
    for split in ("train", "val"):
        for path in (tiny_data / "val").rglob("*.*"):
            deeper = "deep" if path.stem == "3" else ""
            place = root / split / path.parent.name / deeper / path.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes() + split.encode())  # behind the end of the image
    return root


def test_an_exported_dataset_read_back_is_the_same(photos, tmp_path, capsys):
    shards = written(photos, "shards", tmp_path / "shards")
    assert {path.name for path in shards.iterdir()} == {
        MARKER_FILE, "train-000000.tar", "val-000000.tar",
    }  # fmt: skip
    back = written(shards, "folder", tmp_path / "back")
    assert files_of(back) == files_of(photos)
    assert seen(shards) == seen(photos) == seen(back)
    told = capsys.readouterr().err
    assert f"vit data: wrote 54 images in 2 shards to {shards}\n" in told
    again = written(back, "shards", tmp_path / "again")
    assert files_of(again) == files_of(shards)
    with tarfile.open(shards / "train-000000.tar") as tar:
        members = tar.getmembers()
    assert [m.name for m in members][:2] == ["apple/0.png", "apple/1.jpg"]
    assert {(m.mtime, m.uid, m.uname, m.mode) for m in members} == {(0, 0, "", 0o644)}


def test_an_exported_dataset_without_splits_holds_out_the_same_images(photos, tmp_path):
    shards = written(photos / "train", "shards", tmp_path / "shards")
    assert [path.name for path in shards.glob("*.tar")] == ["images-000000.tar"]
    assert seen(shards) == seen(photos / "train")


def test_shards_have_at_most_the_requested_size(photos, tmp_path):
    noise = Image.effect_noise((700, 700), 99)
    for number in range(6):
        noise.save(photos / "train/apple" / f"large{number}.png")
    shards = written(photos, "shards", tmp_path / "shards", "--shard-size", "1MB")
    sizes = [path.stat().st_size for path in sorted(shards.glob("train-*.tar"))]
    assert len(sizes) >= 3
    assert max(sizes) <= 10**6 + 20480  # tar fills its last block
    assert seen(shards) == seen(photos)


def test_class_names_that_are_no_folder_names_are_kept_in_shards(tmp_path, capsys):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for number, label in enumerate(("T-shirt/top", "..", "T-shirt_top", "train")):
            content = io.BytesIO()
            Image.new("RGB", (4, 4), (number, 0, 0)).save(content, "PNG")
            for name, raw in ((".png", content.getvalue()), (".cls", label.encode())):
                about = tarfile.TarInfo(f"{number}{name}")
                about.size = len(raw)
                tar.addfile(about, io.BytesIO(raw))
    shards = written(tmp_path / "x.tar", "shards", tmp_path / "shards")
    labels = [
        item.labels[0] for item in read_source(DatasetSpec(str(shards), all_splits=True)).splits[""]
    ]
    assert labels == ["T-shirt/top", "..", "T-shirt_top", "train"]
    folder = written(tmp_path / "x.tar", "folder", tmp_path / "folder")
    assert {path.name for path in folder.iterdir()} - {MARKER_FILE} == {
        "T-shirt_top", "T-shirt_top-2", "_", "train_",
    }  # fmt: skip
    told = capsys.readouterr().err
    assert "classes with another folder name, since theirs is not valid or not distinct" in told
    assert ".. is _," in told


def test_unreadable_images_are_left_out_and_named(photos, tmp_path, bad_images, capsys):
    (photos / "train/apple/bad.jpg").write_bytes(b"this is no image")
    whole = (photos / "train/apple/1.jpg").read_bytes()
    (photos / "train/apple/cut.jpg").write_bytes(whole[:-30])
    assert main(["data", str(photos), "--to", "folder", "--out", str(tmp_path / "o")]) == 1
    told = capsys.readouterr().err
    assert "left out " in told
    assert "bad.jpg: not a readable image (text)" in told
    assert (tmp_path / "o/train/apple/cut.jpg").read_bytes() == whole[:-30]
    assert not (tmp_path / "o/train/apple/bad.jpg").exists()


def test_existing_files_are_never_lost(photos, tmp_path, refusal):
    folder = ["--to", "folder", "--out"]
    before = files_of(photos)
    assert "holds the data" in refusal("data", photos, *folder, tmp_path, "--overwrite")
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    assert "has files" in refusal("data", photos, *folder, other)
    assert "was not written by vit data" in refusal("data", photos, *folder, other, "--overwrite")
    assert "is a file" in refusal("data", photos, *folder, other / "mine.txt")
    out = written(photos, "folder", tmp_path / "out")
    (out / "train/apple/0.png").unlink()
    written(photos, "folder", out, "--overwrite")
    assert files_of(out) == before == files_of(photos)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_images_of_a_list_or_pattern_are_not_overwritten(photos, tmp_path, refusal):
    out = written(photos, "folder", tmp_path / "out")
    rows = [f"{path},{path.parent.name}" for path in sorted(out.rglob("*.png"))]
    listed = tmp_path / "list.csv"
    listed.write_text("\n".join(["image,label", *rows]))
    shards = written(photos, "shards", tmp_path / "shards")
    before = files_of(out), files_of(shards)
    pattern = f"{shards}/{{train,val}}-000000.tar"
    for source, place in ((listed, out), (pattern, shards)):
        told = refusal("data", source, "--to", "folder", "--out", place, "--overwrite")
        assert f"{place} holds images of the data, such as {place}" in told
    written(listed, "folder", tmp_path / "other")  # elsewhere they are read
    assert (files_of(out), files_of(shards)) == before
