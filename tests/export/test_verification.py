"""A file that is not the network of its run is found out, and so is what was changed in it."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.exported.test_exported_classifier import over
from tests.slow_cases import mostly_slow
from vit.config import Config, DataConfig, ModelConfig
from vit.config.setting_layers import write_settings
from vit.errors import DataError, RunError, WeightsError
from vit.export import verification
from vit.export.sample_images import SIZES, comparison_images, draw, scene
from vit.export.verification import (
    LIMITS,
    REFERENCE,
    Comparison,
    ModelOutputs,
    by_predictor,
    by_reference_code,
    compare,
    verify,
)
from vit.inference.predictor import Predictor
from vit.weights.saved_model import load_run

CLASSES = ("apple", "class10", "class2")


class TorchGraph:
    """Stands for an exported file: a run's network behind a preprocessing that may be another."""

    inputs, outputs = ["images"], ["probabilities"]

    def __init__(self, run, *, metadata=None, precision="fp32", change=None, **other):
        self.run, self.change = run, change or (lambda x: x)
        self.preprocessing = dataclasses.replace(run.preprocessing, **other)
        self.metadata = {
            "graph": "classifier",
            "classes": json.dumps(run.classes),
            "preprocessing": json.dumps(run.preprocessing.to_dict()),
            "precision": precision,
        } | (metadata or {})

    @torch.inference_mode()
    def __call__(self, inputs):
        fitted = [self.preprocessing(Image.fromarray(image)) for image in inputs["images"]]
        logits = self.run.model(self.preprocessing.normalise(torch.stack(fitted)))
        return [self.change(logits.softmax(1)).numpy()]


@pytest.fixture(scope="module")
def run(tiny_run):
    return load_run(tiny_run)


@pytest.fixture(scope="module")
def input_images(tmp_path_factory):
    """Smooth images of several sizes, none of which is that of the network."""
    folder = tmp_path_factory.mktemp("images")
    paths = [str(folder / f"{number}.png") for number in range(24)]
    for number, path in enumerate(paths):
        width, height = [(40, 31), (24, 50), (33, 33), (70, 64)][number % 4]
        Image.fromarray(scene(width, height, number)).save(path)
    return paths


@pytest.fixture
def verified(run, tiny_run, input_images, monkeypatch):
    """Verifies a TorchGraph against the tiny run."""

    def check(images=None, **changes):
        graph = TorchGraph(run, **changes)
        monkeypatch.setattr(verification, "open_exported", lambda *_: over(graph))
        return verify("fruit.onnx", input_images if images is None else images, run=tiny_run)

    return check


def test_equal_networks_agree_in_every_implementation(verified, input_images):
    found = verified()
    assert found.agrees
    assert (found.images, found.top1_agreement, found.causes) == (24, 1.0, ())
    assert found.max_probability_difference < 1e-5
    assert [path.name for path in found.paths] == ["by hand", "predictor", "fruit.onnx"]
    assert found.paths[0].worst is None
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert record["images"] == 24
    assert record["agrees"] is True
    assert record["paths"][2]["top1_agreement"] == record["top1_agreement"] == 1.0
    assert record["failed"] == record["causes"] == []


@pytest.mark.parametrize(
    "changes",
    mostly_slow(
        [
            {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
            {"mean": (0.4, 0.6, 0.3)},
            {"crop_share": 0.5},
            {"crop_share": 1.0},
            {"resize": "squash"},
            {"interpolation": "bilinear"},
            {"change": lambda rows: rows[:, [2, 0, 1]]},
        ]
    ),
    ids=lambda value: str(value)[:30],
)
def test_a_file_with_other_preprocessing_or_outputs_does_not_agree(verified, changes):
    found = verified(**changes)
    assert not found.agrees
    by_name = {path.name: path for path in found.paths}
    assert [name for name, path in by_name.items() if not path.agrees] == ["fruit.onnx"]
    assert by_name["fruit.onnx"].max_probability_difference > 0.02
    assert by_name["fruit.onnx"].worst.endswith(".png")
    assert found.complaints()[0].startswith("fruit.onnx is not the network of the run: another")
    assert found.causes == ()  # its metadata are the run's


def test_differing_metadata_are_reported_even_if_outputs_agree(verified, run):
    said = dataclasses.replace(run.preprocessing, mean=(0.4, 0.5, 0.6), crop_share=0.8).to_dict()
    found = verified(metadata={"preprocessing": json.dumps(said)})
    assert all(path.agrees for path in found.paths)
    assert not found.agrees
    assert found.causes == ("its metadata differ from the run in crop_share, mean",)


def test_other_classes_are_reported(verified):
    found = verified(metadata={"classes": json.dumps(["class2", "apple", "class10"])})
    assert found.causes == ("its metadata differ from the run in classes",)
    assert not found.paths[2].agrees


def test_the_precision_of_the_file_sets_its_limits(verified):
    def noisy(rows):
        return (rows * 0.97 + 0.01).contiguous()

    assert not verified(change=noisy).agrees
    found = verified(change=noisy, precision="fp16")
    assert found.agrees
    assert found.paths[2].limits == LIMITS["fp16"]
    assert found.paths[1].limits == LIMITS["fp32"]
    assert found.lines()[-2].strip() == "its limits are those of fp16, as it says"
    assert found.to_dict()["precision"] == "fp16"
    with pytest.raises(WeightsError, match="precision='fp4' in the metadata: expected fp32, fp16"):
        verified(precision="fp4")


def test_an_unreadable_image_is_one_failure(verified, input_images, bad_images):
    found = verified([input_images[0], *bad_images, input_images[1]])
    assert (found.agrees, found.images) == (True, 2)
    assert [row["image"] for row in found.failures] == bad_images
    assert {row["path"] for row in found.failures} == {"all"}
    with pytest.raises(DataError, match=r"none of 1 images can .*; the first, .*: an empty"):
        verified(bad_images[:1])
    with pytest.raises(DataError, match="not one image"):
        verified([])


def test_an_image_that_one_implementation_fails_on_is_reported():
    hand, other = (
        [ModelOutputs(np.array([0.4, 0.6])), "torn"],
        [ModelOutputs(np.array([0.7, 0.3])), "torn"],
    )
    found = compare("b", ["x", "y"], hand, other, LIMITS["fp32"])
    assert found == Comparison("b", 1, 0.0, pytest.approx(0.3), "x", LIMITS["fp32"])
    ways = {REFERENCE: hand, "b": ["empty", "torn"]}
    assert verification.failures_of(["x", "y"], ways) == (
        {"image": "x", "path": "b", "error": "empty"},
        {"image": "y", "path": "all", "error": "torn"},
    )


def test_reference_code_and_predictor_give_the_same_probabilities(
    run, tiny_run, input_images, bad_images
):
    """Of two implementations that share the network alone; and in float32, whatever is usual."""
    mixed = [*input_images[:3], bad_images[0], input_images[3]]
    truth = Predictor(tiny_run, precision="fp32", device="cpu", batch_size=1)(mixed, top_k=3)
    for said in (by_reference_code(run, mixed), by_predictor(run, mixed)):
        for one, expected in zip(said, truth, strict=True):
            if expected.error is not None:
                assert one == expected.error
            else:
                scores = dict(expected.predictions)
                assert one.probabilities == pytest.approx([scores[n] for n in CLASSES], abs=1e-6)


def test_a_run_without_a_file_is_compared_with_the_predictor(tiny_run, input_images, monkeypatch):
    found = verify(tiny_run, images=input_images[:3])
    assert found.agrees
    assert [path.name for path in found.paths] == ["by hand", "predictor"]
    wrong = [ModelOutputs(np.array([1.0, 0.0, 0.0]))] * 3
    monkeypatch.setattr(verification, "by_predictor", lambda *_: wrong)
    found = verify(tiny_run, images=input_images[:3])
    assert not found.agrees
    assert found.causes == ("the predictor differs from its own parts: please report it",)


class TestImages:
    """Which images are compared where nobody gave any."""

    def chosen(self, folder):
        said = []
        with comparison_images(folder, load_run(folder), None, said.append) as paths:
            assert all(np.asarray(Image.open(path)).size for path in paths)
            return [*paths], said

    @pytest.fixture
    def with_data(self, tiny_run, tiny_data, tmp_path):
        """The tiny run as if it had been trained on the tiny data."""
        folder = tmp_path / "run"
        shutil.copytree(tiny_run, folder)
        shutil.copytree(tiny_data / "val", tmp_path / "data" / "val")
        shutil.copytree(tiny_data / "val", tmp_path / "data" / "train")
        model = ModelConfig(
            image_size=16, patch_size=8, dim=32, depth=2, num_heads=2, num_classes=3
        )
        config = Config(model=model, data=DataConfig(data=str(tmp_path / "data")))
        write_settings(folder / "config.yaml", config)
        return folder

    def test_validation_images_of_the_run_are_used(self, with_data, tmp_path):
        paths, said = self.chosen(with_data)
        assert paths == sorted(str(path) for path in (tmp_path / "data" / "val").rglob("*.*"))
        assert said == [f"27 of 27 validation images of {tmp_path / 'data'}"]

    def test_images_that_the_training_held_out_are_used(self, with_data, tmp_path):
        shutil.rmtree(tmp_path / "data" / "val")
        names = ["train/apple/1.jpg", "train/class2/0.png"]
        split = {"root": str(tmp_path / "data"), "val": names}
        (with_data / "split.json").write_text(json.dumps(split))
        paths, said = self.chosen(with_data)
        assert paths == [str(tmp_path / "data" / name) for name in names]
        assert said == [f"2 of 2 validation images of {tmp_path / 'data'}"]

    @pytest.mark.parametrize("missing", ["config.yaml", "data"])
    def test_images_are_drawn_if_there_are_no_validation_images(
        self, with_data, tmp_path, missing, monkeypatch
    ):
        monkeypatch.setattr("vit.export.sample_images.SIZES", SIZES[:6])
        if missing == "data":
            shutil.rmtree(tmp_path / "data")
        else:
            (with_data / missing).unlink()
        paths, (said,) = self.chosen(with_data)
        assert len(paths) == 6
        assert said.startswith("no validation images (")
        assert said.endswith("): drew 6 of many sizes")

    def test_the_drawn_images_are_the_same_each_time(self, tmp_path, monkeypatch):
        monkeypatch.setattr("vit.export.sample_images.SIZES", sizes := SIZES[:9])
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        first, second = draw(tmp_path / "a"), draw(tmp_path / "b")
        for one, other, size in zip(first, second, sizes, strict=True):
            with Image.open(one) as image, Image.open(other) as again:
                assert image.size == size
                assert image.tobytes() == again.tobytes()


def test_files_without_a_usable_run_are_refused(tmp_path, tiny_run, monkeypatch):
    (tmp_path / "a.zip").write_bytes(b"PK")
    with pytest.raises(WeightsError, match=r"a.zip is no exported file: give X.onnx or X.xml"):
        verify(tmp_path / "a.zip", run=tiny_run)
    graph = TorchGraph(load_run(tiny_run))
    monkeypatch.setattr(verification, "open_exported", lambda *_: over(graph))
    with pytest.raises(RunError, match=r"fruit.onnx names no run; give it with --run RUN"):
        verify("fruit.onnx")
    graph.metadata["source_run"] = "runs/\x1b[31mgone"
    with pytest.raises(RunError, match=r"exported from runs/.x1b\[31mgone, which is not here"):
        verify("fruit.onnx")
