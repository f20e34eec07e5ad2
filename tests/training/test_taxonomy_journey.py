"""A taxonomy from nested folders to a page: every command on the way, killed once."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.serving.conftest import running
from tests.tasks.test_taxonomy import COLORS, write_images
from tests.training.children import same_command_after_a_kill
from tests.training.test_instrument_journeys import SMALL, browser, rows_of
from vit.commands.main import main

__all__ = ["browser"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def journey(tmp_path_factory) -> SimpleNamespace:
    """A training on nested folders, killed and resumed."""
    folder = tmp_path_factory.mktemp("journey")
    data = folder / "data"
    write_images(data / "train", COLORS, 12)
    write_images(data / "val", COLORS, 20)
    words = ["train", str(data), "--task", "taxonomy", "--lr", "1e-2", *SMALL.split()]
    run, said = same_command_after_a_kill(words, folder)
    assert "tree: 8 nodes, 3 levels" in said
    files = sorted((data / "val").rglob("*.png"))[::12]
    return SimpleNamespace(data=data, run=run, files=files)


def answers(rows):
    return [(row["answer"], row["answer_score"] or 0) for row in rows]


def check(found, expected):
    assert [node for node, _ in found] == [node for node, _ in expected]
    scores = ([score for _, score in some] for some in (found, expected))
    np.testing.assert_allclose(*scores, atol=1e-4)


def test_every_way_gives_the_same_answers(journey, tmp_path, capsys):
    expected = answers(rows_of(capsys, journey.run, journey.files))
    assert len({node for node, _ in expected}) > 1
    assert main(["evaluate", str(journey.run), str(journey.data), "--precision", "fp32"]) == 0
    assert "level 1" in capsys.readouterr().out
    file = tmp_path / "net.onnx"
    assert main(["export", str(journey.run), "--out", str(file)]) == 0
    capsys.readouterr()
    check(answers(rows_of(capsys, file, journey.files)), expected)
    with running([journey.run]) as client:
        sent = [(path.name, path.read_bytes()) for path in journey.files]
        check(answers(client.send(sent).json["results"]), expected)


def test_the_page_shows_the_answer_above_the_classes(journey, browser, capsys):
    (expected,) = rows_of(capsys, journey.run, journey.files[:1])
    with running([journey.run]) as client:
        page = browser.new_page()
        page.goto(client.server.url)
        page.set_input_files("#files", str(journey.files[0]))
        card = page.locator(".card").first
        card.locator(".bars li").first.wait_for()
        text = "unknown"
        if expected["answer"] is not None:
            text = f"{expected['answer']} {100 * expected['answer_score']:.2f} %"
        assert card.locator(".caption").text_content() == text
        assert card.locator(".bars .label").count() == 5
        assert "6 classes" in page.locator("#about").text_content()
        page.close()
