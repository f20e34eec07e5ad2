"""Cross-validation: every image is measured once, and what all folds say together."""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from scipy import stats

import vit
from tests.training.runs import equal_models
from vit.commands.main import main
from vit.config.collect_settings import collect_settings
from vit.config.setting_layers import make_config
from vit.errors import ConfigError, RunError, WeightsError
from vit.evaluation.exact_tests import wilson_interval
from vit.evaluation.temperature_scaling import fit_temperature
from vit.inference.fold_results import save_fold_soup
from vit.score_calibration import ScoreCalibration
from vit.training import cross_validation
from vit.training.cross_validation import interval, t_quantile, train_folds
from vit.training.train import train
from vit.weights.model_soup import delete_fold_soup
from vit.weights.safetensors_io import read_tensors
from vit.weights.saved_model import load_run, store_calibration

SETTINGS = {"folds": 3, "epochs": 1, "warmup_epochs": 0}


@pytest.fixture(scope="module")
def config(tiny_config, colour_data):
    return lambda **more: tiny_config(data=str(colour_data / "train"), **{**SETTINGS, **more})


def measured(folder):
    """What the fold in `folder` validated on, as if it were a score."""
    record = json.loads((folder / "split.json").read_text())
    return {"count": len(record["val"]), "top1": record["fold"] / 10, "loss": 1.0, "per_class": []}


def stopping(_folder):
    raise KeyboardInterrupt


def held_out(run):
    """The names of the validation images of a run."""
    return json.loads((run / "split.json").read_text())["val"]


def test_each_fold_is_a_run_folder(config, tmp_path):
    out = tmp_path / "all"
    record = train_folds(config(), out, measure=measured)
    runs = [out / f"fold-{n}" for n in (1, 2, 3)]
    assert sorted(name for run in runs for name in held_out(run)) == sorted(
        f"{colour}/{n}.png" for colour in ("blue", "green", "red") for n in range(12)
    )
    assert all((run / "model.safetensors").is_file() for run in runs)
    written = json.loads((out / "folds.json").read_text())
    assert {key: record[key] for key in written} == written
    assert written["scores"]["2"] == {"count": 12, "top1": 0.2, "loss": 1.0}
    assert written["mean"] == pytest.approx({"top1": 0.2, "loss": 1.0})
    assert written["interval"]["top1"] == interval([0.1, 0.2, 0.3], limits=(0.0, 1.0))
    # each is what `--fold` alone gives
    assert equal_models(train(config(fold=2), tmp_path / "alone").folder, runs[1])


@pytest.mark.slow
def test_folds_resume_from_any_folder(tiny_config, colour_data, tmp_path, monkeypatch):
    shutil.copytree(colour_data / "train", tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    Path("fixed.csv").write_text("image,label\nred/1.png,blue\n")
    settings = {**SETTINGS, "folds": 2, "data": "photos", "corrections": "fixed.csv"}
    train_folds(tiny_config(**settings), "out", measure=measured)
    weights = tmp_path / "out/fold-2/model.safetensors"
    before = weights.read_bytes()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "fixed.csv").write_text("image,label\nred/2.png,blue\n")
    for _ in range(2):  # the second time with the settings that the first one wrote
        shutil.rmtree(weights.parent)
        values = collect_settings({"data": "../photos"}, out=tmp_path / "out", resume=True)
        train_folds(make_config(values), tmp_path / "out", measure=measured, resume=True)
        assert weights.read_bytes() == before


@pytest.mark.slow
def test_all_folds_of_deep_images_have_one_range(tiny_config, tmp_path):
    random = np.random.default_rng(0)
    for name, level in (("dark", 900), ("light", 3000)):
        (tmp_path / "deep" / name).mkdir(parents=True)
        for number in range(8):
            values = level + random.integers(0, 100 * (number + 1), size=(18, 20))
            image = Image.fromarray(values.astype(np.uint16))
            image.save(tmp_path / "deep" / name / f"{number}.png")
    settings = tiny_config(data=str(tmp_path / "deep"), batch_size=4, **SETTINGS)
    train_folds(settings, tmp_path / "out", measure=measured)
    ranges = [
        load_run(tmp_path / f"out/fold-{fold}").preprocessing.intensity_range for fold in (1, 2, 3)
    ]
    assert ranges[0] is not None
    assert ranges == [ranges[0]] * 3


def test_finished_folds_are_not_trained_again(config, tmp_path):
    seen, record = [], tmp_path / "folds.json"

    def stopping(folder):
        seen.append(folder.name)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return measured(folder)

    with pytest.raises(KeyboardInterrupt):
        train_folds(config(), tmp_path, measure=stopping)
    with pytest.raises(RunError, match=r"folds\.json exists: --resume continues it"):
        train_folds(config(), tmp_path, measure=stopping)
    with pytest.raises(ConfigError, match=r"lr=0\.1 differs from 0\.003"):
        train_folds(config(lr=0.1), tmp_path, measure=stopping, resume=True)
    before = (tmp_path / "fold-1/model.safetensors").stat().st_mtime_ns
    scores = train_folds(config(), tmp_path, measure=stopping, resume=True)["scores"]
    assert seen == ["fold-1", "fold-2", "fold-2", "fold-3"]
    assert list(scores) == ["1", "2", "3"]
    assert (tmp_path / "fold-1/model.safetensors").stat().st_mtime_ns == before
    recorded = json.loads(record.read_text())
    recorded["settings"]["randaugment_layers"] = 2  # of a file with all settings, without effect
    record.write_text(json.dumps(recorded))
    assert train_folds(config(), tmp_path, measure=stopping, resume=True)["scores"]
    record.write_text("{")
    with pytest.raises(RunError, match=r"folds\.json is damaged"):
        train_folds(config(), tmp_path, measure=stopping, resume=True)


@pytest.mark.slow
def test_overwriting_leaves_no_fold_of_the_command_before(config, tiny_config, tmp_path):
    train_folds(config(), tmp_path, measure=measured)
    weights = {path.parent.name: path.read_bytes() for path in tmp_path.glob("*/model.safetensors")}
    for name in ("rows.jsonl", "label_errors.csv", "fold-1/rows.jsonl", "fold-3/rows.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "fold-2/thesis.txt").touch()
    (tmp_path / "fold-of-sheep").mkdir()
    before = {path for path in tmp_path.rglob("*") if path.name != ".lock"}
    refusals = [
        (config(folds=2), RunError, r"fold-2/thesis\.txt was written by no training.*: move it"),
        (tiny_config(**SETTINGS), ConfigError, "the data have validation images"),
    ]
    for settings, kind, message in refusals:
        with pytest.raises(kind, match=message):
            train_folds(settings, tmp_path, measure=measured, overwrite=True)
        assert {path for path in tmp_path.rglob("*") if path.name != ".lock"} == before
        (tmp_path / "fold-2/thesis.txt").unlink(missing_ok=True)
        before.discard(tmp_path / "fold-2/thesis.txt")
    with pytest.raises(KeyboardInterrupt):
        train_folds(config(folds=2), tmp_path, measure=stopping, overwrite=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"folds.json", "fold-1", "fold-of-sheep"}
    assert not (tmp_path / "fold-1/rows.jsonl").exists()
    record = train_folds(config(folds=2), tmp_path, measure=measured, resume=True)
    assert list(record["scores"]) == ["1", "2"]
    assert (tmp_path / "fold-2/model.safetensors").read_bytes() != weights["fold-2"]


@pytest.mark.slow
@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_the_plan_of_interrupted_folds_is_that_of_the_others(colour_data, tmp_path, monkeypatch):
    data = tmp_path / "data"
    shutil.copytree(colour_data / "train", data)
    words = ["train", str(data), "--folds", "2", "--epochs", "1"]
    words += ["--device", "cpu", "--precision", "fp32"]
    out = tmp_path / "out"
    real = cross_validation.train

    def stopping(config, folder, **options):
        assert options["part_of"][:2] == ("vit train", out)
        if folder.name == "fold-2":
            raise KeyboardInterrupt
        return real(config, folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr(cross_validation, "train", stopping)
        assert main([*words, "--out", str(out)]) == 130
    monkeypatch.setattr("vit.training.plan.plan_training", None)  # it is not made again
    assert main(["train", "--resume", "--out", str(out)]) == 0
    first, second = (
        yaml.safe_load((out / f"fold-{number}" / "config.yaml").read_text()) for number in (1, 2)
    )
    assert first["optimizer"] == "muon"  # the plan's choice, and not the default
    assert {**first, "fold": 2} == second


def test_what_is_not_for_folds_is_refused(config, tiny_config, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="a run trains one fold"):
        train(config(), tmp_path / "new")
    with pytest.raises(ConfigError, match=r"val_share=0\.3: folds=3 does not read it; folds=none"):
        tiny_config(**SETTINGS, val_share=0.3)
    with pytest.raises(ConfigError, match="fold=4: must be from 1 to folds=3"):
        config(fold=4)
    with pytest.raises(ConfigError, match="no data given"):
        vit.cross_validate({"folds": 3}, tmp_path / "new")
    # before a plan measures anything
    monkeypatch.setattr(cross_validation, "resolve_plan", lambda *_: pytest.fail("planned"))
    for settings in (config(time="5m"), {"data": "digits", "folds": 3, "time": "5m"}):
        with pytest.raises(ConfigError, match="time=5m: it would be that of each fold; leave --ti"):
            train_folds(settings, tmp_path / "new", measure=measured)


def test_a_refused_cross_validation_leaves_nothing_behind(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match="the data have validation images"):
        train_folds(tiny_config(**SETTINGS), tmp_path / "new", measure=measured)
    assert not (tmp_path / "new").exists()
    record = {"folds": 2, "settings": {"data": "x", "folds": 2}, "planned": {}, "scores": {}}
    (tmp_path / "folds.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="the data have validation images"):
        train_folds(tiny_config(**SETTINGS), tmp_path, measure=measured, overwrite=True)
    assert json.loads((tmp_path / "folds.json").read_text()) == record


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_the_command_prints_all_folds(config, colour_data, tmp_path, capsys):
    out, flags = str(tmp_path), ["--folds", "2", "--group", r"(\d+)\.png", "--epochs", "1"]
    flags += ["--image-size", "16", "--patch-size", "8", "--dim", "16", "--depth", "1"]
    flags += ["--num-heads", "2", "--batch-size", "6", "-j", "0"]
    # with images kept for the end, which no fold sees
    data = tmp_path / "data"
    shutil.copytree(colour_data / "train", data / "train")
    shutil.copytree(colour_data / "val", data / "test")
    assert main(["train", str(data), "--out", out, *flags]) == 0
    printed = capsys.readouterr().out
    first = [line.split()[0] for line in printed.splitlines()[1:]]
    assert first == ["fold", "fold", "mean", "95%", "(95%"]
    assert "Nadeau and Bengio" in printed
    assert not (tmp_path / "soup").exists()  # from scratch, they make no network
    record = json.loads((tmp_path / "folds.json").read_text())
    mean, scores = record["mean"], record["scores"]
    (line,) = (line for line in printed.splitlines() if line.startswith("mean"))
    shares = [f"{mean[name]:.2%}" for name in ("top1", "balanced_accuracy")]
    assert line.split()[1:] == [*shares, f"{mean['loss']:.4f}"]
    stored = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "fold-1/rows.jsonl").unlink()  # a kill after its training
    assert main(["train", "--resume", "--out", out]) == 0
    again = capsys.readouterr()
    assert again.out == printed
    assert f"label errors: {len(suspects(tmp_path))} of 36 images are suspected" in again.err
    assert "fold 2 of 2 is finished" in again.err
    assert (tmp_path / "rows.jsonl").read_text() == stored
    record = vit.cross_validate(out=out, resume=True)
    assert (record["mean"], record["failed"]) == (mean, {})
    with pytest.raises(ConfigError, match="folds is missing: give the number of folds"):
        vit.cross_validate(data, tmp_path / "new", epochs=1)
    # every image has a row, by the fold that held it out
    rows = [*map(json.loads, stored.splitlines())]
    sides = [held_out(tmp_path / f"fold-{fold}") for fold in (1, 2)]
    for fold, side in enumerate(sides, 1):
        own = [row for row in rows if row["fold"] == fold]
        assert {str(data / name) for name in side} == {row["image"] for row in own}
        right = [row["predictions"][0]["label"] == row["label"] for row in own]
        assert sum(right) / len(right) == scores[str(fold)]["top1"]
        assert scores[str(fold)]["count"] == len(side)
    numbers = [{name.rsplit("/", 1)[1] for name in side} for side in sides]
    assert not numbers[0] & numbers[1]
    # the suspected labels are shown by the check, too
    found = tmp_path / "found.json"
    words = ["check", str(data), "--rows", str(tmp_path / "rows.jsonl"), "--json", str(found)]
    assert main(words) == 0
    problems = json.loads(found.read_text())["problems"]
    listed = [one["image"] for one in problems if one["kind"] == "suspected_label"]
    assert listed == suspects(tmp_path)
    assert "21 of 57 images have no row" in capsys.readouterr().err


def suspects(folder):
    """The images in label_errors.csv."""
    with open(folder / "label_errors.csv", encoding="utf-8", newline="") as file:
        return [row["image"] for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished_folds(config, tmp_path_factory):
    """A cross-validation in folds/ that began with the weights of first/; not to be written to."""
    place = tmp_path_factory.mktemp("cross_validation")
    train(config(folds=None, epochs=2), place / "first")
    vit.cross_validate(config(weights=str(place / "first"), epochs=2), place / "folds")
    return place


@pytest.fixture
def fold_runs(finished_folds, tmp_path):
    """The runs of a copy of it in tmp_path/folds."""
    shutil.copytree(finished_folds / "folds", tmp_path / "folds")
    return [tmp_path / f"folds/fold-{fold}" for fold in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.auto_precision
def test_folds_of_pretrained_weights_make_one_network(fold_runs, colour_data, tmp_path, capfd):
    soup = tmp_path / "folds/soup"
    weights = [read_tensors(run / "model.safetensors")[0] for run in fold_runs]
    for name, mean in read_tensors(soup / "model.safetensors")[0].items():
        exact = np.mean([each[name].double().numpy() for each in weights], axis=0)
        assert np.array_equal(mean.numpy(), exact.astype(np.float32))
    predictor = vit.Predictor(soup, device="cpu")
    assert predictor.classes == ("blue", "green", "red")
    assert predictor(sorted((colour_data / "val/red").iterdir()))[0].predictions[0][0] == "red"
    # no image is left to measure it, which an evaluation says
    vit.evaluate(soup, str(colour_data / "train"), device="cpu", notify=print)
    assert "soup was trained on 36 of these 36 images" in capfd.readouterr().out
    with pytest.raises(WeightsError, match=r"give the network of all folds, .*/folds/soup$"):
        vit.Predictor(tmp_path / "folds")
    # config.yaml repeats the cross-validation
    stored = yaml.safe_load((soup / "config.yaml").read_text())
    assert (stored["folds"], stored["fold"]) == (3, None)
    assert [run.name for run in vit.runs(tmp_path / "folds").runs] == ["fold-1", "fold-2", "fold-3"]


@pytest.mark.slow
@pytest.mark.auto_precision
def test_the_network_of_all_folds_has_the_temperature_of_unseen_images(
    fold_runs, tmp_path, monkeypatch
):
    soup = tmp_path / "folds/soup"
    assert not load_run(soup).calibration.scales  # 36 images are too few
    monkeypatch.setattr("vit.evaluation.temperature_scaling.MIN_IMAGES", 30)
    save_again(tmp_path / "folds")
    logits, labels = [], []
    for run in fold_runs:
        predictor = vit.Predictor(run, device="cpu", precision="fp32", no_calibration=True)
        record = json.loads((run / "split.json").read_text())
        for name in record["val"]:
            (result,) = predictor([f"{record['root']}/{name}"])
            scores = dict(result.predictions)
            logits.append([math.log(scores[label]) for label in predictor.classes])
            labels.append(predictor.classes.index(name.split("/")[0]))
    fitted = fit_temperature(torch.tensor(logits), torch.tensor(labels))
    calibration = load_run(soup).calibration
    found = fitted.scaling
    assert (calibration.temperature, calibration.exponent) == pytest.approx(found, rel=1e-3)
    assert (calibration.images, calibration.rejects) == (36, False)


@pytest.mark.slow
@pytest.mark.auto_precision
def test_a_network_of_all_folds_that_is_worse_than_they_are_is_not_kept(
    fold_runs, config, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "vit.inference.fold_results.average_weights",
        lambda states: {name: -each[0] for name, each in together(states).items()},
    )
    line = save_again(tmp_path / "folds")
    assert line.startswith("note: no network of all folds: the mean of their weights is worse")
    assert not (tmp_path / "folds/soup").exists()
    # nor of folds of different networks
    monkeypatch.undo()
    train(config(fold=2, dim=24, weights=None), fold_runs[1], overwrite=True)
    line = save_again(tmp_path / "folds")
    assert "fold-2 differs from" in line
    assert line.endswith("fold-1 in classes, network, preprocessing or first weights")


def save_again(folds):
    """Make the network of all folds anew; the last line of it."""
    delete_fold_soup(folds)
    lines = []
    save_fold_soup(folds, 3, lines.append)
    return lines[-1]


def together(states):
    """All tensors of the same name."""
    states = list(states)
    return {name: [state[name] for state in states] for name in states[0]}


@pytest.mark.slow
@pytest.mark.auto_precision
def test_the_network_of_all_folds_stays_until_a_fold_is_trained_again(
    fold_runs, finished_folds, config, tmp_path, monkeypatch
):
    out, lines = tmp_path / "folds", []
    weights = out / "soup/model.safetensors"
    store_calibration(out / "soup", ScoreCalibration(temperature=2.0, images=50))
    before = weights.read_bytes()
    vit.cross_validate(out=out, resume=True)
    assert weights.read_bytes() == before
    # unreadable images are not compared
    monkeypatch.setattr("vit.evaluation.temperature_scaling.MIN_IMAGES", 30)
    record = json.loads((fold_runs[0] / "split.json").read_text())
    broken = f"{record['root']}/{record['val'][0]}"
    content = Path(broken).read_bytes()
    Path(broken).write_bytes(b"no image")
    save_again(out)
    Path(broken).write_bytes(content)
    assert load_run(out / "soup").calibration.images == 35
    # a refused command changes nothing, and a training deletes it
    settings = config(weights=str(finished_folds / "first"), epochs=2)
    with pytest.raises(WeightsError, match="nothing is not there"):
        train_folds(config(weights="nothing"), out, measure=measured, overwrite=True)
    assert weights.is_file()

    with pytest.raises(KeyboardInterrupt):
        train_folds(settings, out, measure=stopping, overwrite=True)
    assert not (out / "soup").exists()
    assert not fold_runs[1].exists()  # nor are other folds of the command before
    for run in fold_runs[1:]:
        shutil.copytree(fold_runs[0], run)
    # a run that somebody called so is left alone
    shutil.copytree(finished_folds / "first", out / "soup")
    save_fold_soup(out, 3, lines.append)
    assert lines == [
        f"note: no network of all folds: {out}/soup has other files; move them away, and --resume"
    ]


@pytest.mark.parametrize("freedom", range(1, 12))
def test_quantiles_of_students_t_equal_scipys(freedom):
    for share in (0.6, 0.95, 0.975, 0.9995):
        assert t_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-9)


def test_numbers_of_images_and_groups_have_no_interval():
    rows = [{"count": 90, "groups": 9.0, "top1": 0.5}, {"count": 91, "groups": 11.0, "top1": 0.7}]
    assert cross_validation.summary(rows)["interval"].keys() == {"top1"}


def test_the_interval_is_that_of_nadeau_and_bengio():
    # k = 5: t(0.975, 4) = 2.776; s = 0.1581; sqrt(1/5 + 1/4) = 0.6708
    low, high = interval([0.3, 0.4, 0.5, 0.6, 0.7])
    assert high - 0.5 == pytest.approx(2.7764451 * math.sqrt(0.025) * math.sqrt(0.45), rel=1e-6)
    assert low + high == pytest.approx(1.0)
    assert interval([0.9, 1.0], limits=(0.0, 1.0)) == [0.0, 1.0]
    assert interval([0.9]) is None


@pytest.mark.parametrize(
    ("name", "limits"), [("kappa", [-1.0, 1.0]), ("spearman", [-1.0, 1.0]), ("top1", [0.0, 1.0])]
)
def test_no_interval_is_beyond_the_values_of_its_score(name, limits):
    rows = [{"count": 18, name: value} for value in (0.1, 0.9)]
    assert cross_validation.summary(rows)["interval"][name] == limits


def summarized(*shares, **numbers):
    rows = [{"count": 18, "balanced_accuracy": s, "top1": s, **numbers} for s in shares]
    return cross_validation.summary(rows)["interval"]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_folds_that_do_not_differ_have_the_interval_of_all_their_images(share):
    found = summarized(share, share, nll=0.4)
    assert found["top1"] == [*wilson_interval(36 * share, 36)]
    assert (found["balanced_accuracy"], found["nll"]) == (None, None)
    assert summarized(share, share, groups=5)["top1"] == [*wilson_interval(10 * share, 10)]
    # by chance they differ by little: no less wide
    few = 3 * [share], share + (0.001 if share < 1 else -0.001)
    low, high = summarized(*few[0], few[1])["top1"]
    least, most = wilson_interval(share * 72, 72)
    assert (low, high) == pytest.approx((least, most), abs=0.001)
