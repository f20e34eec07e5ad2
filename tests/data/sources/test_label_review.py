"""Labels of a list, images that a review leaves out, and labels that it corrects."""

import json
import tarfile

import pytest

from tests.data.sources.conftest import opened, plant, png
from vit.data.dataset_types import NO_LABEL
from vit.data.image_archives import relative
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.label_review import review_names
from vit.data.sources.open_dataset import open_splits, read_source
from vit.errors import ConfigError, DataError
from vit.output.prediction_results import write_review_list


@pytest.fixture
def data(tmp_path):
    """train/ and val/ with two classes of three images each."""
    files = {
        f"photos/{split}/{name}/{number}.png": png(number)
        for split in ("train", "val")
        for name in ("cat", "dog")
        for number in range(3)
    }
    plant(tmp_path, files)
    return tmp_path / "photos"


def labels(data, **settings):
    """{(split, name in it): label}, and notes."""
    index = read_source(DatasetSpec(str(data), **settings))
    return {
        (split, "/".join(record.path.split("/")[-2:])): record.labels[0]
        for split, records in index.splits.items()
        for record in records
    }, index.notes


SPELLINGS = r"line 3: .*train/cat/1.png has two labels, cat and dog, the first in line 2"


def listed(folder, *rows, header="image,label", name="list.csv"):
    (folder / name).write_text("\n".join([header, *rows]) + "\n")
    return str(folder / name)


@pytest.mark.parametrize("absolute", [False, True])
def test_excluded_images_are_left_out_and_counted(data, tmp_path, absolute):
    base = f"{data}/" if absolute else ""
    rows = [f"{base}train/cat/1.png,cat,dog", f"{base}val/dog/0.png,dog,cat", "train/no.png,x,y"]
    before, _ = labels(data)
    after, notes = labels(data, exclude=listed(tmp_path, *rows, header="image,label,likely"))
    assert before.keys() - after.keys() == {("train", "cat/1.png"), ("val", "dog/0.png")}
    assert notes[-1].endswith("list.csv: 2 images (1 other not in the data) left out")


@pytest.mark.parametrize("above", ["{root}/", "../../{root}/", "{parent}/{root}/"])
def test_names_may_begin_in_a_folder_above_the_data(data, tmp_path, above):
    """As `vit predict` names images, in whatever folder it is used later."""
    start = above.format(root=data.name, parent=data.parent.name)
    found, _ = labels(data, exclude=listed(tmp_path, f"{start}train/cat/1.png", header="image"))
    assert ("train", "cat/1.png") not in found
    with pytest.raises(DataError, match="none of its 1 image"):
        labels(data, exclude=listed(tmp_path, "other/train/cat/1.png", header="image"))


def test_corrected_labels_replace_those_of_the_data(data, tmp_path):
    corrected = [("train/cat/1.png", "dog"), ("val/dog/0.png", "dog")]
    corrected += [(f"{data}/train/cat/1.png", "dog")]  # the same by another name
    path = tmp_path / "list.jsonl"
    lines = (json.dumps({"image": image, "label": label}) for image, label in corrected)
    path.write_text("\n".join(lines))
    before, _ = labels(data)
    after, notes = labels(data, corrections=str(path))
    assert after == {**before, ("train", "cat/1.png"): "dog"}
    assert notes[-1].endswith("2 images read, 1 label corrected")
    splits = opened(data, corrections=str(path))
    found = {one.path[-15:]: splits.classes[one.label] for one in splits.train}
    assert found["train/cat/1.png"] == "dog"
    assert len(splits.val) == 6


@pytest.mark.parametrize(
    ("setting", "rows", "message"),
    [
        ("exclude", ["train/x.png,cat"], r"none of its 1 image, such as train/x\.png, is in the"),
        ("corrections", ["train/cat/1.png,dgo"], "line 2: no image .* dgo; did you mean dog"),
        ("corrections", ["train/cat/1.png,cat|dog"], "line 2: 2 classes; an image has one here"),
        ("label_list", ["train/cat/0.png,"], "none of its 1 row has a label yet; fill in the col"),
        ("label_list", ["x.png,cat"], r"none of its 1 labelled image, such as x\.png, is in the d"),
        ("label_list", ["train/cat/0.png,a", "train/cat/0.png,b"], "has two labels, a and b"),
        (
            "label_list",
            ["train/cat/0.png,", "train/cat/0.png,a", "train/cat/0.png,b"],
            "has two labels, a and b, the first in line 2",
        ),
        # two spellings of an image
        ("label_list", ["train/cat/1.png,cat", "{data}/train/cat/1.png,dog"], SPELLINGS),
        ("corrections", ["train/cat/1.png,cat", "{data}/train/cat/1.png,dog"], SPELLINGS),
    ],
)
def test_a_review_that_does_not_fit_is_refused(data, tmp_path, setting, rows, message):
    path = listed(tmp_path, *(row.format(data=data) for row in rows))
    with pytest.raises(DataError, match=message):
        labels(data, **{setting: path})


def test_labels_are_corrected_only_where_they_are_read(data, tmp_path):
    with pytest.raises(ConfigError, match="these data have no labels"):
        labels(data, labels=False, corrections=listed(tmp_path, "train/cat/1.png,dog"))


def test_a_label_list_is_all_that_is_used_and_its_empty_rows_are_counted(data, tmp_path):
    plant(data, {"train/loose.png": png(0)})
    rows = ["train/cat/0.png,hat,cat", "train/cat/1.png,hat,", "train/dog/0.png,,dog"]
    rows += ["train/dog/1.png,coat,", "train/loose.png,coat,", "other.png,coat,"]
    rows += ["train/cat/1.png,,"]  # left empty, which does not contradict the label
    path = listed(tmp_path, *rows, header="image,label,likely")
    found, notes = labels(data, label_list=path)
    assert found == {
        ("train", "cat/0.png"): "hat",
        ("train", "cat/1.png"): "hat",
        ("train", "dog/1.png"): "coat",
        ("train", "train/loose.png"): "coat",
    }
    assert notes[-2].endswith(
        "list.csv: 4 labelled images (1 other not in the data); 1 row without a label"
    )
    use = "with --teacher RUN a training learns from those of train"
    assert notes[-1] == f"9 images without a label: not used ({use})"


def test_notes_about_a_label_list_are_those_of_any_list(data, tmp_path):
    path = listed(tmp_path, *["train/cat/0.png,dog,x"] * 2, header="image,label,likely")
    for setting in ("label_list", "corrections"):
        _, notes = labels(data, **{setting: path})
        assert any("left out 1 line that name an image again" in note for note in notes)
        assert any(note.endswith("classes from label; not used: likely") for note in notes)


@pytest.mark.parametrize(
    ("name", "cells"),
    [("l.csv", ("a|b", "b", "[]", "|", "[ ]", "")), ("l.csv", ("a;b", "b", ";", "[]", "| ", " "))]
    + [("l.jsonl", (["a", "b"], "b", [], [], [], none)) for none in (None, "")],
)
def test_an_image_with_none_of_the_classes_is_not_one_without_a_label(data, tmp_path, name, cells):
    """`[]` is none of the classes; nothing is, beside the data, a label that is not written yet."""
    images = [f"train/{folder}/{number}.png" for folder in ("cat", "dog") for number in range(3)]
    path = tmp_path / name
    if name == "l.csv":
        rows = "".join(f'{image},"{cell}"\n' for image, cell in zip(images, cells, strict=True))
        path.write_text(f"image,labels\n{rows}")
    else:
        rows = zip(images, cells, strict=True)
        path.write_text("".join(json.dumps({"image": i, "labels": c}) + "\n" for i, c in rows))
    expected = [("a", "b"), ("b",), (), (), ()]
    index = read_source(DatasetSpec(str(data), label_list=str(path), multilabel=True))
    assert [record.labels for record in index.train] == expected
    (note,) = (one for one in index.notes if "labelled images" in one)
    assert note.endswith(
        "5 labelled images; 1 row without a label: not used "
        "([] in labels is not one of the classes)"
    )
    index = read_source(DatasetSpec(str(path), images=str(data), multilabel=True))
    assert [record.labels for record in index.train] == [*expected, ()]
    with pytest.raises(DataError, match=r"line [67]: no label; write one, or \[\] for none"):
        read_source(
            DatasetSpec(str(path), images=str(data), multilabel=True, corrections=str(path))
        )


def test_each_list_may_name_what_another_one_leaves_out(data, tmp_path):
    rows = [f"train/{name}/{n}.png,{name}" for name in ("cat", "dog") for n in (0, 1)]
    path = listed(tmp_path, *rows)
    fix = listed(tmp_path, "train/cat/1.png,dog", "train/dog/2.png,dog", name="fix.csv")
    for excluded, left in ((["train/cat/2.png", "val/dog/0.png"], 4), (["train/cat/1.png"], 3)):
        exclude = listed(tmp_path, *excluded, header="image", name="x.csv")
        found, _ = labels(data, label_list=path, exclude=exclude)
        assert len(found) == left
    found, notes = labels(data, label_list=path, exclude=exclude, corrections=fix)
    assert ("train", "cat/1.png") not in found
    assert notes[-1].endswith("2 images read, 0 labels corrected")


def test_images_without_a_label_are_kept_for_a_teacher(data, tmp_path):
    rows = ["train/cat/0.png,x", "train/dog/0.png,y", "train/dog/2.png,"]
    rows += ["val/cat/0.png,x", "val/dog/0.png,y"]
    asked = {"label_list": listed(tmp_path, *rows)}
    exclude = listed(tmp_path, "train/cat/2.png", header="image", name="exclude.csv")
    splits = opened(data, exclude=exclude, unlabelled=True, **asked)
    expected = {str(data / "train" / name) for name in ("cat/1.png", "dog/1.png", "dog/2.png")}
    assert "3 images without a label: the teacher labels them" in splits.notes
    assert splits.unlabelled == expected
    assert [one.label for one in splits.train] == [0, 1, *[NO_LABEL] * 3]
    assert {one.path for one in splits.train[2:]} == expected
    assert [one.label for one in splits.val] == [0, 1]
    plain = opened(data, **asked)
    assert (plain.train, plain.unlabelled) == (splits.train[:2], frozenset())


def test_images_are_held_out_of_a_label_list_without_validation_images(data, tmp_path):
    rows = [f"train/{name}/{n}.png,{name}" for name in ("cat", "dog") for n in range(3)]
    splits = opened(data, val_share=0.34, label_list=listed(tmp_path, *rows))
    assert (splits.classes, splits.made, splits.multilabel) == (("cat", "dog"), True, False)
    assert (len(splits.train), len(splits.val)) == (4, 2)


def test_a_label_list_may_name_splits_and_several_labels(data, tmp_path):
    rows = ["train/cat/0.png,a|b,train", "train/cat/1.png,b,val", "val/dog/0.png,a,val"]
    path = listed(tmp_path, *rows, header="image,labels,split")
    index = read_source(DatasetSpec(str(data), label_list=path))
    assert index.multilabel
    assert {split: [one.labels for one in records] for split, records in index.splits.items()} == {
        "train": [("a", "b")],
        "val": [("b",), ("a",)],
    }
    with pytest.raises(DataError, match="several labels; --task multilabel"):
        labels(data, label_list=path, multilabel=False)


def test_a_label_list_may_have_any_column_of_labels_and_one_of_groups(data, tmp_path):
    rows = [f"train/{name}/{n}.png;{name};site {n}" for n in range(3) for name in ("cat", "dog")]
    path = listed(tmp_path, *rows, header="\ufefffile;species;site")
    asked = {"label_list": path, "label_column": "species", "multilabel": False}
    splits = opened(data, val_share=0.34, group="site", **asked)
    assert splits.classes == ("cat", "dog")
    sites = [{one.path[-5] for one in part} for part in (splits.train, splits.val)]
    assert [len(part) for part in (splits.train, splits.val)] == [4, 2]
    assert not sites[0] & sites[1]
    with pytest.raises(DataError, match=r"that name \(columns that are not read: site\)"):
        opened(data, group="sites", **asked)


def test_the_column_of_images_is_that_of_the_label_list_unless_the_data_have_one(data, tmp_path):
    images = ["train/cat/0.png", "train/dog/0.png"]
    rows = [f"{image},{label}" for image, label in zip(images, "xy", strict=True)]
    columns = {"image_column": "id", "label_column": "breed"}
    path = listed(tmp_path, *rows, header="id,breed")
    assert [*labels(data, label_list=path, **columns)[0].values()] == ["x", "y"]
    path = listed(tmp_path, *rows, header="image,breed")
    every = [f"{image},no.png" for image in images]
    every = listed(tmp_path, *every, header="id,image", name="all.csv")
    found, _ = labels(every, images=str(data), label_list=path, **columns)
    assert [*found.values()] == ["x", "y"]


def test_images_without_a_label_are_kept_apart_from_validation_images(data, tmp_path):
    """Those of its groups, copies of its images, and rows of the split val teach nothing."""
    plant(data, {"train/cat/copy.png": (data / "train/dog/1.png").read_bytes()})
    rows = ["train/cat/0.png,x,train,a", "train/dog/0.png,y,train,b"]
    rows += ["train/cat/1.png,x,val,c", "train/dog/1.png,y,val,d"]
    rows += ["train/cat/2.png,,train,c", "train/cat/copy.png,,train,e"]
    header = "image,label,split,site"
    path = listed(tmp_path, *rows, "train/dog/2.png,,train,f", header=header)
    spec = DatasetSpec(str(data), label_list=path, group="site", unlabelled=True)
    splits = open_splits(spec, val_share=0.3, seed=0)
    assert splits.unlabelled == {str(data / "train/dog/2.png")}
    assert [one.group for one in read_source(spec).unlabelled] == ["c", "e", "f"]
    (note,) = (one for one in splits.notes if "left out" in one)
    assert note == (
        "2 images without a label left out: copies of validation images, or of their groups"
    )
    quick = open_splits(spec, val_share=0.3, seed=0, compare=False)
    assert quick.unlabelled == splits.unlabelled | {str(data / "train/cat/copy.png")}
    listed(tmp_path, *rows, "train/dog/2.png,,val,f", header=header)
    assert not open_splits(spec, val_share=0.3, seed=0).unlabelled


def test_images_without_a_label_keep_the_groups_of_their_source(data, tmp_path):
    every = [f"train/{name}/{n}.png,{n}" for name in ("cat", "dog") for n in "012"]
    every = listed(tmp_path, *every, header="image,site", name="all.csv")
    rows = [
        "train/cat/0.png,cat,0,train",
        "train/dog/0.png,dog,0,train",
        "train/cat/1.png,cat,1,val",
    ]
    path = listed(tmp_path, *rows, header="image,label,site,split")
    asked = {"images": str(data), "label_list": path, "group": "site", "unlabelled": True}
    spec = DatasetSpec(every, **asked)
    splits = open_splits(spec, val_share=0.3, seed=0, compare=False)
    found = {relative(one, data) for one in splits.unlabelled}
    assert found == {"train/cat/2.png", "train/dog/2.png"}  # dog/1 is of the site that validates


def test_an_expression_of_groups_need_not_match_images_without_a_label(data, tmp_path):
    rows = ["train/cat/0.png,x,train", "train/dog/0.png,y,train", "train/cat/1.png,x,val"]
    path = listed(tmp_path, *rows, header="image,label,split")
    spec = DatasetSpec(str(data), label_list=path, group="(dog/0)", unlabelled=True)
    assert len(open_splits(spec, val_share=0.3, seed=0, compare=False).unlabelled) == 3


@pytest.fixture
def shards(data, tmp_path):
    """The same images in a shard of each split, in which train and val have equal names."""
    (tmp_path / "shards").mkdir()
    for split in ("train", "val"):
        with tarfile.open(tmp_path / "shards" / f"{split}-000000.tar", "w") as shard:
            shard.add(data / split, arcname="")
    return tmp_path / "shards"


def test_a_name_of_two_images_is_refused_and_their_paths_are_not(shards, tmp_path):
    index = read_source(DatasetSpec(str(shards)))
    paths = {split: records[0].path for split, records in index.splits.items()}
    assert relative(paths["train"], index.root) == relative(paths["val"], index.root)
    path = listed(tmp_path, "cat/0.png,dog")
    for setting in ("exclude", "corrections", "label_list"):
        with pytest.raises(DataError, match=r"cat/0.png is the name of several images"):
            labels(shards, **{setting: path})
    everything = [one.path for records in index.splits.values() for one in records]
    found = review_names(everything, index.root)
    assert review_names(everything[:1], index.root)[everything[0]] == "cat/0.png"
    write_review_list(path, ("image", "label"), [(found[paths["train"]], "dog")])
    before, _ = labels(shards)
    after, notes = labels(shards, corrections=path)
    assert after == {**before, ("train", "cat/0.png"): "dog"}
    assert notes[-1].endswith("1 image read, 1 label corrected")


def test_a_correction_to_a_class_that_a_split_lacks_holds_when_it_is_evaluated(data, tmp_path):
    plant(data, {"train/fox/0.png": png(3)})
    asked = {"corrections": listed(tmp_path, "val/cat/1.png,fox")}
    for split in ({}, {"split": "val"}):
        assert labels(data, **split, **asked)[0]["val", "cat/1.png"] == "fox"
