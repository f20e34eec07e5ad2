"""Grades of images from a list to a served answer: every command on the way, killed once."""

import csv
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.serving.conftest import running
from tests.training.children import same_command_after_a_kill
from tests.training.test_instrument_journeys import SMALL, rows_of
from vit.commands.main import main

pytestmark = pytest.mark.slow
GRADES = ("poor", "fair", "good", "best")


@pytest.fixture(scope="module")
def journey(tmp_path_factory) -> SimpleNamespace:
    """A training of grades that images are the lighter by, killed and resumed."""
    folder, random = tmp_path_factory.mktemp("journey"), np.random.default_rng(0)
    data, order = folder / "list.csv", GRADES
    rows: list[Any] = [("image", "split", "grade")]
    for number in range(120):
        grade = int(random.integers(len(order)))
        pixels = random.normal(60 + 40 * grade, 40, (26, 30, 3)).clip(0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        rows.append((f"{number}.png", "train" if number % 2 else "val", order[grade]))
    with data.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    words = ["train", str(data), "--target", "grade", "--order", ",".join(order), *SMALL.split()]
    run, said = same_command_after_a_kill(words, folder)
    assert "task=ordinal" in said
    assert "val kappa" in said
    files = [folder / f"{n}.png" for n in range(8)]
    return SimpleNamespace(data=data, run=run, order=order, files=files)


def scores(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Grade -> probability, of each row."""
    return [{one["label"]: one["score"] for one in row["predictions"]} for row in rows]


def close(found: list[dict[str, float]], expected: list[dict[str, float]], within: float) -> bool:
    """Whether all probabilities of the same grades are within so much."""
    pairs = zip(found, expected, strict=True)
    return all(one == pytest.approx(other, abs=within) for one, other in pairs)


def test_every_way_gives_the_same_grades(journey, tmp_path, capsys):
    expected = scores(rows_of(capsys, journey.run, journey.files))
    assert all(row.keys() == {*journey.order} for row in expected)
    assert not close(expected[:1] * len(expected), expected, 1e-3)  # what the ways are compared on
    found = tmp_path / "scores.json"
    words = ["--json", str(found), "--precision", "fp32"]
    assert main(["evaluate", str(journey.run), str(journey.data), *words]) == 0
    assert "weighted kappa" in capsys.readouterr().out
    own = json.loads(found.read_text())
    assert [*own["confusion"]] == [*journey.order]
    file = tmp_path / "net.onnx"
    assert main(["export", str(journey.run), "--out", str(file)]) == 0
    capsys.readouterr()
    assert close(scores(rows_of(capsys, file, journey.files)), expected, 1e-5)
    assert main(["evaluate", str(file), str(journey.data), "--json", str(found)]) == 0
    exported = json.loads(found.read_text())
    assert exported["kappa"] == pytest.approx(own["kappa"], abs=1e-3)
    assert [*exported["confusion"]] == [*journey.order]
    with running([journey.run]) as client:
        sent = [(path.name, path.read_bytes()) for path in journey.files]
        assert close(scores(client.send(sent).json["results"]), expected, 1e-5)
