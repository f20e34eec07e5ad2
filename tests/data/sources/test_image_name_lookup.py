"""Every list that a command writes is read by each that reads lists, for hostile names too."""

import itertools
import json
import os
import random
import re
from pathlib import Path

import pytest

from tests.data.sources.conftest import pack, plant
from tests.slow_cases import mostly_slow
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.image_list import images_in
from vit.data.sources.image_name_lookup import ImageNames
from vit.data.sources.open_dataset import read_source
from vit.errors import DataError
from vit.output.prediction_results import (
    FORMATS,
    Layout,
    Prediction,
    to_json,
    write_review_list,
    write_workbook,
)

PIECES = [
    *(b"a", b"1", b".", b" ", b"  ", b"\t", b"\n", b"\r", b"\x01", b"\x1b[31m", b"\x7f", b"\\"),
    *(b"'", b"=", b"+", b"-", b"@", b",", b";", b"|", b'"', b'""', b"#", b"%41", b"~", b"$HOME"),
    *(b"*", b"?", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xed\xb3\xbf", b"\\x1b", b"\\n", b"\\udcff"),
    *(b"C:", b":", b"sep=;", b"image", b"_x001b_", b"[]"),
    *map(str.encode, ("\u200f", "\u202e", "\u2028", "\u200d", "\x85", "\xa0", "\ufeff", "\uff1d")),
    *map(str.encode, ("\u3000", "\xe9", "e\u0301", "\U0001f600")),
]


def hostile_names(count, seed):
    """Names of images in folders, of bytes that a Linux file name may have."""
    draw = random.Random(seed)

    def word():
        pieces = draw.choices(PIECES, k=draw.randint(1, 4))
        pieces += [bytes([draw.choice([*range(1, 47), *range(48, 256)])])] * draw.randint(0, 2)
        draw.shuffle(pieces)
        return b"".join(pieces)

    names = {}
    while len(names) < count:
        parts = [part for part in (word(), word()) if not part.startswith(b".")][
            : draw.randint(1, 2)
        ]
        name = os.fsdecode(b"/".join([*parts, word() + b".png"]))
        if parts and not name.split("/")[-1].startswith("."):
            names[name] = None
    return [*names]


def predictions(style, names, path, separator=","):
    layout = Layout(1, ("a", "b"), names, truth=("label", "label_score"), separator=separator)
    header, row = FORMATS[style](layout)
    lines = [header]
    for name in names:
        truth = {"label": label_of(name), "label_score": 0.5}
        lines.append(row(Prediction(name, (("a", 0.5),), truth=truth)))
    if style == "xlsx":
        with open(path, "wb") as book:
            write_workbook(book, map(str.encode, lines))
    else:
        path.write_text("".join(lines), encoding="utf-8", newline="")


def review(names, path):
    write_review_list(
        str(path), ("image", "label", "likely"), [(n, label_of(n), "a") for n in names]
    )


def records(names, path):
    path.write_text("".join(to_json({"image": n, "label": label_of(n)}) + "\n" for n in names))


WRITERS = {
    "predict, evaluate --out rows.csv": lambda names, path: predictions("csv", names, path),
    "predict --csv-separator semicolon": lambda n, path: predictions("csv", n, path, ";"),
    "predict --csv-separator tab": lambda names, path: predictions("csv", names, path, "\t"),
    "predict, evaluate --out rows.jsonl": lambda names, path: predictions("jsonl", names, path),
    "predict, evaluate --out rows.xlsx": lambda names, path: predictions("xlsx", names, path),
    "suggest, check --write-list list.csv, train --folds label_errors.csv": review,
    "suggest, check --write-list list.jsonl": review,
    "suggest, check --write-list list.xlsx": review,
    "train --folds rows.jsonl, data labels.jsonl": records,
}
"""Commands that write lists, with the suffix of the file."""


def label_of(name):
    return "ab"[len(name) % 2]


def labels(spec):
    return {
        os.path.relpath(record.path, spec.images or spec.data): record.labels
        for record in itertools.chain(*read_source(spec).splits.values())
    }


def as_data(path, root, names):
    """train, evaluate, calibrate, compare, check, data: DATA."""
    found = labels(DatasetSpec(str(path), images=str(root)))
    assert found == {name: (label_of(name),) for name in names}


def as_input(path, root, names):
    """predict: the list of its images."""
    assert images_in(str(path)) == names


def as_labels(path, root, names):
    """train, check, suggest, evaluate, calibrate, compare, data: --labels."""
    found = labels(DatasetSpec(str(root), label_list=str(path)))
    assert found == {name: (label_of(name),) for name in names}


def as_exclude(path, root, names):
    """train, suggest: --exclude."""
    assert labels(DatasetSpec(str(root), labels=False, exclude=str(path))) == {"rest/x.png": ()}


def as_corrections(path, root, names):
    """train: --corrections."""
    (root / "every.jsonl").write_text(
        "".join(json.dumps({"image": n, "label": "ba"[n in names[:9]]}) + "\n" for n in names)
    )
    spec = DatasetSpec(str(root / "every.jsonl"), images=str(root), corrections=str(path))
    assert labels(spec) == {name: (label_of(name),) for name in names}


READERS = (as_data, as_input, as_labels, as_exclude, as_corrections)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Images of hostile names, of which no two are written alike in CSV files."""
    root = tmp_path_factory.mktemp("data")
    names = hostile_names(150, seed=0)
    plant(root, dict.fromkeys(["rest/x.png", *names], b""))
    return root, names


@pytest.mark.parametrize("read", mostly_slow(READERS))
@pytest.mark.parametrize("writer", WRITERS)
def test_every_list_that_is_written_is_read(tree, tmp_path, monkeypatch, writer, read):
    root, names = tree
    monkeypatch.chdir(root)
    path = tmp_path / f"list.{writer.rpartition('.')[2]}"
    if not writer.endswith((".csv", ".jsonl", ".xlsx")):
        path = tmp_path / "list.csv"
    WRITERS[writer](names, path)
    read(path, root, names)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "xlsx"])
def test_whole_paths_are_names_too(tree, tmp_path, monkeypatch, suffix):
    root, names = tree
    monkeypatch.chdir(root.parent)
    paths = [f"{root}/{name}" for name in names]
    predictions(suffix, paths, path := tmp_path / f"list.{suffix}")
    assert images_in(str(path)) == paths
    as_exclude(path, Path(root.name), names)
    predictions(suffix, [f"{root.name}/{name}" for name in names], path)
    assert images_in(str(path)) == [f"{root.name}/{name}" for name in names]
    as_exclude(path, root, names)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "xlsx"])
def test_addresses_in_shards_are_names_too(tree, tmp_path, monkeypatch, suffix):
    _, names = tree
    monkeypatch.chdir(tmp_path)
    plain = [name for name in names if not re.search(r"[\x00-\x1f\x7f-\x9f]", name)]
    members = dict.fromkeys(["rest/x.png", *plain], b"")  # the others are refused in shards
    pack(Path("shards/train-000000.tar"), members)
    records = read_source(DatasetSpec("shards", labels=False)).train
    addresses = [one.path for one in records if not one.path.endswith("rest/x.png")]
    assert len(addresses) == len(records) - 1 > 30
    predictions(suffix, addresses, path := Path(f"list.{suffix}"))
    assert images_in(str(path)) == addresses
    (left,) = read_source(DatasetSpec("shards", labels=False, exclude=str(path))).train
    assert left.path.endswith("rest/x.png")


@pytest.mark.parametrize("pair", [("a\x1b.png", "a\\x1b.png"), ("=a.png", "'=a.png")])
def test_of_two_files_that_a_table_writes_alike_none_is_guessed(tmp_path, monkeypatch, pair):
    monkeypatch.chdir(tmp_path)
    for name in pair:
        Path(name).touch()
    review(pair, Path("list.csv"))
    with pytest.raises(DataError, match=r"write several names so: .*; rename one of the files"):
        images_in("list.csv")
    with pytest.raises(DataError, match="write several names so"):
        labels(DatasetSpec(".", labels=False, exclude="list.csv"))
    review(pair, Path("list.jsonl"))
    assert images_in("list.jsonl") == [*pair]
    os.remove(pair[1])
    review(pair[:1], Path("list.csv"))
    assert images_in("list.csv") == [pair[0]]


def test_names_are_looked_up_once_a_folder_and_plain_ones_not_at_all():
    listed = []

    def names_in(folder):
        listed.append(folder)
        return {"": ["a", "it's"], "a": ["1.png", "2.jpg", "2.png"], "it's": ["=1.png"]}[folder]

    names = ImageNames(names_in)
    assert names.find("b/missing.png", True) == "b/missing.png"
    assert listed == []
    assert [names.find(name, True) for name in ("a/1", "a\\1.png", " a/1.png", "it's/=1.png")] == [
        *("a/1.png", "a/1.png", "a/1.png", "it's/=1.png")
    ]
    assert names.find("a/2", True) is None  # of two images, none is guessed
    assert sorted(listed) == ["", "a"]
