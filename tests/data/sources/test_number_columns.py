"""Numbers in columns of lists: what is read, what is refused, and how they reach a batch."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import openpyxl
import pytest
import torch

from tests.data.sources.conftest import noted, opened, png
from vit.config import DataConfig
from vit.data.dataloader import EvaluationLoader
from vit.data.image_archives import relative
from vit.data.preprocessing import Preprocessing
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.number_columns import read_numbers
from vit.data.sources.open_dataset import open_eval_split, read_source, text_targets
from vit.data.sources.train_val_split import Fold
from vit.errors import ConfigError, DataError
from vit.training.setup import fingerprint

COUNT = 40
PREPROCESSING = Preprocessing(image_size=(8, 8))
NUMBERS = {f"{place:02}.png": place / 4 - 3 for place in range(COUNT)}


@pytest.fixture
def folder(tmp_path):
    """Forty images."""
    for name in NUMBERS:
        (tmp_path / name).write_bytes(png(3 * int(name[:2])))
    return tmp_path


@pytest.fixture
def write(folder):
    """Writes a list of the images with the cells of some, by their place; others are numbers."""

    def write(cells=(), name="list.csv", header="image;age", usual="{}"):
        rows = [[name, usual.format(number)] for name, number in NUMBERS.items()]
        for row, cell in zip(rows, cells, strict=False):
            row[1:] = [cell]
        path = folder / name
        path.write_text("\n".join([header, *map(";".join, rows)]) + "\n", encoding="utf-8")
        return str(path)

    return write


def numbers_in(path, *target, **settings):
    return opened(path, target=target or ("age",), labels=False, **settings)


def by_name(splits):
    every = (*splits.train, *splits.val, *splits.test)
    return {relative(one.path, splits.root): one.numbers for one in every}


def refused(path, pattern, *target, error=DataError, **settings):
    with pytest.raises(error, match=pattern) as raised:
        numbers_in(path, *target, **settings)
    assert "\n" not in str(raised.value)


def test_every_form_of_a_list_gives_the_same_numbers(folder, write):
    expected = {name: (number,) for name, number in NUMBERS.items()}
    book = openpyxl.Workbook()
    for row in [("image", "age"), *NUMBERS.items()]:
        book.active.append(row)
    book.save(folder / "list.xlsx")
    lines = [json.dumps({"image": name, "age": number}) for name, number in NUMBERS.items()]
    (folder / "list.jsonl").write_text("\n".join(lines))
    tabs = "image\tage\n" + "\n".join(f"{name}\t{number}" for name, number in NUMBERS.items())
    (folder / "list.tsv").write_text(tabs)
    first = numbers_in(write(), "Age")
    assert by_name(first) == expected
    assert (first.classes, first.units, first.multilabel) == ((), ("",), False)
    for name in ("list.xlsx", "list.jsonl", "list.tsv"):
        splits = numbers_in(folder / name)
        assert (splits.train, splits.val) == (first.train, first.val)


@pytest.mark.parametrize(
    ("usual", "unit", "note"),
    [
        ("{} cm", "cm", "list.csv: numbers of age: in cm"),
        ("{}cm", "cm", "in cm"),
        ("{} %", "%", "in %"),
        ("{} kg/m2", "kg/m2", "in kg/m2"),
        ("{} °C", "°C", "in °C"),
    ],
)
def test_a_unit_of_all_cells_is_read_and_noted_once(write, usual, unit, note):
    splits = numbers_in(write(usual=usual))
    assert splits.units == (unit,)
    assert by_name(splits)["01.png"] == (-2.75,)
    assert len([text for text in splits.notes if note in text]) == 1


def test_decimal_commas_are_read_and_noted(write):
    cells = [str(number).replace(".", ",") for number in NUMBERS.values()]
    splits = numbers_in(write(cells))
    assert by_name(splits) == {name: (number,) for name, number in NUMBERS.items()}
    assert noted(splits, "numbers of age: with decimal commas")
    plain = read_numbers(["0,125", "1,250", "\u22123,5", "1e3", ""], [2, 3, 4, 5, 6], is_table=True)
    assert plain.values[:4] == [0.125, 1.25, -3.5, 1000]
    assert math.isnan(plain.values[4])
    assert not plain.errors


@pytest.mark.parametrize(
    ("cells", "pattern"),
    [
        (["abc"], r"list\.csv, line 2: age: 'abc' is no number; write digits"),
        (["1", "NaN"], "line 3: age: NaN; leave the cell empty"),
        (["1", "-inf"], "line 3: age: -inf; leave the cell empty"),
        (["1e999"], "line 2: age: an infinite number"),
        (["1e39"], "line 2: age: an infinite number"),  # in float32
        (["2024-05-01"], "'2024-05-01' is no number"),
        (["1,234.5"], "'1,234.5' is no number"),
        (["#N/A"], "'#N/A' is no number"),
        (["12 cm"], "line 2: age: cm here, and none in line 3; write all numbers .* in one unit"),
        (["3,5"], "line 2: age: a comma here, and a point in line 3; write 1234.5"),
        ([""], "line 2: nothing in age; fill it in, or leave the line out"),
        (["abc", "x", ""], r"3 lines cannot be read: line 2: .*; line 3: .*; line 4: nothing"),
    ],
)
def test_what_is_no_number_is_refused_with_its_line(write, cells, pattern):
    refused(write(cells), pattern)


def test_two_units_and_thousands_are_refused(write):
    cells = [f"{number} cm" for number in NUMBERS.values()]
    refused(write([*cells[:-1], "3 mm"]), "line 41: age: mm here, and cm in line 2; write all")
    cells = [f"{place + 1},{250 + place}" for place in range(COUNT)]
    refused(write(cells), "40 lines .*: a comma before three digits in each cell .*; write 1234.5")
    assert by_name(numbers_in(write([*cells[:-1], "0,125"])))["00.png"] == (1.25,)


@pytest.mark.parametrize("value", ["true", '"3"', "[1]", '{"a": 1}', "Infinity", "1e999"])
def test_in_json_numbers_are_numbers(folder, value):
    lines = [f'{{"image": "{name}", "age": {number}}}' for name, number in NUMBERS.items()]
    path = folder / "list.jsonl"
    path.write_text("\n".join([*lines[:-1], f'{{"image": "39.png", "age": {value}}}']))
    refused(path, r"list\.jsonl, line 40: age: ")
    path.write_text("\n".join([*lines[:-1], '{"image": "39.png"}']))
    refused(path, "line 40: no 'age' in this record; write .* null for no group or number")


def test_empty_cells_are_nan_where_another_target_is_filled(folder, write):
    path = write([f"{place};" for place in range(9)], header="image;age;width", usual="{};2")
    splits = numbers_in(path, "width", "age")
    numbers = by_name(splits)
    assert math.isnan(numbers["03.png"][0])
    assert numbers["03.png"][1] == 3
    assert numbers["39.png"] == (2, NUMBERS["39.png"])
    assert noted(numbers_in(path, "age"), "numbers from age; not used: width")


def test_columns_that_cannot_be_targets_are_refused(write):
    refused(write(), "target=agee: no such column among age; did you mean age", "agee")
    refused(write(), "target=image: no such column among age", "image")
    for names in (("image",), ("Error",), ("age", "Age"), ("age", "age_low")):
        with pytest.raises(ConfigError, match=r"answers have image, error, .* each once"):
            DataConfig(data="x", target=names)


def test_another_number_of_an_image_is_a_contradiction(folder, write):
    path = Path(write())
    path.write_text(path.read_text() + "03.png;-2.25\n")
    assert noted(numbers_in(path), "left out 1 line that name an image again")
    path.write_text(path.read_text() + "03.png;7\n")
    refused(path, r"line 43: 03\.png has other numbers in line 5; correct one of them")


def test_numbers_are_read_from_lists_only(folder, write):
    (folder / "a").mkdir()
    refused(folder, f"target=age: {folder} is not a list", error=ConfigError)
    refused("hf:a/b", "target=age: hf:a/b is not a list", error=ConfigError)
    refused(write(), "labels=x.csv: a list of classes, and numbers", error=ConfigError,
            label_list="x.csv")  # fmt: skip
    spec = DatasetSpec(write(), target=("age",))
    with pytest.raises(ConfigError, match=r"target=age: classes are read here.*--label-column"):
        read_source(spec)
    assert read_source(dataclasses.replace(spec, label_column="age")).train[0].labels == ("-3.0",)


def test_lists_of_splits_have_one_unit(folder, write):
    train, val = write(name="train.csv", usual="{} cm"), write(name="val.csv", usual="{} cm")
    (folder / "all").mkdir()
    for path in (train, val):
        Path(path).rename(folder / "all" / Path(path).name)
    spec = DatasetSpec(str(folder / "all"), images=str(folder), target=("age",), labels=False)
    index = read_source(spec)
    assert ({*index.splits}, index.units) == ({"train", "val"}, ("cm",))
    (folder / "all" / "val.csv").write_text("image;age\n00.png;3 mm\n")
    with pytest.raises(DataError, match=r"target=age: cm in .*train\.csv, mm in .*val\.csv; write"):
        read_source(spec)
    expected = dataclasses.replace(spec, split="val", units=("cm",))
    with pytest.raises(DataError, match=r"target=age: mm in .*val\.csv, cm in the training"):
        read_source(expected)


def test_held_out_images_and_folds_spread_over_the_range(write):
    path = write()
    for splits in (
        numbers_in(path, val_share=0.25),
        numbers_in(path, fold=Fold(1, 4)),
        numbers_in(path, group=r"^\d+", val_share=0.25),
    ):
        values = sorted(one.numbers[0] for one in splits.val)
        # one of each tenth of the range
        assert [int((value + 3) * 4 * 10 / COUNT) for value in values] == [*range(10)]
    folds = [{one.path for one in numbers_in(path, fold=Fold(n, 4)).val} for n in range(1, 5)]
    assert len(set.union(*folds)) == sum(map(len, folds)) == COUNT


def test_an_evaluation_has_the_numbers(folder, write):
    spec = DatasetSpec(write(), target=("age",), labels=False)
    samples, notes = open_eval_split(spec, split="val", classes=("age",))
    assert [one.numbers[0] for one in samples] == [*NUMBERS.values()]
    assert not any("class" in note for note in notes)


def test_the_fingerprint_changes_with_a_number(write):
    first = fingerprint(numbers_in(write()))
    assert fingerprint(numbers_in(write())) == first
    assert fingerprint(numbers_in(write(["-3.5"]))) != first


def test_batches_have_float32_numbers(folder, write):
    samples = numbers_in(write([f"{n};" for n in range(9)], header="image;age;b", usual="{};2"),
                         "age", "b").train  # fmt: skip
    expected = np.array([one.numbers for one in samples], np.float32)
    for workers in (0, 1):
        loader = EvaluationLoader(samples, PREPROCESSING, batch_size=8, workers=workers)
        try:
            labels = torch.cat([batch.labels for batch in loader])
        finally:
            loader.close()
        assert labels.dtype == torch.float32
        np.testing.assert_array_equal(labels.numpy(), expected)
        assert np.isnan(expected).any()
        assert loader.empty_batch.labels.shape == (0, 2)


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ([], "numbers"),
        (["", "7"], "numbers"),
        (["cat", "dog"] * 20, "classes"),
        (["1", "2", "other"] * 14, "classes"),
        (["cat"], "line 2: age: 'cat' is no number"),
        (["nan"] * 20, "numbers"),  # which reading refuses
        ([""] * COUNT, "all cells .* are empty"),
    ],
)
def test_a_column_holds_numbers_or_classes(write, cells, kind):
    spec = DatasetSpec(write(cells), target=("age",))
    if kind in ("numbers", "classes"):
        assert text_targets(spec) == ({"age": False} if kind == "classes" else {})
    else:
        with pytest.raises(DataError, match=kind):
            text_targets(spec)


def test_several_columns_hold_numbers_or_texts(folder, write):
    path = write(header="image;age;name", usual="{};cat")
    assert text_targets(DatasetSpec(path, target=("age", "name"))) == {"name": False}
    with pytest.raises(ConfigError, match=re.escape("is not a list")):
        text_targets(DatasetSpec(str(folder), target=("age",)))
