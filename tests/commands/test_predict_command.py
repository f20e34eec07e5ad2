"""`vit predict`: a record for every input, in order; one line for what cannot start."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
from PIL import Image

from vit.commands.main import main
from vit.inference.predictor import Predictor

pytestmark = pytest.mark.auto_precision


def give_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_json_lines_say_what_the_predictor_says(predict, tiny_run, input_images):
    code, out, err = predict(*input_images, "--format", "jsonl", "-k", 2)
    assert (code, err) == (0, [])
    expected = Predictor(tiny_run)(input_images, top_k=2)
    assert len(out) == len(expected) > 0
    for line, prediction in zip(out, expected, strict=True):
        scored = [{"label": label, "score": score} for label, score in prediction.predictions]
        assert json.loads(line) == {"image": prediction.image, "predictions": scored}


@pytest.mark.parametrize("style", ["jsonl", "csv", "table"])
def test_bad_images_are_errors_at_their_place(predict, input_images, bad_images, style):
    mixed = [path for pair in zip(input_images, bad_images, strict=False) for path in pair]
    code, out, err = predict(*mixed, "--format", style, "-b", 4)
    assert code == 1
    assert err == [
        f"vit predict: {len(bad_images)} of {len(mixed)} images failed; "
        "each has its error in its row"
    ]
    rows = out if style == "jsonl" else out[1:]
    assert len(rows) == len(mixed)
    for row, path in zip(rows, mixed, strict=True):
        assert path in row
        if style == "jsonl":
            kind = "error" if path in bad_images else "predictions"
            assert json.loads(row).keys() == {"image", kind}
        if style == "csv":
            assert bool(next(csv.reader([row]))[-1]) == (path in bad_images)


def test_folders_patterns_and_lists_keep_their_order(predict, tiny_data, input_images, monkeypatch):
    folder = tiny_data / "val"
    give_input(monkeypatch, os.fsencode(f"{input_images[3]}\r\n\n{input_images[1]}\n"))
    words = (folder / "class2", "-", folder / "apple" / "*.png")
    code, out, _ = predict(*words, "--format", "jsonl")
    found = [json.loads(line)["image"] for line in out]
    expected = [path for path in input_images if "/class2/" in path]
    expected += [input_images[3], input_images[1]]
    expected += [path for path in input_images if "/apple/" in path and path.endswith(".png")]
    assert code == 0
    assert found == expected


def test_a_list_may_be_separated_by_nul(predict, input_images, monkeypatch):
    give_input(monkeypatch, b"\0".join(map(os.fsencode, input_images[:2])) + b"\0")
    assert len(predict("-", "--format", "jsonl")[1]) == 2


def test_names_that_are_not_unicode_work(predict, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff=\x1b[31m.png"
    try:
        with open(name, "wb") as file:
            Image.new("RGB", (8, 8)).save(file, format="PNG")
    except OSError:
        pytest.skip("this file system takes only Unicode names")
    for style in ("jsonl", "csv", "table"):
        code, out, _ = predict(tmp_path, "--format", style)
        assert code == 0
        assert "\x1b" not in "".join(out)
    code, out, _ = predict(tmp_path, "--format", "jsonl")
    assert os.fsencode(json.loads(out[0])["image"]) == name


@pytest.mark.parametrize("name", ["found.jsonl", "found.csv", "found.txt"])
def test_out_is_written_whole_in_the_format_of_its_name(predict, input_images, tmp_path, name):
    out = tmp_path / name
    code, shown, err = predict(*input_images, "--out", out)
    assert (code, shown, err) == (0, [], [])
    text = out.read_text(encoding="utf-8")
    start = {".jsonl": "{", ".csv": "image,label_1,score_1,", ".txt": "image "}
    assert text.startswith(start[out.suffix])
    assert len(text.splitlines()) == len(input_images) + (out.suffix != ".jsonl")
    assert os.listdir(tmp_path) == [name]


def test_out_is_replaced_only_when_asked(predict, refusal, tiny_run, input_images, tmp_path):
    out = tmp_path / "found.csv"
    out.write_text("precious")
    assert "--overwrite" in refusal("predict", tiny_run, input_images[0], "--out", out)
    assert out.read_text() == "precious"
    assert predict(input_images[0], "--out", out, "--overwrite")[0] == 0
    assert out.read_text().startswith("image,")


@pytest.mark.parametrize("broken", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_out_is_untouched_when_the_work_breaks_off(
    predict, input_images, tmp_path, monkeypatch, broken
):
    whole = Predictor.stream

    def stream(self, images, **options):
        yield from whole(self, images[:1], **options)
        raise broken

    monkeypatch.setattr(Predictor, "stream", stream)
    out = tmp_path / "found.jsonl"
    out.write_text("precious")
    code, _, err = predict(*input_images, "--out", out, "--overwrite")
    assert code == (130 if broken is KeyboardInterrupt else 2)
    assert len(err) == 1
    assert out.read_text() == "precious"
    assert os.listdir(tmp_path) == ["found.jsonl"]


def test_an_input_that_is_not_there_has_its_row_and_the_nearest_name(
    predict, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    code, out, err = predict("photso")
    assert (code, len(out)) == (1, 2)
    assert err[0] == "vit predict: photso is not there; did you mean photos?"


def test_an_empty_list_is_one_line(refusal, tiny_run, monkeypatch):
    give_input(monkeypatch, b"\n")
    assert refusal("predict", tiny_run, "-")


@pytest.mark.slow
def test_names_are_the_same_in_every_locale(
    tiny_run, tiny_data, tmp_path, monkeypatch, capfdbinary
):
    (tmp_path / "café").mkdir()
    shutil.copy(next((tiny_data / "val").rglob("*.png")), tmp_path / "café/é.png")
    words = ["predict", str(tiny_run), "café", "--format", "jsonl", "--precision", "fp32"]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    ours = capfdbinary.readouterr().out
    assert json.loads(ours)["image"] == "café/é.png"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ascii_only |= {"PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    theirs = subprocess.run(
        [sys.executable, "-m", "vit", *words], env=ascii_only, capture_output=True, check=True
    )
    assert theirs.stdout == ours


def test_a_name_that_is_not_utf8_is_one_line(monkeypatch, refusal):
    monkeypatch.setattr("vit.commands.models_command.run", lambda _args: "caf\udce9".encode())
    said = refusal("models")
    assert said == "vit models: a name is not UTF-8, rename it: ...caf\\udce9..."


NO_ROOM = "vit predict: the output could not be written: No space left on device"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_device_is_one_line(tiny_run, tiny_data):
    command = [sys.executable, "-m", "vit", "predict", str(tiny_run), str(tiny_data / "val")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "--format", "csv"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr.splitlines()) == (2, [NO_ROOM])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_file_on_a_full_device_is_one_line(predict, tiny_data):
    code, out, err = predict(tiny_data / "val", "--format", "csv", "--out", "/dev/full")
    assert (code, out, err) == (2, [], [NO_ROOM])
