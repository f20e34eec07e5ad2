"""A network that names several classes keeps its probabilities and thresholds wherever it goes."""

import json
import shutil

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForImageClassification

from vit.data.image_io import read_image
from vit.data.sources.dataset_spec import DatasetSpec
from vit.errors import ConfigError, VitError, WeightsError
from vit.export.export_accuracy import Accuracy, compare
from vit.export.export_formats import export_model, export_onnx
from vit.export.verification import ModelOutputs, verify
from vit.exported.onnx_session import OnnxSession
from vit.inference.compare import compare as compare_networks
from vit.inference.evaluate import evaluate
from vit.inference.evaluation_data import load_samples
from vit.inference.predictor import Predictor
from vit.score_calibration import COVERAGES, ScoreCalibration, decision_confidence
from vit.tasks.task import get_task
from vit.weights.convert import convert
from vit.weights.load_model import load_model
from vit.weights.saved_model import CALIBRATION, load_run, update_run

pytestmark = pytest.mark.slow


@pytest.fixture
def images(several_list):
    return [str(path) for path in sorted(several_list.parent.glob("*.png"))]


@pytest.fixture(scope="module")
def exported(several_run, tmp_path_factory, traced_once):
    out = tmp_path_factory.mktemp("exported") / "m.onnx"
    export_onnx(several_run, out, notify=None)
    return out


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert [name for name, _ in one.predictions] == [name for name, _ in other.predictions]
        assert dict(one.predictions) == pytest.approx(dict(other.predictions), abs=1e-5)


def exact(run):
    """The run in the precision of the file."""
    return Predictor(run, device="cpu", precision="fp32")


def test_the_file_names_the_same_classes_as_the_run(several_run, exported, images):
    runner, predictor = Predictor(exported), exact(several_run)
    assert runner.thresholds == predictor.thresholds == (0.3, 0.5, 0.7)
    assert runner.metadata["activation"] == "sigmoid"
    same(runner(images), predictor(images))
    same(runner(images, threshold=0.45), predictor(images, threshold=0.45))
    same(runner(images, top_k=1), predictor(images, top_k=1))


def test_the_file_rejects_and_returns_sets_as_the_run(several_run, exported, images, tmp_path):
    levels = [round(0.2 + 0.7 * coverage, 3) for coverage in COVERAGES]
    (outputs,) = exact(several_run).batches(images)
    sure = [decision_confidence(one.probabilities.tolist(), (0.3, 0.5, 0.7)) for one in outputs]
    least = (sorted(sure)[15] + sorted(sure)[16]) / 2
    stored = ScoreCalibration(
        temperature=1.0,
        images=99,
        target_precision=0.5,
        threshold=least,
        set_levels=tuple(levels),
        multilabel=True,
    )
    folder = shutil.copytree(several_run, tmp_path / "run")
    update_run(folder, {CALIBRATION: stored.to_dict()})
    graph = onnx.load(exported)  # a temperature of 1 changes only the metadata
    entry = graph.metadata_props.add()
    entry.key, entry.value = "score_calibration", json.dumps(stored.to_dict())
    onnx.save(graph, tmp_path / "m.onnx")
    runner, run = Predictor(tmp_path / "m.onnx"), exact(folder)
    assert runner.calibration == run.calibration == stored
    found, expected = (each(images, reject=True, sets=0.6) for each in (runner, run))
    for one, other in zip(found, expected, strict=True):
        assert one.unknown == other.unknown
        assert {*one.prediction_set} == {*other.prediction_set}
    assert {one.unknown for one in found} == {None, "uncertain"}
    assert len({one.prediction_set for one in found}) > 1
    with pytest.raises(ConfigError, match="leave one of the two out"):
        runner(images, reject=True, threshold=0.4)


def test_verify_compares_the_sets_of_named_classes(several_run, exported, images):
    report = verify(exported, images, run=several_run)
    assert report.agrees, report.complaints()
    first = ModelOutputs(np.array([0.9, 0.6, 0.1]), thresholds=(0.5, 0.5, 0.5))
    second = ModelOutputs(np.array([0.9, 0.4, 0.1]), thresholds=(0.5, 0.5, 0.5))
    assert first.agreement(first) == 1
    assert first.agreement(second) == 0.5  # one of two
    none = ModelOutputs(np.zeros(3), thresholds=(0.5, 0.5, 0.5))
    assert (none.agreement(none), none.agreement(first)) == (1, 0)


def test_verify_reports_other_thresholds_and_single_label_files(
    several_run, exported, images, tmp_path
):
    other = tmp_path / "run"
    shutil.copytree(several_run, other)
    update_run(other, {"thresholds": [0.6, 0.5, 0.7]})
    report = verify(exported, images, run=other)
    assert not report.agrees
    assert "differ from the run in thresholds" in " ".join(report.complaints())
    proto = onnx.load(exported)
    onnx.helper.set_model_props(
        proto,
        {**{p.key: p.value for p in proto.metadata_props}, "activation": "softmax"},
    )
    onnx.save(proto, tmp_path / "one.onnx")
    report = verify(tmp_path / "one.onnx", images, run=several_run)
    assert "differ from the run in thresholds" in " ".join(report.complaints())


@pytest.mark.parametrize("thresholds", ["null", "[0.5]", "[0.5, 0.5, 7]", "x"])
def test_damaged_thresholds_in_the_metadata_are_refused(exported, tmp_path, thresholds):
    proto = onnx.load(exported)
    found = {p.key: p.value for p in proto.metadata_props}
    onnx.helper.set_model_props(proto, {**found, "thresholds": thresholds})
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(WeightsError, match="metadata are damaged"):
        Predictor(tmp_path / "m.onnx")


def test_the_export_reports_the_loss_of_map(several_run, several_list, tmp_path):
    lines = []
    for precision, more in (("fp16", {}), ("int8", {"dynamic": True})):
        out = tmp_path / f"{precision}.onnx"
        data = {"validation": str(several_list), "max_drop": 0.5, **more}
        export_onnx(several_run, out, precision=precision, notify=lines.append, **data)
        assert verify(out, run=several_run).precision == precision
    assert sum(line.startswith("mAP: run ") for line in lines) == 2


def test_the_accuracy_of_a_multilabel_file_is_mean_average_precision(
    several_run, exported, several_list, monkeypatch
):
    run = load_run(several_run)
    samples = load_samples(
        get_task(run.task_name), several_run, DatasetSpec(str(several_list)), run.classes, print
    )
    monkeypatch.setattr("vit.export.export_accuracy.SECONDS", 0.0)
    found = compare(run, OnnxSession(exported), samples, (lines := []).append)
    scores = evaluate(several_run, str(several_list), device="cpu", precision="fp32")
    assert found.before == pytest.approx(scores["map"], abs=1e-6)
    assert (found.score, found.agreement) == ("mAP", 1.0)
    assert lines[0].startswith(f"compared 16 of {len(samples)} images with the run, 0:0")
    with pytest.raises(VitError, match=r"lose 1\.00% of mAP"):
        Accuracy(10, 0, 0.91, 0.9, 1.0, 0.1, "mAP").check(0.005, "m.onnx")
    undefined = Accuracy(10, 0, None, None, 1.0, 0.1, "mAP")
    undefined.check(0.0, "m.onnx")
    assert undefined.line().startswith("mAP: run -, file -, on 10 images")


def test_openvino_and_torch_files_keep_the_thresholds(several_run, images, tmp_path):
    pytest.importorskip("openvino")
    export_model(several_run, tmp_path / "m.xml", to="openvino", notify=None)
    runner = Predictor(tmp_path / "m.xml", engine="openvino")
    same(runner(images[:8]), exact(several_run)(images[:8]))
    export_model(several_run, tmp_path / "m.pt2", to="torch", notify=None)
    extra = {"thresholds.json": ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    assert json.loads(extra["thresholds.json"]) == [0.3, 0.5, 0.7]


def test_transformers_opens_the_folder_as_a_multilabel_model(several_run, images, tmp_path):
    _, lines = convert(several_run, "huggingface", tmp_path / "hf")
    assert "multi_label_classification" in " ".join(lines)
    theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "hf").eval()
    assert theirs.config.problem_type == "multi_label_classification"
    run = load_run(several_run)
    pixels = run.preprocessing.normalise(run.preprocessing(read_image(images[5])).unsqueeze(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(pixels).logits, run.model(pixels), atol=1e-5, rtol=0)
    back = load_model(tmp_path / "hf", notify=None)
    assert back.thresholds == (0.5, 0.5, 0.5)  # there is no place for others


def test_conversion_to_timm_notes_that_thresholds_are_dropped(several_run, tmp_path):
    _, lines = convert(several_run, "timm", tmp_path / "timm")
    assert any("take sigmoids" in line for line in lines)


def test_vit_evaluate_and_vit_compare_measure_the_file_as_the_run(
    several_run, exported, several_list, tmp_path
):
    exact_settings = {"device": "cpu", "precision": "fp32"}
    data, rows, notes = str(several_list), tmp_path / "rows.jsonl", []
    expected = evaluate(several_run, data, **exact_settings)
    found = evaluate(exported, data, out=rows, notify=notes.append)
    for name in ("count", "map", "macro_f1", "subset_accuracy", "loss", "failed"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5)
    features = {row["feature"] for row in found["slices"]}
    assert features <= {row["feature"] for row in expected["slices"]} - {"brightness", "sharpness"}
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    paths = [row["image"] for row in written]
    same(Predictor(exported)(paths), Predictor(several_run, **exact_settings)(paths))
    assert [[one["label"] for one in row["predictions"]] for row in written] == [
        [name for name, _ in one.predictions] for one in Predictor(exported)(paths)
    ]
    compared = compare_networks(several_run, exported, data, precision="fp32").to_dict()
    assert compared["verdict"] == "not distinguishable"
    assert abs(compared["difference"]) < 1e-3


def test_images_that_the_run_of_a_file_held_out_are_measured(several_run, several_list, tmp_path):
    run = shutil.copytree(several_run, tmp_path / "run")
    out, notes = tmp_path / "m.onnx", []
    export_onnx(run, out, notify=None)
    (run / "config.yaml").write_text(f"data: {several_list}\ntask: multilabel\n")
    record = {"val": ["03.png", "05.png"], "root": str(several_list.parent)}
    (run / "split.json").write_text(json.dumps(record))
    assert evaluate(out, str(several_list), notify=notes.append)["count"] == 2
    assert not [note for note in notes if "not here" in note]
    run.rename(tmp_path / "gone")
    found = evaluate(out, str(several_list), notify=notes.append)
    assert found["count"] > 2
    assert [note for note in notes if "is not here: images of its training" in note]
    with pytest.raises(ConfigError, match="corruptions: an exported network resizes"):
        evaluate(out, str(several_list), corruptions=True)
    with pytest.raises(ConfigError, match="tta='flip': not supported by an exported network"):
        evaluate(out, str(several_list), tta="flip")
