"""Held-out images are recognised by their content, whatever happened to the data since."""

import itertools
import json
import random
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.data.sources.conftest import pack, plant
from tests.slow_cases import mostly_slow
from vit.data.sources import split_file
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_eval_split, read_source
from vit.data.sources.split_file import HeldOutSplit, read_split, split_record

Files = dict[str, bytes]


def images(number: int, kind: bytes = b"photo") -> Files:
    """Numbered files of two classes, most of equal sizes; nothing here decodes them."""
    return {f"{'ab'[n % 2]}/{n:04}.png": b"%s %03d" % (kind, n) for n in range(number)}


def renamed(files: Files, _: random.Random) -> Files:
    return {name.replace("/", "/new-"): content for name, content in files.items()}


def renumbered(files: Files, rng: random.Random) -> Files:
    """The same names, each of another image of its class or of the other one."""
    names = [*files]
    rng.shuffle(names)
    return dict(zip(names, files.values(), strict=True))


def subset(files: Files, rng: random.Random) -> Files:
    return dict(rng.sample([*files.items()], len(files) // 2))


def copied_twice(files: Files, _: random.Random) -> Files:
    return {f"{name[:2]}{copy}-{name[2:]}": files[name] for name in files for copy in "12"}


def encoded_again(files: Files, rng: random.Random) -> Files:
    """A few images have other bytes, of the same or of another size."""
    return {name: one.upper() + b"x" * rng.randrange(2) if rng.random() < 0.3 else one
            for name, one in files.items()}  # fmt: skip


def all_encoded_again(files: Files, _: random.Random) -> Files:
    return {name: content.upper() for name, content in files.items()}


def extended(files: Files, _: random.Random) -> Files:
    more = images(8, b"other")
    return files | {name.replace("/", "/more-"): content for name, content in more.items()}


def replaced(files: Files, _: random.Random) -> Files:
    """Another dataset with the same numbered names."""
    return dict(zip(files, images(len(files), b"other").values(), strict=True))


CHANGES = (renamed, renumbered, subset, copied_twice, encoded_again, all_encoded_again, extended)
CHAINS = [
    *([one] for one in (*CHANGES, replaced)),
    *itertools.permutations((*CHANGES, replaced), 2),
    *random.Random(0).sample([*itertools.permutations((*CHANGES, replaced), 3)], 12),
]


def write(root: Path, files: Files) -> Path:
    plant(root, files)
    return root


def paths_of(root: Path) -> list[str]:
    return [one.path for one in read_source(DatasetSpec(str(root))).train]


@pytest.fixture
def trained(tmp_path):
    """A dataset, the split.json of a run that held out a quarter of it, and those images."""
    files = images(16)
    root = write(tmp_path / "photos", files)
    held_out = [str(root / name) for number, name in enumerate(files) if number % 4 == 1]
    run = tmp_path / "run"
    run.mkdir()
    (run / "split.json").write_text(json.dumps(split_record(held_out, root)))
    return root, run, {Path(path).read_bytes() for path in held_out}


def measured(run: Path, data: Path) -> tuple[set[str], str]:
    """The images that an evaluation takes, and what it says of them."""
    samples, notes = open_eval_split(
        str(data), split="val", classes=("a", "b"), held_out=read_split(run)
    )
    return {one.path for one in samples}, notes[0]


@pytest.mark.parametrize("moved", mostly_slow([False, True], 2), ids=["in its place", "moved"])
def test_what_is_measured_is_what_is_said(trained, tmp_path, moved):
    root, run, held_out = trained
    files = {path: Path(root / path).read_bytes() for path in images(16)}
    rng = random.Random(1)
    for chain in CHAINS:
        changed = files
        for change in chain:
            changed = change(changed, rng)
        shutil.rmtree(root, ignore_errors=True)
        data = write(tmp_path / "elsewhere" if moved else root, changed)
        expected = {str(data / name) for name, one in changed.items() if one in held_out}
        taken, note = measured(run, data)
        case = [change.__name__ for change in chain]
        assert taken == (expected or {str(data / name) for name in changed}), case
        if expected:
            less = " left of the 4" if len(expected) < 4 else ""
            assert f"took the {len(expected)} image" in note, (case, note)
            assert f"{less} that training held out" in note, (case, note)
            others = len(changed) - len(expected) if less else 0
            assert (f"not measured: {others} other image" in note) == (others > 0), (case, note)
        else:
            said = f"took all {len(changed)} images: training held out none of them"
            assert said in note, (case, note)
        again = {*held_out_names(run)} & {*changed}
        lost = held_out - {*changed.values()}
        if again and not expected:
            assert f"equal in name, but not in content: {len(again)} image" in note, (case, note)
        assert lost or "content" not in note, (case, note)
        shutil.rmtree(data)


def held_out_names(run: Path) -> list[str]:
    return json.loads((run / "split.json").read_text())["val"]


def test_of_unchanged_data_only_held_out_images_are_read(trained, tmp_path, monkeypatch):
    root, run, _ = trained
    read = Mock(wraps=split_file.content_digest)
    monkeypatch.setattr(split_file, "content_digest", read)
    for data in (root, shutil.copytree(root, tmp_path / "copy")):
        read.reset_mock()
        assert measured(run, data)[1].endswith("took the 4 images that training held out")
        assert read.call_count == 4


def test_members_of_shards_have_the_content_of_files(trained, tmp_path):
    root, run, held_out = trained
    names = [Path(path).relative_to(root).as_posix() for path in paths_of(root)]
    files = {f"{name[:2]}x{name[2:]}": (root / name).read_bytes() for name in names}
    taken, _ = measured(run, pack(tmp_path / "x.tar", files))
    assert {files[path.split(".tar/")[1]] for path in taken} == held_out


def test_names_of_an_earlier_version_count_in_their_folder_only(trained, tmp_path):
    root, run, _ = trained
    record = json.loads((run / "split.json").read_text())
    del record["val_digests"]
    (run / "split.json").write_text(json.dumps(record))
    assert len(measured(run, root)[0]) == 4
    listed = tmp_path / "list.csv"
    rows = [f"{Path(path).relative_to(tmp_path)},a" for path in paths_of(root)]
    listed.write_text("\n".join(["image,label", *rows]) + "\n")
    assert len(measured(run, listed)[0]) == 4  # the same files, by other names
    taken, note = measured(run, shutil.copytree(root, tmp_path / "copy"))
    assert len(taken) == 16
    assert "the run knows its images by name only, and they were in another folder" in note
    assert note.endswith("another folder. If these are its data, the numbers are too good")


def test_images_that_cannot_be_read_are_no_held_out_images(trained, tmp_path):
    root, run, _ = trained
    split = read_split(run)
    assert split is not None
    first = root / split.val[0]
    first.write_bytes(b"")
    assert len(measured(run, root)[0]) == 3
    first.unlink()
    record = split_record([str(first), str(root / split.val[1])], root)
    assert record["val_digests"][0] is None
    unread = HeldOutSplit(root, record["val"], record["val_digests"])
    match = unread.find([str(first), *paths_of(root)], root)
    assert match.paths == {str(root / split.val[1])}
