"""Images of instruments, whole rectangles and tiles from a folder to a page: every command on the
way, killed once."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tifffile

from tests.serving.conftest import running
from tests.training.children import same_command_after_a_kill
from tests.training.test_rectangles import draw
from tests.training.test_tiles import write_slide
from vit.commands.main import main
from vit.training.plan_rules import TimedNetwork
from vit.weights.saved_model import load_run, update_run

pages = pytest.importorskip("tests.evaluation.test_pages_in_browser")
browser = pages.browser
pytestmark = pytest.mark.slow

CLASSES = ("none", "disc")
IMAGES = 32
SMALL = "--image-size 24 --patch-size 8 --dim 32 --depth 2 --num-heads 2 --epochs 2 --batch-size 8"
SMALL += " --drop-path 0.1 --checkpoint-steps 2 --device cpu --precision fp32 --workers 1"


def disc(channels: int, seed: int) -> Any:
    """Twelve bits of noise, (30, 30, channels), and in the last channel a disc or none."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:30, :30] - random.uniform(13, 17, (2, 1, 1))
    values = random.normal(1000, 80, (30, 30, channels))
    values[..., -1] += (x**2 + y**2 < 60) * (seed % 2) * 900
    return values.clip(0, 4095).astype(np.uint16)


def write_five_channels(path: Path, seed: int) -> None:
    values = np.moveaxis(disc(5, seed), 2, 0)
    tifffile.imwrite(path.with_suffix(".tif"), values, photometric="minisblack", metadata=None,
                     planarconfig="separate", compression="zlib")  # fmt: skip


def write_dicom(path: Path, seed: int) -> None:
    """A CT slice by its tags: Hounsfield units, without a window."""
    import pydicom

    known = Path(pydicom.__file__).parent / "data/test_files/CT_small.dcm"
    data = pydicom.dcmread(known)
    data.Rows, data.Columns, data.PixelData = 30, 30, disc(1, seed).tobytes()
    data.PixelRepresentation = 0
    data.save_as(path.with_suffix(".dcm"))


def write_rectangle(path: Path, seed: int) -> None:
    draw(path.with_suffix(".png"), seed)


JOURNEYS: dict[str, tuple[Callable[[Path, int], None], str, str, str]] = {
    "five channels": (write_five_channels, "", "5 channels of uint16", "channels: 5"),
    "dicom": (write_dicom, "--channels 0", "1 channel of float32", "channels: 1"),
    "native": (write_rectangle, "--resize native", "", "resize: native"),
    "tiles": (write_slide, "--tiles 80,16", "", "tiles:"),
}
"""What writes an image, the flags of the plan, what a training says of the data, and keeps."""


@pytest.fixture(scope="module", params=JOURNEYS)
def journey(request, tmp_path_factory) -> SimpleNamespace:
    """A plan, and its training, killed in the middle and resumed."""
    write, flags, said, kept = JOURNEYS[request.param]
    folder: Path = tmp_path_factory.mktemp("journey")
    data, plan = folder / "data", folder / "plan.yaml"
    for number in range(IMAGES):
        place = data / CLASSES[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        write(place / str(number // 2), number)
    timed = TimedNetwork(1.0, 80e9)  # what each plan measures for seconds
    with mock.patch("vit.training.plan.measure_speed", return_value=timed):
        assert main(["plan", str(data), *SMALL.split(), *flags.split(), "--save", str(plan)]) == 0
    cut, log = same_command_after_a_kill(["train", str(data), "-c", str(plan)], folder)
    assert said in log
    assert kept in (cut / "config.yaml").read_text()
    return SimpleNamespace(data=data, run=cut, files=sorted(data.rglob("*.*"))[14:18])


UNCOVERED = """card => {
  const image = card.querySelector("img"), map = card.querySelector("canvas");
  const [box, own] = [image, map].map((one) => one.getBoundingClientRect());
  const [width, height] = [image.naturalWidth, image.naturalHeight];
  const fit = Math.min(box.width / width, box.height / height);
  const sides = [own.left + own.right - box.left - box.right, own.width - width * fit];
  return Math.max(...[...sides, own.height - height * fit].map(Math.abs));
}"""
"""Pixels by which the map of a card is not where its image is."""


def rows_of(capsys: Any, model: Path, files: list[Path]) -> list[dict[str, Any]]:
    """What `vit predict` writes."""
    words = ["predict", str(model), *map(str, files), "--format", "jsonl", "--precision", "fp32"]
    assert main(words[:-2] if model.suffix else words) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def scores(rows: list[dict[str, Any]]) -> list[list[float]]:
    best = [{one["label"]: one["score"] for one in row["predictions"]} for row in rows]
    return [[row[name] for name in CLASSES] for row in best]


def test_every_way_gives_the_same_answers(journey, tmp_path, capsys):
    expected = scores(rows_of(capsys, journey.run, journey.files))
    assert np.ptp(expected, axis=0).max() > 1e-3  # what the ways are compared on
    assert main(["evaluate", str(journey.run), str(journey.data), "--precision", "fp32"]) == 0
    network = tmp_path / "net.onnx"
    assert main(["export", str(journey.run), "--out", str(network)]) == 0
    capsys.readouterr()
    np.testing.assert_allclose(scores(rows_of(capsys, network, journey.files)), expected, atol=1e-5)
    with running([journey.run]) as client:
        sent = [(path.name, path.read_bytes()) for path in journey.files]
        found = scores(client.send(sent).json["results"])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_page_shows_the_answer(journey, browser, capsys):
    check_page(journey.run, journey.files[0], browser, capsys)


def test_the_page_shows_the_map_of_an_image_with_borders(tiny_run, tmp_path, browser, capsys):
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    padded = replace(load_run(run).preprocessing, resize="pad", crop_share=1.0)
    update_run(run, {"preprocessing": padded.to_dict()})
    for seed in (0, 2):  # wide, and tall
        write_rectangle(tmp_path / f"{seed}", seed)
        check_page(run, tmp_path / f"{seed}.png", browser, capsys)


def check_page(run: Path, file: Path, browser: Any, capsys: Any) -> None:
    """The page's answer is that of `vit predict`, and its map lies over the image."""
    (expected,) = rows_of(capsys, run, [file])
    with running([run]) as client:
        page = browser.new_page()
        page.goto(client.server.url)
        page.set_input_files("#files", str(file))
        card = page.locator(".card").first
        card.locator(".bars li").first.wait_for()
        best = expected["predictions"][0]
        assert card.locator(".label").first.text_content() == best["label"]
        assert card.locator(".score").first.text_content() == f"{100 * best['score']:.2f} %"
        if file.suffix != ".png":  # a browser shows no such file
            card.locator(".no-preview").wait_for()
        card.get_by_role("button", name="Why?").click()
        card.locator("canvas").wait_for(state="visible")
        assert card.evaluate(UNCOVERED) <= 1
        page.close()
