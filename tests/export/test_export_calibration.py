"""Calibrated scores are the same in the run and in every exported file."""

import json
import shutil

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import nn

from vit.config import ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError
from vit.export import float16
from vit.export.classifier_graph import ClassifierWithTokens
from vit.export.export_formats import export_model, export_onnx
from vit.export.verification import verify
from vit.exported.onnx_session import OnnxSession
from vit.inference.predictor import Predictor
from vit.model.build import build_classifier
from vit.model.feature_distance import FeatureDistance, encode_with_features
from vit.tasks.task import calibrated_activation
from vit.weights.saved_model import CALIBRATION, load_run, update_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def file(distance_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "m.onnx"
    export_onnx(distance_run, out, notify=None)
    return out


@pytest.fixture
def images(tiny_data):
    return [str(path) for path in sorted((tiny_data / "val").rglob("*.*"))]


def largest_difference(found, expected):
    pairs = zip(found, expected, strict=True)
    scores = [(dict(one.predictions), dict(other.predictions)) for one, other in pairs]
    return max(abs(one[name] - other[name]) for one, other in scores for name in other)


def test_the_file_gives_the_calibrated_scores(distance_run, tiny_run, file, images):
    runner = Predictor(file)
    exact = Predictor(distance_run, device="cpu", precision="fp32")
    assert largest_difference(runner(images), exact(images)) < 1e-5
    raw = Predictor(tiny_run, device="cpu", precision="fp32")
    assert largest_difference(runner(images), raw(images)) > 0.05
    assert runner.calibration == exact.calibration
    assert json.loads(runner.metadata["score_calibration"]) == exact.calibration.to_dict()
    options = {"reject": True, "sets": 0.8}
    for one, other in zip(runner(images, **options), exact(images, **options), strict=True):
        assert (one.unknown, one.prediction_set) == (other.unknown, other.prediction_set)
    assert verify(file, images, run=distance_run).agrees


def test_int8_scales_its_own_logits(calibrated_run, images, tmp_path):
    options = {"precision": "int8", "dynamic": True, "notify": None}
    for name, raw in (("raw.onnx", True), ("calibrated.onnx", False)):
        export_onnx(calibrated_run, tmp_path / name, no_calibration=raw, **options)
    raw, found = (Predictor(tmp_path / name) for name in ("raw.onnx", "calibrated.onnx"))
    scale = calibrated_activation(load_run(calibrated_run))
    for one, other in zip(*(next(one.batches(images)) for one in (raw, found)), strict=True):
        expected = scale(torch.from_numpy(one.probabilities)[None].log())[0]
        assert other.probabilities == pytest.approx(expected.numpy(), abs=1e-4)


def test_raw_scores_can_be_exported(calibrated_run, tiny_run, images, tmp_path):
    out = tmp_path / "raw.onnx"
    report = export_model(calibrated_run, out, no_calibration=True, notify=None)
    assert report.agrees
    runner = Predictor(out)
    assert runner.calibration is None
    raw = Predictor(tiny_run, device="cpu", precision="fp32")
    assert largest_difference(runner(images), raw(images)) < 1e-5


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11's own
def test_a_program_of_torch_gives_the_calibrated_scores(calibrated_run, tmp_path):
    export_model(calibrated_run, tmp_path / "m.pt2", notify=None)
    extra = {"score_calibration.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    assert json.loads(extra["score_calibration.json"])["temperature"] == 3
    scores = program.module()(torch.zeros(2, 16, 16, 3, dtype=torch.uint8))[0]
    run = Predictor(calibrated_run, device="cpu", precision="fp32")
    black = run.preprocessing.normalise(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    with torch.inference_mode():
        expected = run.activation(run.model(black))
    torch.testing.assert_close(scores[:1], expected, atol=1e-5, rtol=0)


def test_a_file_of_an_earlier_calibration_is_named(calibrated_run, file, images, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(calibrated_run, copy)
    update_run(copy, {CALIBRATION: {"temperature": 2.0, "images": 99, "exponent": 1.0}})
    report = verify(file, images, run=copy)
    assert not report.agrees
    assert any("in calibration temperature" in cause for cause in report.causes)


def test_the_scores_of_a_file_cannot_be_raw(file):
    with pytest.raises(ConfigError, match="export it with --no-calibration"):
        Predictor(file, no_calibration=True)


def test_the_file_rejects_the_images_that_the_run_rejects(distance_run, file, images):
    assert_same_rejections(distance_run, file, images)


def test_a_file_in_half_precision_computes_the_distance_in_single(
    distance_run, file, images, tmp_path
):
    out = tmp_path / "m.onnx"
    export_onnx(distance_run, out, precision="fp16", notify=None)
    assert_same_rejections(distance_run, out, images)
    proto = onnx.load(out)
    apart = float16.distance_nodes(proto)
    assert {"MatMul", "Mul"} <= {node.op_type for node in apart}
    casts = [node.attribute[0].i for node in apart if node.op_type == "Cast"]
    assert onnx.TensorProto.FLOAT in casts  # of the tokens
    assert onnx.TensorProto.FLOAT16 not in casts  # between two operators
    rows = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in images])
    distances = [OnnxSession(path)({"images": rows})[-1] for path in (out, file)]
    np.testing.assert_allclose(*distances, rtol=0, atol=0.01)
    read = {name for node in apart for name in node.input}
    kinds = {one.name: one.data_type for one in proto.graph.initializer}
    halves = [name for name in read & {*kinds} if kinds[name] == onnx.TensorProto.FLOAT16]
    assert halves == []
    assert onnx.TensorProto.FLOAT16 in kinds.values()


def test_a_file_with_tokens_rejects_the_same_images(distance_run, images, tmp_path):
    export_onnx(distance_run, tmp_path / "m.onnx", tokens=True, notify=None)
    assert_same_rejections(distance_run, tmp_path / "m.onnx", images)


def test_a_distance_adds_no_attention_of_the_pooling():
    config = ModelConfig(
        image_size=16, patch_size=8, dim=32, depth=2, num_heads=2, num_classes=3,
        pooling="attention",
    )  # fmt: skip
    model = build_classifier(config).eval()
    images = torch.randint(0, 256, (3, 16, 16, 3), dtype=torch.uint8)
    prepared = Preprocessing(image_size=(16, 16))
    with torch.inference_mode():
        floats = prepared.normalise(images.permute(0, 3, 1, 2))
        distance = FeatureDistance.fit(encode_with_features(model, floats)[2])
        parts = [
            ClassifierWithTokens(model, prepared, nn.Softmax(-1), one) for one in (None, distance)
        ]
        (*plain,), (*found, _) = (part(images) for part in parts)
    assert plain[3].shape[1] == 2
    torch.testing.assert_close(found, plain)


def assert_same_rejections(run, file, images):
    runner, exact = Predictor(file), Predictor(run, device="cpu", precision="fp32")
    found, expected = (each(images, reject=True) for each in (runner, exact))
    assert [one.unknown for one in found] == [one.unknown for one in expected]
    assert "unlike the training images" in {one.unknown for one in found}
    ((row,),) = runner.batches(images[:1])
    exact.engine.returns_distances = True
    ((output,),) = exact.batches(images[:1])
    assert row.distance == pytest.approx(output.distance, abs=5e-3)
