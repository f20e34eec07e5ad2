"""vit.predict does what `vit predict` does, in one call and under the same names."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import openpyxl
import pytest
from PIL import Image

import vit
from vit.commands.main import main
from vit.config.inference_config import InferenceConfig, PredictionConfig
from vit.data.sources.open_dataset import list_images
from vit.errors import ConfigError, RunError, VitError
from vit.inference.prediction_job import find_images, input_rows, run_on_ray
from vit.output.resumable_output import BlockLog

pytestmark = pytest.mark.auto_precision


def test_one_call_writes_what_the_command_writes(tiny_run, tiny_data, bad_images, tmp_path):
    inputs = [str(tiny_data / "val"), *bad_images]
    lines, steps, paths = [], [], {}
    for name in ("library", "command"):
        (tmp_path / name).mkdir()
        paths[name] = [str(tmp_path / name / file) for file in ("a.csv", "a.npy")]
    out, vectors = paths["library"]
    settings = {"batch_size": 4, "top_k": 2, "sort_into": str(tmp_path / "sorted")}
    told = {"notify": lines.append, "progress": lambda *step: steps.append(step)}
    failed = vit.predict(tiny_run, inputs, out=out, embeddings=vectors, **settings, **told)
    total = 27 + len(bad_images)
    assert failed == len(bad_images)
    assert lines[0].startswith("27 images sorted into")
    assert lines[1].startswith(f"{failed} of {total} images failed")
    assert (steps[0], steps[-1]) == ((0, total), (total, total))
    out, vectors = paths["command"]
    words = ["-b", "4", "--top-k", "2", "--out", out, "--embeddings", vectors]
    assert main(["predict", str(tiny_run), *inputs, *words]) == 1
    for one, other in zip(paths["library"], paths["command"], strict=True):
        assert Path(one).read_bytes() == Path(other).read_bytes()
    assert np.load(vectors).shape == (total, 32)


def test_csv_for_a_spreadsheet_has_a_byte_order_mark_in_a_file_only(tiny_run, tmp_path, capsys):
    """tests/output/test_prediction_results.py has the separators and digits of the cells."""
    image, mark = tmp_path / "Grün.png", b"\xef\xbb\xbf"
    Image.new("RGB", (8, 8)).save(image)
    plain = shutil.copy(image, tmp_path / "a.png")
    out, options = tmp_path / "a.csv", {"precision": "fp32", "overwrite": True}
    for given, settings, beginning in (
        (plain, {}, b"image,label_1"),
        (image, {}, mark + b"image,label_1"),
        (plain, {"csv_separator": "semicolon"}, mark + b"image;label_1"),
    ):
        vit.predict(tiny_run, given, out=str(out), **settings, **options)
        assert out.read_bytes().startswith(beginning)
        assert list_images([str(out)]) == [str(given)]
    vit.predict(tiny_run, image, format="csv", precision="fp32")
    assert capsys.readouterr().out.startswith("image,")


def test_a_workbook_has_the_rows_of_the_json_lines(tiny_run, input_images, bad_images, tmp_path):
    inputs = [*input_images[:5], bad_images[0]]
    options = {"precision": "fp32", "top_k": 2, "batch_size": 2}
    for name in ("a.xlsx", "a.jsonl"):
        assert vit.predict(tiny_run, inputs, out=str(tmp_path / name), **options) == 1
    header, *rows = openpyxl.load_workbook(tmp_path / "a.xlsx").active.iter_rows(values_only=True)
    assert header == ("image", "label_1", "score_1", "label_2", "score_2", "error")
    for row, line in zip(rows, (tmp_path / "a.jsonl").read_text().splitlines(), strict=True):
        record = json.loads(line)
        expected = [record["image"], None, None, None, None, record.get("error")]
        for place, one in enumerate(record.get("predictions", [])):
            score = pytest.approx(one["score"], rel=1e-15)
            expected[1 + 2 * place : 3 + 2 * place] = [one["label"], score]
        assert list(row) == expected
    lines = []
    again = {"resume": True, "out": str(tmp_path / "b.xlsx"), "notify": lines.append}
    for _ in range(2):
        assert vit.predict(tiny_run, inputs, **again, **options) == 1
    assert lines[1].endswith("b.xlsx is complete")
    names = sorted(path.name for path in tmp_path.glob("?.*"))
    assert names == ["a.jsonl", "a.xlsx", "b.xlsx", "b.xlsx.done"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "xlsx"}, "--format xlsx is a file: give --out FILE"),
        ({"out": "a.xlsx", "explain": "maps"}, "--format xlsx is a file"),
        ({"out": "a.jsonl", "csv_digits": 3}, "csv_digits=3: the format is jsonl"),
        ({"otu": "a.csv"}, "otu is not a setting of a prediction; did you mean out?"),
        ({"model": None}, "model=None (NoneType): give a run folder"),
        ({"inputs": [np.zeros(3)]}, "inputs=array([0., 0., 0.]) (ndarray): give files, folders"),
    ],
)
def test_wrong_settings_are_one_line(tiny_run, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        vit.predict(**{"model": tiny_run, "inputs": ["a.jpg"], **settings})
    assert not list(tmp_path.iterdir())


@pytest.fixture
def sheet(tiny_data, tmp_path):
    """A list beside its images, with names relative to it, and one that is there again."""
    shutil.copytree(tiny_data / "val", tmp_path / "traps/Site A")
    names = sorted(p.relative_to(tmp_path / "traps") for p in (tmp_path / "traps").rglob("*.*"))
    rows = [(str(name), number % 3, f"-{number}.5") for number, name in enumerate(names)][::-1]
    with open(tmp_path / "traps/sheet.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("photo", "site", "lon"), *rows, (rows[0][0], "again", "1")])
    return tmp_path / "traps/sheet.csv", rows


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_rows_can_be_joined_with_the_list(tiny_run, sheet, tmp_path, suffix, monkeypatch):
    listed, rows = sheet
    listed.write_text(listed.read_text().replace("photo", "path"))
    monkeypatch.chdir(tmp_path)
    out = f"rows{suffix}"
    settings = {"device": "cpu", "precision": "fp32", "out": out, "batch_size": 4}
    assert vit.predict(tiny_run, "traps/sheet.csv", **settings) == 0
    with open(out, encoding="utf-8-sig", newline="") as file:
        found = [*csv.DictReader(file)] if suffix == ".csv" else [*map(json.loads, file)]
    assert [(row["path"], int(row["site"]), row["lon"]) for row in found] == rows
    assert all(row["image"] == f"traps/{row['path']}" for row in found)
    assert list_images([out]) == [row["image"] for row in found]  # it is a list itself


def test_a_list_that_was_changed_is_not_resumed(tiny_run, sheet, tmp_path, monkeypatch):
    listed, _ = sheet
    listed.write_text(listed.read_text().replace("photo", "file_name"))
    settings = {"device": "cpu", "precision": "fp32", "out": str(tmp_path / "rows.jsonl")}
    append = BlockLog.append

    def append_once(log, block):
        append(log, block)
        raise RunError("full")

    with monkeypatch.context() as patch:
        patch.setattr(BlockLog, "append", append_once)
        with pytest.raises(VitError, match="full"):
            vit.predict(tiny_run, str(listed), **settings)
    before = listed.read_text()
    listed.write_text(before.replace("-1.5", "-1.7"))
    with pytest.raises(RunError, match="was begun with another list cells"):
        vit.predict(tiny_run, str(listed), **settings, resume=True)
    listed.write_text(before)
    assert vit.predict(tiny_run, str(listed), **settings, resume=True) == 0
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert row["list_file_name"].startswith("Site A/")  # else it would be read by that column


def test_rows_of_an_evaluation_have_the_cells_of_the_list(tiny_run, sheet, tmp_path):
    rows = sheet[1]
    with open(tmp_path / "traps/labelled.jsonl", "w", encoding="utf-8") as file:
        for name, site, lon in rows:
            row = {"image": name, "label": name.split("/")[1], "site": site, "lon": [lon]}
            file.write(json.dumps(row) + "\n")
    out = tmp_path / "rows.jsonl"
    settings = {"device": "cpu", "precision": "fp32", "out": str(out)}
    vit.evaluate(tiny_run, str(tmp_path / "traps/labelled.jsonl"), **settings)
    found = {row["list_image"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(found) == len(rows)
    for name, site, lon in rows:
        assert (found[name]["site"], found[name]["lon"]) == (site, [lon])
        assert found[name]["label"] == found[name]["list_label"] == name.split("/")[1]


def test_workers_of_ray_have_the_cells_of_lists_without_addresses(sheet, tmp_path, monkeypatch):
    listed, rows = sheet
    listed.write_text(listed.read_text().replace("photo", "path"))
    (tmp_path / "web.csv").write_text("image,site\nhttps://a.example/1.png,A\n")
    given = {}
    monkeypatch.setattr(
        "vit.inference.ray_inference.predict_with_ray", lambda *_, **words: given.update(words)
    )
    inputs = (str(listed), str(tmp_path / "web.csv"))
    config = PredictionConfig(model="run", inputs=inputs, out="a.jsonl", format="jsonl")
    run_on_ray(config, InferenceConfig(), [], print)
    assert [row["path"] for row in given["cells"].values()] == [name for name, *_ in rows]


def found(word, *, urls):
    notes = []
    return find_images([str(word)], notify=notes.append, urls=urls)


def test_local_lists_are_read_alike_by_all_engines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / "data" / name)
    listed = tmp_path / "data" / "list.csv"
    for header in ("image", "file_name"):
        listed.write_text(f"{header},label\na.png,x\nb.png,y\n")
        names = found("data/list.csv", urls=True)
        assert names == found("data/list.csv", urls=False)
        assert [os.path.relpath(name) for name in names] == ["data/a.png", "data/b.png"]
    listed.write_text("image\ns3://bucket/a.png\nb.png\n")
    assert found("data/list.csv", urls=True) == ["s3://bucket/a.png", "data/b.png"]


def test_rows_of_an_image_in_several_lists_have_the_cells_of_all(tmp_path):
    (tmp_path / "a.csv").write_text("path,site,n\nx/1.png,A,1\nx/1.png,B,2\nx/2.png,C,3\n")
    (tmp_path / "b.jsonl").write_text('{"file_name": "x/1.png", "site": "D", "more": [1]}\n')
    rows = input_rows([str(tmp_path / "a.csv"), str(tmp_path), "-", str(tmp_path / "b.jsonl")])
    one, two = (str(tmp_path / f"x/{number}.png") for number in (1, 2))
    first_line = {"path": "x/1.png", "site": "A", "n": "1"}
    assert rows[one] == {**first_line, "file_name": "x/1.png", "more": [1]}
    assert rows[two] == {"path": "x/2.png", "site": "C", "n": "3"}
