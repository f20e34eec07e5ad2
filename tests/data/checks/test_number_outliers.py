"""Numbers that `vit check` reports: far from the others, missing, constant, or two of one file."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from vit.commands.main import main
from vit.data.checks.number_outliers import RANGES, far


@pytest.fixture
def checked(tmp_path, capsys):
    """Writes a list of images with the cells, checks it; returns exit code, lines and JSON."""

    def check(cells, *words, copy=None):
        random = np.random.default_rng(0)
        rows = ["image,age,size" if "," in str(cells[0]) else "image,age"]
        for number, cell in enumerate(cells):
            pixels = random.integers(0, 256, (20, 24, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}.png")
            rows.append(f"{number}.png,{cell}")
        if copy is not None:
            (tmp_path / "copy.png").write_bytes((tmp_path / "0.png").read_bytes())
            rows.append(f"copy.png,{copy}")
        (tmp_path / "list.csv").write_text("\n".join(rows))
        found = tmp_path / "found.json"
        data = str(tmp_path / "list.csv")
        code = main(["check", data, "--target", "age", "--json", str(found), "--no-cache", *words])
        return code, capsys.readouterr().out.splitlines(), json.loads(found.read_text())

    return check


def by_kind(found):
    return {one["kind"]: one["detail"] for one in found["problems"]}


def test_a_list_of_numbers_has_its_range_and_its_faults(checked):
    cells = [f"{10 + n % 7} y" for n in range(30)] + ["1200 y", ""]
    code, lines, found = checked(cells, copy="12 y")
    assert code == 1  # a line without a number stops a training
    assert lines[:2] == ["32 images with numbers", "age: 32 numbers from 10 to 1200 y, median 13"]
    assert found["targets"] == [
        {"name": "age", "unit": "y", "count": 32, "min": 10, "median": 13, "max": 1200}
    ]
    faults = by_kind(found)
    assert faults["far_number"].startswith("age is 1200, far from the others")
    assert faults["far_number"].endswith("line 32)")
    assert "line 33: nothing in age" in faults["bad_line"]


def test_two_numbers_of_one_file_are_named_with_their_lines(checked):
    code, _, found = checked(range(12), copy="99")
    assert code == 0
    assert "the same file with 0 and 99" in by_kind(found)["two_numbers"]
    assert "line 14" in by_kind(found)["two_numbers"]


def test_a_constant_target_is_an_error(checked):
    code, _, found = checked([7] * 6)
    assert code == 1
    assert (
        by_kind(found)["one_number"] == "target age: is 7 in all training images; nothing to learn"
    )


def test_an_empty_cell_beside_another_target_is_a_note(checked):
    _, lines, found = checked([f"{n},{n % 5 or ''}" for n in range(10)], "--target", "age,size")
    assert lines[2] == "size: 8 numbers from 1 to 4, median 2.5"
    assert by_kind(found)["no_number"] == "2 images of 10 have an empty cell in size"


def test_columns_of_texts_are_counted_by_class(checked):
    cells = [f"{'old' if n % 3 else 'new'},{n}" for n in range(12)]
    _, lines, found = checked(cells, "--target", "age,size", copy="new,5")
    assert lines[0] == "13 images with numbers, and classes"
    assert lines[1] == "age: 13 images in 2 classes, new 5, old 8"
    assert found["targets"][0] == {"name": "age", "count": 13, "classes": {"new": 5, "old": 8}}
    assert "the same file with new, 0 and new, 5" in by_kind(found)["two_numbers"]
    _, _, found = checked([f"new,{n}" for n in range(12)], "--target", "age,size")
    assert "age: is new in all training images" in by_kind(found)["one_number"]


@pytest.mark.slow
def test_predictions_suspect_numbers_far_from_them(checked, tmp_path):
    random, rows = np.random.default_rng(0), tmp_path / "rows.jsonl"
    numbers = [float(n) for n in range(40)]
    found = [n + random.normal() for n in numbers]
    numbers[3], numbers[5] = 30.0, 90.0
    written = [
        {"image": str(tmp_path / f"{n}.png"), "age": found[n], "true_age": numbers[n]}
        | ({"age_low": found[n] - 2, "age_high": found[n] + 2} if n != 3 else {})
        for n in range(40)
    ]
    written += [{"image": "unreadable.png", "error": "cut short"}]
    rows.write_text("\n".join(map(json.dumps, written)) + "\n")
    suspects = tmp_path / "suspects.csv"
    words = ["--rows", str(rows), "--write-list", str(suspects), "--overwrite"]
    _, _, checks = checked(numbers, *words)
    kinds = [one for one in checks["problems"] if one["kind"] == "suspected_number"]
    assert [Path(one["image"]).name for one in kinds] == [
        "3.png",
        "5.png",
    ]  # the first: no interval
    assert [one["labels"][0] for one in kinds] == ["30", "90"]
    assert "line 7" in kinds[1]["detail"]
    assert suspects.read_text().splitlines()[2].startswith("5.png,90,")
    _, _, checks = checked([*numbers[:5], 5.0, *numbers[6:]], *words)  # corrected since
    assert sum(one["kind"] == "suspected_number" for one in checks["problems"]) == 1
    rows.write_text('{"image": "0.png", "predictions": []}\n')
    assert main(["check", str(tmp_path / "list.csv"), "--target", "age", "--rows", str(rows)]) == 2


def test_texts_and_a_task_make_classes(checked):
    _, lines, found = checked(["young", "old"] * 6)
    assert (lines[0], found["classes"]) == ("12 images in 2 classes", 2)
    assert "targets" not in found
    _, lines, _ = checked([1, 2] * 6, "--task", "classify")
    assert lines[0] == "12 images in 2 classes"


def test_far_is_tukeys_rule_and_logarithms_excuse_orders_of_magnitude():
    values = np.r_[np.random.default_rng(0).normal(0, 1, 200), 40.0, np.nan]
    known = values[:-1]
    low, high = np.quantile(known, [0.25, 0.75])
    reach = RANGES * stats.iqr(known)
    expected = [one < low - reach or one > high + reach for one in known]
    assert far(values).tolist() == [*expected, False]
    assert sum(expected) == 1
    spread = np.exp(np.random.default_rng(0).normal(0, 2, 300))
    assert not far(spread).any()
    assert far(np.r_[spread, 1e9]).sum() == 1
    assert not far(np.r_[np.zeros(9), 5.0]).any()
