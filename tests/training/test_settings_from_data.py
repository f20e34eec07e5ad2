"""Settings that the data decide: the range of the values of deep images."""

import io
import json
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.training.runs import ON_CPU, SIZES
from vit.config.setting_layers import make_config, read_settings
from vit.data.image_io import MAX_PIXELS, read_image, set_max_pixels
from vit.errors import BadImage, DataError
from vit.inference.evaluate import evaluate
from vit.inference.predictor import Predictor
from vit.training.checkpoint.run_folder import with_stored_settings
from vit.training.train import train
from vit.weights.saved_model import load_run

CONSTANT = 0x5000
"""Upper byte of all values; with up to LARGEST in the lower one all are equal in 8 bits."""
LARGEST = 0xCF
SETTINGS = {**SIZES, **ON_CPU, "dim": 32, "depth": 1, "epochs": 8, "batch_size": 16, "lr": 3e-3}
SETTINGS |= {"warmup_epochs": 1, "min_crop": 1.0}


@pytest.fixture(scope="module")
def low_byte(tmp_path_factory) -> Path:
    """16-bit images whose classes, which half is bright, are only in the lower byte."""
    root, random = tmp_path_factory.mktemp("low"), np.random.default_rng(0)
    for label in ("left", "right"):
        (root / label).mkdir()
        for number in range(40):
            values = random.integers(0, LARGEST // 2, (16, 16))
            half = np.s_[:, :8] if label == "left" else np.s_[:, 8:]
            values[half] += LARGEST // 2
            image = Image.fromarray((values + CONSTANT).astype(np.uint16))
            image.save(root / label / f"{number}.{'png' if number % 2 else 'tif'}")
    return root


@pytest.fixture(scope="module")
def low_byte_run(low_byte, tmp_path_factory):
    out, said = tmp_path_factory.mktemp("runs") / "low", io.StringIO()
    with redirect_stderr(said):
        result = train(make_config({"data": str(low_byte), **SETTINGS}), out, report=False)
    return result, said.getvalue()


def test_the_upper_byte_of_the_images_shows_no_class(low_byte):
    images = {np.asarray(read_image(path)).tobytes() for path in low_byte.rglob("*.*")}
    assert len(images) == 1


@pytest.mark.slow
def test_a_class_in_the_lower_byte_is_learned_and_predicted_by_every_runtime(
    low_byte, low_byte_run, tmp_path
):
    from vit.export.export_formats import export_onnx

    result, said = low_byte_run
    assert result.val_top1 >= 0.95
    assert "64 images with more than 8 bits per channel" in said
    range_ = load_run(result.folder).preprocessing.intensity_range
    assert range_ == pytest.approx((CONSTANT, CONSTANT + LARGEST), abs=3)
    stored = json.loads((result.folder / "config.json").read_text())["vit"]["preprocessing"]
    assert tuple(stored["intensity_range"]) == range_

    scores = evaluate(result.folder, str(low_byte), device="cpu", precision="fp32")
    assert scores["top1"] == result.val_top1

    paths = sorted(map(str, low_byte.rglob("*.*")))
    predictor = Predictor(result.folder, device="cpu", precision="fp32")
    ours = [dict(one.predictions) for one in predictor(paths)]
    export_onnx(result.folder, tmp_path / "m.onnx")
    notes = []
    exported = Predictor(tmp_path / "m.onnx", notify=notes.append)
    for path, mine, theirs in zip(paths, ours, exported(paths), strict=True):
        assert mine == pytest.approx(dict(theirs.predictions), abs=1e-5)
        assert max(mine, key=mine.get) == Path(path).parent.name
    assert not notes


def test_another_range_can_be_given_for_a_prediction(low_byte, low_byte_run):
    path = str(next((low_byte / "left").iterdir()))
    usual, other = (
        Predictor(
            low_byte_run[0].folder, device="cpu", precision="fp32", intensity_range=deep
        ).read(path)
        for deep in (None, (0.0, 65535.0))
    )
    assert np.ptp(usual.numpy()) > 200
    assert np.ptp(other.numpy()) == 0


def test_resuming_a_run_keeps_its_range_and_an_older_run_has_none(
    low_byte, low_byte_run, tmp_path, capsys
):
    stored = make_config(read_settings(low_byte_run[0].folder / "config.yaml"))
    asked = make_config({"data": str(low_byte), **SETTINGS})
    resumed = with_stored_settings(asked, low_byte_run[0].folder)
    assert resumed.data.intensity_range == stored.data.intensity_range is not None

    older = (low_byte_run[0].folder / "config.yaml").read_text().splitlines()
    older = [line for line in older if not line.startswith("intensity_range")]
    (tmp_path / "config.yaml").write_text("\n".join(older))
    assert with_stored_settings(asked, tmp_path).data.intensity_range is None


def test_a_run_of_8_bit_images_stores_no_range_and_notes_the_first_dark_image(
    tiny_run, low_byte, tmp_path
):
    stored = json.loads((tiny_run / "config.json").read_text())["vit"]["preprocessing"]
    assert "intensity_range" not in stored
    dark, notes = tmp_path / "dark.tif", []
    Image.fromarray(np.full((16, 16), 3000, np.uint16)).save(dark)
    predictor = Predictor(tiny_run, device="cpu", precision="fp32", notify=notes.append)
    predictor([dark, dark])
    assert len([note for note in notes if "nearly black" in note]) == 1


@pytest.mark.slow
def test_a_share_without_effect_is_named(low_byte, tmp_path, capsys):
    """Of data with their own validation images none are held out."""
    for split in ("train", "val"):
        shutil.copytree(low_byte, tmp_path / "data" / split)
    settings = {**SETTINGS, "data": str(tmp_path / "data"), "epochs": 2, "val_share": 0.3}
    train(make_config(settings), tmp_path / "run")
    told = "note: val_share=0.3 is not used: the data have their own validation images"
    assert told in capsys.readouterr().err


@pytest.fixture
def noise(tmp_path):
    """Writes a folder with images of noise for each class; names of files are not UTF-8."""
    random = np.random.default_rng(0)

    def write(*classes: str) -> Path:
        for name in classes:
            (tmp_path / "data" / name).mkdir(parents=True)
            for number in range(6):
                pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / name / f"\udcff{number}.png")
        return tmp_path / "data"

    return write


def test_a_class_whose_name_is_not_utf8_is_refused_before_training(noise, tmp_path):
    data = noise("caf\udce9", "dog")
    with pytest.raises(DataError, match=r"1 class .* not UTF-8, .* \(caf\\udce9\); rename the fol"):
        train(make_config({**SETTINGS, "data": str(data)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (data / "caf\udce9").rename(data / "café")
    settings = make_config({**SETTINGS, "data": str(data), "batch_size": 4})
    result = train(settings, tmp_path / "run")
    assert result.classes == ("café", "dog")


def test_good_images_above_the_limit_are_refused_with_the_setting(noise, tmp_path):
    settings = make_config({**SETTINGS, "data": str(noise("a", "b")), "max_pixels": 255})
    try:
        with pytest.raises(
            BadImage, match="16 x 16 is more than 255 pixels; raise --max-"
        ) as refused:
            train(settings, tmp_path / "run")
    finally:
        set_max_pixels(MAX_PIXELS)
    assert "mend" not in str(refused.value)
