"""Whole rectangles, --resize pad and native: from files to every engine's answer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from vit.config.setting_layers import make_config
from vit.errors import ConfigError
from vit.inference.attribution_plot import draw_explanations
from vit.training.train import train
from vit.weights.saved_model import load_run

CLASSES = ("blue", "red")
LEARNS: dict[str, Any] = {"epochs": 12, "warmup_epochs": 0, "batch_size": 16, "min_crop": 0.8}
LEARNS |= {"image_size": 32, "dim": 32, "stem": "conv", "pooling": "mean", "class_token": False}
LEARNS |= dict.fromkeys(("ema", "dropout", "mixup", "cutmix"), 0)


def draw(path: Path, seed: int) -> None:
    """Noise of one of four shapes, with a square at one end: red, or blue."""
    random = np.random.default_rng(seed)
    width, height = [(96, 32), (32, 96), (64, 40), (48, 48)][seed // 2 % 4]
    pixels = random.integers(60, 190, (height, width, 3), dtype=np.uint8)
    pixels[:12, :12] = (255, 0, 0) if seed % 2 else (0, 0, 255)
    image = Image.fromarray(pixels)
    image.rotate(180 * (seed % 3 == 0)).save(path)


def folder_of(root: Path, count: int, first: int = 0) -> Path:
    for seed in range(first, first + count):
        place = root / CLASSES[seed % 2]
        place.mkdir(parents=True, exist_ok=True)
        draw(place / f"{seed}.png", seed)
    return root


@pytest.fixture(scope="session")
def rectangles(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("rectangles") / "data"
    folder_of(root / "train", 128)
    return folder_of(root / "val", 100, first=500).parent


@pytest.fixture(scope="session")
def config_of(tiny_config):
    return lambda data, **more: tiny_config(data=str(data), **{**LEARNS, **more})


@pytest.fixture(scope="session")
def native_run(rectangles, config_of, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "native"
    train(config_of(rectangles, resize="native", epochs=2), out)
    return out


def some(data: Path) -> list[Path]:
    return sorted((data / "val").rglob("*.png"))[::9]


def shares(results: Any) -> Any:
    return np.array([[dict(result.predictions)[name] for name in CLASSES] for result in results])


def test_a_run_predicts_natively_as_its_network_does(native_run, rectangles):
    run = load_run(native_run)
    files = some(rectangles)
    found = shares(vit.Predictor(native_run, precision="fp32", no_calibration=True)(files))
    for path, row in zip(files, found, strict=True):
        read = run.preprocessing.read(path)
        image = run.preprocessing(read)
        height, width = image.shape[1:]
        assert height * width <= 32 * 32
        assert (height > width) == (read.height > read.width)
        with torch.inference_mode():
            logits = run.model(run.preprocessing.normalise(image[None]))
        np.testing.assert_allclose(row, logits.softmax(1)[0], atol=1e-6)


@pytest.mark.slow
def test_a_calibration_is_of_native_images(native_run, rectangles, tmp_path):
    vit.calibrate(native_run, rectangles, split="val", precision="fp32", target_precision=0.6)
    assert load_run(native_run).distance is not None
    predictor = vit.Predictor(native_run, precision="fp32")
    assert all(one.prediction_set for one in predictor(some(rectangles), sets=0.9, reject=True))
    assert list(draw_explanations(predictor, some(rectangles)[:2], tmp_path / "plots"))
    record = json.loads(next((tmp_path / "plots").glob("*.json")).read_text())
    assert record["seen"]["resize"] == "native"
    assert len(record["classes"][0]["weights"]) * 8 == record["seen"]["size"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"method": "probe"},
        {"method": "full"},
        {"resize": "crop"},
    ],
)
def test_weights_of_a_native_run_stay_native_unless_another_way_is_chosen(
    native_run, rectangles, tmp_path, more
):
    plain = {"epochs": 1, "batch_size": 16, "workers": 0, "device": "cpu", "precision": "fp32"}
    plain |= {"weights": str(native_run), "feature_cache": str(tmp_path / "cache")}
    taught = {"teacher": str(native_run)} if more.get("resize") else {}
    vit.train(str(rectangles), tmp_path / "run", **{**plain, **more, **taught})
    assert load_run(tmp_path / "run").preprocessing.resize == more.get("resize", "native")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"mixup": 0.2}, "mixup=0.2: does not work with resize=native"),
        ({"random_crop": "simple"}, "random_crop='simple': does not work with resize=native"),
        ({"cache": "device"}, "cache='device': does not work with resize=native"),
        ({"task": "caption"}, "task='caption': does not work with resize=native"),
        ({"task": "dino", "resize": "pad"}, "task='dino': does not work with resize=pad"),
        ({"compile": True}, "compile=True: does not work with resize=native"),
        ({"position": "relative"}, "position='relative': does not work with resize=native"),
        ({"crop_share": 0.8}, "crop_share=0.8: resize=native does not read it"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings, part):
    with pytest.raises(ConfigError, match=part):
        make_config({"data": "x", "resize": "native", **settings})


def test_exports_of_one_size_are_refused(native_run, tmp_path):
    with pytest.raises(ConfigError, match="resize=native: a program of torch has one size"):
        vit.export_model(native_run, tmp_path / "net.pt2")
    with pytest.raises(ConfigError, match="resize=native: the number of tokens varies"):
        vit.export_model(native_run, tmp_path / "net.onnx", tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("resize", ["native", "pad"])
def test_a_class_at_the_ends_is_learned(resize, rectangles, config_of, tmp_path):
    train(config_of(rectangles, resize=resize, drop_path=0.1), tmp_path / "run")
    new = folder_of(tmp_path / "new", 60, first=1000)
    assert vit.evaluate(tmp_path / "run", new, precision="fp32")["top1"] >= 0.9
