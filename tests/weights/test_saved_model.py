"""A saved model is loaded unchanged, and any damage is detected."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from vit.config import Config, ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import RunError, VitError, WeightsError
from vit.model.build import build_classifier
from vit.score_calibration import ScoreCalibration
from vit.weights import saved_model
from vit.weights.load_model import from_pretrained
from vit.weights.saved_model import load_run, save_model, serialize_model, update_run

MODEL = ModelConfig(image_size=16, patch_size=8, dim=16, depth=1, num_heads=2, num_classes=3)
CLASSES = ("cat", "dog's", "ünï \u202e\x1b")
PREPROCESSING = Preprocessing(
    image_size=(16, 16), resize="squash", crop_share=0.875, mean=(0.1, 0.2, 0.3)
)


@pytest.fixture
def run(tmp_path, randomise) -> Path:
    model = build_classifier(MODEL)
    model.load_state_dict(randomise(model.state_dict()))
    save(tmp_path, model)
    return tmp_path


def save(folder: Path, model: torch.nn.Module, **changes) -> None:
    arguments = {"config": Config(model=MODEL), "classes": CLASSES, "preprocessing": PREPROCESSING}
    save_model(folder, model, **{**arguments, **changes})


def test_a_saved_model_is_loaded_unchanged(run, randomise):
    loaded = load_run(run)
    assert loaded.classes == CLASSES
    assert loaded.preprocessing == PREPROCESSING
    assert loaded.config == MODEL
    assert not loaded.model.training
    expected = randomise(loaded.model.state_dict())
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(from_pretrained(str(run))(images), loaded.model(images))


def test_the_licence_of_the_weights_is_loaded(run, tmp_path):
    loaded = load_run(run)
    assert loaded.license is None
    about = {"config": Config(model=MODEL), "classes": CLASSES, "preprocessing": PREPROCESSING}
    (tmp_path / "licensed").mkdir()
    packed = serialize_model(loaded.model.state_dict(), **about, terms="cc-by-4.0")
    packed.write(tmp_path / "licensed")
    assert load_run(tmp_path / "licensed").license == "cc-by-4.0"


def test_half_precision_is_saved_as_float32(tmp_path, run):
    save(tmp_path, load_run(run).model.bfloat16())
    assert load_run(tmp_path).model.head.weight.dtype == torch.float32


def test_saving_again_replaces_only_the_weights(run):
    before = (run / "config.json").read_bytes()
    model = load_run(run).model
    torch.nn.init.ones_(model.head.bias)
    save(run, model)
    assert (run / "config.json").read_bytes() == before
    assert bool((load_run(run).model.head.bias == 1).all())
    assert sorted(path.name for path in run.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": ("a", "b")}, "2 class names for num_classes=3"),
        ({"classes": ("a", "b", "b")}, "two classes have the same name"),
        ({"classes": ("a", "b", 3)}, "must be a list of names"),
        ({"config": Config(model=ModelConfig(**{**vars(MODEL), "depth": 2}))}, "missing: blocks.1"),
    ],
)
def test_saving_mismatched_arguments_raises(tmp_path, changes, message):
    with pytest.raises(VitError, match=message):
        save(tmp_path, build_classifier(MODEL), **changes)
    assert list(tmp_path.iterdir()) == []


def test_refuses_to_save_weights_that_are_not_finite(run):
    model = load_run(run).model
    model.head.bias.data[1] = float("nan")
    before = (run / "model.safetensors").read_bytes()
    with pytest.raises(WeightsError, match=r"not finite: head\.bias"):
        save(run, model)
    assert (run / "model.safetensors").read_bytes() == before


def test_every_flipped_bit_is_noticed(run):
    choose = random.Random(0)
    for name in ("model.safetensors", "config.json"):
        path = run / name
        whole = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            damaged[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(VitError, match=str(run)) as error:
                load_run(run)
            assert "\n" not in str(error.value)
        path.write_bytes(whole)
    load_run(run)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_every_cut_is_noticed(run, name):
    whole = (run / name).read_bytes()
    for length in (0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1):
        (run / name).write_bytes(whole[:length])
        with pytest.raises(VitError, match=str(run)):
            load_run(run)


def test_files_of_two_runs_do_not_mix(run, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    save(other, load_run(run).model, classes=("dog's", "cat", CLASSES[2]))
    (run / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(WeightsError, match="of another run"):
        load_run(run)


def test_missing_files_are_named(run, tmp_path):
    (run / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors is missing"):
        load_run(run)
    (run / "config.json").unlink()
    with pytest.raises(RunError, match="give the run folder of a training"):
        load_run(run)
    with pytest.raises(RunError, match="is not a folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(RunError):
        load_run("nul\0byte")


def forge(run: Path, change) -> None:
    """Rewrite config.json and sign the weights for it, as an ill-willed writer would."""
    from vit.weights.safetensors_io import read_tensors, write_tensors
    from vit.weights.saved_model import CONFIG_DIGEST, sha256

    content = json.loads((run / "config.json").read_text())
    content = change(content) or content
    (run / "config.json").write_text(json.dumps(content))
    tensors, notes = read_tensors(run / "model.safetensors")
    notes[CONFIG_DIGEST] = sha256((run / "config.json").read_bytes())
    write_tensors(run / "model.safetensors", tensors, notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("vit") and None, "has no key 'vit'"),
        (lambda _: [1, 2], "has no key 'vit'"),
        (lambda c: c["vit"].update(version=99), "version 99, this vit reads 1; install"),
        (lambda c: c["vit"].update(more=1), "has the keys"),
        (lambda c: c["vit"].update(config=[]), "config must have exactly activation"),
        (lambda c: c["vit"]["config"].update(dim=3.5), "dim=3.5"),
        (lambda c: c["vit"]["config"].update(norm="x"), "choose one of layernorm, rmsnorm"),
        (lambda c: c["vit"]["config"].update(lr=1), "config must have exactly"),
        (lambda c: c["vit"]["config"].update(dim=32), "of another shape"),
        (lambda c: c["vit"]["config"].update(dim=2 * 10**12), "overflow"),
        (lambda c: c["vit"]["config"].update(depth=10**9), "only 20 tensors"),
        (lambda c: c["vit"]["config"].update(num_classes=4), "3 class names for num_classes=4"),
        (lambda c: c["vit"].update(classes="abc"), "must be a list of names"),
        (lambda c: c["vit"]["preprocessing"].update(std=[0, 1, 1]), "std"),
        (lambda c: c["vit"].update(preprocessing=None), "preprocessing"),
    ],
)
def test_an_invalid_config_with_a_valid_digest_raises(run, change, message):
    forge(run, change)
    with pytest.raises(WeightsError, match=message) as error:
        load_run(run)
    assert str(run) in str(error.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(RunError, match="could not be written"):
        save(tmp_path / "nowhere", build_classifier(MODEL))


def test_a_calibration_is_stored_beside_the_other_fields_and_survives(calibrated_run, tiny_run):
    ours, theirs = (
        json.loads((at / "config.json").read_text()) for at in (calibrated_run, tiny_run)
    )
    stored = ours["vit"].pop("calibration")
    assert ours == theirs
    run = load_run(calibrated_run)
    assert run.calibration == ScoreCalibration.from_dict(stored)
    assert run.calibration.temperature == 3
    assert run.without_calibration().calibration is None
    assert load_run(tiny_run).calibration is None
    assert load_run(tiny_run).without_calibration().config == run.config


def test_a_calibration_may_be_gone_again_but_not_damaged(calibrated_run, tiny_run, tmp_path):
    copy = Path(shutil.copytree(calibrated_run, tmp_path / "run"))
    shutil.copy(tiny_run / "config.json", copy)  # a resumed training; the weights come after it
    assert load_run(copy).calibration is None
    shutil.copy(calibrated_run / "config.json", copy)
    update_run(copy, {"calibration": {"temperature": 0}})
    with pytest.raises(WeightsError, match="calibration must have"):
        load_run(copy)


def test_the_distance_belongs_to_the_run(distance_run, calibrated_run, tmp_path):
    assert load_run(calibrated_run).distance is None
    run = load_run(distance_run)
    assert run.distance is not None
    assert run.distance.tokens.mean.shape == (3, 32)
    assert run.without_calibration().distance is None
    copy = Path(shutil.copytree(distance_run, tmp_path / "run"))
    (copy / "distance.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"distance\.safetensors is missing"):
        load_run(copy)


def test_a_kill_while_the_distance_is_written_leaves_a_whole_run(
    distance_run, tmp_path, monkeypatch
):
    copy = Path(shutil.copytree(distance_run, tmp_path / "run"))
    run = load_run(copy)
    write = saved_model.write_tensors

    def killed(path, *rest):
        if path.name == "distance.safetensors":
            raise KeyboardInterrupt
        write(path, *rest)

    monkeypatch.setattr(saved_model, "write_tensors", killed)
    with pytest.raises(KeyboardInterrupt):
        saved_model.store_calibration(copy, run.calibration, run.distance)
    assert load_run(copy).calibration is None
    monkeypatch.undo()
    saved_model.store_calibration(copy, run.calibration, run.distance)
    assert load_run(copy).calibration == run.calibration
