"""The report at the end of a training: its numbers, and errors that do not fail the run."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

import vit
from tests.training.runs import SHORT, events, read_report
from vit.commands.main import main
from vit.config.setting_layers import make_config
from vit.data.dataset_types import Sample, Splits
from vit.errors import DataError, RunError
from vit.evaluation.temperature_scaling import Scaling
from vit.inference.evaluate import evaluate
from vit.inference.predictor import Predictor
from vit.stop_signals import Interrupted
from vit.training.checkpoint.run_folder import delete_run, foreign_files
from vit.training.final_report import distance_samples, report
from vit.training.train import train
from vit.weights.saved_model import load_run


@pytest.fixture(scope="module")
def finished(tiny_config, tmp_path_factory) -> Path:
    """A finished run of two epochs."""
    return train(tiny_config(epochs=2), tmp_path_factory.mktemp("finished") / "run").folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of that run."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize(
    ("images", "held_out", "chosen"), [(3999, 500, 3999), (45_000, 12, 2046), (45_000, 1, 0)]
)
def test_distances_are_measured_from_some_of_the_training_images(images, held_out, chosen):
    train, val = (
        tuple(Sample(f"{n}.png", 0) for n in range(count)) for count in (images, held_out)
    )
    splits = Splits(classes=("a", "b"), train=train, val=val, notes=(), made=True, root=Path())
    assert len(distance_samples(make_config({}), splits)) == chosen


def test_the_report_has_the_numbers_of_the_validation_and_of_evaluate(run, colour_data, tmp_path):
    scores = tmp_path / "scores.json"
    words = [str(run), str(colour_data), "--json", str(scores), "--device", "cpu"]
    assert main(["evaluate", *words, "--precision", "fp32"]) == 0
    expected = json.loads(scores.read_text())
    best = max(events(run), key=lambda event: (event["val_top1"], -event["val_loss"]))
    shown = [f"<bdi>{name}</bdi>" for name in ("blue", "green", "red")]
    shown += [f"<b>{best['val_top1']:.2%}</b>", f"<dd>{best['val_loss']:.4f}</dd>"]
    shown += [f"{expected[name]:.2%}" for name in ("top1", "macro_f1", "balanced_accuracy")]
    shown.append(f"calibration error {expected['ece']:.4f}")
    page = read_report(run)
    assert [text for text in shown if text not in page] == []
    assert "experts" not in page


def test_the_interval_of_the_report_is_of_the_groups_of_the_training(tiny_config, tmp_path):
    folders = r"((?:train|val)/\w+)/"  # three for validation
    run = train(tiny_config(epochs=2, group=folders), tmp_path / "run").folder
    page = read_report(run)
    assert "95% interval 0.00% to 100.00%" in " ".join(page.split())


def test_the_report_has_the_slices_of_evaluate(run, colour_data, monkeypatch):
    monkeypatch.setattr("vit.evaluation.accuracy_slices.MIN_IMAGES", 4)
    report(run)
    page = read_report(run)
    rows = evaluate(run, str(colour_data), device="cpu", precision="fp32")["slices"]
    assert {row["feature"] for row in rows} == {"brightness", "sharpness"}
    assert f"All {len(rows)} slices" in page
    for row in rows:
        cells = [f"{row['count']:,}", f"{row['accuracy']:.1%}"]
        assert f"<bdi>{row['slice']}</bdi>" in page
        assert re.search(r"\s*".join(f'<td class="n">{cell}</td>' for cell in cells), page)


@pytest.fixture
def few_images_calibrate(monkeypatch):
    monkeypatch.setattr("vit.evaluation.temperature_scaling.MIN_IMAGES", 10)


@pytest.mark.usefixtures("few_images_calibrate")
def test_raw_scores_that_are_kept_are_not_called_calibrated(tiny_config, tmp_path, monkeypatch):
    worse = "vit.evaluation.temperature_scaling.best_scaling"
    monkeypatch.setattr(worse, lambda *_: Scaling(50.0))
    run = train(tiny_config(**SHORT), tmp_path / "run").folder
    assert not load_run(run).calibration.scales
    page = read_report(run)
    assert "<td>raw</td>" in page
    assert "calibrated, temperature" not in page
    assert "by a calibration that was fitted without it" not in page


@pytest.mark.usefixtures("few_images_calibrate")
def test_the_end_of_a_training_calibrates_the_scores(
    tiny_config, colour_data, tmp_path, monkeypatch
):
    monkeypatch.setattr("vit.evaluation.fit_calibration.FALSE_ALARMS", 0.1)
    settings = tiny_config(epochs=2, ema=0.0, mixup=0.0)
    run = train(settings, tmp_path / "run").folder
    config, page = (run / "config.json").read_bytes(), read_report(run)
    own = json.loads(config)["vit"]
    stored = own["calibration"]
    assert stored["images"] == 21
    images = [str(path) for path in sorted((colour_data / "val").rglob("*.png"))]
    predictor = Predictor(run, device="cpu", precision="fp32")
    predictor.engine.returns_distances = True
    distances = [one.distance for batch in predictor.batches(images) for one in batch]
    assert sum(distance > stored["farthest"] + 1e-4 for distance in distances) == 1
    assert stored["temperature"] != 1 or stored["exponent"] != 1
    raw = evaluate(run, str(colour_data), device="cpu", precision="fp32", no_calibration=True)
    found = evaluate(run, str(colour_data), device="cpu", precision="fp32")
    assert f"temperature {stored['temperature']:.3f}" in page
    assert f"error of {raw['ece']:.4f}" in page
    assert f"{own['calibration_error']:.4f}" in page
    assert found["loss"] < raw["loss"]
    assert found["top1"] == raw["top1"]
    train(settings, run, resume=True)
    assert (run / "config.json").read_bytes() == config
    assert read_report(run) == page
    # --overwrite deletes the distance, too: a folder with it alone would be refused
    assert (run / "distance.safetensors").is_file()
    assert len(json.loads((run / "reference.json").read_text())["distances"]) == 21
    assert foreign_files(run) == []
    delete_run(run)
    assert {path.name for path in run.iterdir()} <= {".lock"}


def test_a_fast_report_opens_no_image_again(tiny_config, tmp_path, monkeypatch):
    def refuse(path, **_options):
        raise AssertionError(path)

    with monkeypatch.context() as patched:
        patched.setattr("vit.evaluation.html_page.read_image", refuse)
        patched.setattr("vit.evaluation.accuracy_slices.read_header", refuse)
        run = train(tiny_config(epochs=2, lr=1e-5, report="fast"), tmp_path / "run").folder
    page = read_report(run)
    assert "<h2>Fast report</h2>" in page
    assert f"vit report {run}" in page
    assert "Fast report" not in report(run).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["caption", "classify,caption"])
def test_a_captioner_has_a_report_with_the_validations_numbers(
    caption_config, tmp_path, capsys, task
):
    config, run = caption_config(task=task, epochs=2), tmp_path / "run"
    scores = train(config, run).scores
    page = read_report(run)
    shown = [f"<b>{scores['cider']:.3f}</b>", f"<dd>{scores['bleu4']:.2%}</dd>"]
    shown += [f"<dd>{scores['distinct']:.1%}</dd>", f"<dd>{scores['loss_shuffled']:.4f}</dd>"]
    shown.append(f"<dd>{scores.get('caption_loss', scores['loss']):.4f}</dd>")
    shown += ["<dt>images measured</dt><dd>21</dd>", "with 72 captions of"]
    if "top1" in scores:
        shown += [f"<dt>top-1</dt><dd>{scores['top1']:.2%}</dd>", "What is taken for what"]
    assert [text for text in shown if text not in page] == []
    train(config, run, resume=True)
    assert read_report(run) == page
    assert capsys.readouterr().err.splitlines()[-1] == f"report: {run / 'report.html'}"


def test_at_most_caption_samples_images_are_measured(caption_config, tmp_path):
    train(caption_config(**SHORT, caption_samples=5), tmp_path / "run")
    page = read_report(tmp_path / "run")
    assert "<dt>images measured</dt><dd>5</dd>" in page
    assert "5 (evenly spread) of the data" in page


BOTH = pytest.mark.parametrize("settings", ["tiny_config", "caption_config"])


@BOTH
def test_a_signal_stops_the_measuring_but_the_run_is_complete(
    request, tmp_path, monkeypatch, settings
):
    def send(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    config = request.getfixturevalue(settings)(**SHORT)
    with monkeypatch.context() as patched:
        patched.setattr("vit.training.logging.metrics_logger.MetricsLogger.end", send)
        with pytest.raises(Interrupted, match=r"the run is complete.*--resume") as stopped:
            train(config, tmp_path / "run")
    assert stopped.value.exit_code == 143
    assert not (tmp_path / "run/report.html").exists()
    train(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run/report.html").is_file()


@pytest.mark.parametrize(
    ("settings", "part", "error"),
    [
        ("tiny_config", "run_report.write_text", RunError("the disk is full")),
        ("caption_config", "caption_page.write_caption_report", KeyError("full")),
    ],
)
def test_no_fault_of_a_report_costs_the_run(
    request, tmp_path, monkeypatch, capsys, settings, part, error
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(f"vit.evaluation.{part}", fail)
    config = request.getfixturevalue(settings)(**SHORT)
    assert train(config, tmp_path / "run").epoch == 1
    assert not (tmp_path / "run/report.html").exists()
    told = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"note: no report\.html, but the run is complete: .*full.*", told[-1])


@BOTH
def test_an_image_that_vanished_is_told(request, tmp_path, caption_data, settings):
    build, data = request.getfixturevalue(settings), tmp_path / "data"
    shutil.copytree(caption_data, data)
    victim = next((data / "val").rglob("*.png"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF  # its header is right, its pixels are not
    victim.write_bytes(content)
    config = build(**SHORT, data=str(data), on_bad_image="skip")
    train(config, tmp_path / "run")
    page = read_report(tmp_path / "run")
    assert "1 image could not be read and took no part." in page
    assert "<dd>20</dd>" in page


def test_a_resume_and_vit_report_write_the_same_report_again(
    finished, tiny_config, run, colour_data, tmp_path, capsys
):
    page = finished / "report.html"
    before = page.read_bytes()
    page.write_bytes(b"old")
    train(tiny_config(epochs=2), finished, resume=True)
    assert page.read_bytes() == before
    assert capsys.readouterr().err.splitlines()[-1] == f"report: {page}"
    page.unlink()
    assert main(["report", str(finished)]) == 0
    assert capsys.readouterr().out == f"written: {page}\n"
    assert page.read_bytes() == before
    moved = shutil.copytree(colour_data, tmp_path / "moved")
    assert vit.report(run, moved) == run / "report.html"
    shutil.rmtree(moved / "val/red")
    shutil.rmtree(moved / "train/red")
    with pytest.raises(DataError, match="has other classes than the run; vit evaluate"):
        vit.report(run, moved)
    with pytest.raises(DataError, match="no such folder"):
        vit.report(run, tmp_path / "nowhere")
    with pytest.raises(RunError, match="is no run folder with a finished epoch: it has no config"):
        vit.report(colour_data)
    assert main(["report", str(tmp_path / "rum")]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_a_report_needs_the_images_that_were_held_out(tiny_config, colour_data, tmp_path):
    data = shutil.copytree(colour_data / "train", tmp_path / "data")
    config = tiny_config(data=str(data), **SHORT)
    run = vit.train(config, tmp_path / "run").folder
    held = json.loads((run / "split.json").read_text())["val"]
    for name in ("blue", "green"):
        for number in range(20):
            shutil.copy(data / name / "0.png", data / name / f"new{number}.png")
    with pytest.raises(DataError, match=rf"of the {len(held)} that .* held out: give the data as"):
        report(run)


@pytest.fixture
def without_val(colour_data, tmp_path):
    """Training and test images, and none for validation."""
    shutil.copytree(colour_data / "train", tmp_path / "data/train")
    shutil.copytree(colour_data / "val", tmp_path / "data/test")
    return tmp_path / "data"


def test_test_images_are_measured_once_with_the_best_weights(
    without_val, tiny_config, tmp_path, capsys
):
    config = tiny_config(data=str(without_val), epochs=2, keep_best=2, soup=True)
    result = train(config, tmp_path / "run")
    (event,) = (one for one in events(result.folder, "test"))
    found = evaluate(result.folder, without_val, split="test", precision="fp32")
    assert event["test_images"] == found["count"]
    assert event["test_top1"] == result.test_scores["top1"] == found["top1"]
    assert event["test_loss"] == pytest.approx(found["loss"])
    line = f"test top-1 {found['top1']:.2%} of {found['count']} images, measured once, at the end"
    assert line in capsys.readouterr().err
    report(result.folder)
    assert line in read_report(result.folder)
    held_out = evaluate(result.folder, without_val, precision="fp32")
    assert held_out["top1"] == result.val_top1


def test_a_run_that_validated_on_test_images_has_a_report(without_val, tiny_config, tmp_path):
    (without_val / "test").rename(without_val / "val")
    run = train(tiny_config(data=str(without_val), epochs=2), tmp_path / "run").folder
    (without_val / "val").rename(without_val / "test")  # as older versions used them
    report(run)
    assert "test top-1" not in read_report(run)
    assert evaluate(run, without_val, precision="fp32")["top1"] == events(run)[-1]["val_top1"]


def test_a_damaged_metrics_file_costs_its_lines_and_not_the_report(run, capsys):
    path = run / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-20])  # of the second epoch
    assert main(["report", str(run)]) == 0
    damage = f"line {content.count(10)} of metrics.jsonl cannot be read"
    assert f"note: {damage}; the report has what is left" in capsys.readouterr().err
    page = read_report(run)
    assert damage in page
    assert "for 1 epoch" in page
    path.write_bytes(b'{"event')
    assert main(["report", str(run)]) == 2
    error = f"{run} has no finished epoch: line 1 of metrics.jsonl cannot be read\n"
    assert capsys.readouterr().err.endswith(error)
