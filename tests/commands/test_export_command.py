"""`vit export` writes two files, and says in one line what it cannot do."""

import json

import numpy as np
import pytest
from PIL import Image

from vit.commands.main import main
from vit.export import export_formats, verification
from vit.exported.onnx_session import OnnxSession
from vit.inference.predictor import Predictor


def export(*words):
    return main(["export", *map(str, words)])


@pytest.mark.slow
def test_a_captioner_becomes_two_files_that_only_overwrite_replaces(
    vit, refusal, captioner, tmp_path, tiny_data
):
    out, beside = tmp_path / "pets.onnx", tmp_path / "pets.decoder.onnx"
    beside.write_text("mine")
    words = ("export", captioner, "--out", out)
    taken = "pets.decoder.onnx exists; choose another name, or add --overwrite"
    assert taken in refusal(*words)
    assert beside.read_text() == "mine"
    code, shown, notes = vit(*words, "--overwrite", "--precision", "fp32")
    assert (code, notes[-1]) == (0, "all agree")
    assert [line.split(" (")[0] for line in shown] == [f"written: {out}", f"written: {beside}"]
    assert notes[0].startswith("same as torch up to ")
    assert {path.name for path in tmp_path.iterdir()} == {out.name, beside.name}
    image = str(next(tiny_data.rglob("*.png")))
    (answer,) = Predictor(out)([image])
    assert answer.caption is not None
    rows = []
    for words in ([captioner, "--precision", "fp32"], [out]):  # the file is of float32
        code, shown, _ = vit("predict", *words, image, "missing.png", "--format", "jsonl")
        assert code == 1
        rows.append([*map(json.loads, shown)])
    assert rows[0][1] == rows[1][1]
    assert rows[0][0]["caption"] == rows[1][0]["caption"] == answer.caption
    assert rows[0][0]["score"] == pytest.approx(rows[1][0]["score"], abs=1e-4)
    for words, reason in (("--beams 2", "beams=2"), ("--explain why", "explain='why'")):
        assert reason in refusal("predict", out, image, *words.split())


@pytest.mark.usefixtures("traced_once")
def test_a_classifier_becomes_one_verified_file(tiny_run, tmp_path, capsys, tiny_data, monkeypatch):
    out, numbers = tmp_path / "pets.onnx", tmp_path / "pets.json"
    before = []

    def verify(file, run):
        before.append(capsys.readouterr())
        assert OnnxSession(file)
        return verification.verify(file, run=run)

    monkeypatch.setattr(export_formats, "verify", verify)
    flags = ("--validation", tiny_data, "--json", numbers, "--precision", "fp16")
    assert export(tiny_run, "--out", out, *flags) == 0
    printed = capsys.readouterr()
    (measured,) = before
    assert measured.out.startswith(f"written: {out} (")
    assert "top-1: run " in measured.err
    assert (printed.out, printed.err.splitlines()[-1]) == ("", "all agree")
    found = json.loads(numbers.read_text())
    assert found["precision"] == "fp16"
    assert found["files"] == [{"path": str(out), "bytes": out.stat().st_size}]
    assert found["accuracy"]["count"] == 27
    assert found["accuracy"]["agreement"] == 1
    session = OnnxSession(out)
    image = np.asarray(Image.open(next(tiny_data.rglob("*.png"))))
    (probabilities,) = session({"images": image[None]})
    assert probabilities.sum() == pytest.approx(1, abs=1e-3)
    assert export(tiny_run, "--out", out) == 2
    assert "pets.onnx exists; choose another name, or add --overwrite" in capsys.readouterr().err
