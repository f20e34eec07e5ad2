"""Scenes in a split: they stay in one part, unless a class is little else."""

import re
from collections import Counter
from pathlib import Path

import pytest

from vit.data.dataset_types import ImageGroups, ImageRecord
from vit.data.image_archives import relative
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import image_groups, open_splits
from vit.data.sources.scene_groups import (
    NOT_SEARCHED,
    FoundGroups,
    given_groups,
    read_groups,
    recorded_groups,
    write_groups,
)
from vit.data.sources.train_val_split import Fold
from vit.errors import DataError, RunError
from vit.paths import GROUPS_FILE


@pytest.fixture
def data(make_tree) -> Path:
    """Two classes of ten images."""
    return make_tree({"data/cat": 10, "data/dog": 10}) / "data"


def names(samples) -> set[str]:
    return {"/".join(Path(one.path).parts[-2:]) for one in samples}


def by_name(*scenes: str):
    """Finds scenes that are named by the first letter of the class, and numbers: `c01`."""
    folder = {"c": "cat", "d": "dog"}

    def find(records, root):
        known = {str(Path(one.path).relative_to(root)): one.path for one in records}
        return FoundGroups(
            [[known[f"{folder[one[0]]}/{at}.png"] for at in one[1:]] for one in scenes]
        )

    return find


@pytest.mark.parametrize("seed", range(4))
def test_a_scene_is_in_one_split_and_other_images_keep_their_place(data, seed):
    spec = DatasetSpec(str(data), finds_groups=True)
    plain = open_splits(spec, val_share=0.3, seed=seed)
    splits = open_splits(spec, val_share=0.3, seed=seed, find_groups=by_name("c0123", "d45"))
    held = names(splits.val)
    for scene in ({f"cat/{at}.png" for at in range(4)}, {"dog/4.png", "dog/5.png"}):
        assert scene <= held or scene.isdisjoint(held)
    assert len(splits.val) == len(plain.val) == 6 or {f"cat/{at}.png" for at in range(4)} <= held
    assert splits.groups.scenes == {f"cat/{at}.png": "cat/0.png" for at in range(4)} | {
        "dog/4.png": "dog/4.png",
        "dog/5.png": "dog/4.png",
    }
    assert any(note.startswith("6 images in 2 scenes") for note in splits.notes)
    off = open_splits(DatasetSpec(str(data)), val_share=0.3, seed=seed, find_groups=by_name("c01"))
    assert (off, off.groups) == (plain, ImageGroups())


def test_a_scene_that_is_most_of_a_class_is_divided(data):
    find = by_name("c012345", "d01234")
    splits = open_splits(
        DatasetSpec(str(data), finds_groups=True), val_share=0.2, seed=0, find_groups=find
    )
    assert {*splits.groups.scenes.values()} == {"dog/0.png"}
    assert any(note.startswith("1 scene with more than half") for note in splits.notes)


def test_a_search_that_took_too_long_is_told(data):
    spec = DatasetSpec(str(data), finds_groups=True)
    splits = open_splits(
        spec, val_share=0.2, seed=0, find_groups=lambda _records, _root: NOT_SEARCHED
    )
    assert any("not looked for" in note for note in splits.notes)


def test_validation_images_of_trained_scenes_are_counted(make_tree):
    data = make_tree({f"data/{part}/{name}": 4 for part in ("train", "val") for name in "ab"})

    def find(records, root):
        known = {str(Path(one.path).relative_to(root)): one.path for one in records}
        names = ("train/a/0.png", "val/a/0.png", "val/a/1.png")
        return FoundGroups([[known[name] for name in names]])

    spec = DatasetSpec(str(data / "data"), finds_groups=True)
    splits = open_splits(spec, val_share=0.2, seed=0, find_groups=find)
    assert any(note.startswith("2 of 8 validation images show a scene") for note in splits.notes)
    groups = image_groups(
        DatasetSpec(spec.data, split="val", groups=splits.groups),
        [one.path for one in splits.val],
    )
    assert groups == ["train/a/0.png"] * 2 + [""] * 6
    first = [one.path for one in splits.val][:1] + [one.path for one in splits.val][2:]
    assert image_groups(DatasetSpec(spec.data, split="val", groups=splits.groups), first) is None
    others = [one.path for one in splits.val if "/b/" in one.path]
    assert image_groups(DatasetSpec(spec.data, split="val", groups=splits.groups), others) is None


def test_the_record_of_a_run_finds_its_groups(tmp_path):
    scenes = {"cat/1, a.png": "cat/0.png", "cat/0.png": "cat/0.png", 'dog/"b".png': "dog/2.png"}
    scenes["cat/\udcff.png"] = "cat/\udcff.png"  # a name that is not UTF-8
    sources = {"cat/0.png": "camera: A, b", "cat/9.png": "camera: C"}
    groups = ImageGroups(scenes, sources, {"cat/9.png": "camera: C"})
    write_groups(tmp_path, groups)
    assert read_groups(tmp_path) == groups
    root = Path("/data")
    records = [ImageRecord(f"/data/{name}", ("cat",)) for name in (*scenes, "cat/9.png")]
    found = recorded_groups(tmp_path)(records, root)
    assert found.scenes == [[one.path for one in records[:2]]]
    assert found.sources == {f"/data/{name}": source for name, source in sources.items()}
    assert found.new == {"/data/cat/9.png": "camera: C"}
    assert recorded_groups(tmp_path / "none")(records, root) == FoundGroups([], new={})
    (tmp_path / GROUPS_FILE).write_text("image,group\na,b\n")  # of an earlier version
    assert read_groups(tmp_path) == ImageGroups({"a": "b"})
    (tmp_path / GROUPS_FILE).write_text("picture,group\na,b\n")
    with pytest.raises(RunError, match="is damaged"):
        read_groups(tmp_path)


def test_a_file_of_groups_is_read_as_it_was_edited(make_tree, tmp_path):
    data = make_tree({f"data/{name}": 6 for name in ("cat", "dog")}) / "data"
    file = tmp_path / "groups.csv"
    file.write_text(
        "\ufeffimage,group,source\ncat/0.png,sofa,Anna\ncat/1.png,sofa,\ndog/5.png,,\n"
        "dog/1.png,gone,\nno/1.png,,camera: B\n",
        encoding="utf-8",
    )
    records = [ImageRecord(str(path), (path.parent.name,)) for path in sorted(data.rglob("*.png"))]
    found = given_groups(str(file))(records, data)
    assert [[Path(path).name for path in scene] for scene in found.scenes] == [["0.png", "1.png"]]
    assert found.sources == {str(data / "cat/0.png"): "source: Anna"}
    assert found.new is None
    notes = found.divisible(records).notes
    assert notes[0] == f"1 image of {file} is not in the data"
    assert f"2 images in 1 group (as in {file})" in notes[1]
    splits = open_splits(
        DatasetSpec(str(data), finds_groups=True),
        val_share=0.4,
        seed=0,
        find_groups=given_groups(str(file)),
    )
    held_out = {relative(one.path, data) for one in splits.val}
    assert len({"cat/0.png", "cat/1.png"} & held_out) in (0, 2)


def test_groups_of_many_classes_that_are_most_of_one_stay_together(make_tree, tmp_path):
    data = make_tree({f"data/{name}": 12 for name in ("cat", "dog", "emu")}) / "data"
    paths = sorted(str(path.relative_to(data)) for path in data.rglob("*.png"))
    file = tmp_path / "groups.csv"
    rows = [f"{path},{'A' if int(Path(path).stem) < 7 else Path(path).stem}" for path in paths]
    file.write_text("\n".join(["image,group", *rows, ""]))
    spec = DatasetSpec(str(data), finds_groups=True)
    for seed in range(4):
        finder = given_groups(str(file))
        splits = open_splits(spec, val_share=0.2, seed=seed, find_groups=finder)
        numbers = Counter(int(Path(one.path).stem) for one in splits.val)
        assert len(splits.val) in (6, 9)
        assert all(count == 3 and number >= 7 for number, count in numbers.items())
    file.write_text("image,group\n" + "".join(f"{path},\n" for path in paths))
    assert open_splits(spec, val_share=0.2, seed=0, find_groups=given_groups(str(file))).val


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("picture,group\na,b\n", "no column image; columns: image, group, source"),
        ("image,group\nx/1.png,b\n", "none of its 1 image, such as x/1.png"),
        ("image,group\na.png,b\na.png,c\n", "a.png is in two lines"),
        ('image,group\n"a,b\n', "unexpected end of data"),
        (None, "No such file"),
    ],
)
def test_a_file_of_groups_that_cannot_be_used_is_refused(tmp_path, text, reason):
    file = tmp_path / "groups.csv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=f"^group={re.escape(str(file))}: .*{reason}"):
        given_groups(str(file))([ImageRecord("/data/a.png", ("a",))], Path("/data"))


@pytest.mark.parametrize("fold", [None, Fold(2, 5)])
def test_a_record_gives_the_split_where_nothing_new_was_measured(make_tree, tmp_path, fold):
    data = make_tree({f"data/{name}": 60 for name in ("cat", "dog")}) / "data"

    def find(records, _root):
        cameras = {one.path: f"camera: {int(Path(one.path).stem) % 10}" for one in records}
        return FoundGroups([], cameras)

    spec = DatasetSpec(str(data), finds_groups=True)
    settings = {"val_share": 0.2, "seed": 0, "fold": fold}
    splits = open_splits(spec, **settings, find_groups=find)
    assert not splits.groups.new  # fewer than 30 images
    write_groups(tmp_path, splits.groups)
    again = open_splits(spec, **settings, find_groups=recorded_groups(tmp_path))
    assert (again.train, again.val) == (splits.train, splits.val)
    if fold is not None:
        assert any("10 sources, each in one fold" in note for note in splits.notes)
