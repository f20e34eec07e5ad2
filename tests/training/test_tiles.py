"""Networks of tiles: from large images to every answer."""

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import vit
from tests.training.children import same_after_a_kill
from vit.commands.main import main
from vit.data.image_io import MAX_PIXELS, set_max_pixels
from vit.data.image_tiles import TileGrid, open_tiles
from vit.errors import ConfigError, VitError
from vit.inference.attribution import class_maps
from vit.model.tiled_classifier import TiledClassifier
from vit.training.train import train
from vit.weights.saved_model import load_run

CLASSES, SIDE, TILE = ("blue", "red"), 160, 16
SETTINGS: dict[str, Any] = {"tiles": (TILE,), "tile_count": 40, "image_size": 16, "patch_size": 8}
SETTINGS |= {"epochs": 24, "batch_size": 4, "optimizer": "muon", "lr": 3e-3, "warmup_epochs": 0}
SETTINGS |= dict.fromkeys(("ema", "dropout", "drop_path", "mixup", "cutmix", "smoothing"), 0)
PLAIN = {"batch_size": 4, "workers": 0, "device": "cpu", "precision": "fp32"}


def slide(seed: int) -> tuple[Any, tuple[int, int]]:
    """Glass with a piece of tissue, in which one spot has the colour of the class; its place."""
    random = np.random.default_rng(seed)
    pixels = np.full((SIDE, SIDE, 3), 240, np.uint8)
    left, top = random.integers(0, SIDE - 100, 2)
    pixels[top : top + 100, left : left + 100] = random.normal(170, 12, (100, 100, 3))
    x, y = left + random.integers(8, 92), top + random.integers(8, 92)
    colour = (200, 60, 60) if seed % 2 else (60, 60, 200)
    pixels[y - 5 : y + 5, x - 5 : x + 5] = colour
    return pixels, (int(x), int(y))


def write_slide(path: Path, seed: int) -> None:
    tifffile.imwrite(path.with_suffix(".tif"), slide(seed)[0], photometric="rgb", tile=(16, 16),
                     compression="deflate")  # fmt: skip


def slides(root: Path, count: int, first: int = 0) -> Path:
    for seed in range(first, first + count):
        place = root / CLASSES[seed % 2]
        place.mkdir(parents=True, exist_ok=True)
        write_slide(place / str(seed), seed)
    return root


@pytest.fixture(scope="session")
def tile_data(tmp_path_factory) -> Path:
    return slides(tmp_path_factory.mktemp("tiles") / "data", 40)


@pytest.fixture(scope="session")
def config_of(tiny_config) -> Callable[..., Any]:
    return lambda data, **more: tiny_config(data=str(data), **{**SETTINGS, **more})


@pytest.fixture(scope="session")
def tile_run(tile_data, config_of, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "tiles"
    try:  # fewer pixels at once than an image has
        train(config_of(tile_data, epochs=2, max_pixels=2000), out)
    finally:
        set_max_pixels(MAX_PIXELS)
    return out


def shares(results: Any) -> Any:
    return np.array([[dict(result.predictions)[name] for name in CLASSES] for result in results])


def epochs(run: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if "val_loss" in event]


def test_files_arrays_and_whole_bags_give_one_answer(tile_run, tile_data):
    files = sorted(tile_data.rglob("*.tif"))[::9]
    predictor = vit.Predictor(tile_run, precision="fp32")
    found = shares(predictor(files))
    pixels = [tifffile.imread(path) for path in files]
    assert np.array_equal(shares(predictor(pixels)), found)
    assert np.array_equal(shares(predictor([Image.fromarray(one) for one in pixels])), found)
    run = load_run(tile_run)
    assert isinstance(run.model, TiledClassifier)
    bag = run.preprocessing(run.preprocessing.read(files[0]))
    assert 25 <= len(bag) < 100  # without the glass
    with torch.inference_mode():
        logits = run.model(run.preprocessing.normalise(bag[None]))
    np.testing.assert_allclose(logits.softmax(1).numpy()[0], found[0], atol=1e-6)


def test_the_report_shows_the_maps_of_tiles(tile_run):
    page = (tile_run / "report.html").read_text()
    assert "Colour is the part of each tile" in page
    data = re.findall('data:image/jpeg;base64,([^"]+)', page.split("surest mistakes")[1])
    for encoded in data:
        image = Image.open(io.BytesIO(base64.b64decode(encoded)))
        assert image.size == (240, 240)
        red, _, blue = np.asarray(image, int).transpose(2, 0, 1)
        assert (red - blue).max() > 150  # of the colour of the map
    assert data


@pytest.mark.slow
def test_an_exported_file_answers_as_the_run_does(tile_run, tile_data, tmp_path):
    files = sorted(tile_data.rglob("*.tif"))[::9]
    found = shares(vit.Predictor(tile_run, precision="fp32")(files))
    assert vit.export_model(tile_run, tmp_path / "net.onnx").agrees
    assert np.abs(shares(vit.Predictor(tmp_path / "net.onnx")(files)) - found).max() < 1e-5


def test_a_damaged_tile_is_named_and_the_others_are_answered(tile_run, tile_data, tmp_path):
    good = sorted(tile_data.rglob("*.tif"))[0]
    bad, data = tmp_path / "bad.tif", bytearray(good.read_bytes())
    with tifffile.TiffFile(good) as file:
        at = file.pages.first.dataoffsets[55]
    data[at : at + 20] = bytes(20)
    bad.write_bytes(data)
    results = vit.Predictor(tile_run, precision="fp32")([good, bad, tmp_path / "none.tif"])
    assert results[0].error is None
    assert "damaged" in str(results[1].error)
    assert "no such file" in str(results[2].error)


def test_a_map_of_the_tiles_lies_over_the_whole_image(tile_run, tile_data, tmp_path):
    path = sorted(tile_data.rglob("*.tif"))[3]
    words = ["predict", str(tile_run), str(path), "--explain", str(tmp_path / "maps")]
    assert main([*words, "--precision", "fp32"]) == 0
    (record,) = (tmp_path / "maps").glob("*.json")
    found = json.loads(record.read_text())
    assert found["seen"]["tiles"] == {"size": 16, "overlap": 0}
    weights = np.array(found["classes"][0]["weights"])
    assert weights.shape == (10, 10)
    assert weights.sum() == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_a_network_of_tiles_finds_the_spot(tile_data, config_of, tmp_path):
    run = tmp_path / "run"
    train(config_of(tile_data, hflip=0.5, color_jitter=0.1), run)
    new = slides(tmp_path / "new", 40, first=100)
    assert vit.evaluate(run, new, precision="fp32")["top1"] >= 0.9
    predictor, hits = vit.Predictor(run, precision="fp32"), 0
    for (output,) in predictor.batches(sorted(new.rglob("*.tif"))):
        (_, weights), *_ = class_maps(predictor, output)
        row, col = divmod(int(weights.argmax()), 10)
        x, y = slide(int(Path(output.image).stem))[1]
        hits += abs(col * TILE + 8 - x) <= 13 and abs(row * TILE + 8 - y) <= 13
    assert hits >= 36


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "linear"])
def test_pretrained_weights_encode_the_tiles(tile_data, tiny_run, tmp_path, method):
    out, given = tmp_path / "run", {**PLAIN, "weights": str(tiny_run), "method": method}
    vit.train(str(tile_data), out, tiles=(TILE,), tile_count=8, epochs=1, **given)
    assert load_run(out).config.tile_pooling == "attention"
    settings = {"tiles": (32, 8), "tile_count": 8, "epochs": 1, "method": "full"}
    vit.train(str(tile_data), tmp_path / "next", **{**PLAIN, "weights": str(out)}, **settings)
    assert load_run(tmp_path / "next").preprocessing.tiles.overlap == 8


@pytest.mark.slow
def test_a_killed_run_with_a_frozen_encoder_resumes(tile_data, config_of, tile_run, tmp_path):
    more = {"weights": str(tile_run), "method": "linear", "epochs": 9, "ema": 0.9}
    same_after_a_kill(config_of(tile_data, checkpoint_steps=7, **more), tmp_path)


@pytest.mark.slow
def test_a_frozen_encoder_sees_each_tile_once(tile_data, config_of, tile_run, tmp_path):
    more = {"weights": str(tile_run), "method": "linear", "epochs": 3, "lr": 1e-3}
    config, seen = config_of(tile_data, **more), list[int]()
    features = TiledClassifier.features

    def counted(model: Any, images: Any) -> Any:
        seen.append(len(images))
        return features(model, images)

    run, anew = tmp_path / "run", tmp_path / "anew"
    with mock.patch.object(TiledClassifier, "features", counted):
        train(config, run, report=False)
    paths, grid = [*tile_data.rglob("*.tif")], TileGrid(TILE)
    assert sum(seen) == sum(len(open_tiles(path, grid).numbers()) for path in paths)
    train(config_of(tile_data, **more, hflip=1e-9), anew, report=False)  # augmentation of no tile
    found, expected = (
        [(one["train_loss"], one["val_loss"], one["val_top1"]) for one in epochs(folder)]
        for folder in (run, anew)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert len(found) == 3
    measured = vit.evaluate(run, tile_data, precision="fp32")  # those that were held out
    best = max(epochs(run), key=lambda one: one["val_top1"] - one["val_loss"])
    assert measured["loss"] == pytest.approx(best["val_loss"], rel=1e-5)
    assert vit.export_model(run, tmp_path / "net.onnx").agrees


def test_a_plan_knows_tiles(tile_data, capsys, known_speed):
    words = ["plan", str(tile_data), "--tiles", "32,8", "--device", "cpu", "--precision", "fp32"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "short side 32 px" in shown
    assert "min_crop" in shown


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"tiles": (16, 16)}, "an overlap below the size"),
        ({"tiles": (16, 2, 2)}, "SIZE,OVERLAP"),
        ({"mixup": 0.2}, "bags are not mixed"),
        ({"cache": "ram"}, "read from their files"),
        ({"resize": "crop"}, "each tile is resized"),
        ({"tile_pooling": "max", "tiles": None}, "does not read it"),
        ({"task": "simclr"}, "does not read it"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tile_data, config_of, tmp_path, settings, part):
    with pytest.raises(ConfigError, match=part):
        train(config_of(tile_data, **settings), tmp_path / "run")


def test_what_does_not_know_tiles_is_refused(tile_run, tmp_path):
    for settings in ({"tta": "flip"}, {"keep_aspect": True}, {"compile": True}):
        with pytest.raises(ConfigError, match="tiles"):
            vit.Predictor(tile_run, precision="fp32", **settings)
    for name, more in (("net.xml", {}), ("net.onnx", {"precision": "fp16"})):
        with pytest.raises(VitError, match="a network of tiles"):
            vit.export_model(tile_run, tmp_path / name, **more)


def test_other_runs_store_nothing_of_tiles(tiny_run):
    assert "tile" not in (tiny_run / "config.json").read_text()
