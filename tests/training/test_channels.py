"""Networks of any number of channels, in their full depth: from files to every engine's answer."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from safetensors.torch import load_file

import vit
from tests.serving.conftest import running
from tests.slow_cases import mostly_slow
from tests.training.children import same_after_a_kill
from vit.commands.main import main
from vit.config import Config
from vit.config.data_config import CHANNEL_SETTINGS
from vit.config.setting_layers import make_config, read_settings
from vit.errors import BadImage, ConfigError, DataError, VitError
from vit.training.settings_from_data import refuse_for_channels
from vit.training.train import train
from vit.weights.saved_model import load_run, save_model

CLASSES = ("none", "disc")
SIDE = 24
NAMES = ("red", "nir", "green", "blue")
LEARNS: dict[str, Any] = {"epochs": 20, "warmup_epochs": 0, "batch_size": 8, "min_crop": 0.8}
LEARNS |= {"image_size": 24, "dim": 32}
LEARNS |= dict.fromkeys(("ema", "dropout", "drop_path", "mixup", "cutmix"), 0)
PLAIN = {"epochs": 1, "batch_size": 8, "workers": 0, "device": "cpu", "precision": "fp32"}


def disc(channels: int, *, level: float, noise: float, contrast: float, seed: int) -> Any:
    """Values (24, 24, channels) of noise, and in the last channel a disc or none."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE] - random.uniform(10, 14, (2, 1, 1))
    inside = (x**2 + y**2 < 49) * (seed % 2)
    values = random.normal(level, noise, (SIDE, SIDE, channels))
    values[..., -1] += inside * contrast
    return values


def write_tiff(path: Path, values: Any, **options: Any) -> None:
    known = {"photometric": "minisblack", "planarconfig": "contig", "metadata": None}
    tifffile.imwrite(path, values, **{**known, **options})


def write_deep(path: Path, seed: int) -> None:
    values = disc(4, level=2000, noise=150, contrast=1500, seed=seed)
    write_tiff(path.with_suffix(".tif"), values.astype(np.uint16), extrasamples=["unspecified"] * 3)


def write_fine(path: Path, seed: int) -> None:
    """Float32 that differ by less than half precision, or 16 bits of their size, can tell."""
    values = disc(2, level=1000, noise=0.005, contrast=0.05, seed=seed)
    np.save(path.with_suffix(".npy"), values.astype(np.float32))


def folder_of(root: Path, write: Callable[[Path, int], None], count: int, first: int = 0) -> Path:
    """A folder for each class, with `count` images."""
    for number in range(first, first + 2 * count):
        place = root / CLASSES[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        write(place / str(number // 2), number)
    return root


@pytest.fixture(scope="session")
def deep_data(tmp_path_factory) -> Path:
    """Four channels of 16 bits, of which only the last shows the class."""
    return folder_of(tmp_path_factory.mktemp("deep") / "data", write_deep, 24)


@pytest.fixture(scope="session")
def config_of(tiny_config) -> Callable[..., Any]:
    return lambda data, **more: tiny_config(data=str(data), **{**LEARNS, **more})


@pytest.fixture(scope="session")
def deep_run(deep_data, config_of, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "deep"
    train(config_of(deep_data, epochs=2), out)
    return out


def some(data: Path) -> list[Path]:
    return sorted(data.rglob("*.*"))[::5]


def shares(results: Any) -> Any:
    return np.array([[dict(result.predictions)[name] for name in CLASSES] for result in results])


def top1(run: Path, write: Callable[[Path, int], None]) -> float:
    """The share of 60 new images that is right."""
    new = folder_of(run.with_suffix(".new"), write, 30, first=100)
    return vit.evaluate(run, new, precision="fp32")["top1"]


def test_a_run_stores_what_it_measured_and_takes_arrays_as_files(deep_run, deep_data):
    spec = load_run(deep_run).preprocessing.channels
    assert not {"axes", "names"} & load_run(deep_run).preprocessing.to_dict()["channels"].keys()
    assert (spec.value_type, spec.count, spec.order) == ("uint16", 4, (0, 1, 2, 3))
    assert all(1400 < low < 1700 for low in spec.low)
    assert [high > 3500 for high in spec.high] == [False, False, False, True]
    files = some(deep_data)
    predictor = vit.Predictor(deep_run, precision="fp32")
    expected = shares(predictor(files))
    arrays = [tifffile.imread(path) for path in files]
    tensors = [torch.from_numpy(array).permute(2, 0, 1) for array in arrays]
    for images in (arrays, tensors):
        assert np.array_equal(shares(predictor(images)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["net.onnx", "net.xml"])
def test_exported_files_answer_as_torch_does(deep_run, deep_data, tmp_path, name):
    files, other = some(deep_data), tmp_path / name
    expected = shares(vit.Predictor(deep_run, precision="fp32")(files))
    vit.export_model(deep_run, other)
    assert np.abs(shares(vit.Predictor(other)(files)) - expected).max() < 1e-5
    scores = [vit.evaluate(one, deep_data, precision="fp32") for one in (deep_run, other)]
    assert scores[0]["top1"] == scores[1]["top1"]


def test_a_server_answers_for_a_tiff_as_for_its_path(deep_run, deep_data):
    path = some(deep_data)[1]
    (expected,) = vit.Predictor(deep_run, precision="fp32")([path])
    with running([deep_run]) as client:
        (found,) = client.send([("a.tif", path.read_bytes())]).json["results"]
        (inputs,) = client.get("/v2/models/deep").json["inputs"]  # no 8-bit pixels of RGB
    assert inputs["name"] == "encoded"
    best = found["predictions"][0]
    assert (best["label"], best["score"]) == pytest.approx(expected.predictions[0], abs=1e-6)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes_and_sees_the_fourth_channel(
    deep_data, config_of, tmp_path
):
    config = config_of(deep_data, checkpoint_steps=5, color_jitter=0.3, hflip=0.5)
    whole = same_after_a_kill(config, tmp_path)
    assert top1(whole, write_deep) >= 0.9
    train(config_of(deep_data, channel_order=("0", "1", "2")), tmp_path / "blind")
    assert top1(tmp_path / "blind", write_deep) < 0.75


@pytest.mark.slow
def test_floats_in_another_order_are_learnt(config_of, tmp_path):
    data = folder_of(tmp_path / "data", write_fine, 24)
    train(config_of(data, channel_order=("1", "0")), tmp_path / "run")
    assert top1(tmp_path / "run", write_fine) >= 0.9
    run = load_run(tmp_path / "run")
    assert run.preprocessing.channels.value_type == "float32"
    files = some(data)
    ours = shares(vit.Predictor(tmp_path / "run", precision="fp32")(files))
    for name in ("net.onnx", "net.xml"):
        vit.export_model(tmp_path / "run", tmp_path / name)
        assert np.abs(shares(vit.Predictor(tmp_path / name)(files)) - ours).max() < 1e-5


@pytest.mark.slow
def test_a_plan_knows_the_channels(deep_data, tmp_path, capsys, known_speed):
    small = "--epochs 1 --dim 32 --depth 1 --device cpu --precision fp32"
    assert main(["train", str(deep_data), "--out", str(tmp_path / "run"), *small.split()]) == 0
    assert "4 channels of uint16" in capsys.readouterr().err
    words = ["predict", str(tmp_path / "run"), str(deep_data / "none/0.tif")]
    assert main([*words, "--precision", "fp32"]) == 0
    assert main(["check", str(deep_data)]) == 0
    assert "stored in uint16 x 4, and read with all their channels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"channel_order": ("9",)}, "--channels 9: give different numbers from 0 to 3"),
        ({"channel_order": ("a",)}, "--channels a: .* or names for all 4 channels"),
        ({"channel_order": ("1", "1")}, "--channels 1,1: give different numbers from 0 to 3"),
        ({"axes": "Z"}, "no axis Z in YXS; vit train --axes Z needs it"),
        ({"channels": 4}, "leave --in-chans out"),
        ({"auto_augment": "randaugment"}, "--color-jitter"),
        ({"mean": (0.4, 0.5, 0.5)}, "each channel has its own"),
    ],
)
def test_settings_that_do_not_fit_are_refused(deep_data, config_of, tmp_path, settings, part):
    with pytest.raises(VitError, match=part) as caught:
        train(config_of(deep_data, **settings), tmp_path / "run")
    assert str(caught.value).startswith((next(iter(settings)), "--channels", str(deep_data)))


@pytest.mark.slow
def test_a_cache_of_channels_gives_the_same_network(deep_data, deep_run, config_of, tmp_path):
    for kind in ("disk", "device"):
        folder = str(tmp_path / f"{kind}.images")
        more = {"cache": kind, "cache_folder": folder, "color_jitter": 0.3 * (kind == "device")}
        train(config_of(deep_data, epochs=2, **more), tmp_path / kind)
    kept, whole = (load_file(run / "model.safetensors") for run in (tmp_path / "disk", deep_run))
    assert kept.keys() == whole.keys()
    assert all(torch.equal(kept[name], whole[name]) for name in whole)
    assert load_run(tmp_path / "device").preprocessing == load_run(deep_run).preprocessing
    rounds = config_of(deep_data, cache="device", precision="tf32")
    with pytest.raises(ConfigError, match="TF32 would round the values of channels"):
        refuse_for_channels(rounds)


@pytest.mark.parametrize("other", mostly_slow(["three.tif", "photo.jpg"], 2))
def test_images_of_another_kind_are_named(deep_data, config_of, tmp_path, capsys, other):
    data = shutil.copytree(deep_data, tmp_path / "data")
    path = data / "disc" / other
    if path.suffix == ".jpg":
        Image.new("RGB", (SIDE, SIDE)).save(path)
    else:
        write_tiff(path, np.ones((SIDE, SIDE, 3), np.uint16), photometric="rgb")
    assert main(["check", str(data)]) == 1
    assert "images of RGB and 4 channels: training takes one kind" in capsys.readouterr().out
    with pytest.raises(DataError, match=rf"\.tif has 4 channels and .*{other} (has 3|is RGB)"):
        train(config_of(data), tmp_path / "run")


def test_files_that_a_network_cannot_take_are_refused(deep_run, tmp_path):
    values = np.ones((SIDE, SIDE, 4), np.float32)
    np.save(tmp_path / "floats.npy", values)
    write_tiff(tmp_path / "five.tif", np.ones((SIDE, SIDE, 5), np.uint16))
    Image.new("RGB", (9, 9)).save(tmp_path / "photo.png")
    np.save(tmp_path / "bytes.npy", values.astype(np.uint8))
    names = ("floats.npy", "five.tif", "photo.png", "bytes.npy")
    predictor = vit.Predictor(deep_run, precision="fp32")
    errors = [one.error for one in predictor([tmp_path / name for name in names])]
    assert "values of float32; the network takes uint16" in errors[0]
    assert "5 channels; the network takes 4" in errors[1]
    assert "the network takes 4 channels" in errors[2]
    assert errors[3] is None  # narrower types hold the same values
    for array, part in ((values, "uint16"), (np.ones((9, 9, 3), np.uint16), "4 channels")):
        with pytest.raises(ConfigError, match=part):
            predictor([array])
    with pytest.raises(VitError, match="fp16"):
        vit.export_model(deep_run, tmp_path / "net.onnx", precision="fp16")


def test_values_that_are_not_finite_are_refused(config_of, tmp_path):
    data = folder_of(tmp_path / "data", write_fine, 12)
    bad = np.load(data / "none/3.npy")
    bad[0, 0, 0] = np.nan
    np.save(data / "none/3.npy", bad)
    with pytest.raises((BadImage, DataError), match=r"none/3\.npy.*not finite"):
        train(config_of(data, epochs=1), tmp_path / "run")


@pytest.mark.slow
def test_a_resumed_run_keeps_its_channels(deep_data, config_of, tmp_path):
    out = tmp_path / "run"
    train(config_of(deep_data, epochs=1, channel_order=("3", "0")), out)
    chosen = load_run(out).preprocessing.channels
    assert chosen.order == (3, 0)
    train(config_of(deep_data, epochs=1, channel_order=("3", "0")), out, resume=True)
    with pytest.raises(VitError, match="--channels='3,1' differs from '3,0'"):
        train(config_of(deep_data, epochs=1, channel_order=("3", "1")), out, resume=True)
    train(config_of(deep_data, epochs=1), out, resume=True)
    assert load_run(out).preprocessing.channels == chosen


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mae", "dino", "simclr"])
def test_four_channels_pretrain_a_network_that_is_fine_tuned(deep_data, config_of, tmp_path, task):
    size = {"epochs": 1, "pooling": "mean", "class_token": False, "ema": 0.9}
    size |= {"color_jitter": 0.3, "cache": {"dino": "device", "simclr": "ram"}.get(task, "none")}
    train(config_of(deep_data, task=task, **size), tmp_path / "pre")
    for more in ({"method": "probe"}, {"method": "full", "channel_order": ("3", "1")}):
        out = tmp_path / more["method"]
        settings = {**PLAIN, **more, "feature_cache": str(tmp_path / "cache")}
        vit.train(str(deep_data), out, weights=str(tmp_path / "pre"), **settings)
        assert load_run(out).config.channels == len(more.get("channel_order", range(4)))


@pytest.mark.parametrize("names", [(), pytest.param(NAMES, marks=pytest.mark.slow)])
def test_weights_of_three_channels_train_on_four(deep_data, tiny_run, tmp_path, capsys, names):
    run, weights = load_run(tiny_run), tmp_path / "weights"
    weights.mkdir()
    colours = replace(run.preprocessing, mean=(0.485, 0.456, 0.406))  # as most weights have
    about = {"config": Config(model=run.config), "classes": run.classes}
    save_model(weights, run.model, preprocessing=colours, **about)
    given = {**PLAIN, "weights": str(weights), "feature_cache": str(tmp_path / "cache")}
    vit.train(str(deep_data), tmp_path / "run", channel_order=names, **given)
    assert load_run(tmp_path / "run").config.channels == 4
    told = "3 -> 4 channels (red, green and blue keep their kernels, others begin at zero)"
    assert (told in capsys.readouterr().err) == bool(names)


@pytest.mark.slow
@pytest.mark.auto_precision
def test_folds_of_four_channels_make_one_network(deep_data, tiny_run, tmp_path):
    given = {**PLAIN, "weights": str(tiny_run), "feature_cache": str(tmp_path / "cache")}
    given |= {"epochs": 2, "folds": 3, "channel_order": ("3", "0", "1")}
    vit.cross_validate(str(deep_data), tmp_path / "folds", **given)
    shutil.rmtree(tmp_path / "folds/fold-3")  # as if it had been stopped before
    record = vit.cross_validate(str(deep_data), tmp_path / "folds", resume=True, **given)
    assert set(record["scores"]) == {"1", "2", "3"}
    stored = [read_settings(tmp_path / f"folds/fold-{n}/config.yaml") for n in (1, 2, 3)]
    kept = [{name: one[name] for name in CHANNEL_SETTINGS} for one in stored]
    assert kept == [kept[0]] * 3
    assert kept[0]["channel_order"] == ["3", "0", "1"]
    soup = vit.Predictor(tmp_path / "folds/soup", device="cpu", precision="fp32")
    assert all(result.error is None for result in soup(some(deep_data)))
    assert soup.preprocessing == load_run(tmp_path / "folds/fold-2").preprocessing


def write_pages(path: Path, seed: int, names=NAMES, axes="CYX", **more: Any) -> None:
    """Four channels of 16 bits as pages of an OME-TIFF."""
    values = disc(4, level=2000, noise=150, contrast=1500, seed=seed).astype(np.uint16)
    metadata = {"axes": axes, "Channel": {"Name": list(names)} if axes == "CYX" else None}
    options = {"photometric": "minisblack", "ome": True, "metadata": metadata, **more}
    tifffile.imwrite(path.with_suffix(".tif"), values.transpose(2, 0, 1), **options)


@pytest.mark.slow
def test_channels_in_pages_are_chosen_by_name_up_to_the_exported_file(config_of, tmp_path, capsys):
    data, out, other = folder_of(tmp_path / "data", write_pages, 10), tmp_path / "run", "net.onnx"
    config = config_of(data, epochs=1, channel_order=("blue", "nir"))
    train(config, out)
    printed = capsys.readouterr().err
    assert printed.count("the axis C of the TIFFs is their channels") == 1
    assert re.search(r"2 channels of uint16.*: blue: \d+ to \d+, nir: ", printed)
    spec = load_run(out).preprocessing.channels
    assert (spec.order, spec.names, spec.axes) == ((3, 1), ("blue", "nir"), "")
    train(config, out, resume=True)  # the names were completed to numbers
    write_pages(tmp_path / "same.tif", 7)
    mixed = dict(zip(NAMES, tifffile.imread(tmp_path / "same.tif"), strict=True))
    order = ("nir", "blue", "red", "green")
    values = np.stack([mixed[name] for name in order])
    known = {"photometric": "minisblack", "ome": True}
    metadata = {"axes": "CYX", "Channel": {"Name": list(order)}}
    tifffile.imwrite(tmp_path / "mixed.tif", values, metadata=metadata, **known)
    write_pages(tmp_path / "other.tif", 7, names="abcd")
    vit.export_model(out, tmp_path / other)
    for source in (out, tmp_path / other):
        predictor = vit.Predictor(source, **({"precision": "fp32"} if source == out else {}))
        same, mixed_up, wrong = predictor(
            [tmp_path / f"{n}.tif" for n in ("same", "mixed", "other")]
        )
        assert np.array_equal(shares([same]), shares([mixed_up]))
        assert "channels named a, b, c, d; the network takes blue, nir" in wrong.error


def test_names_that_differ_are_told_or_refused(config_of, tmp_path, capsys):
    data = folder_of(tmp_path / "data", write_pages, 4)
    write_pages(data / "disc/3.tif", 7, names="abcd")
    with pytest.raises(DataError, match=r"red, nir, green, blue, and .*3\.tif a, b, c, d: name"):
        train(config_of(data, epochs=1, channel_order=("red",)), tmp_path / "run")
    train(config_of(data, epochs=1), tmp_path / "run")
    assert "they are taken by number" in capsys.readouterr().err
    assert load_run(tmp_path / "run").preprocessing.channels.names == ()


@pytest.mark.slow
def test_names_of_the_user_are_those_of_files_without(deep_data, config_of, tmp_path):
    train(config_of(deep_data, epochs=1, channel_order=NAMES), tmp_path / "run")
    assert load_run(tmp_path / "run").preprocessing.channels.names == NAMES
    train(make_config(read_settings(tmp_path / "run/config.yaml")), tmp_path / "again")
    spec = load_run(tmp_path / "again").preprocessing.channels
    assert (spec.order, spec.names) == ((0, 1, 2, 3), NAMES)


@pytest.mark.slow
def test_planes_of_another_axis_are_channels_everywhere(config_of, tmp_path, capsys):
    data, out = folder_of(tmp_path / "data", partial(write_pages, axes="ZYX"), 10), tmp_path / "run"
    with pytest.raises(
        BadImage, match=r"axes ZYX \(4 z\); vit train --axes Z takes 4 planes as channels"
    ):
        train(config_of(data, epochs=1), out)
    assert main(["check", str(data)]) == 1
    assert main(["check", str(data), "--axes", "Z"]) == 0
    assert "stored in uint16 x 4" in capsys.readouterr().out
    vit.export_data(data, tmp_path / "copy", to="folder")
    copies = [path.read_bytes() for path in sorted((tmp_path / "copy").rglob("*.tif"))]
    assert sorted(copies) == sorted(path.read_bytes() for path in data.rglob("*.tif"))
    train(config_of(data, epochs=1, axes="Z", cache="ram"), out)
    assert "data:image/jpeg;base64," in (out / "report.html").read_text()
    assert load_run(out).preprocessing.channels.axes == "Z"
    for more in ({}, {"axes": "Z"}):
        train(config_of(data, epochs=1, cache="ram", **more), out, resume=True)
    vit.export_model(out, tmp_path / "net.onnx")
    path = some(data)[1]
    arrays = [tifffile.imread(path).transpose(1, 2, 0)]
    expected = shares(vit.Predictor(out, precision="fp32")(arrays))
    for source in (out, tmp_path / "net.onnx"):
        predictor = vit.Predictor(source, **({"precision": "fp32"} if source == out else {}))
        assert np.abs(shares(predictor([path])) - expected).max() < 1e-5
    found = vit.suggest(data, weights=out, n=3, device="cpu", precision="fp32")
    assert (len(found.suggested), found.failed) == (3, [])
    with running([out]) as client:
        (found,) = client.send([("a.tif", path.read_bytes())]).json["results"]
    assert found["predictions"][0]["score"] == pytest.approx(expected.max(), abs=1e-6)


@pytest.mark.usefixtures("known_speed")
def test_a_plan_shows_channels_as_they_are_typed(config_of, tmp_path, capsys):
    data = folder_of(tmp_path / "data", write_pages, 4)
    assert main(["plan", str(data), "--channels", "nir,red", "--precision", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert "2 channels (nir, red)" in printed
    assert re.search(r"\n  --channels +nir,red +given", printed)


def test_pixels_without_a_value_are_neither_measured_nor_seen(config_of, tmp_path):
    def write(path: Path, seed: int) -> None:
        values = disc(1, level=2000, noise=150, contrast=1500, seed=seed).astype(np.float32)
        values[: 8 + seed % 3] = -9999
        tag = (42113, 2, 0, "-9999", True)
        write_tiff(path.with_suffix(".tif"), values[..., 0], extratags=[tag], planarconfig=None)

    data = folder_of(tmp_path / "data", write, 10)
    train(config_of(data, epochs=1), tmp_path / "run")
    preprocessing = load_run(tmp_path / "run").preprocessing
    spec = preprocessing.channels  # which RGB of 8 bits would not have
    assert 1400 < spec.low[0] < spec.high[0] < 4000
    seen = preprocessing.normalise(preprocessing(preprocessing.read(some(data)[0])))
    assert abs(seen[0, :5]).max() < 1e-5
    assert seen[0, 12:].std() > 0.5


@pytest.mark.slow
def test_a_run_gives_its_channels_to_the_next_training(deep_data, config_of, tmp_path, capsys):
    names = tuple("abcd")
    data = folder_of(tmp_path / "data", partial(write_pages, names=names), 8)
    first, brighter = tmp_path / "first", folder_of(tmp_path / "new", write_deep, 8)
    train(config_of(data, epochs=1, channel_order=("d", "b")), first)
    given = {**PLAIN, "weights": str(first), "feature_cache": str(tmp_path / "cache")}
    capsys.readouterr()
    for number, (new, more) in enumerate([(brighter, {}), (data, {"channel_order": ("d", "b")})]):
        vit.train(str(new), tmp_path / f"run-{number}", **given, **more)
        assert "channels d,b of uint16, with the ranges, mean and dev" in capsys.readouterr().err
        kept = load_run(tmp_path / f"run-{number}").preprocessing.channels
        assert kept == load_run(first).preprocessing.channels
    floats = folder_of(tmp_path / "floats", write_fine, 4)
    photos = tmp_path / "photos"
    folder_of(photos, lambda path, seed: Image.new("L", (9, 9), seed).save(f"{path}.png"), 4)
    wrong: list[tuple[Path, dict[str, Any], str]] = [
        (floats, {}, r"\.npy: 2 channels; the network takes 4, which comes from the weights"),
        (photos, {}, "--channels 3,1 of the weights: the images are RGB of 8 bits"),
        (data, {"channel_order": ("b", "d")}, "--channels b,d: the weights take d,b"),
        (data, {"axes": "Z"}, "axes='Z': the weights read axes=''"),
        (data, {"intensity_range": (0, 9)}, "intensity_range=.*ranges of channels; leave it out"),
    ]
    for new, more, part in wrong:
        with pytest.raises(VitError, match=part):
            vit.train(str(new), tmp_path / "wrong", **given, **more)
