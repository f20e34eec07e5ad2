"""Grades, trees, numbers and choices from data to a page: every command on the way, killed once."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.serving.conftest import running
from tests.tasks.test_taxonomy import COLORS, write_images
from tests.training.children import same_command_after_a_kill
from tests.training.test_instrument_journeys import SMALL, browser, rows_of
from vit.commands.main import main

__all__ = ["browser"]
pytestmark = pytest.mark.slow
GRADES = ("poor", "fair", "good", "best")
HEADER = ("image", "split", "light", "dark", "tone", "grade")
ENDS = ("", "_low", "_high")


class Question(NamedTuple):
    """What is asked of the images, and what is told of it."""

    flags: str
    told: str
    """By the training."""
    score: str
    """Of the evaluation's JSON."""
    columns: tuple[str, ...]
    """Of a row."""
    within: dict[str, float]
    """How close all ways are."""
    files: tuple[str, ...] = ("net.onnx",)


NUMBERS = {"within": {"rtol": 1e-5}, "files": ("net.onnx", "net.xml")}
LIGHT = tuple(f"light{end}" for end in ENDS)
QUESTIONS = {
    "ordinal": Question(
        f"--target grade --order {','.join(GRADES)}", "val kappa", "kappa", GRADES, {"atol": 1e-5}
    ),
    "taxonomy": Question(
        "--task taxonomy --lr 1e-2", "tree: 8 nodes, 3 levels", "top1",
        ("answer", "answer_score"), {"atol": 1e-4},
    ),
    "regression": Question(
        "--target light,dark", "learned as its logarithm", "mae",
        (*LIGHT, *(f"dark{end}" for end in ENDS)), **NUMBERS,
    ),
    "attributes": Question(
        "--target light,tone", "2 classes, bright, dim", "score", (*LIGHT, "tone", "tone_score"),
        **NUMBERS,
    ),
}  # fmt: skip


def write_list(folder: Path) -> Path:
    """Grey images with their brightness, its logarithm, and the name and the grade of it."""
    random = np.random.default_rng(0)
    rows: list[Any] = [HEADER]
    for number in range(120):
        light = random.uniform(20, 230)
        pixels = random.normal(light, 9, (26, 30, 3)).clip(0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:03d}.png")
        split, tone = "train" if number % 2 else "val", "dim" if light < 125 else "bright"
        dark, grade = f"{np.exp((255 - light) / 60):.4f}", GRADES[int((light - 20) // 52.6)]
        rows.append((f"{number:03d}.png", split, f"{light:.2f} cd", dark, tone, grade))
    with (folder / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder / "list.csv"


@pytest.fixture(scope="module", params=QUESTIONS)
def journey(request, tmp_path_factory) -> SimpleNamespace:
    """A training that was killed and resumed."""
    folder, question = tmp_path_factory.mktemp("journey"), QUESTIONS[request.param]
    if request.param == "taxonomy":
        data = folder / "data"
        write_images(data / "train", COLORS, 12)
        write_images(data / "val", COLORS, 20)
        files = sorted((data / "val").rglob("*.png"))[::12]
    else:
        data = write_list(folder)
        files = sorted(folder.glob("*.png"))[:8]
    words = ["train", str(data), *question.flags.split(), *SMALL.split()]
    run, said = same_command_after_a_kill(words, folder)
    assert f"task={request.param}" in said or "--task" in words
    assert question.told in said
    return SimpleNamespace(data=data, run=run, files=files, question=question)


def answers(journey: SimpleNamespace, rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    """The numbers of rows, and their texts."""
    scores = [{one["label"]: one["score"] for one in row.get("predictions", ())} for row in rows]
    cells = [
        [(row | more)[name] for name in journey.question.columns]
        for row, more in zip(rows, scores, strict=True)
    ]
    texts = [[cell for cell in row if not isinstance(cell, float)] for row in cells]
    return [cell for row in cells for cell in row if isinstance(cell, float)], texts


def evaluated(model: Path, journey: SimpleNamespace, json_file: Path) -> dict[str, Any]:
    words = [str(model), str(journey.data), "--json", str(json_file), "--precision", "fp32"]
    assert main(["evaluate", *(words if model.suffix == "" else words[:-2])]) == 0
    found: dict[str, Any] = json.loads(json_file.read_text())
    assert journey.question.score != "kappa" or [*found["confusion"]] == [*GRADES]
    return found


def test_every_way_gives_the_same_answers(journey, tmp_path, capsys):
    question = journey.question
    expected, texts = answers(journey, rows_of(capsys, journey.run, journey.files))
    width = len(expected) // len(journey.files)
    # what the ways are compared on
    assert len({*map(str, texts)}) > 1 or np.ptp(expected[::width]) > 1e-3
    score = evaluated(journey.run, journey, tmp_path / "scores.json")[question.score]
    for name in question.files:
        assert main(["export", str(journey.run), "--out", str(tmp_path / name)]) == 0
        capsys.readouterr()
        found, named = answers(journey, rows_of(capsys, tmp_path / name, journey.files))
        assert named == texts
        within = {"rtol": 5e-3, "atol": 0.01} if name == "net.xml" else question.within
        np.testing.assert_allclose(found, expected, **within)
        exported = evaluated(tmp_path / name, journey, tmp_path / "exported.json")
        assert exported[question.score] == pytest.approx(score, rel=1e-2, abs=1e-3)
    with running([journey.run]) as client:
        sent = [(path.name, path.read_bytes()) for path in journey.files]
        found, named = answers(journey, client.send(sent).json["results"])
    assert named == texts
    np.testing.assert_allclose(found, expected, **question.within)


@pytest.fixture
def card(journey, browser) -> Any:
    """The answer to the first image on the page of a server."""
    with running([journey.run]) as client:
        page = browser.new_page()
        page.goto(client.server.url)
        page.set_input_files("#files", str(journey.files[0]))
        shown = page.locator(".card").first
        shown.locator(".bars li").first.wait_for()
        yield shown
        page.close()


@pytest.mark.parametrize("journey", ["taxonomy"], indirect=True)
def test_the_page_shows_the_answer_above_the_classes(journey, card, capsys):
    (expected,) = rows_of(capsys, journey.run, journey.files[:1])
    text = "unknown"
    if expected["answer"] is not None:
        text = f"{expected['answer']} {100 * expected['answer_score']:.2f} %"
    assert card.locator(".caption").text_content() == text
    assert card.locator(".bars .label").count() == 5
    assert "6 classes" in card.page.locator("#about").text_content()


@pytest.mark.parametrize("journey", ["regression", "attributes"], indirect=True)
def test_the_page_shows_answers_and_what_raises_them(journey, card, capsys):
    (expected,) = rows_of(capsys, journey.run, journey.files[:1])
    names = [name for name in HEADER if name in journey.question.columns]
    assert card.locator(".label").all_text_contents() == names
    value, low, high = (float(f"{expected[name]:.5g}") for name in LIGHT)
    texts = card.locator(".score").all_text_contents()
    assert texts[0] == f"{value:g} cd ({low:g} to {high:g})"
    if "tone" in expected:
        assert texts[1] == f"{expected['tone']} ({100 * expected['tone_score']:.1f}%)"
    fill = card.locator(".fill").first.bounding_box()
    whole = card.locator(".bars li").first.bounding_box()
    assert 0 < fill["width"] < whole["width"]
    assert not card.page.locator("#top-option").is_visible()
    assert ", ".join(names) in card.page.locator("#about").text_content()
    card.get_by_role("button", name="Why?").click()
    card.locator("canvas").wait_for(state="visible")
    assert card.locator(".maps button").first.text_content() == "light"
