"""Numbers and choices of images from a list to a page: every command on the way, killed once."""

import csv
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.serving.conftest import running
from tests.training.children import same_command_after_a_kill
from tests.training.test_instrument_journeys import SMALL, browser, rows_of
from vit.commands.main import main

__all__ = ["browser"]
pytestmark = pytest.mark.slow
ENDS = ("", "_low", "_high")
COLUMNS = {
    "regression": [f"{name}{end}" for name in ("light", "dark") for end in ENDS],
    "attributes": [*(f"light{end}" for end in ENDS), "tone", "tone_score"],
}


@pytest.fixture(scope="module", params=[*COLUMNS])
def journey(request, tmp_path_factory) -> SimpleNamespace:
    """A training of the brightness of grey images, and of its logarithm or its name, killed and
    resumed."""
    folder, random = tmp_path_factory.mktemp("journey"), np.random.default_rng(0)
    data, second = folder / "list.csv", {"regression": "dark", "attributes": "tone"}[request.param]
    rows: list[Any] = [("image", "split", "light", "dark", "tone")]
    for number in range(80):
        light = random.uniform(20, 230)
        pixels = random.normal(light, 9, (26, 30, 3)).clip(0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        split = "train" if number % 2 else "val"
        dark, tone = f"{np.exp((255 - light) / 60):.4f}", "dim" if light < 125 else "bright"
        rows.append((f"{number}.png", split, f"{light:.2f} cd", dark, tone))
    with data.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    words = ["train", str(data), "--target", f"light,{second}", *SMALL.split()]
    run, said = same_command_after_a_kill(words, folder)
    assert {"dark": "learned as its logarithm", "tone": "2 classes, bright, dim"}[second] in said
    assert f"task={request.param}" in said
    files = [folder / f"{n}.png" for n in range(8)]
    return SimpleNamespace(data=data, run=run, files=files, columns=COLUMNS[request.param])


def answers(journey: SimpleNamespace, rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    """The numbers of rows, and their texts."""
    cells = [[row[name] for name in journey.columns] for row in rows]
    texts = [[cell for cell in row if isinstance(cell, str)] for row in cells]
    return [[cell for cell in row if not isinstance(cell, str)] for row in cells], texts


def test_every_way_gives_the_same_numbers(journey, tmp_path, capsys):
    expected, texts = answers(journey, rows_of(capsys, journey.run, journey.files))
    assert main(["evaluate", str(journey.run), str(journey.data), "--precision", "fp32"]) == 0
    assert "mae" in capsys.readouterr().out.lower()
    for name in ("net.onnx", "net.xml"):
        assert main(["export", str(journey.run), "--out", str(tmp_path / name)]) == 0
        capsys.readouterr()
        found, named = answers(journey, rows_of(capsys, tmp_path / name, journey.files))
        assert named == texts
        np.testing.assert_allclose(found, expected, rtol=5e-3 if name == "net.xml" else 1e-5)
    with running([journey.run]) as client:
        sent = [(path.name, path.read_bytes()) for path in journey.files]
        found, named = answers(journey, client.send(sent).json["results"])
    assert named == texts
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_page_shows_answers_and_what_raises_them(journey, browser, capsys):
    (expected,) = rows_of(capsys, journey.run, journey.files[:1])
    with running([journey.run]) as client:
        page = browser.new_page()
        page.goto(client.server.url)
        page.set_input_files("#files", str(journey.files[0]))
        card = page.locator(".card").first
        card.locator(".bars li").first.wait_for()
        names = [name for name in ("light", "dark", "tone") if name in journey.columns]
        assert card.locator(".label").all_text_contents() == names
        value, low, high = (float(f"{expected[name]:.5g}") for name in journey.columns[:3])
        texts = card.locator(".score").all_text_contents()
        assert texts[0] == f"{value:g} cd ({low:g} to {high:g})"
        if "tone" in expected:
            assert texts[1] == f"{expected['tone']} ({100 * expected['tone_score']:.1f}%)"
        fill = card.locator(".fill").first.bounding_box()
        whole = card.locator(".bars li").first.bounding_box()
        assert 0 < fill["width"] < whole["width"]
        assert not page.locator("#top-option").is_visible()
        assert ", ".join(names) in page.locator("#about").text_content()
        card.get_by_role("button", name="Why?").click()
        card.locator("canvas").wait_for(state="visible")
        assert card.locator(".maps button").first.text_content() == "light"
        page.close()
