"""Lists of images and their classes: CSV, TSV, lines of JSON, alone or one for each split."""

import json
import math
from functools import partial

import openpyxl
import pytest
from PIL import Image

from tests.data.sources import conftest
from tests.data.sources.conftest import names, noted
from vit.data.checks.check_listing import list_dataset
from vit.data.image_archives import relative
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.file_walk import FolderWalker
from vit.data.sources.list_columns import cell_group
from vit.data.sources.open_dataset import list_images, locate_in_lists, open_eval_split
from vit.errors import ConfigError, DataError
from vit.text import csv_text
from vit.training.settings_from_data import scan_headers

NAMES = [f"{name}/{number}.png" for name in "ab" for number in range(10)]
ROWS = [(name, name[0]) for name in NAMES]


@pytest.fixture
def images(make_tree):
    """Ten images in a/, ten in b/."""
    return make_tree({"a": 10, "b": 10})


@pytest.fixture
def write(images):
    """Writes a list beside the images."""

    def write(content, name="list.csv", **options):
        path = images / name
        path.write_text(content, encoding="utf-8", **options)
        return str(path)

    return write


def table(rows=ROWS, header="image,label", end="\n"):
    return end.join([header, *(",".join(row) for row in rows)]) + end


opened = partial(conftest.opened, val_share=0.2)


def labels_by_name(splits):
    found = {}
    for sample in (*splits.train, *splits.val):
        numbers = sample.labels if splits.multilabel else [sample.label]
        found[relative(sample.path, splits.root)] = [splits.classes[n] for n in numbers]
    return found


def records(rows, image="image", label="label"):
    return "".join(json.dumps({image: name, label: said}) + "\n" for name, said in rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.csv", table(ROWS[::-1])),  # in whatever order
        ("list.csv", "\ufeff" + table(end="\r\n", header='"File_Name","Class"')),
        ("list.csv", "\ufeff" + table(end="\r\n").replace(",", "\t")),  # as Excel writes it
        ("list.csv", "\ufeff" + table(end="\r\n").replace(",", ";")),
        ("list.csv", "\n".join(["path;category", *(f'"{n}";{label}' for n, label in ROWS)])),
        ("list.csv", table([(*row, "", "") for row in ROWS], "image,label,,")),
        ("list.tsv", "\n".join(["image\ttags", *("\t".join(row) for row in ROWS)])),
        ("list.jsonl", records(ROWS, "file_name", "labels")),
        ("list.ndjson", records([(n, [label]) for n, label in ROWS], "img", "target")),
    ],
)
def test_every_form_gives_what_the_folder_gives(images, write, name, content):
    folder, path = opened(images), write(content, name, newline="")
    splits = opened(path)
    assert (splits.classes, splits.train, splits.val) == (folder.classes, folder.train, folder.val)
    assert (splits.made, splits.multilabel, splits.root) == (True, False, images)
    assert sorted(list_images([path])) == [str(images / name) for name in NAMES]


def test_a_workbook_is_read_as_its_csv(images):
    book = openpyxl.Workbook()
    book.active.append(["image", "label"])
    for row in ROWS:
        book.active.append(row)
    book.save(images / "list.xlsx")
    (images / "list.csv").write_text(table())
    found = opened(images / "list.xlsx")
    assert labels_by_name(found) == labels_by_name(opened(images / "list.csv"))
    book.active.cell(3, 4, "x")
    book.save(images / "list.xlsx")
    with pytest.raises(DataError, match=r"list\.xlsx, line 3: 4 cells, but 2 in the header"):
        opened(images / "list.xlsx")


def test_empty_rows_are_left_out_and_counted_once(images, write):
    rows = [*ROWS[:3], ("", ""), (" ", ""), *ROWS[3:], ("", "", "", "")]
    splits = opened(write(",,\n" + table(rows) + "\n\n"))
    assert splits.train == opened(images).train
    empty = [note for note in splits.notes if "empty row" in note]
    assert len(empty) == 1
    assert "left out 4 empty rows, the first in line 1" in empty[0]
    notes: list[str] = []
    list_images([write(table(rows))], notes=notes)
    assert [note for note in notes if "left out 3 empty rows, the first in line 5" in note]


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(
    ("header", "asked", "top"),
    [
        ("a/0.png,a", {}, "image,label"),
        ("a;a/0.png;x", {"image_column": "image"}, "image;label"),
    ],
)
def test_a_list_without_names_of_columns_is_told_to_have_them(write, header, asked, top, labels):
    path = write(f"{header}\n{header.replace('0', '1')}\n")
    with pytest.raises(DataError, match=rf"line 1: looks like data .*them, such as {top}$"):
        opened(path, labels=labels, **asked)
    path = write(table(header="x.jpg,label"))  # which is asked for
    assert len(opened(path, image_column="x.jpg").train) == 16


def test_commas_in_labels_are_noted_and_stay(write):
    said = [(name, '"red, round"' if name < "b" else "blue") for name in NAMES]
    splits = opened(write(table(said)))
    assert splits.classes == ("blue", "red, round")
    assert noted(splits, "10 labels have a comma, and each is one class, such as 'red, round'; if")
    assert noted(splits, "write red|round (or a list in JSON lines)")
    one = opened(write(table([(n, '"red, round"' if n == "a/1.png" else n[0]) for n in NAMES])))
    assert not noted(one, "comma")
    assert not noted(opened(write(records(said), "list.jsonl")), "comma")


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("photo,label,breed", {"image_column": "photo", "label_column": "breed"}),
        ("image,label,Label", {"label_column": "Label"}),  # and not the one in another case
    ],
)
def test_columns_may_be_named(write, header, columns):
    splits = opened(write(table([(name, "x", label) for name, label in ROWS], header)), **columns)
    assert splits.classes == ("a", "b")
    assert noted(splits, f"classes from {columns['label_column']}; not used: label")


@pytest.mark.parametrize(
    ("header", "asked", "message"),
    [
        ("picture,kind", {}, "line 1: no .* among picture, kind; expected file_.* --image-column"),
        ("picture,label", {}, "say which with --image-column$"),
        ("Bild,Text hier", {"captions": True}, "say which with --image-column$"),
        ("image,kind", {}, "no column of classes among image, kind; expected label, labels"),
        ("image,caption", {}, "for captions, --task caption"),
        ("image,label", {"label_column": "lable"}, "lable: no such column.*did you mean label?"),
        ("image,label", {"image_column": "imag"}, "image_column=imag: .*did you mean image?"),
        ("image,image", {}, "two columns are called image"),
        ("image,label", {"label_column": "image"}, "=image: no such column among label"),
    ],
)
def test_wrong_columns_are_told_with_those_there(write, header, asked, message):
    with pytest.raises(DataError, match=message):
        opened(write(table(header=header)), **asked)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("http://x.org/1.jpg,a", "line 22: .*is a web address; download"),
        ("../1.jpg,a", "line 22: ../1.jpg leads out of the folder; .*--images.*--allow-outside"),
        ("a/../../1.jpg,a", "line 22: .*leads out of the folder"),
        ("/etc/passwd,a", "line 22: /etc/passwd lies outside of .*--images.*--allow-outside"),
        ("C:\\x\\1.jpg,a", "line 22: .*another computer"),
        ("a/9.png,b", "line 22: a/9.png has two labels, a and b, the first in line 11"),
        ("a/99.png,", "line 22: no label; give it one"),
        ("a/99.png,a|b", "line 22: several labels; --task multilabel"),
        ("a/99.png,\"['a', 'b']\"", r"line 22: a list in a cell: .*; write cat\|dog, or JSON"),
        ("a/99.png,['a' 'b|c']", "line 22: a list in a cell"),
        ("a/99.png,[0 1]", "line 22: a list in a cell"),
        (",a", "line 22: no file name"),
        ("..\\x.png,a", "line 22: .* leads out of the folder"),
        ("..,a", "line 22: .* leads out of the folder"),
        ("\\\\server\\x.png,a", "line 22: .* is a place on another computer"),
        (".,a", "line 22: . is a folder; expected an image"),
        ("a/99.png,#N/A", "line 22: the label is #N/A, an error of a spreadsheet"),
    ],
)
def test_a_bad_line_is_told_with_its_number(write, line, message):
    with pytest.raises(DataError, match=message):
        opened(write(table() + line + "\n"), multilabel=False)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"image": "x.png", "label": 0.5}', "line 21: the label is 0.5, a fraction; expected"),
        ('{"image": "x.png", "label": NaN}', "line 21: no label"),
        ('{"image": "x.png", "label": ["a", ""]}', "line 21: an empty label"),
        ('{"image": "x.png"}', "line 21: no 'label' in this record; write .* for no label yet"),
    ],
)
def test_a_bad_record_is_told_with_its_line(write, record, message):
    with pytest.raises(DataError, match=message):
        opened(write(records(ROWS) + record + "\n", "list.jsonl"))


def test_an_image_named_twice_alike_is_taken_once(write):
    splits = opened(write(table([*ROWS, ROWS[3], ("./a/4.png", "a")])))
    assert len(splits.train) + len(splits.val) == 20
    assert noted(splits, "left out 2 lines that name an image again")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [([0, 10], ("0", "10")), ([0.0, 1.0], ("0", "1")), (["a|b", "b"], ("a|b", "b"))],
)
def test_numbers_and_whole_texts_in_json_are_names(write, labels, classes):
    rows = [(name, labels[label == "b"]) for name, label in ROWS]
    assert opened(write(records(rows), "list.jsonl")).classes == classes


@pytest.mark.parametrize("mark", ["|", ";", " | "])
def test_cells_of_several_labels_make_a_set_of_several(write, mark):
    rows = [*ROWS[:18], (NAMES[18], f"a{mark}b"), (NAMES[19], "")]
    splits = opened(write(table(rows)))
    assert splits.multilabel
    found = labels_by_name(splits)
    assert [found[name] for name in (NAMES[0], *NAMES[18:])] == [["a"], ["a", "b"], []]
    assert {sample.label for sample in splits.train} == {-1}
    lists = [(name, [*label.replace(mark, "")]) for name, label in rows]
    assert labels_by_name(opened(write(records(lists), "list.jsonl"))) == found


def test_other_labels_in_another_line_are_merged_and_named(write):
    rows = [*ROWS, (NAMES[0], "b"), (NAMES[1], "b|c"), (NAMES[1], "a|b|c")]
    path = write(table(rows))
    splits = opened(path, multilabel=True)
    assert labels_by_name(splits)[NAMES[0]] == ["a", "b"]
    assert noted(splits, f"2 images with other labels in another line, such as {NAMES[0]} in lines")
    found = [
        one
        for one in list_dataset(DatasetSpec(path, multilabel=True)).problems
        if one.kind == "merged_labels"
    ]
    assert [one.severity for one in found] == ["warning", "warning"]
    (first,) = (one for one in found if one.images[0].endswith(NAMES[0]))
    assert f"line 22: {NAMES[0]} has two labels, a and b, the first in line 2: all" in first.detail


def test_a_column_splits_in_any_case(write):
    words = ["Train"] * 7 + ["VALID", "test", "unseen"]
    rows = [(name, label, words[n % 10]) for n, (name, label) in enumerate(ROWS)]
    path = write(table(rows, "image,label,split"))
    splits = opened(path)
    assert not splits.made
    assert names(splits.val, splits.root) == ["a/7.png", "b/7.png"]
    assert len(splits.train) == 14
    for split, number in (("test", 8), ("unseen", 9), ("valid", 7), ("val", 7)):
        samples, _ = open_eval_split(path, split=split, classes=["b", "a"])
        assert names(samples, splits.root) == [f"b/{number}.png", f"a/{number}.png"]
    whole = write(table(), "whole.csv")
    for data, split, message in (
        (path, "validation", "no validation split; it has train, valid, test"),
        (whole, "tset", "csv: no tset split; it has all images in one split; leave the split out"),
    ):
        with pytest.raises(DataError, match=message):
            open_eval_split(data, split=split, classes=["a", "b"])
    with pytest.raises(DataError, match=r"line 22: split is 'trian'; .*did you mean train"):
        opened(write(table([*rows, ("a/99.png", "a", "trian")], "image,label,split")))


def test_a_folder_beside_the_images_that_cannot_be_listed_is_no_error(write, images, monkeypatch):
    def images_of(_walk, folder):
        raise DataError(f"{folder}/private: cannot be listed (Permission denied)")

    monkeypatch.setattr("vit.data.sources.list_files.FolderWalker.images", images_of)
    splits = opened(write(table(ROWS[:8] + ROWS[10:18])))
    assert len(splits.train) + len(splits.val) == 16
    assert not noted(splits, "no line of a list names")


def test_lists_of_a_folder_split(write, images):
    write(table(ROWS[:8] + ROWS[10:18]), "train.csv")
    write(records(ROWS[8:9] + ROWS[18:19]), "val.jsonl")
    write("id,a\n1,2\n", "sample_submission.csv")
    splits = opened(images)
    assert not splits.made
    assert (len(splits.train), len(splits.val)) == (16, 2)
    assert noted(splits, "read the lists train.csv, val.jsonl")
    assert noted(splits, "left out lists without a split in their name, or classes: sample_sub")
    assert noted(splits, "left out 2 images that no line of a list names: a/9.png, b/9.png")
    samples, _ = open_eval_split(str(images), split="val", classes=splits.classes)
    assert samples == splits.val


def test_names_of_images_in_no_list_are_written_only_where_they_are_shown(write, monkeypatch):
    written = []
    monkeypatch.setattr(
        FolderWalker, "relative_name", lambda _, path: written.append(path) or path[-7:]
    )
    splits = opened(write(table(ROWS[:4] + ROWS[10:12])))
    names = "a/4.png, a/5.png, a/6.png and 11 more"
    assert noted(splits, f"left out 14 images that no line of a list names: {names}")
    assert sum(path.endswith(".png") for path in written) == 3


def test_class_folders_in_train_go_before_lists(make_tree):
    root = make_tree({"train/a": 3, "train/b": 3, "val/a": 1, "val/b": 1})
    (root / "train.csv").write_text(table([("train/a/0.png", "x"), ("train/a/1.png", "y")]))
    assert opened(root).classes == ("a", "b")


def test_the_same_image_on_both_sides(write, images):
    rows = [(n, label, "val" if "/9" in n else "train") for n, label in ROWS]
    message = r"line 22: a/9\.png is in two splits, val \(line 11\) and tr"
    with pytest.raises(DataError, match=message):
        opened(write(table([*rows, ("a/9.png", "a", "train")], "image,label,split")))
    write(table(), "train.csv")
    write(table([ROWS[0], ("b/../x.png", "b")]), "val.csv")
    splits = opened(images)
    assert noted(splits, "1 image in training and in validation or test (leak): a/0.png")


def test_images_are_found_beside_the_list_or_where_said(make_tree, tmp_path):
    root = make_tree({"images/a": 5, "images/b": 5})
    content = table([(f"{c}/{n}.png", c) for c in "ab" for n in range(5)])
    conftest.plant(tmp_path, {"far.csv": content, "data/list.csv": content})
    found = opened(root / "list.csv")
    assert found.root == root / "images"
    assert opened(tmp_path / "far.csv", images=str(root / "images")).train == found.train
    with pytest.raises(DataError, match="no such folder of images"):
        opened(tmp_path / "far.csv", images=str(root / "nowhere"))


@pytest.mark.parametrize("setting", ["images", "allow_outside", "label_column", "image_column"])
def test_settings_of_lists_are_refused_for_a_folder(images, setting):
    with pytest.raises(ConfigError, match=rf"{setting}=.* is not a list"):
        opened(images, **{setting: str(images)})


def test_absolute_names_and_detours_inside_are_taken_and_outside_where_allowed(write, images):
    here = opened(write(table()))
    absolute = table([(f"{images}/{name}", label) for name, label in ROWS])
    assert opened(write(absolute)).train == here.train
    outside = images.parent / "outside.png"
    Image.new("RGB", (4, 4)).save(outside)
    for name in (str(outside), "../outside.png"):
        path = write(table([*ROWS, (name, "a")]))
        splits = opened(path, allow_outside=True)
        paths = {sample.path for sample in (*splits.train, *splits.val)}
        assert str(outside) in paths
        with pytest.raises(DataError, match="--allow-outside"):
            opened(path)


def test_a_missing_file_is_told_with_its_line(write):
    path = write(table([*ROWS, ("a/none.png", "a")]))
    splits = opened(path)
    bad = scan_headers([*splits.train, *splits.val]).bad
    assert [image.reason for image in bad] == ["no such file"]
    for spec in (DatasetSpec(path), DatasetSpec(path, label_list="l.csv", label_column="species")):
        assert locate_in_lists(spec, [bad[0].path]) == {bad[0].path: f"{path}, line 22"}


def test_prediction_takes_the_images_of_a_list(write, images):
    path = write(table([("a/3.png", "a"), ("b/1.png", ""), ("a/none.png", "?")]))
    paths = [str(images / name) for name in ("a/3.png", "b/1.png", "a/none.png")]
    assert list_images([path]) == paths
    assert list_images([write("path\na/3.png\n", "bare.csv")]) == paths[:1]


def keyed(**more):
    """Records of all images, some with more keys: a value of each line."""
    lines = []
    for number, (name, said) in enumerate(ROWS):
        extra = {key: value(number) for key, value in more.items() if value(number) is not ...}
        lines.append(json.dumps({"image": name, "label": said} | extra))
    return "\n".join(lines)


def test_the_group_0_is_a_group_and_nan_is_none(write):
    """Two groups: each is one side, though half of the images are more than was asked for."""
    path = write(keyed(patient=lambda number: number % 2), "list.jsonl")
    splits = opened(path, group="patient")
    sides = [
        {NAMES.index(name) % 2 for name in names(part, splits.root)}
        for part in (splits.train, splits.val)
    ]
    assert sorted(sides, key=min) == [{0}, {1}]
    assert noted(splits, "(1 group)")
    path = write(keyed(patient=lambda number: math.nan if number < 10 else number), "list.jsonl")
    assert noted(opened(path, group="patient"), "10 images without a group")


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        ((None, "", " a ", 0, 7.0, 0.5, "0"), ["", "", "a", "0", "7", "0.5", "0"]),
        # a number as pandas writes it beside gaps is the group without decimals
        (("17.0", " 17.0 ", "017.0", "v1.0", "1.00"), ["17", "17", "017", "v1.0", "1.00"]),
    ],
)
def test_groups_are_texts_or_numbers(values, groups):
    assert [cell_group(value, "x", 1) for value in values] == groups


@pytest.mark.parametrize(
    ("value", "kind"), [({}, "an object"), ([1], "a list"), (False, "true or false")]
)
def test_groups_that_are_none(write, value, kind):
    path = write(keyed(patient=lambda number: value if number == 3 else 1), "list.jsonl")
    with pytest.raises(DataError, match=f"line 4: the group is {kind}; expected a name"):
        opened(path, group="patient")


@pytest.mark.parametrize("key", ["split", "Split", "patient", "Patient", "note"])
def test_a_key_that_the_first_record_lacks_is_refused_where_it_is_read(write, key):
    path = write(keyed(**{key: lambda number: "train" if number else ...}), "list.jsonl")
    if key == "note":
        assert len(opened(path).classes) == 2
    else:
        message = f"line 2, 3.*: this record has '{key}', the first one do"
        with pytest.raises(DataError, match=message):
            opened(path, group="patient")


@pytest.mark.parametrize("multilabel", [True, None])
def test_a_record_without_the_label_of_others_has_not_none_of_the_classes(write, multilabel):
    labels = [["a", "b"], *([name[0]] for name in NAMES[1:])]
    lines = records(zip(NAMES, labels, strict=True), label="labels")
    for wrong in ('{"image": "x.png"}', '{"image": "x.png", "lables": ["a"]}'):
        path = write(lines + wrong, "list.jsonl")
        with pytest.raises(DataError, match="line 21: no 'labels' in this record; write \\[] for"):
            opened(path, multilabel=multilabel)
    path = write(lines.replace('["a", "b"]', "null"), "list.jsonl")
    splits = opened(path, multilabel=True)
    assert labels_by_name(splits)["a/0.png"] == []


@pytest.mark.parametrize("name", ["=1+1", "-hat 100% wool", "@x", "a,=b"])
def test_an_apostrophe_of_the_own_csv_files_is_no_part_of_a_label(write, name):
    cell = csv_text(name)
    assert cell != name
    said = [(image, cell if label == "a" else label) for image, label in ROWS]
    quoted = table([(image, f'"{label}"') for image, label in said])
    assert opened(write(quoted)).classes == (*sorted([name, "b"]),)
    plain = opened(write(table([(image, f"'{label}'") for image, label in ROWS]), "plain.csv"))
    assert plain.classes == ("'a'", "'b'")
    assert opened(write(records(said), "list.jsonl")).classes == (*sorted([cell, "b"]),)


def test_names_without_a_suffix_are_those_of_images(write, images):
    rows = [(name.removesuffix(".png"), label) for name, label in ROWS]
    columns = {"image_column": "id", "label_column": "breed"}
    path = write(table(rows, header="id,breed"))
    found = labels_by_name(opened(path, **columns))
    assert found == {name: [label] for name, label in ROWS}
    below = write(table([(str(n), "xy"[n % 2]) for n in range(10)]), "below.csv")
    assert len(labels_by_name(opened(below, images=str(images / "a")))) == 10
    both = write(table([*rows, ("a/3.png", "b")], header="id,breed"), "both.csv")
    with pytest.raises(DataError, match=r"line 22: a/3.png has two labels, a and b"):
        opened(both, **columns)
    (images / "a/0.jpg").touch()  # of two images, none is guessed
    assert "a/0" in labels_by_name(opened(path, **columns))


def test_other_words_in_a_column_of_splits_are_no_matter_of_a_prediction(write):
    path = write("image,split\na/0.png,fold1\nb/1.png,fold2\n")
    assert [one[-7:] for one in list_images([path])] == ["a/0.png", "b/1.png"]
    splits = opened(write(table(), "all.csv"), exclude=path)
    assert len((*splits.train, *splits.val)) == 18
