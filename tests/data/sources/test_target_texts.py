"""Columns of texts beside columns of numbers: classes of several questions of an image."""

import json
import math
import unicodedata

import pytest

from tests.data.sources.conftest import opened, png
from vit.config import DataConfig
from vit.data.image_archives import relative
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_eval_split, text_targets
from vit.data.sources.train_val_split import Fold
from vit.errors import ConfigError, DataError

COUNT, TARGET = 24, ("colour", "age")
COLOURS = ("red", "green", "blue")


@pytest.fixture
def write(tmp_path):
    """Writes a list of 24 images: cells of the columns split, colour, sleeve and age by place."""
    for place in range(COUNT):
        (tmp_path / f"{place:02}.png").write_bytes(png(3 * place))

    def write(change=lambda _place, cells: cells, name="list.csv", places=range(COUNT)):
        lines = ["image,split,colour,sleeve,age"]
        for n in places:
            cells = ["train" if n % 2 else "val", COLOURS[n % 3], ("long", "short")[n % 5 > 2], n]
            lines.append(",".join(map(str, [f"{n:02}.png", *change(n, cells)])))
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return write


def read(path, target=TARGET, **settings):
    return opened(path, target=target, labels=False, texts=None, **settings)


def cell(place, column, text):
    """A change of one cell."""
    return lambda n, cells: [*cells[:column], text, *cells[column + 1 :]] if n == place else cells


def test_a_text_becomes_the_index_of_its_class_and_an_empty_cell_nan(write):
    empty = {3: 1, 4: 3}  # place -> column
    path = write(lambda n, cells: cell(n, empty[n], "")(n, cells) if n in empty else cells)
    splits = read(path, ("sleeve", "colour", "age"))
    assert splits.target_classes == (("long", "short"), ("blue", "green", "red"), ())
    assert (splits.targets, splits.classes) == (("sleeve", "colour", "age"), ())
    for sample in (*splits.train, *splits.val):
        place = int(relative(sample.path, splits.root)[:2])
        sleeve, colour, age = sample.numbers
        assert splits.target_classes[0][int(sleeve)] == ("long", "short")[place % 5 > 2]
        assert (
            math.isnan(colour)
            if place == 3
            else (splits.target_classes[1][int(colour)] == COLOURS[place % 3])
        )
        assert math.isnan(age) if place == 4 else age == place


def test_json_lines_and_lists_of_each_split_have_the_same_samples(write, tmp_path):
    whole = read(write())
    folder = tmp_path / "data"
    folder.mkdir()
    for name, odd in (("train", 1), ("val", 0)):
        rows = [
            {"image": f"../{n:02}.png", "colour": COLOURS[n % 3], "age": n}
            for n in range(odd, COUNT, 2)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    found = read(str(folder), allow_outside=True)
    assert [one.numbers for one in found.train] == [one.numbers for one in whole.train]
    assert [one.numbers for one in found.val] == [one.numbers for one in whole.val]
    assert found.target_classes == whole.target_classes


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (cell(2, 1, "grean"), "line 4: colour is 'grean', which no training image is"),
        (cell(3, 1, "red|blue"), "line 5: red, blue: an image has one class of each column"),
        (cell(3, 1, "[]"), "line 5: an empty list: an image has one class"),
        (cell(3, 3, "old"), "line 5: age: 'old' is no number"),
        (lambda _n, cells: [cells[0], "", *cells[2:]], "target=colour: all cells"),
        (lambda n, cells: cells if n < 23 else ["train", "", "", ""], "line 25: nothing in colour"),
    ],
)
def test_wrong_cells_are_refused_with_their_line(write, change, error):
    with pytest.raises(DataError, match=error.replace("|", r"\|").replace("[", r"\[")):
        read(write(change))


def test_validation_images_are_held_out_of_each_class_of_each_target(write):
    whole = lambda n, cells: ["train", *cells[1:2], "rare" if n < 2 else cells[2], cells[3]]  # noqa: E731
    target = ("colour", "sleeve")
    splits = read(write(whole), target, val_share=0.25)
    assert splits.made
    assert 5 <= len(splits.val) <= 7
    for place, classes in enumerate(splits.target_classes):
        for samples in (splits.train, splits.val):
            assert {one.numbers[place] for one in samples} == {*map(float, range(len(classes)))}
    seen = []
    for number in (1, 2, 3):
        fold = read(write(whole), target, fold=Fold(number, 3))
        seen += [one.path for one in fold.val]
        assert {one.numbers[0] for one in fold.train} == {0, 1, 2}
    assert sorted(seen) == sorted({*seen})
    assert len(seen) == COUNT


def test_an_evaluation_takes_the_classes_of_the_network(write):
    decomposed = unicodedata.normalize("NFD", "grün")
    path = write(lambda n, cells: [cells[0], decomposed if n % 2 else "red", *cells[2:]])
    spec = DatasetSpec(path, target=TARGET, labels=False, texts=("colour",))
    choices = (("blau", "grün", "red"), ())
    found, _ = open_eval_split(
        DatasetSpec(**{**vars(spec), "choices": choices}), split="train", classes=("a", "b")
    )
    assert {one.numbers[0] for one in found} == {1.0}
    assert [one.numbers[1] for one in found] == [*range(1, COUNT, 2)]
    with pytest.raises(DataError, match="line 2: colour is 'red', which no training image is"):
        open_eval_split(
            DatasetSpec(**{**vars(spec), "choices": (("blau", "rot"), ())}), split="val", classes=()
        )


def test_names_of_columns_of_rows_are_no_targets():
    for name in ("colour_score", "colour_set", "colour_low"):
        with pytest.raises(ConfigError, match="NAME_low, _high, _score and _set; name each once"):
            DataConfig(target=("colour", name))


def test_which_columns_are_texts_is_found_in_all_lists(write):
    spec = DatasetSpec(write(), target=("age", "colour", "sleeve"))
    assert text_targets(spec) == {"colour": False, "sleeve": False}
