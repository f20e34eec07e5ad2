"""Callbacks, a loss and a transform of one's own, as in a script that calls `vit.train`."""

import dataclasses
import json
import multiprocessing
import os
import pickle
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vit
from tests.slow_cases import mostly_slow
from tests.training.children import Job, complete, differences
from tests.training.runs import (
    ON_CPU,
    SIZES,
    assert_equal_runs,
    equal_models,
    events,
    last_weights,
    read_events,
    signalled_at,
)
from vit.commands.main import main
from vit.config.setting_layers import make_config
from vit.config.user_code import USER_CODE_FILE, UserCode
from vit.errors import ConfigError
from vit.training.checkpoint.checkpoint import find_checkpoints

PLAIN = {"mixup": 0, "cutmix": 0}


def cross_entropy(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")


def focal(logits, targets, gamma=2.0):
    return (cross_entropy(logits, targets) * (1 - logits.softmax(1)).amin(1) ** gamma).float()


def noise(image, generator):
    change = torch.randint(-20, 21, image.shape, generator=generator)
    return (image.int() + change).clamp(0, 255).to(torch.uint8)


class Watch:
    """Logs what it sees."""

    def after_step(self, run, step):
        run.network.eval()  # as a callback that evaluates leaves it
        norms = [parameter.norm().item() for parameter in run.network.parameters()]
        run.log(loss=step.loss, norm=sum(norms))

    def after_validation(self, run, scores):
        run.log(accuracy=scores["val_top1"], rate=run.optimizer.param_groups[0]["lr"])

    def at_end(self, run, result):
        (run.folder / "best.txt").write_text(f"{result.epoch} {run.step}")


class StopAt:
    def __init__(self, step):
        self.step = step

    def after_step(self, run, _step):
        if run.step == self.step:
            run.stop("it is enough")


class StopAfterEpoch:
    def after_validation(self, run, scores):
        if scores["epoch"] == 2:
            run.stop("good enough")


OWN = {"callbacks": [Watch()], "loss": partial(focal, gamma=1.5), "transform": noise}
QUICK = {**OWN, "report": False}


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory) -> Path:
    """A run with all of it that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return vit.train(tiny_config(smoothing=0), folder, **QUICK).folder


def test_callbacks_read_each_step_and_validation_and_log(whole):
    logged = events(whole, "callback")
    steps = [event for event in logged if "loss" in event]
    assert [event["step"] for event in steps] == [*range(1, 10)]
    assert [event["loss"] for event in steps] == [one["loss"] for one in events(whole, "step")]
    validated = [event for event in logged if "accuracy" in event]
    assert [event["step"] for event in validated] == [3, 6, 9]
    assert {event["callback"] for event in logged} == {"Watch"}
    best, step = (whole / "best.txt").read_text().split()
    assert step == "9"
    assert int(best) in (1, 2, 3)


def test_a_callback_changes_nothing(tiny_config, whole, tmp_path):
    own = {name: OWN[name] for name in ("loss", "transform")}
    vit.train(tiny_config(smoothing=0), tmp_path / "run", report=False, **own)
    kept = [event for event in read_events(whole) if event["event"] != "callback"]
    found = read_events(tmp_path / "run")
    losses = [[one.get("val_loss", one.get("loss")) for one in each] for each in (kept, found)]
    assert losses[0] == losses[1]
    assert equal_models(whole, tmp_path / "run")


@pytest.mark.slow
def test_loader_processes_get_the_transform(tiny_config, whole, tmp_path):
    vit.train(tiny_config(smoothing=0, workers=2), tmp_path / "run", **QUICK)
    assert_equal_runs(whole, tmp_path / "run")


@pytest.mark.parametrize("step", [1, 4, pytest.param(9, marks=pytest.mark.slow)])
def test_a_run_that_is_cut_and_resumed_with_its_code_is_the_same(
    tiny_config, whole, tmp_path, step
):
    with signalled_at(step):
        vit.train(tiny_config(smoothing=0), tmp_path / "run", **QUICK)
    vit.train(out=tmp_path / "run", resume=True, **QUICK)
    assert_equal_runs(whole, tmp_path / "run")
    one, other = last_weights(whole), last_weights(tmp_path / "run")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def cut(tiny_config, tmp_path) -> Path:
    with signalled_at(2):
        vit.train(tiny_config(smoothing=0), tmp_path / "run", **QUICK)
    return tmp_path / "run"


def test_the_run_folder_has_names_and_sources(whole):
    watch, loss, transform = json.loads((whole / USER_CODE_FILE).read_text())
    assert (watch["argument"], watch["name"]) == ("callbacks", "Watch")
    assert "run.log(loss=step.loss" in watch["source"]
    assert (loss["argument"], loss["name"]) == ("loss", "focal")
    assert loss["value"] == "functools.partial(<function focal>, gamma=1.5)"
    assert "** gamma" in loss["source"]
    assert transform["source"].startswith("def noise(image, generator):\n")


def test_a_run_is_not_resumed_without_its_code(cut, capfd):
    before = sorted(cut.rglob("*"))
    for own in ({}, {**QUICK, "loss": None}, {**QUICK, "callbacks": [Watch(), StopAt(3)]}):
        with pytest.raises(ConfigError, match="was trained with own code callbacks=Watch, loss="):
            vit.train(out=cut, resume=True, **own)
    assert main(["train", "--resume", "--out", str(cut)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "own code callbacks=Watch, loss=focal, transform=noise, not none" in line
    assert "resume it with the same from Python" in line
    assert "which the command line cannot" in line
    assert sorted(cut.rglob("*")) == before


def test_a_loss_that_changed_is_refused_and_a_callback_may(cut, whole):
    with pytest.raises(ConfigError, match=r"loss=focal differs from that in .*user_code\.json"):
        vit.train(out=cut, resume=True, **{**QUICK, "loss": partial(focal, gamma=3.0)})
    record = json.loads((cut / USER_CODE_FILE).read_text())
    record[0]["source"] += "\n# a word more"
    (cut / USER_CODE_FILE).write_text(json.dumps(record))
    vit.train(out=cut, resume=True, **QUICK)
    assert_equal_runs(whole, cut)


def test_a_run_that_began_without_code_gets_none_on_resume(tiny_config, tmp_path):
    with signalled_at(2):
        vit.train(tiny_config(), tmp_path / "run")
    assert not (tmp_path / "run" / USER_CODE_FILE).exists()
    with pytest.raises(ConfigError, match="own code none, not loss=focal"):
        vit.train(out=tmp_path / "run", resume=True, loss=focal)


def test_settings_of_a_run_with_code_are_noted_where_they_are_repeated(whole, tmp_path, capfd):
    config = whole / "config.yaml"
    assert main(["train", "--config", str(config), "--out", str(whole), "--epochs", "x"]) == 2
    vit.train(config, tmp_path / "run", epochs=1, warmup_epochs=0, **QUICK)
    assert "user_code.json: own code of the run, which its config.yaml does not" in (
        capfd.readouterr().err
    )


@pytest.mark.parametrize(
    "settings",
    [PLAIN, {"accumulate": 2}, pytest.param({"balance": "sampler"}, marks=pytest.mark.slow)],
)
def test_cross_entropy_as_own_loss_is_the_built_in_one_to_the_bit(tiny_config, tmp_path, settings):
    config = tiny_config(smoothing=0, epochs=2, **settings)
    vit.train(config, tmp_path / "built-in", report=False)
    vit.train(config, tmp_path / "own", loss=cross_entropy, report=False)
    one, other = (last_weights(tmp_path / name) for name in ("built-in", "own"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(one) > 50  # the moments of the optimiser too
    # sums over images and classes are in another order
    losses = [
        [event["loss"] for event in events(tmp_path / name, "step")] for name in ("built-in", "own")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_targets_are_shares_after_mixing_and_before_smoothing(tiny_config, tmp_path):
    seen = []

    def recorded(logits, targets):
        seen.append(targets.clone())
        assert logits.dtype == torch.float32
        return cross_entropy(logits, targets)

    vit.train(tiny_config(epochs=1, warmup_epochs=0), tmp_path / "run", loss=recorded)
    targets = torch.cat(seen)
    assert targets.shape == (36, 3)
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(36))
    assert ((targets > 0) & (targets < 1)).any()  # mixed
    assert (targets == 0).any()  # not smoothed
    assert "smoothing: 0.0\n" in (tmp_path / "run/config.yaml").read_text()


def test_a_loss_of_numbers_gets_standardised_ones(colour_data, tmp_path):
    rows = [f"train/red/{n}.png,{n or ''},{3 * n}" for n in range(12)]
    (tmp_path / "list.csv").write_text("\n".join(["image,area,weight", *rows]))
    settings = {"image_size": 16, "patch_size": 8, "dim": 16, "depth": 1, "num_heads": 2}
    settings |= {"batch_size": 8, "epochs": 2, "workers": 0, "device": "cpu", "warmup_epochs": 0}
    settings |= {"data": str(tmp_path / "list.csv"), "images": str(colour_data)}
    settings |= {"target": "area,weight", "task": "regression", "precision": "fp32"}
    seen = []

    def absolute(outputs, targets):
        seen.append(targets)
        return (outputs - targets).nan_to_num().abs().mean(1)

    vit.train(make_config(settings), tmp_path / "run", loss=absolute)
    targets = torch.cat(seen)
    assert targets.shape == (16, 2)
    assert targets.isnan().any()
    assert targets.nan_to_num().abs().max() < 3


def test_the_transform_sees_each_training_image_once_an_epoch_and_no_other(tiny_config, tmp_path):
    seen = []

    def recorded(image, generator):
        seen.append((image.shape, image.dtype, torch.rand(1, generator=generator).item()))
        return image

    vit.train(tiny_config(epochs=2), tmp_path / "run", transform=recorded)
    assert len(seen) == 2 * 36  # and none of the 21 validation images
    assert {pair[:2] for pair in seen} == {((3, 16, 16), torch.uint8)}
    assert len({number for *_, number in seen}) == 72


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"loss": lambda logits, targets: cross_entropy(logits, targets).mean()}, r"tensor \(\)"),
        ({"loss": lambda _logits, _targets: 3}, "returned 3"),
        ({"loss": nn.CrossEntropyLoss}, "loss=.*: give a function of two arguments"),
        ({"loss": "focal"}, "loss='focal': give a function of two arguments"),
        ({"callbacks": [print]}, "give objects with after_step, after_validation or at_end"),
        ({"callbacks": [Watch]}, "give objects with after_step"),
    ],
)
def test_code_of_another_form_is_refused(tiny_config, tmp_path, own, said):
    with pytest.raises(ConfigError, match=said):
        vit.train(tiny_config(smoothing=0), tmp_path / "run", **own)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda image: image[:, 1:], r"must return a tensor \(3, 16, 16\) of torch.uint8"),
        (lambda image: image / 255, "of torch.uint8"),
        (lambda _image: None, "of torch.uint8"),
        (lambda _image: 1 / 0, "division by zero"),
    ],
)
def test_errors_of_a_transform_name_the_image(tiny_config, tmp_path, changed, said):
    with pytest.raises(RuntimeError, match=r"\.png: the transform failed: ") as raised:
        vit.train(tiny_config(), tmp_path / "run", transform=lambda image, _: changed(image))
    assert raised.match(said)


@pytest.mark.parametrize(
    ("own", "settings", "said"),
    [
        ({"loss": focal}, {"smoothing": 0.2}, "smoothing=0.2: does not work with loss=focal"),
        ({"loss": focal}, {"balance": "loss"}, "balance='loss': does not work with loss=focal"),
        ({"loss": focal}, {"task": "simclr", **PLAIN}, "task='simclr': does not work"),
        ({"transform": noise}, {"task": "mae", "pooling": "mean", **PLAIN}, "task='mae': does"),
        ({"transform": noise}, {"cache": "device"}, "cache='device': does not work with transform"),
    ],
)
def test_settings_that_nothing_reads_beside_the_code_are_refused(
    tiny_config, tmp_path, own, settings, said
):
    with pytest.raises(ConfigError, match=said):
        vit.train(tiny_config(**settings), tmp_path / "run", **own)
    assert not (tmp_path / "run/checkpoints").exists()


def test_processes_that_are_spawned_get_the_transform_alone():
    code = UserCode(callbacks=(StopAt(3),), loss=lambda *_: 0, transform=noise)
    assert pickle.loads(pickle.dumps(code)) == UserCode(transform=noise)
    with pytest.raises(ConfigError, match=r"transform=<lambda>: .*; give a function of a module's"):
        pickle.dumps(UserCode(transform=lambda image, _generator: image))


def train_where_loaders_are_spawned(own, config, out) -> int:
    from vit.data import dataloader

    multiprocessing.set_start_method("spawn", force=True)
    dataloader.sys = SimpleNamespace(platform="darwin")
    return train_with(own, config, out)


@pytest.mark.slow
def test_loader_processes_that_are_spawned_give_the_same_run(tiny_config, whole, tmp_path):
    config = tiny_config(smoothing=0, workers=1)
    log = tmp_path / "log"
    complete(train_where_loaders_are_spawned, QUICK, config, tmp_path / "run", log=log)
    assert_equal_runs(whole, tmp_path / "run")


def test_a_callback_stops_the_run_after_its_step(tiny_config, tmp_path, capfd):
    result = vit.train(tiny_config(), tmp_path / "run", callbacks=[StopAt(4)])
    assert "stopping after step 4: StopAt: it is enough" in capfd.readouterr().err
    assert [event["step"] for event in events(tmp_path / "run")] == [3, 4]  # validated once more
    assert (tmp_path / "run/report.html").is_file()
    assert result.epoch in (1, 2)
    lines = (tmp_path / "run/metrics.jsonl").read_bytes()
    again = vit.train(out=tmp_path / "run", resume=True, callbacks=[StopAt(4)])
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == lines  # it is over
    assert again.scores == result.scores


@pytest.mark.parametrize("missing", mostly_slow([1, 2], 2))
def test_a_stopped_run_that_was_killed_ends_as_it_would_have(tiny_config, tmp_path, missing):
    """Whatever checkpoint is the newest: that of the stop, or one before it."""
    own = {"callbacks": [StopAt(4)], "report": False}
    vit.train(tiny_config(checkpoint_steps=1), tmp_path / "run", **own)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    newest = find_checkpoints(tmp_path / "killed/checkpoints")
    for path in newest[:missing]:
        if len(find_checkpoints(tmp_path / "killed/checkpoints")) > 1:
            path.unlink()
    vit.train(out=tmp_path / "killed", resume=True, **own)
    assert_equal_runs(tmp_path / "run", tmp_path / "killed")


def test_a_callback_stops_the_run_after_a_validation(tiny_config, tmp_path):
    vit.train(tiny_config(), tmp_path / "run", callbacks=[StopAfterEpoch()], report=False)
    assert [event["epoch"] for event in events(tmp_path / "run")] == [1, 2]
    vit.train(out=tmp_path / "run", resume=True, callbacks=[StopAfterEpoch()], report=False)
    assert [event["epoch"] for event in events(tmp_path / "run")] == [1, 2]


class StopOnLast:
    """Only the last process decides."""

    def after_step(self, run, _step):
        if run.step == 5 and run.accelerator.process_index == run.processes - 1:
            run.stop("the last process says so")


def train_with(own, config, out, resume=False) -> int:
    vit.train(config, out, resume=resume, **own)
    return 0


@pytest.mark.slow
def test_two_processes_train_as_one_with_the_code(tiny_config, tmp_path):
    config = tiny_config(smoothing=0, dropout=0, drop_path=0, workers=1)
    own = {**QUICK, "callbacks": [StopOnLast()]}
    for processes in (1, 2):
        out, log = tmp_path / f"{processes}", tmp_path / "log"
        complete(train_with, own, config, out, log=log, processes=processes)
    one, other = (last_weights(tmp_path / name) for name in "12")
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=2e-4, rtol=1e-3)
    assert [event["step"] for event in events(tmp_path / "2")] == [3, 5]


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_to_the_same_bytes(tiny_config, tmp_path):
    config = tiny_config(smoothing=0, workers=2, checkpoint_steps=1, epochs=6)
    complete(train_with, QUICK, config, tmp_path / "whole", log=tmp_path / "log")
    killed = 0
    for moment in (0.2, 0.4, 0.6, 0.8, 1.0, 1.3):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        with Job(train_with, QUICK, config, tmp_path / "run", log=tmp_path / "log") as job:
            if not job.ended(moment):
                killed += -signal.SIGKILL in job.kill()
        complete(train_with, QUICK, config, tmp_path / "run", True, log=tmp_path / "log")
        assert differences(tmp_path / "run", tmp_path / "whole") == []
    assert killed >= 2
    assert os.listdir(tmp_path / "run/checkpoints")


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capfd):
    text = (Path(__file__).parents[2] / "docs/own-code.md").read_text(encoding="utf-8")
    example, again = (part.split("```")[0] for part in text.split("```python\n")[1:])
    assert example.count('time="20s"') == 1
    quick = "epochs=1, **" + repr({**SIZES, **ON_CPU, "batch_size": 128, "group": None})
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    exec(example.replace('time="20s"', quick), names)
    assert len(events(Path("runs/own"), "callback")) == 1
    exec(again, names)
    assert capfd.readouterr().err.count("runs/own: ") == 2
    logits, targets = torch.randn(4, 3), torch.eye(3)[[0, 1, 2, 0]]
    assert (names["focal"](logits, targets) <= cross_entropy(logits, targets)).all()


def test_what_a_plan_chose_gives_way_to_the_code_and_what_a_person_chose_does_not(tiny_config):
    planned = dataclasses.replace(tiny_config(cache="device"), origins={})
    settled = planned.with_user_code(UserCode(loss=focal, transform=noise))
    assert (settled.data.cache, settled.training.smoothing) == ("none", 0.0)
    for name, value in (("cache", "device"), ("smoothing", 0.1)):
        chosen = dataclasses.replace(
            tiny_config(smoothing=0.1, cache="device"), origins={name: "flag"}
        )
        with pytest.raises(ConfigError, match=f"{name}={value!r}: does not work with"):
            chosen.with_user_code(UserCode(loss=focal, transform=noise))


def test_a_lambda_is_the_same_in_another_call():
    first = UserCode(loss=lambda logits, targets: (logits * targets).sum(dim=1)).record()
    # in another statement
    again = [UserCode(callbacks=(), loss=lambda logits, targets: (logits * targets).sum(dim=1))]
    other = UserCode(loss=lambda logits, targets: (logits * targets).sum(dim=0)).record()
    assert [one["source"] for one in again[0].record()] == [one["source"] for one in first]
    assert other[0]["source"] != first[0]["source"]
