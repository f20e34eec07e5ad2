"""Layouts of image folders: the table of docs/data.md, row by row, on disk."""

import re
from pathlib import Path

import pytest

from tests.data.sources.conftest import opened
from vit.commands.main import main
from vit.data.checks.check_listing import list_dataset
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.image_folder import LAYOUTS, split_name
from vit.data.sources.open_dataset import open_eval_split, read_source
from vit.errors import DataError

DOCS = Path(__file__).parents[3] / "docs/data.md"
GROUP = "^[^/]+"
SPLITS = ("train", "test")
SAID = ("source", "layout", "beside_train", "loose_picture", "unclear_layout")
SETS = {f"fold{n}/{label}": 6 for n in (1, 2, 3) for label in ("cat", "dog")}


def rows() -> list[tuple[str, ...]]:
    """(layout, folders, what is read, line) of each row of the table."""
    text = DOCS.read_text(encoding="utf-8")
    table = text.partition("| layout | folders in DATA | read as | line |\n|---|---|---|---|\n")[2]
    found: list[tuple[str, ...]] = []
    for line in table.partition("\n\n")[0].splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
        name, *others = (cell.strip(" |") for cell in (*cells, "")[:4])
        found.append((name or found[-1][0], *others))
    return found


def expand(folders: str) -> list[str]:
    """The folders that patterns such as {a,b}/c mean."""
    found = folders.split()
    while any("{" in one for one in found):
        found = [
            one.replace(f"{{{inner[1]}}}", word, 1) if inner else one
            for one in found
            for inner in [re.search(r"{(.*?)}", one)]
            for word in (inner[1].split(",") if inner else [""])
        ]
    return found


@pytest.mark.parametrize(("layout", "folders", "read", "line"), rows())
def test_each_row_of_the_documented_table_is_read_as_it_says(
    make_tree, layout, folders, read, line
):
    root = make_tree(dict.fromkeys(expand(folders), 5))
    names = sorted(one.name for one in root.iterdir())
    assert layout == next(x for x, find in LAYOUTS.items() if find(root, names, root, None))
    if read == "refused":
        with pytest.raises(DataError, match=re.escape(line)):
            opened(root)
    else:
        index = read_source(DatasetSpec(str(root), all_splits=True))
        splits = "" if "" in index.splits else f"splits {', '.join(index.splits)}; "
        classes = sorted({label for one in index.train for label in one.labels})
        assert f"{splits}classes {', '.join(classes)}" == read
        notes = [note.replace(str(root), "DATA") for note in index.notes]
        assert notes == ([line] if line else [])
    said = [one.detail for one in list_dataset(str(root)).problems if one.kind in SAID]
    assert [line in one.replace(str(root), "DATA") for one in said] == ([True] if line else [])


def test_the_documented_table_has_all_layouts_in_their_order():
    assert [*dict.fromkeys(layout for layout, *_ in rows())] == [*LAYOUTS]


def test_sets_are_groups_if_the_group_tells_them_apart(make_tree):
    root = make_tree(SETS)
    splits = opened(root, group=GROUP)
    assert splits.classes == ("cat", "dog")
    assert len({Path(one.path).parents[1] for one in splits.val}) == 1
    assert {Path(one.path).parents[1] for one in (*splits.train, *splits.val)} == {*root.iterdir()}
    assert list_dataset(DatasetSpec(str(root), group=GROUP)).classes == ["cat", "dog"]
    with pytest.raises(DataError, match="hold folders of the same names"):
        opened(root, group="fold")


def test_the_group_of_a_refusal_works_as_it_is_printed(make_tree, capsys):
    root = make_tree({f"archive/photos/{name}": count for name, count in SETS.items()})
    assert main(["check", str(root)]) == 1
    expression = re.search(r"--group '(.*?)'", capsys.readouterr().out)[1]
    assert main(["check", str(root), "--group", expression]) == 0
    assert "in 2 classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "tree",
    [
        {"Animalia/Mammalia/cat": 3, "Animalia/Aves/owl": 3, "Plantae/Rosids/rose": 3},
        {"2022": 3, "2023": 3},
        {"fold": 3, "unfold": 3},
        {"cat/left": 3, "cat/right": 3, "dog": 3},
        {"cat/0": 3, "dog/0": 3},  # one folder in common
        {"site1/cat": 3, "site1/dog": 3, "site2/fox": 3, "site2/owl": 3},
        {"cat/train": 3, "dog/steam": 3},  # no split beside train
        {"blood test": 3, "urine test": 3, "none": 3},
        {"valid": 3, "invalid": 3, "unclear": 3},
        {f"train/{name}": count for name, count in SETS.items()},
        {f"archive/train/{name}": count for name, count in SETS.items()},
        {"Train": 9, "Car": 9},  # images straight in them
        {"Training/day": 9, "Car/day": 9},
        {"Testing/a": 9, "Validation/a": 9, "Car": 9},
        {"Training/s1": 9, "Testing/s2": 9},
        {"Training/day": 9, "Testing/day": 9},
        {"Train/a": 6, "Train/b": 6, "Test/c": 9, "Test/d": 3},
        {"Train/a": 6, "Train/b": 6, "Bus": 9, "Car": 9},
    ],
)
def test_classes_may_have_any_names_and_hold_any_folders(make_tree, tree):
    below = (name.removeprefix("archive/").removeprefix("train/") for name in tree)
    assert opened(make_tree(tree)).classes == tuple(sorted({name.split("/")[0] for name in below}))


@pytest.mark.parametrize(
    "names", [("site A", "site B"), ("2022", "2023"), ("day-1", "day-02"), ("siteA", "siteB")]
)
def test_sets_with_nearly_equal_classes_are_refused(make_tree, names):
    tree = {f"{name}/{label}": 3 for name in names for label in ("cat", "dog")}
    with pytest.raises(DataError, match=r"hold folders of the same names \(cat, dog\)"):
        opened(make_tree(tree | {f"{names[0]}/fox": 3}))


def test_several_datasets_are_refused(make_tree):
    tree = [f"{name}/{split}/{label}" for name in "xy" for split in SPLITS for label in "ab"]
    with pytest.raises(DataError, match=r"of several datasets, give one, such as .*data/x$"):
        opened(make_tree(dict.fromkeys(tree, 2)))


CLASSLESS = "left out {}, which has no class folders"
MOVE = "; if it is a class, move all classes to DATA/train"


@pytest.mark.parametrize(
    ("tree", "notes"),
    [
        (
            {"train/train/cat": 9, "train/train/dog": 9, "test/test": 3},
            [CLASSLESS.format("test/test"), "read train/train as train"],
        ),
        (
            {"cat": 9, "dog": 9, "Test": 3, "VAL": 3},
            [CLASSLESS.format(name) + MOVE for name in ("Test", "VAL")],
        ),
    ],
)
def test_unsorted_images_are_left_out_and_named(make_tree, tree, notes):
    index = read_source(DatasetSpec(str(make_tree(tree))))
    assert sorted(index.notes) == notes
    assert len(index.train) == 18


def test_unsorted_images_are_evaluated_as_no_split(make_tree):
    root = make_tree({"cat": 9, "dog": 9, "test": 4})
    found, _ = open_eval_split(str(root), split="val", classes=("cat", "dog"))
    assert len(found) == 18
    with pytest.raises(DataError, match="test has no class folders"):
        open_eval_split(str(root), split="test", classes=("cat", "dog"))
    unlabelled = read_source(DatasetSpec(str(root), labels=False))
    assert len(unlabelled.train) == 22


def test_one_class_in_val_is_no_folder_around_others(make_tree):
    root = make_tree({"train/cat": 9, "train/dog": 9, "val/cat": 2, "val/cat/day": 1})
    splits = opened(root)
    assert (splits.classes, len(splits.val)) == (("cat", "dog"), 3)


@pytest.mark.parametrize("optional", [False, True])
def test_without_labels_split_folders_need_no_classes(make_tree, optional):
    root = make_tree({"train": 9, "more": 2, "test": 4})
    spec = DatasetSpec(str(root), labels=optional, optional_labels=optional, all_splits=True)
    index = read_source(spec)
    sizes = {name: len(records) for name, records in index.splits.items()}
    assert sizes == {"train": 9, "test": 4}
    assert index.notes == ["left out folders beside train: more"]


def test_a_folder_around_itself_ends(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(DataError, match="no images"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("folder", "split"),
    [
        ("seg_train", "train"),
        ("Evaluation", "test"),
        ("dev", "val"),
        ("Test-Images", "test"),
        ("training_test", None),
        ("cat", None),
    ],
)
def test_a_split_is_named_by_one_word(folder, split):
    assert split_name(folder) == split
