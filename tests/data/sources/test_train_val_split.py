"""Training/validation split: shares of each class, groups, folds."""

from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.data.sources.conftest import opened
from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.image_archives import relative
from vit.data.sources import train_val_split
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.train_val_split import (
    Fold,
    find_groups,
    hold_out,
    make_units,
    name_copies,
    split_train_val,
    stratify,
)
from vit.errors import ConfigError, DataError


def split(
    records, val_share=0.2, seed=0, fold=None, group=None, multilabel=False, root="/x", **splits
):
    """(train, val, notes) of records without splits of their own."""
    parts = splits or {"": records}
    listed = DatasetIndex(
        root, parts, dict.fromkeys(parts, "x"), multilabel=multilabel, has_groups=bool(group)
    )
    asked = DatasetSpec("x", group=group)
    return split_train_val(listed, asked, val_share=val_share, seed=seed, fold=fold)


def random_records(number, labels, seed=0, groups=0):
    """Items with random sets of labels, unequally frequent, and maybe groups of unequal size."""
    random = np.random.default_rng(seed)
    odds = np.geomspace(0.5, 0.02, labels)
    sizes = random.geometric(0.3, groups) if groups else ()
    names = np.repeat([f"g{n}" for n in range(groups)], sizes)[:number] if groups else ()
    return [
        ImageRecord(
            f"/x/{at}.png",
            tuple(f"c{n}" for n in np.flatnonzero(random.random(labels) < odds)),
            str(names[at]) if at < len(names) else "",
        )
        for at in range(number)
    ]


def shares(records, part):
    all_of, here = (Counter(label for i in some for label in i.labels) for some in (records, part))
    return {label: (here[label], number) for label, number in all_of.items()}


def test_multilabel_images_are_stratified_by_every_label():
    records = random_records(500, 12)
    train, val, notes = split(records, multilabel=True)
    assert len(train) + len(val) == 500
    assert {*train}.isdisjoint(val)
    for held, number in shares(records, val).values():
        assert abs(held - 0.2 * number) <= 2
    none = [record for record in val if not record.labels]
    assert abs(len(none) - 0.2 * sum(not record.labels for record in records)) <= 2
    # a draw that does not look at the labels is further off, or this tests nothing
    random_val = np.random.default_rng(1).permutation(500)[:100]
    unstratified = shares(records, [records[at] for at in random_val])
    assert max(abs(held - 0.2 * number) for held, number in unstratified.values()) > 3
    assert split(records, multilabel=True)[1] == val
    assert split(records[::-1], multilabel=True)[1] == val[::-1]
    assert split(records, multilabel=True, seed=1)[1] != val
    assert notes == [f"no validation folder: held out {len(val)} images, 20% of each class"]


def test_a_class_of_one_image_is_trained_on():
    records = [ImageRecord(f"/x/{n}.png", (f"c{n % 40}", "all")) for n in range(41)]
    train, val, notes = split(records, multilabel=True)
    assert {label for record in train for label in record.labels} == {
        "all",
        *map("c{}".format, range(40)),
    }
    assert len(val) >= 1
    assert any("held out none of class c1, c10" in note for note in notes)


@pytest.mark.parametrize("multilabel", [True, False])
def test_a_group_is_in_one_split_only(multilabel):
    records = random_records(600, 6, groups=150)
    if not multilabel:
        records = [record._replace(labels=(record.labels or ("none",))[:1]) for record in records]
    train, val, notes = split(records, group="patient", multilabel=multilabel)
    sides = [{record.group for record in part} - {""} for part in (train, val)]
    assert not sides[0] & sides[1]
    assert all(sides)
    for held, number in shares(records, val).values():
        assert 0.1 < held / number < 0.34
    alone = sum(not record.group for record in records)
    assert any(
        f"{alone} images without a group (patient): each is a group of its own" == n for n in notes
    )
    assert split(records, group="patient", multilabel=multilabel)[1] == val


def test_copies_take_one_place_in_the_order():
    images = {"a": [f"/x/a/{n:02d}.png" for n in range(20)], "b": ["/x/b/0.png", "/x/b/1.png"]}
    usual = hold_out(images, val_share=0.25, seed=0, root="/x")[1]
    assert hold_out(images, val_share=0.25, seed=0, root="/x", copies={})[1] == usual
    copies = dict.fromkeys(images["a"][:3], "a/00.png")
    for seed in range(20):
        val = hold_out(images, val_share=0.25, seed=seed, root="/x", copies=copies)[1]
        assert len({*copies} & {*val["a"]}) in (0, 3)
        assert 1 <= len(val["a"]) <= 5
    alike = dict.fromkeys(images["a"], "a/00.png")
    assert hold_out(images, val_share=0.25, seed=0, root="/x", copies=alike)[1]["a"] == []
    pairs = {path: f"a/{n // 10}.png" for n, path in enumerate(images["a"])}
    held = hold_out(images, val_share=0.25, seed=0, root="/x", copies=pairs)[1]["a"]
    assert len(held) == 10  # there are no fewer to hold out


def test_a_copy_in_another_class_is_held_out_with_both_or_none():
    images = {name: [f"/x/{name}/{n}.png" for n in range(8)] for name in "ab"}
    copies = {"/x/a/0.png": "a/0.png", "/x/b/0.png": "a/0.png"}
    sides = set()
    for seed in range(60):
        val = hold_out(images, val_share=0.5, seed=seed, root="/x", copies=copies)[1]
        sides.add(tuple(f"/x/{name}/0.png" in val[name] for name in "ab"))
    assert sides == {(True, True), (False, False)}


def test_many_copies_are_named_in_one_pass(monkeypatch):
    named = Mock(wraps=relative)
    monkeypatch.setattr(train_val_split, "relative", named)
    group = [f"/x/{number}.png" for number in range(50, 0, -1)]
    assert name_copies([group], Path("/x")) == dict.fromkeys(group, "1.png")
    assert named.call_count == 50


def test_groups_with_copies_of_an_image_in_common_are_one_unit():
    records = [ImageRecord(f"/x/{n}.png", ("a",), f"g{n // 2}") for n in range(8)]
    copies = {"/x/1.png": "1.png", "/x/2.png": "1.png", "/x/3.png": "3.png", "/x/6.png": "3.png"}
    names = [relative(record.path, "/x") for record in records]
    for order in (1, -1):
        units = make_units(
            records[::order], [record.group for record in records[::order]], names[::order], copies
        )
        found = {unit.name: {names[::order][at] for at in unit.members} for unit in units}
        assert found == {
            "g0": {f"{n}.png" for n in (0, 1, 2, 3, 6, 7)},
            "g2": {"4.png", "5.png"},
        }


def test_absent_classes_get_a_note():
    records = [ImageRecord(f"/x/{n}.png", (f"c{n // 30}",), f"g{n // 15}") for n in range(60)]
    records += [ImageRecord(f"/x/z{n}.png", ("c2",), "alone") for n in range(9)]
    train, _, notes = split(records, group="g")
    assert {"c2"} <= {label for record in train for label in record.labels}
    assert "held out none of class c2, which is in one image or group" in notes


NAMES = ["a/p1_x.png", "b/p1_y.png", "a/p22_z.png", "a/odd.png"]


def test_groups_from_a_regular_expression():
    assert find_groups(NAMES, r"p(\d+)_") == ["1", "1", "22", ""]
    assert find_groups(NAMES, r"p\d+") == ["p1", "p1", "p22", ""]
    units = make_units([ImageRecord(n, ("a",)) for n in NAMES], find_groups(NAMES, "p."), NAMES)
    assert [unit.members for unit in units] == [(0, 1), (2,), (3,)]


@pytest.mark.parametrize(
    ("group", "columns", "error", "message"),
    [
        ("(", [], ConfigError, "no column of the data, and no regular expression"),
        ("patient", [], DataError, r"matches none of 4 paths such as a/p1_x\.png"),
        (
            "object",
            ["object_id", "taken"],
            DataError,
            r"\(columns .*: object_id, taken\).*did y",
        ),
    ],
)
def test_a_group_that_is_no_column_and_matches_nothing_is_refused(group, columns, error, message):
    with pytest.raises(error, match=message):
        find_groups(NAMES, group, columns)


def test_a_group_in_both_given_splits_is_refused():
    train = [ImageRecord(f"/x/t{n}.png", ("a",), f"g{n}") for n in range(4)]
    val = [ImageRecord("/x/v.png", ("a",), "g3"), ImageRecord("/x/w.png", ("a",), "")]
    with pytest.raises(DataError, match=r"x: 1 group \(patient\) in training too: g3; move"):
        split([], group="patient", train=train, val=val)
    assert split([], group="patient", train=train[:3], val=val)[1] == val


@pytest.mark.parametrize("kind", ["one", "multilabel", "groups"])
def test_every_image_is_in_one_fold(kind):
    records = random_records(300, 5, groups=80 if kind == "groups" else 0)
    if kind != "multilabel":
        records = [record._replace(labels=(record.labels or ("none",))[:1]) for record in records]
    options = {"multilabel": kind == "multilabel", "group": "g" if kind == "groups" else None}
    parts = [split(records, fold=Fold(n, 5), **options) for n in range(1, 6)]
    assert sorted(record for _, val, _ in parts for record in val) == sorted(records)
    for train, val, notes in parts:
        assert sorted([*train, *val]) == sorted(records)
        assert abs(len(val) - 60) <= (8 if kind == "groups" else 3)
        for held, number in shares(records, val).values():
            assert abs(held - number / 5) <= (0.12 * number + 2 if kind == "groups" else 2)
        assert "of 5: validates on" in notes[0]
    if kind == "groups":
        assert (
            max(Counter(g for _, val, _ in parts for g in {i.group for i in val} - {""}).values())
            == 1
        )


def test_impossible_folds_are_refused():
    records = [ImageRecord(f"/x/{n}.png", ("ab"[n % 2],)) for n in range(6)]
    alone = [*records, ImageRecord("/x/c.png", ("c",))]
    for fold, some, splits, message in (
        (Fold(1, 2), [], {"train": records, "val": records}, "the data have validation images"),
        (Fold(1, 7), records, {}, "folds=7: only 6 images or groups"),
        (Fold(1, 2), alone, {}, "only one image or group of class c"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            split(some, fold=fold, **splits)
    train, val, notes = split([], fold=Fold(1, 2), train=records, test=records)
    assert len(train) == len(val) == 3
    assert "left out test: no fold sees it; measure on it at the end" in notes


def test_stratification_is_as_even_as_possible():
    records = [ImageRecord(f"/x/{n}.png", (f"c{n % 3}",)) for n in range(35)]
    units = make_units(records, None, [record.path for record in records])
    counts = Counter(
        zip(stratify(units, (0.25,) * 4, seed=0), [i.labels for i in records], strict=True)
    )
    assert set(counts.values()) <= {2, 3}


def test_single_label_split_equals_hold_out_by_class(make_tree):
    root = make_tree({"a": 10, "b": 5})
    splits = opened(root, val_share=0.2)
    tree = {c: [str(root / f"{c}/{n}.png") for n in range(k)] for c, k in (("a", 10), ("b", 5))}
    _, held = hold_out(tree, val_share=0.2, seed=0, root=root)
    assert [sample.path for sample in splits.val] == held["a"] + held["b"]
