"""Labels of a list, images that a review leaves out, and labels that it corrects."""

import dataclasses
import json
import tarfile

import pytest
from PIL import Image

from vit.data.archives import relative
from vit.data.dataset_types import NO_LABEL
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.label_review import review_names
from vit.data.sources.open_dataset import open_eval_split, open_splits, read_source
from vit.data.sources.split_file import HeldOutSplit
from vit.errors import ConfigError, DataError
from vit.output.prediction_results import csv_row, write_review_list
from vit.text import csv_text


@pytest.fixture
def data(tmp_path):
    """train/ and val/ with two classes of three images each."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for number in range(3):
                path = tmp_path / "photos" / split / name / f"{number}.png"
                Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    return tmp_path / "photos"


def labels(spec):
    index = read_source(spec)
    return {
        (split, "/".join(record.path.split("/")[-2:])): record.labels[0]
        for split, records in index.splits.items()
        for record in records
    }, index.notes


@pytest.mark.parametrize("absolute", [False, True])
def test_excluded_images_are_left_out_and_counted(data, tmp_path, absolute):
    base = f"{data}/" if absolute else ""
    rows = [f"{base}train/cat/1.png,cat,dog", f"{base}val/dog/0.png,dog,cat", "train/no.png,x,y"]
    (tmp_path / "list.csv").write_text("image,label,likely\n" + "\n".join(rows) + "\n")
    before, _ = labels(DatasetSpec(str(data)))
    after, notes = labels(DatasetSpec(str(data), exclude=str(tmp_path / "list.csv")))
    assert before.keys() - after.keys() == {("train", "cat/1.png"), ("val", "dog/0.png")}
    assert notes[-1].endswith("list.csv: 2 images (1 other not in the data) left out")


@pytest.mark.parametrize("above", ["{root}/", "../../{root}/", "{parent}/{root}/"])
def test_names_may_begin_in_a_folder_above_the_data(data, tmp_path, above):
    """As `vit predict` names images, in whatever folder it is used later."""
    start = above.format(root=data.name, parent=data.parent.name)
    (tmp_path / "bad.csv").write_text(f"image\n{start}train/cat/1.png\n")
    kept = read_source(DatasetSpec(str(data), exclude=str(tmp_path / "bad.csv"))).splits["train"]
    assert str(data / "train/cat/1.png") not in [one.path for one in kept]
    (tmp_path / "bad.csv").write_text("image\nother/train/cat/1.png\n")
    with pytest.raises(DataError, match="none of its 1 image"):
        read_source(DatasetSpec(str(data), exclude=str(tmp_path / "bad.csv")))


def test_corrected_labels_replace_those_of_the_data(data, tmp_path):
    (tmp_path / "list.jsonl").write_text(
        '{"image": "train/cat/1.png", "label": "dog"}\n{"image": "val/dog/0.png", "label": "dog"}\n'
    )
    spec = DatasetSpec(str(data), corrections=str(tmp_path / "list.jsonl"))
    before, _ = labels(DatasetSpec(str(data)))
    after, notes = labels(spec)
    assert after == {**before, ("train", "cat/1.png"): "dog"}
    assert notes[-1].endswith("2 images read, 1 label corrected")
    splits = open_splits(spec, val_share=0.2, seed=0)
    found = {one.path[-15:]: splits.classes[one.label] for one in splits.train}
    assert found["train/cat/1.png"] == "dog"
    assert len(splits.val) == 6


def test_a_review_written_for_spreadsheets_has_the_names_of_the_data(data, tmp_path):
    odd = data / "train" / "=cmd(),@a"
    (data / "train" / "cat").rename(odd)
    (data / "val" / "cat").rename(data / "val" / "=cmd(),@a")
    (odd / "0.png").rename(odd / "-0\t.png")
    names = [f"train/=cmd(),@a/{name}" for name in ("-0\t.png", "1.png")]
    root = str(data / "train")
    rows = [[csv_text(name.removeprefix("train/")), csv_text("=cmd(),@a")] for name in names] + [
        ["dog/0.png", csv_text("=cmd(),@a")]
    ]
    path = tmp_path / "list.csv"
    path.write_text("image,label\n" + "".join(map(csv_row, rows)), encoding="utf-8")
    assert path.read_text().count("'=cmd()") == 5
    after, notes = labels(DatasetSpec(root, corrections=str(path)))
    assert notes[-1].endswith("list.csv: 3 images read, 1 label corrected")
    assert [*after.values()].count("=cmd(),@a") == 4
    after, notes = labels(DatasetSpec(root, exclude=str(path)))
    assert notes[-1].endswith("list.csv: 3 images left out")


@pytest.mark.parametrize(
    ("setting", "rows", "message"),
    [
        ("exclude", "train/x.png,cat", r"none of its 1 image, such as train/x\.png, is in the"),
        ("corrections", "train/cat/1.png,dgo", "line 2: no image .* dgo; did you mean dog"),
        ("corrections", "train/cat/1.png,cat|dog", "line 2: 2 classes; an image has one here"),
        ("label_list", "train/cat/0.png,", "none of its 1 row has a label yet; fill in the column"),
        (
            "label_list",
            "x.png,cat",
            r"none of its 1 labelled image, such as x\.png, is in the data",
        ),
        ("label_list", "train/cat/0.png,a\ntrain/cat/0.png,b", "has two labels, a and b"),
    ],
)
def test_a_review_that_does_not_fit_is_refused(data, tmp_path, setting, rows, message):
    (tmp_path / "list.csv").write_text(f"image,label\n{rows}\n")
    with pytest.raises(DataError, match=message):
        read_source(DatasetSpec(str(data), **{setting: str(tmp_path / "list.csv")}))


def test_labels_are_corrected_only_where_they_are_read(data, tmp_path):
    (tmp_path / "list.csv").write_text("image,label\ntrain/cat/1.png,dog\n")
    with pytest.raises(ConfigError, match="these data have no labels"):
        read_source(DatasetSpec(str(data), labels=False, corrections=str(tmp_path / "list.csv")))


def label_list(folder, *rows):
    path = folder / "labels.csv"
    header = "image,label,likely" if rows[0].count(",") == 2 else "image,label"
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def test_a_label_list_is_all_that_is_used_and_its_empty_rows_are_counted(data, tmp_path):
    (data / "train" / "loose.png").write_bytes((data / "train" / "cat" / "0.png").read_bytes())
    rows = ["train/cat/0.png,hat,cat", "train/cat/1.png,hat,", "train/dog/0.png,,dog"]
    rows += ["train/dog/1.png,coat,", "train/loose.png,coat,", "other.png,coat,"]
    found, notes = labels(DatasetSpec(str(data), label_list=label_list(tmp_path, *rows)))
    assert found == {
        ("train", "cat/0.png"): "hat",
        ("train", "cat/1.png"): "hat",
        ("train", "dog/1.png"): "coat",
        ("train", "train/loose.png"): "coat",
    }
    assert notes[-2].endswith(
        "labels.csv: 4 labelled images (1 other not in the data); 1 row without a label"
    )
    use = "with --teacher RUN a training learns from those of train"
    assert notes[-1] == f"9 images without a label: not used ({use})"


def test_notes_about_a_label_list_are_those_of_any_list(data, tmp_path):
    rows = ["train/dog/0.png,dog", 'train/cat/0.png,"cat, dog"', 'train/cat/1.png,"cat, hat"']
    path = label_list(tmp_path, *rows, "train/dog/0.png,dog")
    _, notes = labels(DatasetSpec(str(data), label_list=path))
    assert any("2 labels have a comma" in note and "write cat|dog" in note for note in notes)
    assert any("left out 1 line that name an image again" in note for note in notes)
    path = label_list(tmp_path, *rows, "train/dog/0.png,coat")
    index = read_source(DatasetSpec(str(data), label_list=path, multilabel=True))
    assert any("1 image with other labels in another line" in note for note in index.notes)
    path = label_list(tmp_path, "train/cat/0.png,dog,x")
    _, notes = labels(DatasetSpec(str(data), corrections=path))
    assert notes[-2].endswith("classes from label; not used: likely")


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
    path = label_list(tmp_path, *(f"train/{name}/{n}.png,{name}" for name in ("cat", "dog")
                                  for n in (0, 1)))  # fmt: skip
    for rows, left in (("train/cat/2.png\nval/dog/0.png", 4), ("train/cat/1.png", 3)):
        (tmp_path / "x.csv").write_text(f"image\n{rows}\n")
        spec = DatasetSpec(str(data), label_list=path, exclude=str(tmp_path / "x.csv"))
        assert len(read_source(spec).train) == left
    (tmp_path / "fix.csv").write_text("image,label\ntrain/cat/1.png,dog\ntrain/dog/2.png,dog\n")
    found, notes = labels(dataclasses.replace(spec, corrections=str(tmp_path / "fix.csv")))
    assert ("train", "cat/1.png") not in found
    assert notes[-1].endswith("2 images read, 0 labels corrected")


def test_images_without_a_label_are_kept_for_a_teacher(data, tmp_path):
    rows = ["train/cat/0.png,x", "train/dog/0.png,y", "train/dog/2.png,"]
    rows += ["val/cat/0.png,x", "val/dog/0.png,y"]
    (tmp_path / "exclude.csv").write_text("image\ntrain/cat/2.png\n")
    spec = DatasetSpec(
        str(data),
        label_list=label_list(tmp_path, *rows),
        unlabelled=True,
        exclude=str(tmp_path / "exclude.csv"),
    )
    index = read_source(spec)
    labelled = {one.path for records in index.splits.values() for one in records}
    every = {str(path) for path in (data / "train").rglob("*.png")} - labelled
    expected = every - {str(data / "train" / "cat" / "2.png")}
    assert {one.path for one in index.unlabelled} == expected
    assert len(expected) == 3
    splits = open_splits(spec, val_share=0.3, seed=0)
    assert f"{len(expected)} images without a label: the teacher labels them" in splits.notes
    assert splits.unlabelled == expected
    assert [one.label for one in splits.train] == [0, 1, *[NO_LABEL] * len(expected)]
    assert {one.path for one in splits.train[2:]} == expected
    assert [one.label for one in splits.val] == [0, 1]
    plain = open_splits(
        dataclasses.replace(spec, unlabelled=False, exclude=None), val_share=0.3, seed=0
    )
    assert (plain.train, plain.unlabelled) == (splits.train[:2], frozenset())


def test_images_are_held_out_of_a_label_list_without_validation_images(data, tmp_path):
    rows = [f"train/{name}/{n}.png,{label}" for name, label in (("cat", "x"), ("dog", "y"))
            for n in range(3)]  # fmt: skip
    spec = DatasetSpec(str(data), label_list=label_list(tmp_path, *rows))
    splits = open_splits(spec, val_share=0.34, seed=0)
    assert (splits.classes, splits.made, splits.multilabel) == (("x", "y"), True, False)
    assert (len(splits.train), len(splits.val)) == (4, 2)
    held_out = HeldOutSplit(data.resolve(), [relative(one.path, data) for one in splits.val])
    measured, _ = open_eval_split(spec, split="val", classes=splits.classes, held_out=held_out)
    assert measured == splits.val


def test_a_label_list_may_name_splits_and_several_labels(data, tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text(
        "image,labels,split\ntrain/cat/0.png,a|b,train\ntrain/cat/1.png,b,val\nval/dog/0.png,a,val\n"
    )
    index = read_source(DatasetSpec(str(data), label_list=str(path)))
    assert index.multilabel
    assert {split: [one.labels for one in records] for split, records in index.splits.items()} == {
        "train": [("a", "b")],
        "val": [("b",), ("a",)],
    }
    with pytest.raises(DataError, match="several labels; --task multilabel"):
        read_source(DatasetSpec(str(data), label_list=str(path), multilabel=False))


def test_a_label_list_may_have_any_column_of_labels_and_one_of_groups(data, tmp_path):
    path = tmp_path / "specimens.csv"
    rows = [
        f"train/{name}/{number};{name};site {number}"
        for number in ("0.png", "1.png", "2.png")
        for name in ("cat", "dog")
    ]
    path.write_text("\r\n".join(["\ufefffile;species;site", *rows]), encoding="utf-8")
    spec = DatasetSpec(
        str(data), label_list=str(path), label_column="species", group="site", multilabel=False
    )
    splits = open_splits(spec, val_share=0.34, seed=0)
    assert splits.classes == ("cat", "dog")
    sites = [{one.path[-5] for one in part} for part in (splits.train, splits.val)]
    assert [len(part) for part in (splits.train, splits.val)] == [4, 2]
    assert not sites[0] & sites[1]
    with pytest.raises(DataError, match=r"that name \(columns that are not read: site\)"):
        open_splits(dataclasses.replace(spec, group="sites"), val_share=0.34, seed=0)


def test_the_column_of_images_is_that_of_the_label_list_unless_the_data_have_one(data, tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("id,breed\ntrain/cat/0.png,x\ntrain/dog/0.png,y\n")
    columns = {"image_column": "id", "label_column": "breed"}
    spec = DatasetSpec(str(data), label_list=str(path), **columns)
    assert [*labels(spec)[0].values()] == ["x", "y"]
    (tmp_path / "all.csv").write_text("id,image\ntrain/cat/0.png,no.png\ntrain/dog/0.png,no.png\n")
    path.write_text("image,breed\ntrain/cat/0.png,x\ntrain/dog/0.png,y\n")
    spec = dataclasses.replace(spec, data=str(tmp_path / "all.csv"), images=str(data))
    assert [*labels(spec)[0].values()] == ["x", "y"]


def test_names_without_a_suffix_are_those_of_images_where_there_is_one(data, tmp_path):
    rows = ["train/cat/0,x", "train/cat/1,x", "train/dog/0,y", "val/dog/0.png,y"]
    path = label_list(tmp_path, *rows)
    found, notes = labels(DatasetSpec(str(data), label_list=path))
    assert len(found) == 4
    Image.new("RGB", (4, 4)).save(data / "train" / "cat" / "1.jpg")  # of two, none is guessed
    found, notes = labels(DatasetSpec(str(data), label_list=path))
    assert ("train", "cat/1.png") not in found
    assert any("3 labelled images (1 other not in the data)" in note for note in notes)


def test_rows_of_a_list_that_were_left_empty_do_not_contradict_those_with_a_label(data, tmp_path):
    rows = ["train/cat/0.png,", "train/dog/0.png,coat", "train/cat/0.png,hat", "train/dog/0.png,"]
    found, notes = labels(DatasetSpec(str(data), label_list=label_list(tmp_path, *rows)))
    assert found == {("train", "cat/0.png"): "hat", ("train", "dog/0.png"): "coat"}
    assert any(note.endswith("labels.csv: 2 labelled images") for note in notes)
    with pytest.raises(DataError, match="has two labels, hat and cap, the first in line 2"):
        labels(
            DatasetSpec(str(data), label_list=label_list(tmp_path, *rows, "train/cat/0.png,cap"))
        )


def test_images_without_a_label_are_kept_apart_from_validation_images(data, tmp_path):
    """Those of its groups, copies of its images, and rows of the split val teach nothing."""
    extra = data / "train" / "cat" / "copy.png"
    extra.write_bytes((data / "train" / "dog" / "1.png").read_bytes())
    path = tmp_path / "labels.csv"
    rows = ["train/cat/0.png,x,train,a", "train/dog/0.png,y,train,b"]
    rows += ["train/cat/1.png,x,val,c", "train/dog/1.png,y,val,d"]
    rows += ["train/cat/2.png,,train,c", "train/cat/copy.png,,train,e"]
    rows += ["train/dog/2.png,,train,f"]
    path.write_text("\n".join(["image,label,split,site", *rows]) + "\n")
    spec = DatasetSpec(str(data), label_list=str(path), group="site", unlabelled=True)
    splits = open_splits(spec, val_share=0.3, seed=0)
    assert splits.unlabelled == {str(data / "train" / "dog" / "2.png")}
    assert [one.group for one in read_source(spec).unlabelled] == ["c", "e", "f"]
    (note,) = (one for one in splits.notes if "left out" in one)
    assert note == (
        "2 images without a label left out: copies of validation images, or of their groups"
    )
    quick = open_splits(spec, val_share=0.3, seed=0, compare=False)
    assert quick.unlabelled == splits.unlabelled | {str(extra)}
    path.write_text(path.read_text().replace("dog/2.png,,train,f", "dog/2.png,,val,f"))
    assert not open_splits(spec, val_share=0.3, seed=0).unlabelled


def test_images_without_a_label_keep_the_groups_of_their_source(data, tmp_path):
    every = ["image,site", *(f"train/{name}/{n}.png,{n}" for name in ("cat", "dog") for n in "012")]
    (tmp_path / "all.csv").write_text("\n".join(every) + "\n")
    path = tmp_path / "labels.csv"
    rows = [f"train/{name}/{n}.png,{name},{n},{part}" for name in ("cat", "dog")
            for n, part in (("0", "train"), ("1", "val")) if name + n != "dog1"]  # fmt: skip
    path.write_text("\n".join(["image,label,site,split", *rows]) + "\n")
    spec = DatasetSpec(
        str(tmp_path / "all.csv"),
        images=str(data),
        label_list=str(path),
        group="site",
        unlabelled=True,
    )
    splits = open_splits(spec, val_share=0.3, seed=0, compare=False)
    names = {relative(one, data) for one in splits.unlabelled}
    assert names == {"train/cat/2.png", "train/dog/2.png"}  # dog/1 is of the site that validates


def test_an_expression_of_groups_need_not_match_images_without_a_label(data, tmp_path):
    rows = ["train/cat/0.png,x,train", "train/dog/0.png,y,train", "train/cat/1.png,x,val"]
    spec = DatasetSpec(
        str(data),
        label_list=label_list_with_splits(tmp_path, *rows),
        group="(dog/0)",
        unlabelled=True,
    )
    splits = open_splits(spec, val_share=0.3, seed=0, compare=False)
    assert len(splits.unlabelled) == 3


def label_list_with_splits(folder, *rows):
    path = folder / "labels.csv"
    path.write_text("\n".join(["image,label,split", *rows]) + "\n")
    return str(path)


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
    listed = tmp_path / "list.csv"
    listed.write_text("image,label\ncat/0.png,dog\n")
    for setting in ("exclude", "corrections", "label_list"):
        with pytest.raises(DataError, match=r"cat/0.png is the name of several images"):
            read_source(DatasetSpec(str(shards), **{setting: str(listed)}))
    everything = [one.path for records in index.splits.values() for one in records]
    names = review_names(everything, index.root)
    write_review_list(str(listed), ("image", "label"), [(names[paths["train"]], "dog")])
    before, _ = labels(DatasetSpec(str(shards)))
    after, notes = labels(DatasetSpec(str(shards), corrections=str(listed)))
    assert after == {**before, ("train", "cat/0.png"): "dog"}
    assert notes[-1].endswith("1 image read, 1 label corrected")


def test_names_that_are_unique_are_those_of_review_lists(data):
    index = read_source(DatasetSpec(str(data)))
    paths = [one.path for records in index.splits.values() for one in records]
    assert review_names(paths, index.root)[paths[0]] == "train/cat/0.png"


@pytest.mark.parametrize("setting", ["corrections", "label_list"])
def test_two_spellings_of_an_image_may_not_contradict_each_other(data, tmp_path, setting):
    listed = tmp_path / "list.csv"
    listed.write_text(f"image,label\ntrain/cat/1.png,cat\n{data}/train/cat/1.png,dog\n")
    with pytest.raises(
        DataError,
        match=r"line 3: .*train/cat/1.png has two labels, cat and dog, the first in line 2",
    ):
        read_source(DatasetSpec(str(data), **{setting: str(listed)}))
    listed.write_text(f"image,label\ntrain/cat/1.png,dog\n{data}/train/cat/1.png,dog\n")
    assert read_source(DatasetSpec(str(data), **{setting: str(listed)})).splits


def test_a_correction_to_a_class_that_a_split_lacks_holds_when_it_is_evaluated(data, tmp_path):
    (data / "train" / "fox").mkdir()
    Image.new("RGB", (4, 4)).save(data / "train" / "fox" / "0.png")
    listed = tmp_path / "list.csv"
    listed.write_text("image,label\nval/cat/1.png,fox\n")
    spec = DatasetSpec(str(data), corrections=str(listed))
    assert labels(spec)[0]["val", "cat/1.png"] == "fox"
    assert labels(dataclasses.replace(spec, split="val"))[0]["val", "cat/1.png"] == "fox"
