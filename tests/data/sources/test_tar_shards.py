"""Tar shards: the same as folders, whatever wrote them; and what is refused, in one line."""

import json
import multiprocessing
import os
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.data.sources import conftest
from tests.data.sources.conftest import names, pack, plant, png, read_samples, tar_of
from vit.data import image_archives
from vit.data.image_archives import is_inside, open_member, read_index, size_of
from vit.data.image_io import check_header, read_image
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.dataset_warnings import equal_files
from vit.data.sources.open_dataset import (
    list_images,
    read_source,
    source_of,
)
from vit.data.sources.tar_shards import expand_braces, read_shards, split_of_shard
from vit.errors import BadImage, DataError
from vit.output.prediction_results import Prediction
from vit.output.sort_into_folders import ImageSorter

TREE = {"train/a": 9, "train/b": 5, "train/b/deep": 2, "val/a": 3, "val/b": 2}


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


opened = partial(conftest.opened, seed=3)


def assert_equal_samples(splits, folder) -> None:
    assert read_samples(splits.train) == read_samples(folder.train)
    assert read_samples(splits.val) == read_samples(folder.val)
    assert (splits.classes, splits.made) == (folder.classes, folder.made)


@pytest.mark.parametrize("way", ["", "/{train-{0000..0002},val-0000}.tar", "/*.tar"])
def test_shards_give_the_samples_of_the_folder(pair, way):
    root, shards = pair
    folder, packed = opened(root), opened(f"{shards}{way}")
    assert_equal_samples(packed, folder)
    assert names(packed.val, packed.root) == [
        name.removeprefix("val/") for name in names(folder.val, folder.root)
    ]


@pytest.mark.parametrize("above", ["", "photos/"])
def test_a_tar_of_an_image_folder_gives_the_same_samples(pair, tmp_path, above):
    members = {above + name: content for name, content in files_of(pair[0]).items()}
    packed = pack(tmp_path / "p.tar", dict(reversed(members.items())))
    folder, splits = opened(pair[0]), opened(packed)
    assert_equal_samples(splits, folder)
    assert names(splits.train, splits.root) == names(folder.train, folder.root)


def test_shards_without_a_split_hold_out_what_the_folder_does(pair, tmp_path):
    root, shards = pair[0] / "train", tmp_path / "x.tar"
    pack(shards, files_of(root))
    folder, packed = opened(root), opened(shards)
    assert packed.made
    assert_equal_samples(packed, folder)
    assert names(packed.val, packed.root) == names(folder.val, folder.root)


@pytest.mark.parametrize("style", ["gnu", "ustar", "posix"])
def test_archives_of_gnu_tar_are_read(tmp_path, style):
    files = {f"train/a/{name}.png": png(len(name)) for name in ("0", "n" * 92)}
    plant(tmp_path / "data", files)
    path, folder = tmp_path / "x.tar", tmp_path / "data"
    subprocess.run(["tar", f"--format={style}", "-cf", path, "-C", folder, "./train"], check=True)
    assert {name: read_member(f"{path}/{name}") for name in read_index(str(path))} == files


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
    monkeypatch.setattr(image_archives, "MAX_OPEN_SHARDS", 2)
    paths = [sample.path for sample in opened(pair[1]).train] * 20
    expected = [read_member(path) for path in paths]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(read_member, paths)] == expected
    assert len(image_archives._OPEN) <= 3
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(size_of, paths[:9]) == [*map(len, expected[:9])]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(read_forked, paths).result() == expected


def read_forked(paths: list[str]) -> list[bytes]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(read_member, paths)


def read_member(path: str) -> bytes:
    return open_member(path).read()


def test_a_shard_that_was_written_anew_is_read_anew(tmp_path):
    path = pack(tmp_path / "x.tar", {"a/1.jpg": b"one", "a/2.jpg": b"two"})
    assert open_member(f"{path}/a/2.jpg").read() == b"two"
    pack(path, {"a/2.jpg": b"other"})
    assert open_member(f"{path}/a/2.jpg").read() == b"other"


def beside(*values: object, ending: str = "json") -> dict[str, bytes]:
    """Images and a file beside each: this text, or the label in JSON."""
    members = {f"{number}.jpg": b"x" for number in range(len(values))}
    for number, value in enumerate(values):
        text = json.dumps({"label": value}) if ending == "json" else str(value)
        members[f"{number}.{ending}"] = text.encode()
    return members


@pytest.mark.parametrize(
    ("members", "classes", "labels"),
    [
        (beside("7\n", "cat", ending="cls"), {}, ["7", "cat"]),
        (
            {"1.left.jpg": b"x", "1.cls": b"1", "2.jpg": b"x", "2.cls": b"0"},
            {"classes.txt": "no\nyes\n"},
            ["yes", "no"],
        ),
        (beside("b", 1) | {"classes.json": b'{"b": 0, "a": 1}'}, {}, ["b", "a"]),
        # classes that are called by numbers keep their images
        (beside("2", 2, "10"), {"classes.txt": "1\n10\n2\n"}, ["2", "2", "10"]),
        (beside(1, 1, ending="cls"), {"classes.txt": "1\n10\n2\n"}, ["10", "10"]),
        (beside(1, 1, ending="cls"), {"classes.txt": "0\n1\n2\n"}, ["1", "1"]),
    ],
)
def test_webdataset_label_files_are_read(tmp_path, members, classes, labels):
    plant(tmp_path, classes)
    found = read_shards(DatasetSpec(str(pack(tmp_path / "x.tar", members))))
    assert [record.labels for record in found.splits[""]] == [(label,) for label in labels]
    assert not found.multilabel


def test_lists_of_labels_in_json_are_multilabel(tmp_path):
    members = {"1.json": b'{"labels": ["b", "a"]}', "1.jpg": b"x", "1.txt": b"a cat"}
    members |= {"2.jpg": b"x", "2.json": b'{"labels": []}'}
    found = read_shards(DatasetSpec(str(pack(tmp_path / "x.tar", members))))
    assert [record.labels for record in found.splits[""]] == [("b", "a"), ()]
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
        images = {f"{c}/{n}.jpg": f"{number}{c}{n}" for c in "ab" for n in range(4)}
        pack(tmp_path / f"{number}.tar", images)
    splits = opened(tmp_path)
    found = {*names((*splits.train, *splits.val), splits.root)}
    assert len(found) == 16
    assert "0.tar/a/1.jpg" in found


def test_shards_may_lie_in_the_folders_of_their_splits(tmp_path):
    for split in ("train", "val"):
        pack(tmp_path / split / "0000.tar", {"a/1.jpg": split, "b/2.jpg": b"b"})
    assert [*read_source(DatasetSpec(str(tmp_path))).splits] == ["train", "val"]
    (tmp_path / "val" / "a").mkdir()
    assert source_of(str(tmp_path)) == "folder"


@pytest.mark.parametrize(
    ("files", "source"),
    [
        (["a/1.jpg", "b/1.jpg"], "folder"),
        (["1.jpg", "2.jpg"], "folder"),
        (["__MACOSX/1.jpg"], "shards"),
    ],
    ids=["class folders", "images", "system folders"],
)
@pytest.mark.parametrize("name", ["photos.tar", "photos.tar.gz"])
def test_an_archive_beside_images_is_ignored(tmp_path, name, files, source):
    plant(tmp_path, {**dict.fromkeys(files, png(1)), "circle": Path("circle")})
    pack(tmp_path / name, {"c/1.jpg": b"x"})
    assert source_of(str(tmp_path)) == source
    if source == "folder":
        assert len(read_source(DatasetSpec(str(tmp_path), labels=False)).train) == 2


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


WHOLE = tar_of(GOOD)[:4096]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "an empty file, not a tar"),
        (b"no tar at all " * 99, "not a tar file"),
        (WHOLE[:2500], r"member b/2\.jpg: cut short: it needs 2,\d+ bytes"),
        (WHOLE[:1600], r"cut short: it has no end mark after a/1\.jpg"),
        (WHOLE[:3072], r"cut short: it has no end mark after b/2\.jpg"),
        (WHOLE[:1540] + b"\xff" + WHOLE[1541:], r"damaged at byte 1,536, after a/1\.jpg"),
        (WHOLE + WHOLE, "more behind its end mark, such as a second tar"),
    ],
    ids=["empty", "text", "member", "header", "end", "flipped byte", "two tars"],
)
def test_damaged_shards_are_refused(tmp_path, content, what):
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    with pytest.raises(DataError, match=what) as refused:
        read_shards(DatasetSpec(str(path)))
    assert str(refused.value).startswith(str(path))


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


@pytest.mark.parametrize(
    ("name", "kind", "size", "what"),
    [
        ("a/1.jpg", tarfile.REGTYPE, 2**40, r"cut short: it needs 1,099,511,6\d\d,\d+ bytes"),
        ("a/1.jpg", tarfile.GNUTYPE_SPARSE, 0, r"a/1\.jpg: is sparse"),
        ("x", tarfile.XHDTYPE, 2**35, "an extended header of 34,359,738,368 bytes"),
    ],
)
def test_wrong_sizes_and_gaps_are_refused(tmp_path, name, kind, size, what):
    about = tarfile.TarInfo(name)
    about.type, about.size = kind, size
    path = tmp_path / "x.tar"
    path.write_bytes(about.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(DataError, match=what):
        read_shards(DatasetSpec(str(path)))


def test_any_flipped_bytes_are_refused_or_harmless(tmp_path):
    random = np.random.default_rng(0)
    for trial in range(300):
        broken = bytearray(WHOLE)
        for at in random.integers(0, len(WHOLE), size=3):
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


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("{data}/x.tar.gz", r"compressed with gzip; .*; unpack it once with gunzip"),
        ("{data}/x.tgz", "compressed with gzip"),
        ("{data}/zipped.tar", "compressed with gzip"),
        ("{data}", r"x\.tar\.gz: compressed with gzip"),  # not left out beside others
        ("{data}/{{0000..0002}}.tar", r"no such shard.*0001\.tar, "),
        ("{data}/{{0.tar", "a brace is not closed"),
        ("{data}/none.tar", r"no such shard \(.*none\.tar\) on this disk"),
        ("s3://bucket/none.tar", r"no such shard \(s3://bucket/none\.tar\) on this disk"),
    ],
)
def test_compressed_and_missing_shards_are_refused(tmp_path, given, what):
    pack(tmp_path / "0000.tar", {"a/1.jpg": b"x"})
    for name in ("x.tar.gz", "x.tgz", "zipped.tar"):
        with tarfile.open(tmp_path / name, "w:gz") as tar:
            tar.addfile(tarfile.TarInfo("a/1.jpg"))
    with pytest.raises(DataError, match=what):
        opened(given.format(data=tmp_path))


def test_a_shard_index_is_small_in_memory(tmp_path):
    """A million names in a dict would be copied into every loader process."""
    path = pack(tmp_path / "x.tar", {f"a/{number:06d}.jpg": b"" for number in range(500)})
    index = read_index(str(path))
    held = index.keys.nbytes + index.order.nbytes + index.positions.nbytes + index.ends.nbytes
    assert held + len(index.blob) < 60 * 500
    assert json.dumps([*index])[:10] == '["a/000000'
