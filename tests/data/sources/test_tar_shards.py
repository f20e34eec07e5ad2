"""Tar shards: the same as folders, whatever wrote them; and what is refused, in one line."""

import io
import json
import multiprocessing
import os
import shutil
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit.commands.main import main
from vit.data import archives
from vit.data.archives import is_inside, open_binary, open_member, read_index, relative, size_of
from vit.data.image_io import check_header, read_image
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.dataset_warnings import equal_files
from vit.data.sources.open_dataset import (
    list_images,
    open_eval_split,
    open_splits,
    read_source,
    source_of,
)
from vit.data.sources.split_file import HeldOutSplit
from vit.data.sources.tar_shards import expand_braces, read_shards, split_of_shard
from vit.errors import BadImage, DataError
from vit.output.prediction_results import Prediction
from vit.output.sort_into_folders import ImageSorter

TREE = {"train/a": 9, "train/b": 5, "train/b/deep": 2, "val/a": 3, "val/b": 2}


def pack(path: Path, members: dict[str, bytes], style: int = tarfile.GNU_FORMAT) -> Path:
    """A tar with these members, written by Python."""
    with tarfile.open(path, "w", format=style, encoding="utf-8") as tar:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def pair(make_tree, tmp_path) -> tuple[Path, Path]:
    """The same images as a folder, and as shards: three of train, one of val."""
    root, out = make_tree(TREE), tmp_path / "shards"
    out.mkdir()
    train = list(files_of(root / "train").items())
    for number in range(3):
        pack(out / f"train-{number:04d}.tar", dict(train[number::3]))
    pack(out / "val-0000.tar", files_of(root / "val"))
    return root, out


def read_samples(samples) -> list[tuple[bytes, int]]:
    found = []
    for sample in samples:
        with open_binary(sample.path) as file:
            found.append((file.read(), sample.label))
    return found


def open_data(data):
    return open_splits(str(data), val_share=0.25, seed=3)


def test_shards_give_the_samples_of_the_folder(pair):
    root, shards = pair
    folder, packed = open_data(root), open_data(shards)
    assert packed.classes == folder.classes == ("a", "b")
    assert read_samples(packed.train) == read_samples(folder.train)
    assert read_samples(packed.val) == read_samples(folder.val)
    assert not packed.made
    assert [relative(s.path, packed.root) for s in packed.val] == [
        relative(s.path, folder.root).removeprefix("val/") for s in folder.val
    ]
    for way in ("{train-{0000..0002},val-0000}.tar", "*.tar"):
        assert read_samples(open_data(f"{shards}/{way}").train) == read_samples(folder.train)


def test_shards_without_a_split_hold_out_what_the_folder_does(pair, tmp_path):
    root, shards = pair[0] / "train", tmp_path / "x.tar"
    pack(shards, files_of(root))
    folder, packed = open_data(root), open_data(shards)
    assert packed.made
    assert folder.made
    assert read_samples(packed.train) == read_samples(folder.train)
    assert read_samples(packed.val) == read_samples(folder.val)
    held = [relative(sample.path, packed.root) for sample in packed.val]
    assert held == [relative(sample.path, folder.root) for sample in folder.val]
    split = HeldOutSplit(packed.root.resolve(), held)
    samples, notes = open_eval_split(str(shards), split="val", classes=("a", "b"), held_out=split)
    assert read_samples(samples) == read_samples(packed.val)
    assert any("that training held out" in note for note in notes)


@pytest.mark.parametrize("above", ["", "photos/"])
def test_a_tar_of_an_image_folder_gives_the_same_samples(pair, tmp_path, above):
    root = pair[0]
    packed = pack(tmp_path / "p.tar", {above + k: v for k, v in files_of(root).items()})
    folder, splits = open_data(root), open_data(packed)
    assert read_samples(splits.train) == read_samples(folder.train)
    assert read_samples(splits.val) == read_samples(folder.val)
    assert [relative(s.path, splits.root) for s in splits.train] == [
        relative(s.path, folder.root) for s in folder.train
    ]


def test_archives_of_gnu_tar_are_read(pair, tmp_path):
    name = "n" * 92
    long = pair[0] / "train/a" / f"{name}.png"
    shutil.copy(pair[0] / "train/a/0.png", long)
    for style in ("gnu", "ustar", "posix"):
        path = tmp_path / f"{style}.tar"
        subprocess.run(
            ["tar", f"--format={style}", "-cf", path, "-C", pair[0], "./train"], check=True
        )
        index = read_index(str(path))
        assert {*index} == {f"train/{name}" for name in files_of(pair[0] / "train")}
        assert open_member(f"{path}/train/a/{name}.png").read() == long.read_bytes()


@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_member_offsets_equal_those_of_tarfile(tmp_path, style):
    names = ["a/1.jpg", "ü/é.jpg", "d/" * 40 + "x.jpg", "empty.jpg", "a/2.tar/3.jpg"]
    path = pack(tmp_path / "x.tar", {name: name.encode() * 99 for name in names}, style)
    index = read_index(str(path))
    with tarfile.open(path) as tar:
        for member in tar:
            assert index.find(member.name) == (member.offset_data, member.size)
    assert [*index] == names
    assert index.find("a/3.jpg") is None


def test_an_address_is_read_like_a_file(pair):
    root, shards = pair
    path, inside = f"{root}/val/a/1.png", f"{shards}/val-0000.tar/a/1.png"
    assert is_inside(inside)
    assert not is_inside(path)
    assert size_of(inside) == size_of(path) == os.path.getsize(path)
    assert np.array_equal(read_image(inside), read_image(path))
    check_header(inside)
    assert equal_files([path, inside, f"{root}/val/a/0.png"]) == [[path, inside]]
    for name in ("val-0000.tar/a/99.png", "val-0000.tar/", "none.tar/a/1.png"):
        with pytest.raises(BadImage, match="no such"):
            read_image(f"{shards}/{name}")


def test_a_shard_is_read_by_many_threads_and_processes(pair, monkeypatch):
    monkeypatch.setattr(archives, "MAX_OPEN_SHARDS", 2)
    paths = [sample.path for sample in open_data(pair[1]).train] * 20
    expected = [open_member(path).read() for path in paths]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda path: open_member(path).read(), paths)] == expected
    assert len(archives._OPEN) <= 3
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(size_of, paths[:9]) == [*map(len, expected[:9])]
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(_forked, paths).result()
    assert found == [*map(len, expected)]


def _forked(paths: list[str]) -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(_length, paths)


def _length(path: str) -> int:
    return len(open_member(path).read())


def test_a_shard_that_was_written_anew_is_read_anew(tmp_path):
    path = pack(tmp_path / "x.tar", {"a/1.jpg": b"one", "a/2.jpg": b"two"})
    assert open_member(f"{path}/a/2.jpg").read() == b"two"
    pack(path, {"a/2.jpg": b"other"})
    assert open_member(f"{path}/a/2.jpg").read() == b"other"


def labelled(tmp_path, members: dict[str, bytes], **beside: str):
    for name, text in beside.items():
        (tmp_path / f"classes.{name}").write_text(text)
    found = read_shards(DatasetSpec(str(pack(tmp_path / "x.tar", members))))
    return [record.labels for record in found.splits[""]], found


def test_webdataset_label_files_are_read(tmp_path):
    names, _ = labelled(tmp_path, {"1.jpg": b"x", "1.cls": b"7\n", "2.jpg": b"x", "2.cls": b"cat"})
    assert names == [("7",), ("cat",)]
    names, _ = labelled(
        tmp_path, {"1.left.jpg": b"x", "1.cls": b"1", "2.jpg": b"x", "2.cls": b"0"}, txt="no\nyes\n"
    )
    assert names == [("yes",), ("no",)]
    members = {"1.json": b'{"label": "b"}', "1.jpg": b"x", "classes.json": b'{"b": 0, "a": 1}'}
    (tmp_path / "classes.txt").unlink()
    names, found = labelled(tmp_path, members | {"2.jpg": b"x", "2.json": b'{"label": 1}'})
    assert names == [("b",), ("a",)]
    assert not found.multilabel
    members = {"1.json": b'{"labels": ["b", "a"]}', "1.jpg": b"x", "1.txt": b"a cat"}
    names, found = labelled(tmp_path, members | {"2.jpg": b"x", "2.json": b'{"labels": []}'})
    assert names == [("b", "a"), ()]
    assert found.multilabel
    assert found.notes == ["left out 1 text (.txt): captions are no classes"]


def test_ignored_members_get_a_note(tmp_path):
    members = {"a/1.jpg": b"x", "b/2.jpg": b"x", "b/3.psd": b"x", "a/._1.jpg": b"x", "m.json": b""}
    path = pack(tmp_path / "x.tar", members)
    with tarfile.open(path, "a") as tar:
        for name, kind in (("a/l.jpg", tarfile.SYMTYPE), ("a/p.jpg", tarfile.FIFOTYPE)):
            about = tarfile.TarInfo(name)
            about.type, about.linkname = kind, "/etc/passwd"
            tar.addfile(about)
    found = read_shards(DatasetSpec(str(path)))
    assert sum(map(len, found.splits.values())) == 2
    assert found.notes == [
        "left out 1 member not taken for images: .psd 1; convert .psd to JPEG or PNG",
        "left out special members of the shards: 1 device, 1 link",
        "left out hidden and system names: ._1.jpg",
        "left out 1 file .json beside no image",
    ]


def test_equal_names_in_two_shards_are_prefixed_by_the_shard(tmp_path):
    for number in range(2):
        images = {f"{c}/{n}.jpg": f"{number}{c}{n}".encode() for c in "ab" for n in range(4)}
        pack(tmp_path / f"{number}.tar", images)
    splits = open_data(tmp_path)
    names = [relative(sample.path, splits.root) for sample in (*splits.train, *splits.val)]
    assert len({*names}) == 16
    assert "0.tar/a/1.jpg" in names


def test_shards_may_lie_in_the_folders_of_their_splits(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        pack(tmp_path / split / "0000.tar", {"a/1.jpg": split.encode(), "b/2.jpg": b"b"})
    assert [*read_source(DatasetSpec(str(tmp_path))).splits] == ["train", "val"]
    (tmp_path / "val" / "a").mkdir()
    assert source_of(str(tmp_path)) == "folder"


def test_a_tar_beside_class_folders_is_ignored(make_tree):
    root = make_tree({"a": 3, "b": 3})
    pack(root / "backup.tar", {"c/1.jpg": b"x"})
    assert source_of(str(root)) == "folder"
    assert open_data(root).classes == ("a", "b")


def test_system_folders_and_circular_links_beside_shards_are_ignored(tmp_path):
    pack(tmp_path / "0000.tar", {"c/1.jpg": b"x"})
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    assert source_of(str(tmp_path)) == "shards"


@pytest.mark.parametrize("name", ["photos.tar", "photos.tar.gz"])
def test_an_archive_beside_the_images_unpacked_from_it_is_ignored(tmp_path, name):
    for number in range(3):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{number}.jpg")
    pack(tmp_path / name, {"0.jpg": b"x"})
    assert source_of(str(tmp_path)) == "folder"
    index = read_source(DatasetSpec(str(tmp_path), labels=False))
    assert sum(map(len, index.splits.values())) == 3


def test_predict_needs_no_classes_in_shards(tmp_path):
    path = pack(tmp_path / "x.tar", {"2.jpg": b"x", "1.heic": b"x", "._1.jpg": b"x", "1.txt": b""})
    notes: list[str] = []
    expected = [f"{path}/1.heic", f"{path}/2.jpg"]
    assert list_images([str(path)], notes=notes) == expected
    assert notes == [f"{path}: left out hidden and system names: ._1.jpg"]
    assert list_images([str(tmp_path)]) == expected
    (tmp_path / "beside.jpg").write_bytes(b"x")  # loose images are what a folder holds
    assert list_images([str(tmp_path)], notes=notes) == [f"{tmp_path}/beside.jpg"]
    assert "left out" in notes[1]
    with pytest.raises(DataError, match="no images in 1 shard"):
        list_images([str(pack(tmp_path / "none.tar", {"x.txt": b""}))])


def test_images_are_sorted_out_of_shards_as_copies(pair, tmp_path):
    image = f"{pair[1]}/val-0000.tar/a/1.png"
    prediction = Prediction(image, (("a", 1.0),))
    for _ in range(2):  # what is there already is let be
        ImageSorter(str(tmp_path / "sorted"), "copy", ["a"], [image])(0, prediction)
    assert (tmp_path / "sorted/a/1.png").read_bytes() == (pair[0] / "val/a/1.png").read_bytes()


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("x.tar", ["x.tar"]),
        ("{08..11}.tar", ["08.tar", "09.tar", "10.tar", "11.tar"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{a,b{1..2}}-{x,y}", ["a-x", "a-y", "b1-x", "b1-y", "b2-x", "b2-y"]),
    ],
)
def test_braces_expand_as_in_a_shell(pattern, names):
    assert expand_braces(pattern) == names
    shell = subprocess.run(["bash", "-c", f"echo {pattern}"], capture_output=True, text=True)
    assert shell.stdout.split() == names


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("/d/train-0000.tar", "train"),
        ("/d/imagenet-validation-07.tar", "validation"),
        ("/d/val/0000.tar", "val"),
        ("/d/trainer.tar", ""),
    ],
)
def test_the_split_is_in_the_name_of_a_shard(path, split):
    assert split_of_shard(path) == split


GOOD = {"a/1.jpg": b"x" * 700, "b/2.jpg": b"y" * 700}


def damaged(tmp_path: Path, kind: str) -> str:
    path = pack(tmp_path / "x.tar", GOOD)
    whole = path.read_bytes()
    end = 4 * 1024 - 1024
    changed = {
        "empty": b"",
        "text": b"no tar at all " * 99,
        "cut in a member": whole[:2500],
        "cut in a header": whole[:1600],
        "cut behind a member": whole[:end],
        "a flipped byte": whole[:1540] + b"\xff" + whole[1541:],
        "two tars": whole + whole,
    }
    path.write_bytes(changed[kind])
    return str(path)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("empty", "an empty file, not a tar"),
        ("text", "not a tar file"),
        ("cut in a member", r"member b/2\.jpg: cut short: it needs 2,\d+ bytes"),
        ("cut in a header", r"cut short: it has no end mark after a/1\.jpg"),
        ("cut behind a member", r"cut short: it has no end mark after b/2\.jpg"),
        ("a flipped byte", r"damaged at byte 1,536, after a/1\.jpg"),
        ("two tars", "more behind its end mark, such as a second tar"),
    ],
)
def test_damaged_shards_are_refused(tmp_path, kind, what):
    path = damaged(tmp_path, kind)
    with pytest.raises(DataError, match=what) as refused:
        read_shards(DatasetSpec(path))
    assert str(refused.value).startswith(path)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("../x.jpg", r"member \.\./x\.jpg: not a name inside"),
        ("a/../../x.jpg", "not a name inside"),
        ("/etc/x.jpg", "member /etc/x.jpg: not a name inside"),
        ("a/\x1b[31m.jpg", r"member a/\\x1b\[31m\.jpg: has control characters"),
        ("a/1.jpg", "is there twice"),
        ("./a//1.jpg", "is there twice"),
    ],
)
def test_hostile_members_are_refused(tmp_path, name, what):
    path = pack(tmp_path / "x.tar", {"a/1.jpg": b"x"})
    with tarfile.open(path, "a") as tar:
        tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match=what):
        read_shards(DatasetSpec(str(path)))


def test_wrong_sizes_and_gaps_are_refused(tmp_path):
    path = tmp_path / "x.tar"
    about = tarfile.TarInfo("a/1.jpg")
    about.size = 2**40
    path.write_bytes(about.tobuf(tarfile.GNU_FORMAT) + b"x" * 512)
    with pytest.raises(DataError, match=r"cut short: it needs 1,099,511,6\d\d,\d+ bytes"):
        read_shards(DatasetSpec(str(path)))
    about.size, about.type = 0, tarfile.GNUTYPE_SPARSE
    path.write_bytes(about.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(DataError, match=r"a/1\.jpg: is sparse"):
        read_shards(DatasetSpec(str(path)))
    about = tarfile.TarInfo("x")
    about.type, about.size = tarfile.XHDTYPE, 2**35
    path.write_bytes(about.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(DataError, match="an extended header of 34,359,738,368 bytes"):
        read_shards(DatasetSpec(str(path)))


def test_any_flipped_bytes_are_refused_or_harmless(tmp_path):
    whole = bytearray(pack(tmp_path / "x.tar", GOOD).read_bytes()[:4096])
    random = np.random.default_rng(0)
    for trial in range(300):
        broken = bytearray(whole)
        for at in random.integers(0, len(whole), size=3):
            broken[at] = random.integers(256)
        path = tmp_path / f"{trial}.tar"
        path.write_bytes(broken[: random.integers(1, 4096)] if trial % 3 == 0 else broken)
        try:
            places = [read_index(str(path)).find(name) for name in GOOD]
        except DataError:
            continue
        assert all(place is None or place.size == 700 for place in places)


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ({"readme.md": b""}, "no images in 1 shard"),
        ({"1.jpg": b"x"}, r"x\.tar/1\.jpg: without a class; expected CLASS/"),
        (
            {"1.jpg": b"x", "1.cls": b"1", "2.jpg": b"x"},
            r"2\.jpg: no \.cls beside, which others have",
        ),
        ({"1.jpg": b"x", "1.cls": b""}, r"1\.jpg: its \.cls is not the name or number"),
        ({"1.jpg": b"x", "1.cls": b"\xff\xfe"}, r"1\.cls: not UTF-8 text"),
        ({"1.jpg": b"x", "1.json": b'{"label": [1.5]}'}, r"1\.jpg: the label is 1.5, a fraction"),
        ({"1.jpg": b"x", "1.json": b'{"label": ""}'}, r'1\.jpg: its \.json has no "label"'),
        ({"1.jpg": b"x", "1.json": b"{"}, r"1\.json, line 1: not JSON"),
        ({"1.jpg": b"x", "1.json": b"[" * 99999}, r"1\.json: not JSON"),
        ({"1.jpg": b"x", "1.cls": b"3", "classes.txt": b"a\nb"}, "label '3' is not one of the 2"),
        ({"1.jpg": b"x", "1.cls": b"0", "classes.txt": b"a\na"}, "not the names of classes"),
    ],
)
def test_invalid_labels_are_refused(tmp_path, members, what):
    with pytest.raises(DataError, match=what):
        read_shards(DatasetSpec(str(pack(tmp_path / "x.tar", members))))


def one_line(capsys, *words: str) -> str:
    assert main([*words]) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1, stderr
    return stderr


@pytest.mark.auto_precision
@pytest.mark.parametrize("ending", ["tar.gz", "tar", "tgz"])
def test_the_command_refuses_compressed_shards(tmp_path, capsys, ending):
    with tarfile.open(tmp_path / f"x.{ending}", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a/1.jpg"))
    stderr = one_line(capsys, "train", str(tmp_path / f"x.{ending}"), "--out", str(tmp_path / "r"))
    assert "compressed with gzip" in stderr
    assert "unpack it once with gunzip" in stderr


@pytest.mark.auto_precision
def test_the_command_names_shards_that_are_missing(tmp_path, capsys):
    pack(tmp_path / "0000.tar", {"a/1.jpg": b"x"})
    stderr = one_line(capsys, "train", f"{tmp_path}/{{0000..0002}}.tar", "--out", f"{tmp_path}/r")
    assert "no such shard" in stderr
    assert "0001.tar, " in stderr
    assert "a brace is not closed" in one_line(capsys, "train", f"{tmp_path}/{{0.tar")
    for name in (f"{tmp_path}/none.tar", "s3://bucket/none.tar"):
        assert f"no such shard ({name}) on this disk" in one_line(capsys, "train", name)


def test_a_shard_index_is_small_in_memory(tmp_path):
    """A million names in a dict would be copied into every loader process."""
    path = pack(tmp_path / "x.tar", {f"a/{number:06d}.jpg": b"" for number in range(500)})
    index = read_index(str(path))
    held = index.keys.nbytes + index.order.nbytes + index.positions.nbytes + index.ends.nbytes
    assert held + len(index.blob) < 60 * 500
    assert json.dumps([*index])[:10] == '["a/000000'


def test_a_compressed_shard_among_others_is_not_left_out(pair, tmp_path):
    shards = tmp_path / "mixed"
    shards.mkdir()
    pack(shards / "train-0000.tar", files_of(pair[0] / "train"))
    (shards / "train-0001.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"train-0001\.tar\.gz: compressed with gzip"):
        open_data(shards)


def test_classes_that_are_called_by_numbers_keep_their_images(tmp_path):
    table = {"txt": "1\n10\n2\n"}
    members = {f"{n}.jpg": b"x" for n in range(3)}
    values = ("2", 2, "10")
    files = {f"{n}.json": json.dumps({"label": value}).encode() for n, value in enumerate(values)}
    names, _ = labelled(tmp_path, members | files, **table)
    assert names == [("2",), ("2",), ("10",)]
    names, _ = labelled(tmp_path, members | {f"{n}.cls": b"1" for n in range(3)}, **table)
    assert names == [("10",)] * 3
    names, _ = labelled(tmp_path, members | {f"{n}.cls": b"1" for n in range(3)}, txt="0\n1\n2\n")
    assert names == [("1",)] * 3
