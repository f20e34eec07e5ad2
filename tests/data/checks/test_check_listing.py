"""`vit check` of lists and shards: all faults at once, where training stops at the first."""

import errno
import io
import json
import os

import pytest
from PIL import Image

from tests.data.sources.conftest import opened, pack
from vit.commands.main import main
from vit.data.checks.check_listing import list_dataset
from vit.data.checks.dataset_check import check_dataset
from vit.data.sources.dataset_problem import KINDS, Problem, shared_property
from vit.data.sources.dataset_spec import DatasetSpec
from vit.errors import ConfigError, DataError

NAMES = [f"{label}/{number}.png" for label in "ab" for number in range(4)]
GOOD = [f"{name},{name[0]}" for name in NAMES]


@pytest.fixture
def images(make_tree):
    """Four images in a/, four in b/."""
    return make_tree({"a": 4, "b": 4})


@pytest.fixture
def write(images):
    def write(lines, name="list.csv"):
        path = images / name
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
        return str(path)

    return write


def checked(data, **settings):
    return check_dataset(DatasetSpec(str(data), **settings), workers=1, cache=False)


def located(report, *kinds):
    """(kind, line) of all problems of these kinds."""
    return [
        (one.kind, int(one.detail.partition(", line ")[2].partition(":")[0]))
        for one in report.problems
        if one.kind in (kinds or FAULTS)
    ]


def test_labels_of_another_list_are_not_located_in_that_of_the_images(write, images):
    labels = write(["image,species", *GOOD], "labels.csv")
    path = write(["image,kind", *GOOD])
    (images / "a/0.png").write_bytes(b"no image")
    report = checked(path, label_list=labels, label_column="species")
    (bad,) = [one for one in report.problems if one.kind == "unreadable"]
    assert bad.detail.endswith(f"({path}, line 2)")
    suspected = Problem("suspected_label", "is like b", (str(images / "a/1.png"),))
    assert report.listing.with_lines([suspected]) == [suspected]


FAULTS = ("bad_line", "bad_path", "no_label", "several_labels", "contradiction", "repeated_line")


def test_every_bad_line_of_a_table_is_reported_and_the_others_are_checked(write, images):
    bad = [
        *("a/0.png,a,b", "a/1.png", ",a", "../x.png,a", "http://x.org/1.png,a", "/etc/passwd,a"),
        *("a/3.png,b", "a/2.png,a", "b/9.png,", "b/0.png,a"),
    ]
    (images / "b/3.png").write_bytes(b"<html>")
    path = write(["image,label", *GOOD[:4], *bad, *GOOD[4:]])
    report = checked(path)
    assert located(report) == [
        *(("bad_line", line) for line in (6, 7)),
        *(("bad_path", line) for line in (8, 9, 10, 11)),
        ("no_label", 14),
        ("contradiction", 12),
        # the first line of an image stays, whatever comes later
        ("contradiction", 16),
        ("repeated_line", 13),
    ]
    assert {one.path for one in report.listing.images} == {str(images / n) for n in NAMES}
    (unreadable,) = (one for one in report.problems if one.kind == "unreadable")
    assert unreadable.detail.endswith("list.csv, line 19)")
    assert report.listing.counts("all") == {"a": 5, "b": 3}
    assert not any("left out" in one.detail for one in report.problems)
    errors = [one for one in report.to_dict()["problems"] if one["severity"] == "error"]
    assert {one["kind"] for one in errors} == {*FAULTS[:3], "contradiction", "unreadable"}
    with pytest.raises(DataError, match=r"list\.csv: 5 lines .*: line 6: 3 cells, but 2 in the"):
        opened(path)


def test_every_bad_record_of_json_is_reported(write, images):
    good = [json.dumps({"image": name, "label": name[0]}) for name in NAMES]
    bad = [
        *("{", "[1]", '{"image": 3, "label": "a"}', '{"image": "x.png", "label": true}'),
        *('{"image": "x.png"}', '{"image": "a/1.png", "tags": "a"}', '{"image": "", "label": "a"}'),
    ]
    for name in ("list.jsonl", "list.ndjson"):
        path = write([*bad[:1], *good, *bad[1:]], name)
        report = checked(path)
        assert located(report) == [
            *(("bad_line", line) for line in (1, 10, 11, 12, 13, 14)),
            ("bad_path", 15),
        ]
        assert len(report.stats) == 8
        with pytest.raises(DataError, match="line 1: not JSON"):
            opened(path)


def test_lists_with_splits_report_the_problems_of_each(write, images):
    rows = [f"{line},{'val' if '3' in line else 'train'}" for line in GOOD]
    more = ["a/0.png,a,val", "b/9.png,b,trian", "c/0.png,c,val"]
    report = checked(write(["image,label,split", *rows, *more]))
    assert located(report) == [("bad_line", 11), ("contradiction", 10)]
    assert report.kinds()["unknown_class"] == 1
    write(["image,label", *GOOD[:3], "x", *GOOD[4:7]], "train.csv")
    write(["image,label", "x", GOOD[3], GOOD[7]], "val.csv")
    report = checked(images)
    assert located(report) == [("bad_line", 5), ("bad_line", 2)]
    assert sum(report.listing.counts("val").values()) == 2


def test_contradicting_labels_are_reported_with_their_lines(write):
    path = write(["image,label", *GOOD, "a/0.png,b", "a/1.png,a|b"])
    report = checked(path)
    assert not report.failed
    assert any("line 11: several labels, so" in one.detail for one in report.problems)
    single = checked(path, multilabel=False)
    assert located(single) == [("contradiction", 10), ("contradiction", 11)]
    alone = checked(write(["image,label", *GOOD[1:], "a/0.png,a|b"]), multilabel=False)
    assert located(alone) == [("several_labels", 9)]


def test_absolute_paths_are_shown_relative_to_the_folder(write, images):
    lines = [f"{images}/{line}" for line in GOOD[:2]]
    path = write(["image,label", *GOOD, *lines, f"{images}/a/3.png,b", "/etc/x.png,a"])
    assert located(checked(path)) == [
        ("bad_path", 13),
        ("contradiction", 12),
        ("repeated_line", 10),
        ("repeated_line", 11),
    ]
    outside = checked(path, allow_outside=True)
    assert outside.kinds()["unreadable"] == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["picture,kind", *GOOD], "line 1: no column of images among"),
        (["image,label"], "no images in it; expected a line for each"),
        (["image,label", *GOOD, "a/\0.png,a"], "line 10: has a NUL byte"),
        (["image,label", "a", "b,c,d"], r"line 2: 1 cell, .* \(and 1 more such faults"),
        (["image,label", "a/0.png,", "a/0.png,"], "line 2: no label; give it one"),
    ],
)
def test_an_error_of_the_whole_list_is_one_line(write, capsys, lines, message):
    path = write(lines)
    with pytest.raises(DataError, match=message):
        checked(path)
    assert main(["check", path]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unclosed_quote_ends_what_is_read_of_a_table(write, images):
    report = checked(write(["image,label", *GOOD, '"a/2.png,a', "c/1.png,c"]))
    assert located(report) == [("bad_line", 10)]
    assert len(report.listing.images) == len(GOOD)


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((12 + seed, 12), 90).convert("RGB").save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def shards(tmp_path):
    """Four shards of four images: three of train, one of val."""
    for place, name in enumerate(("train-0", "train-1", "train-2", "val-0")):
        members = {f"{label}/{name}-{n}.png": png(4 * place + n) for label in "ab" for n in (0, 1)}
        pack(tmp_path / f"shards/{name}.tar", members)
    return tmp_path / "shards"


def test_broken_shards_are_reported_and_the_others_are_checked(shards):
    cut = shards / "train-1.tar"
    cut.write_bytes(cut.read_bytes()[:3000])
    (shards / "train-3.tar").write_bytes(b"no tar at all " * 99)
    (shards / "train-4.tar").write_bytes(b"")
    report = checked(shards)
    bad = [one for one in report.problems if one.kind == "bad_shard"]
    assert [one.images for one in bad] == [(str(shards / f"train-{n}.tar"),) for n in (1, 3, 4)]
    for one, text in zip(bad, ("after a/train-1-1.png", "not a tar", "an empty file"), strict=True):
        assert text in one.detail
    assert "cut short" in bad[0].detail
    assert len(report.stats) == 12
    assert report.failed
    with pytest.raises(DataError, match=r"train-1\.tar.*cut short"):
        opened(shards)
    for path in shards.iterdir():
        path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(DataError, match=r"train-0\.tar.*5 more such faults"):
        checked(shards)


def test_incomplete_pairs_of_shards_are_reported_one_by_one(tmp_path):
    members = {f"{n}.png": png(n) for n in range(8)} | {
        f"{n}.cls": b"ab"[n % 2 :][:1] for n in range(4)
    }
    members |= {"4.cls": b"", "5.cls": b"\xff\xfe", "9.cls": b"a"}
    path = pack(tmp_path / "x.tar", members)
    report = checked(path)
    found = {(one.kind, one.images[0].rpartition("/")[2]) for one in report.problems if one.images}
    assert {one for one in found if one[0] in ("no_label", "bad_label", "lone_label")} == {
        ("no_label", "6.png"),
        ("no_label", "7.png"),
        ("bad_label", "4.png"),
        ("bad_label", "5.png"),
        ("lone_label", "9.cls"),
    }
    assert len(report.stats) == 4
    assert KINDS["lone_label"] == "warning"
    with pytest.raises(DataError, match=r"4\.png: its \.cls is not the name or number"):
        opened(path)


def test_shards_with_labels_in_json_report_images_without_a_label(tmp_path):
    members = {f"{n}.png": png(n) for n in range(4)}
    labels = {"0.json": b"{", "1.json": b'{"label": "a"}', "2.json": b'{"label": "b"}'}
    report = checked(pack(tmp_path / "x.tar", {**members, **labels, "3.json": b'{"label": 1.5}'}))
    assert report.kinds()["bad_label"] == 2
    assert report.listing.classes == ["a", "b"]
    tree = {f"{'ab'[n % 2]}/{n}.png": png(n) for n in range(4)}
    report = checked(pack(tmp_path / "y.tar", {**tree, "loose.png": png(9)}))
    assert report.kinds()["no_label"] == 1
    assert len(report.stats) == 4


@pytest.fixture
def patients(make_tree):
    return make_tree({"train/a": 4, "train/b": 4, "val/a": 2, "val/b": 2, "test/a": 1, "test/b": 1})


def test_groups_in_training_and_validation_are_reported(patients):
    report = checked(patients, group=r"/(\d)\.png")
    leaks = {one.detail: one for one in report.problems if one.kind == "group_leak"}
    assert len(leaks) == 2
    (words, first), _ = sorted(leaks.items())
    assert words.startswith("group 0 (/(")
    assert words.endswith("has 2 images in train and 2 in val")
    assert {path.removeprefix(f"{patients}/") for path in first.images} == {
        *("train/a/0.png", "train/b/0.png", "val/a/0.png", "val/b/0.png")
    }
    assert report.kinds()["group_in_test"] == 1
    assert report.failed
    with pytest.raises(DataError, match=r"2 groups .* in training too"):
        opened(patients, group=r"/(\d)\.png")
    assert "group_leak" not in checked(patients, group=r"(.*)/\d").kinds()


def test_groups_come_from_a_column(patients):
    lines = ["image,label,split,patient"]
    for place, path in enumerate(sorted(patients.rglob("*.png"))):
        split, label = path.relative_to(patients).parts[:2]
        lines.append(f"{path.relative_to(patients)},{label},{split},p{place % 11}")
    (patients / "list.csv").write_text("\n".join(lines))
    report = checked(patients / "list.csv", group="patient")
    (words,) = [one.detail for one in report.problems if one.kind == "group_leak"]
    assert words.startswith("group p2 (patient) has 1 image in train and 1 in val (")
    assert "list.csv, line 4; " in words
    assert "list.csv, line 15)" in words
    assert "11 groups by the column patient" in {one.detail for one in report.problems}
    for data, group in ((patients, "patient"), (patients / "list.csv", "(")):
        with pytest.raises((ConfigError, DataError), match="no column of th"):
            checked(data, group=group)


def test_notes_about_a_list_of_captions_are_shown_and_no_classes(make_tree):
    root = make_tree({"": 8})
    lines = ["image,caption,id\n", *(f"{n}.png,a dog,{n}\n" for n in range(6)), "6.png,,6\n"]
    (root / "captions.txt").write_text("".join(lines))
    first, *others = checked(root, captions=True, labels=False).lines(5)
    assert first == "6 images with captions"
    text = "\n".join(others)
    for note in (
        "not used: id",
        "1 image that no line of a list names",
        "1 caption, empty or repeated",
    ):
        assert note in text


def test_a_folder_is_checked_alike_where_one_label_an_image_is_required(make_tree):
    root = make_tree({"train/a": 3, "train/b": 0, "train/c": 0, "val/a": 1, "val/d": 1})
    reports = [checked(root), checked(root, multilabel=False)]
    plain, single = [[one.to_dict() for one in report.problems] for report in reports]
    assert plain == single
    assert reports[1].kinds()["empty_class"] == 1  # of both, and no empty folders besides
    assert "unknown_class" in reports[1].kinds()
    assert "empty_folder" not in reports[1].kinds()


def test_very_few_images_of_several_labels_are_counted_as_images(write):
    rows = [f"{name},a|b|c" for name in NAMES]
    report = checked(write(["image,labels", *rows]))
    (few,) = [one for one in report.problems if one.kind == "few_pictures"]
    assert few.detail.startswith("only 8 training images for 3 classes")


def test_a_folder_without_rights_is_no_empty_class(make_tree, monkeypatch):
    root = make_tree({"train/a": 2, "train/b": 2, "train/c": 2, "val/a": 1, "val/b": 1, "val/c": 1})
    for split in ("train", "val"):
        (root / split / "b" / "locked").mkdir()
    scandir = os.scandir

    def denied(folder):
        if str(folder).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr("vit.data.sources.file_walk.os.scandir", denied)
    listing = list_dataset(str(root))
    found = [one for one in listing.problems if one.severity != "note"]
    assert [one.kind for one in found] == ["folder_unreadable"] * 2
    message = "b/locked: cannot be listed (Permission denied); allow reading it (chmod u+rwx), or "
    assert message in found[0].terminal_line(listing.root)
    with pytest.raises(DataError, match=r"locked: cannot be listed .*; allow reading it"):
        opened(root)


def test_counts_and_verbs_agree(make_tree):
    root = make_tree({"a": 2, "b": 2})
    (root / "a" / "gone.png").symlink_to(root / "nothing")
    (root / "stray.png").write_bytes((root / "a" / "0.png").read_bytes())
    report = checked(root)
    details = {one.kind: one.detail for one in report.problems}
    assert details["not_a_file"] == "left out special files (pipes, broken links)"
    assert details["loose_picture"] == "left out images that lie in no class folder"
    assert shared_property("huge", ["x"], 3, "have pixels")[0].detail == "1 image of 3 has pixels"
    assert shared_property("huge", ["x"] * 2, 3, "are big")[0].detail == "2 images of 3 are big"
    assert report.lines(5)[0] == "4 images in 2 classes"
