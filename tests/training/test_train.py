"""Whole trainings: what they leave behind, how they stop, and that they continue exactly."""

import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vit
from tests.training.children import Job, hold
from tests.training.runs import SHORT, assert_equal_runs, equal_models, events, signalled_at
from vit.commands.main import main
from vit.config.setting_layers import flatten
from vit.errors import BadImage, ConfigError, DataError, RunError, VitError, WeightsError
from vit.evaluation.runs_table import runs
from vit.stop_signals import Interrupted
from vit.tasks import classification
from vit.training import training_loop
from vit.training.checkpoint import checkpoint
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.training.checkpoint.run_folder import delete_run
from vit.training.train import plan, resolve, train
from vit.training.trainer import Trainer
from vit.training.training_loop import updates_weights
from vit.weights.saved_model import load_run


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a run."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tiny_config, tmp_path_factory) -> Path:
    """A finished run of the usual settings; not to be written to."""
    return train(tiny_config(), tmp_path_factory.mktemp("undisturbed") / "run").folder


@pytest.fixture(scope="module")
def finished(tiny_config, tmp_path_factory) -> Path:
    """A finished run of one epoch; not to be written to."""
    return train(tiny_config(**SHORT), tmp_path_factory.mktemp("finished") / "run").folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of that run."""
    return shutil.copytree(finished, tmp_path / "run")


def test_a_run_folder_is_refused_before_a_plan_measures_anything(
    finished, tiny_data, tmp_path, monkeypatch
):
    monkeypatch.setattr("vit.training.train.resolve_plan", lambda *_: pytest.fail("planned"))
    with pytest.raises(RunError, match="exists: --resume continues it, --overwrite starts anew"):
        train(str(tiny_data), finished, time="1m")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_bytes(b"x")
    with pytest.raises(RunError, match="no training wrote"):
        train(str(tiny_data), tmp_path / "photos", overwrite=True, time="1m")
    assert (tmp_path / "photos/cat.jpg").read_bytes() == b"x"
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and writable(path, mode))
    with pytest.raises(RunError, match=r"run cannot be written: .* is read-only"):
        train(str(tiny_data), tmp_path / "new" / "run", time="1m")


@pytest.mark.parametrize(
    ("gone", "changes", "options", "message"),
    [
        ("checkpoints", {}, {"resume": True}, "its checkpoints were deleted: --weights "),
        ("model.safetensors", {}, {"resume": True}, "model.safetensors is missing, and epoch 1"),
        (None, {}, {}, "--resume continues it, --overwrite starts anew"),
        (None, {"lr": 0.1}, {"resume": True}, "lr=0.1 differs from 0.003"),
        (None, {"optimizer": "adamww"}, {"overwrite": True}, "optimizer='adamww'"),
    ],
)
def test_a_refused_training_leaves_the_run_alone(
    run, tiny_config, tmp_path, gone, changes, options, message
):
    if gone:
        (run / gone).rename(tmp_path / "gone")
    before = contents(run)
    with pytest.raises(VitError, match=message):
        train(tiny_config(**SHORT, **changes), run, **options)
    assert contents(run) == before


def test_a_checkpoint_of_another_network_or_version_is_refused(run, tiny_config, monkeypatch):
    stored = run / "config.yaml"
    stored.write_text(stored.read_text().replace("registers: 0", "registers: 2"))
    other = r"step-.*do not fit the network; missing: reg_token; of another shape: pos_embed"
    with pytest.raises(WeightsError, match=other):
        train(tiny_config(**SHORT, registers=2), run, resume=True)
    monkeypatch.setattr(checkpoint, "VERSION", 0)
    with pytest.raises(WeightsError, match="was written by another version of vit"):
        train(out=run, resume=True)


def test_a_training_leaves_a_run_folder(tiny_config, tmp_path):
    result = train(tiny_config(epochs=6, drop_path=0, dropout=0), tmp_path / "run")
    names = {path.name for path in result.folder.iterdir()}
    files = {"config.yaml", "config.json", "model.safetensors", "metrics.jsonl", "report.html"}
    files |= {"environment.jsonl", "paths.json", "summary.json"}
    files |= {"distance.safetensors", "reference.json"}
    assert names - {".lock"} == files | {"checkpoints"}
    (record,) = runs(result.folder).runs
    (result.folder / "summary.json").unlink()  # as in runs of older versions
    assert runs(result.folder).runs == (record,)
    assert record.epochs == 6
    found = events(result.folder)
    assert [event["epoch"] for event in found] == [1, 2, 3, 4, 5, 6]
    assert found[0].keys() == {
        "event", "epoch", "step", "train_loss", "val_loss", "val_top1",
        "val_balanced_accuracy", "val_images", "lr",
        "images_per_second", "data_wait", "seconds",
    }  # fmt: skip
    assert found[-1]["train_loss"] < found[0]["train_loss"]
    steps = events(result.folder, "step")
    assert [event["step"] for event in steps] == [*range(1, 19)]
    assert [event["epoch"] for event in steps] == [1 + number // 3 for number in range(18)]
    assert steps[0].keys() == {"event", "step", "epoch", "loss", "lr", "grad_norm"}
    assert result.val_top1 == max(event["val_top1"] for event in found) > 0.9
    assert len(find_checkpoints(result.folder / "checkpoints")) == 2


@pytest.mark.parametrize("step", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_to_the_same_result(tiny_config, tmp_path, undisturbed, step):
    with signalled_at(step) as stopped:
        train(tiny_config(), tmp_path / "parts")
    assert stopped.value.exit_code == 143
    assert "--resume" in str(stopped.value)
    train(tiny_config(workers=2), tmp_path / "parts", resume=True)
    assert_equal_runs(undisturbed, tmp_path / "parts")


@pytest.mark.slow
def test_a_signal_during_validation_stops_the_run_at_once(tiny_config, tmp_path, monkeypatch):
    whole = tiny_config(batch_size=4)
    train(whole, tmp_path / "whole")
    batches = []

    def loss_and_correct(logits, labels):
        batches.append(labels)
        if len(batches) == 8:  # the second of six in the second epoch
            os.kill(os.getpid(), signal.SIGINT)
        return original(logits, labels)

    original = classification.loss_and_correct
    monkeypatch.setattr("vit.tasks.classification.loss_and_correct", loss_and_correct)
    with pytest.raises(Interrupted) as stopped:
        train(whole, tmp_path / "parts")
    assert stopped.value.exit_code == 130
    assert len(batches) == 8
    assert len(events(tmp_path / "parts")) == 1
    train(whole, tmp_path / "parts", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_a_finished_run_resumes_to_its_own_result(tiny_config, tmp_path):
    first = train(tiny_config(**SHORT), tmp_path / "run")
    assert train(tiny_config(**SHORT), tmp_path / "run", resume=True) == first
    assert len(events(tmp_path / "run")) == 1


def test_a_run_does_not_resume_with_other_images(tiny_config, tmp_path, colour_data, capsys):
    copy, run = shutil.copytree(colour_data, tmp_path / "data"), tmp_path / "run"
    config = tiny_config(**SHORT, data=str(copy))
    train(config, run)
    shutil.copy(copy / "train/red/0.png", copy / "train/red/new.png")
    with pytest.raises(DataError, match=r"the data set changed .* vit train .* --weights .*run "):
        train(config, run, resume=True)
    for split in ("train", "val"):
        shutil.copytree(copy / split / "red", copy / split / "violet")
    changed = r"the data set changed .*num_classes=3 then, 4 now.* --weights .*run --out"
    with pytest.raises(DataError, match=changed):
        train(config, run, resume=True)
    more = shutil.copytree(copy, tmp_path / "more")
    with pytest.raises(DataError, match=rf"num_classes=3 then.* vit train {more} --weights "):
        train(tiny_config(**SHORT, data=str(more)), run, resume=True)
    # config.yaml has the number of classes, and nobody gave it
    assert main(["train", "--resume", "--out", str(run)]) == 2
    assert re.search(changed, capsys.readouterr().err)
    # nor does it stand in the way of a new run with the same settings
    words = ["train", "--config", str(run / "config.yaml"), "--out", str(tmp_path / "b")]
    assert main(words) == 0
    assert "4 classes instead of num_classes=3 of the settings file" in capsys.readouterr().err
    assert load_run(tmp_path / "b").classes == ("blue", "green", "red", "violet")


@pytest.fixture
def relative_run(tiny_config, colour_data, tmp_path, monkeypatch):
    """The folder `work` with `photos`, lists and a run, whose paths are relative; not stood in."""
    work = tmp_path.resolve() / "work"
    shutil.copytree(colour_data / "train", work / "photos")
    monkeypatch.chdir(work)
    names = sorted(path.relative_to("photos").as_posix() for path in Path("photos").rglob("*.png"))
    rows = [f"{name},{name.split('/')[0]}" for name in names[1:]]
    Path("labels.csv").write_text("\n".join(["image,label", *rows]) + "\n")
    Path("bad.csv").write_text(f"image\nphotos/{names[3]}\n")  # as vit predict names it here
    lists = {"labels": "labels.csv", "exclude": "bad.csv"}
    train(tiny_config(**SHORT, data="photos", **lists), work / "runs" / "run")
    monkeypatch.chdir(tmp_path)
    return work


def test_a_run_with_relative_paths_resumes_from_any_folder(relative_run, monkeypatch, capsys):
    run = relative_run / "runs" / "run"
    before = (run / "model.safetensors").read_bytes()
    words = ["train", "--resume", "--out", str(run)]
    assert main(words) == 0
    assert "has changed since" not in capsys.readouterr().err
    with (relative_run / "labels.csv").open("a") as file:
        file.write("red/0.png,blue\n")
    assert main(words) == 0  # with its own copy
    told = "note: labels=labels.csv has changed since the training, or is gone: its copy "
    assert f"{told}{run}/lists/copy-labels.csv is used" in capsys.readouterr().err
    moved = relative_run.rename(relative_run.parent / "moved")
    assert main(["train", "--resume", "--out", str(moved / "runs" / "run")]) == 0
    assert (moved / "runs" / "run" / "model.safetensors").read_bytes() == before


def test_a_run_resumes_with_moved_data_but_not_with_others(relative_run, tmp_path, capsys):
    run = relative_run / "runs" / "run"
    (tmp_path / "elsewhere").mkdir()
    data = (relative_run / "photos").rename(tmp_path / "elsewhere" / "photos")
    words = ["train", str(data), "--resume", "--out", str(run)]
    assert main(["train", "--resume", "--out", str(run)]) == 2
    remedy = "if it moved, give it: vit train DATA --resume --out RUN, vit report RUN DATA"
    assert remedy in capsys.readouterr().err
    assert main(words) == 0
    capsys.readouterr()
    for path in data.rglob("*.png"):  # the same names
        path.write_bytes(path.read_bytes() + b" ")
    assert main(words) == 2
    assert re.search(r"have 0 of the \d+ that .* held out: give", capsys.readouterr().err)


def test_the_settings_of_a_run_reproduce_it_from_any_folder(relative_run, tmp_path):
    run = relative_run / "runs" / "run"
    (relative_run / "labels.csv").unlink()
    again = train(run / "config.yaml", tmp_path / "again").folder
    assert equal_models(again, run)
    copy = "lists/copy-labels.csv"
    assert (again / copy).read_bytes() == (run / copy).read_bytes()
    (mine := again / "lists" / "mine.csv").write_text("image")
    delete_run(again)
    assert [*again.rglob("*.csv")] == [mine]


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(
    tiny_config, tmp_path, monkeypatch
):
    seen = {}

    def poison(run, batch, epoch, **_):
        logits = run.model(run.preprocessing.normalise(batch.images))
        seen["weights"] = {n: p.detach().clone() for n, p in run.network.named_parameters()}
        seen["run"] = run
        return logits.sum().view(1) * (float("nan") if run.step == 4 else 1.0)

    monkeypatch.setattr("vit.training.training_loop.forward_losses", poison)
    with pytest.raises(RunError, match="the loss became nan at step 4"):
        train(tiny_config(), tmp_path / "run")
    for name, parameter in seen["run"].network.named_parameters():
        assert torch.equal(parameter, seen["weights"][name])
    assert events(tmp_path / "run")[-1]["step"] == 3


def test_a_step_without_a_finite_gradient_is_left_out_and_the_third_in_a_row_stops(
    tiny_config, tmp_path, monkeypatch, capsys
):
    weights, bad = {}, {1}

    def poison(run, batch, epoch, **_):
        weights[run.step] = [p.detach().clone() for p in run.network.parameters()]
        loss = run.model(run.preprocessing.normalise(batch.images)).sum().view(1)
        if run.step in bad:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    monkeypatch.setattr("vit.training.training_loop.forward_losses", poison)
    train(tiny_config(), tmp_path / "run")
    assert "the gradient became nan at step 2: the step is left out" in capsys.readouterr().err
    for step, moved in ((0, True), (1, False), (2, True)):
        pairs = zip(weights[step], weights[step + 1], strict=True)
        assert any(not torch.equal(one, other) for one, other in pairs) is moved
    bad.clear()
    bad.update({3, 4, 5})  # of which the total alone does not stop it
    with pytest.raises(RunError, match="the gradient became nan at step 5: nothing of it was"):
        train(tiny_config(), tmp_path / "other")


@pytest.mark.parametrize(
    ("step", "norms", "last"),
    [
        (1000, (math.inf, math.inf, 1.0, math.nan, math.nan), math.inf),  # the third in a row
        (500, (math.nan, 1.0) * 7, math.nan),  # more than a hundredth of all
    ],
)
def test_steps_without_a_finite_gradient_are_counted(step, norms, last):
    accelerator = SimpleNamespace(mixed_precision="no", is_main_process=False)
    run = SimpleNamespace(step=step, skipped=0, skipped_in_row=0, accelerator=accelerator)
    assert [updates_weights(run, 1.0, norm) for norm in norms] == [*map(math.isfinite, norms)]
    with pytest.raises(RunError, match=f"the gradient became {last} at step {step}"):
        updates_weights(run, 1.0, last)


def test_a_bad_image_stops_the_run_with_its_name(
    tiny_config, tmp_path, data_with_a_bad_image, capsys
):
    data = str(data_with_a_bad_image)
    with pytest.raises(BadImage, match=r"red/3\.png.*--resume --on-bad-image skip"):
        train(tiny_config(data=data), tmp_path / "run")
    assert find_checkpoints(tmp_path / "run/checkpoints")
    result = train(tiny_config(data=data, on_bad_image="skip"), tmp_path / "run", resume=True)
    assert len(events(tmp_path / "run")) == 3
    assert [Path(path).name for path in result.failed] == ["3.png"]
    assert "1 of the images could not be read and were left out:" in capsys.readouterr().err


def test_a_failed_start_does_not_block_the_next_one(tiny_config, tmp_path):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Trainer, "run_all", lambda _: 1 / 0)
        train(tiny_config(), tmp_path / "run")
    assert (tmp_path / "run/config.yaml").exists()
    train(tiny_config(**SHORT), tmp_path / "run")


def test_a_run_is_trained_by_one_process_at_a_time(tiny_config, tmp_path, run, finished):
    before, config = contents(run), tiny_config(**SHORT)
    log, until = tmp_path / "log", tmp_path / "until"
    with Job(hold, run, until, log=log) as other:
        while "held" not in other.said() and not other.ended():
            time.sleep(0.01)
        for choice in ("resume", "overwrite"):
            with pytest.raises(RunError, match="is being trained by another process"):
                train(config, run, **{choice: True})
        until.touch()
        assert other.wait() == [0], other.said()
    assert contents(run) == before
    train(config, run, overwrite=True)
    assert equal_models(run, finished)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("muon", {"position": "relative", "norm_order": "sandwich", "num_kv_heads": 1}),
        ("sgd", {"patch_sizes": (2, 4), "position": "learned"}),
        ("lamb", {"feedforward": "moe", "num_experts": 4, "router_jitter": 0.1}),
        (
            "adan",
            {
                "patch_dropout": 0.5,
                "merge_tokens": 1,
                "patch_size": 4,
                "position": "rotary",
            },
        ),
        ("lion", {"feedforward": "moe", "num_experts": 4, "capacity_factor": 0.8}),
        ("nadamw", {}),
    ],
)
def test_other_networks_and_optimisers_resume_exactly(tiny_config, tmp_path, optimizer, settings):
    config = tiny_config(**settings, optimizer=optimizer, epochs=2)
    train(config, tmp_path / "whole")
    with signalled_at(5):
        train(config, tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_each_step_draws_a_patch_size_and_the_run_serves_all_of_them(
    tiny_config, tmp_path, monkeypatch
):
    drawn = []

    def forward_losses(run, *others, **named):
        drawn.append(run.network.patch_embed.current_patch_size)
        return original(run, *others, **named)

    original = training_loop.forward_losses
    monkeypatch.setattr("vit.training.training_loop.forward_losses", forward_losses)
    run = train(tiny_config(patch_sizes=(2, 4)), tmp_path / "run").folder
    assert len(drawn) == 9
    assert set(drawn) == {2, 4, 8}
    flexible = vit.from_pretrained(run, notify=None).train()
    for part in flexible.modules():
        part.training = part is flexible.patch_embed  # no dropout
    images = torch.randn(2, 3, 16, 16)
    for size in (2, 4, 8):
        flexible.patch_embed.current_patch_size = size
        fixed = vit.from_pretrained(run, patch_size=size, notify=None)
        torch.testing.assert_close(fixed(images), flexible(images))


@pytest.mark.slow
def test_a_newer_damaged_checkpoint_does_not_crowd_out_good_ones(tiny_config, tmp_path):
    folder = tmp_path / "run/checkpoints"
    train(tiny_config(epochs=2), tmp_path / "run")
    newest = find_checkpoints(folder)[0]
    (folder / "step-00099999.safetensors").write_bytes(newest.read_bytes()[:1000])
    train(tiny_config(epochs=2), tmp_path / "run", resume=True)
    train(tiny_config(epochs=2), tmp_path / "run", overwrite=True)
    assert [path.name for path in find_checkpoints(folder)] == [
        "step-00000006.safetensors",
        "step-00000003.safetensors",
    ]


def state_at(step: int) -> checkpoint.CheckpointState:
    return checkpoint.CheckpointState(
        step=step, epoch=0, part={}, failed={}, data={}, scaler=None, metrics_bytes=0, best=[]
    )


def test_a_damaged_checkpoint_is_none_of_the_two_that_are_kept(tmp_path):
    snapshot = checkpoint.Snapshot({"model/a": torch.zeros(1)}, {}, [])
    paths = [checkpoint.write_checkpoint(tmp_path, snapshot, state_at(step)) for step in (1, 2)]
    newest = checkpoint.write_checkpoint(tmp_path, snapshot, state_at(3), damaged=[paths[1]])
    assert find_checkpoints(tmp_path) == [newest, paths[0]]


def test_deleting_a_run_may_be_interrupted_anywhere(tiny_config, run):
    config, original, left = tiny_config(**SHORT), Path.unlink, [3]

    def unlink(self, missing_ok=False):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        original(self, missing_ok=missing_ok)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", unlink)
        train(config, run, overwrite=True)
    assert train(config, run, overwrite=True).epoch == 1
    # nor does a folder that was emptied, but not begun again
    delete_run(run)
    assert {path.name for path in run.iterdir()} <= {".lock"}
    assert train(config, run, resume=True).epoch == 1


def test_a_run_that_another_process_began_is_not_overwritten(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(**SHORT)

    def slowly(*args, **options):
        monkeypatch.undo()
        train(config, tmp_path / "run")
        return resolve(*args, **options)

    monkeypatch.setattr("vit.training.train.resolve", slowly)
    with pytest.raises(RunError, match=r"a run began in .* meanwhile: start again"):
        train(config, tmp_path / "run", resume=True)
    assert len(events(tmp_path / "run")) == 1


def test_a_validation_loss_that_is_not_finite_stops(tiny_config, tmp_path, monkeypatch):
    original = training_loop.set_lr
    monkeypatch.setattr(training_loop, "set_lr", lambda o, lr: original(o, 1e36 * bool(lr)))
    with pytest.raises(RunError, match="became"):
        train(tiny_config(**SHORT, batch_size=36), tmp_path / "run")


def test_two_trainings_in_one_process(tiny_config, tmp_path, finished):
    second = train(tiny_config(**SHORT, precision="bf16"), tmp_path / "b").folder
    losses = [events(folder)[0]["train_loss"] for folder in (finished, second)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.fixture
def full_memory(monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("vit.training.training_loop.forward_losses", full)


@pytest.mark.usefixtures("full_memory")
def test_full_memory_is_an_error_with_a_remedy(tiny_config, tmp_path):
    with pytest.raises(RunError, match="out of memory: -b auto"):
        train(tiny_config(), tmp_path / "run")


@pytest.mark.usefixtures("full_memory")
@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "resume with an --accumulate of more than 2, .* or --checkpoint-activations; other"),
        (
            {"task": "lejepa", "min_crop": 0.5, "mixup": 0.0, "cutmix": 0.0},
            "memory: resume with --checkpoint-activations; oth",
        ),
    ],
)
def test_the_remedy_of_a_resumed_run_is_one_that_may_change(
    tiny_config, tmp_path, capsys, task, message
):
    def killed(self) -> None:
        self.save_and_wait()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Trainer, "run_epoch", killed)
        train(tiny_config(accumulate=2, **task), tmp_path / "run")
    with pytest.raises(RunError, match=message):
        train(out=tmp_path / "run", resume=True, accumulate=None)
    assert "note: -b auto is not used: the run keeps accumulate=2; --acc" in capsys.readouterr().err


def test_files_of_a_run_can_be_read_by_others(finished):
    modes = {path.stat().st_mode & 0o777 for path in finished.rglob("*.*")}
    umask = os.umask(0)
    os.umask(umask)
    assert modes == {0o666 & ~umask}


def test_mixed_pairs_are_in_one_micro_batch(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match=r"is 3 images in each of 4 parts.*a multiple of 8"):
        train(tiny_config(accumulate=4), tmp_path / "run")
    train(tiny_config(**SHORT, accumulate=4, mixup=0, cutmix=0), tmp_path / "run")


def test_a_background_write_that_fails_stops_the_run(tiny_config, tmp_path, monkeypatch):
    def full(*_):
        raise RunError("step-00000002.safetensors could not be written: the disk is full")

    monkeypatch.setattr("vit.training.checkpoint.checkpoint_writer.write_checkpoint", full)
    with pytest.raises(RunError, match="the disk is full"):
        train(tiny_config(epochs=40, checkpoint_steps=2), tmp_path / "run")
    assert len(events(tmp_path / "run", "step")) < 10


def test_checkpoints_are_written_at_their_steps(tiny_config, tmp_path, monkeypatch):
    written = []

    def note(folder, snapshot, state, damaged):
        written.append(state.step)
        return original(folder, snapshot, state, damaged)

    original = checkpoint.write_checkpoint
    monkeypatch.setattr("vit.training.checkpoint.checkpoint_writer.write_checkpoint", note)
    train(tiny_config(epochs=2, checkpoint_steps=2), tmp_path / "run")
    assert written == [2, 3, 4, 6, 6]


NAMED = ["--model", "vit_tiny_patch16_224"]  # so that nothing is measured for a plan


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no such folder"),
        ([], "DATA is missing"),
        (["--target", "grade", "--order", "DATA"], "write DATA first"),
        (["DATA", "--epohcs", "3"], "did you mean --epochs?"),
        (["DATA", "--epochs", "many"], "epochs='many' is not a whole number"),
        (["DATA", *NAMED, "--img-size", "225"], "not a multiple of patch_size=16"),
        (["DATA", *NAMED, "--num-classes", "7"], "num_classes=7: the data has 3 classes"),
        (["DATA", "--model", "resnet50"], "is not a preset"),
        (["DATA", "--device", "tpu"], "device='tpu'"),
        (["DATA", "--precision", "fp16", "--device", "cpu"], "use bf16 or fp32"),
        (["DATA", "--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["DATA", *NAMED, "--opt", "adamww"], "did you mean adamw?"),
        (["DATA", *NAMED, "--opt", "kron"], "its state cannot be resumed"),
        (["DATA", *NAMED, "--resume", "--overwrite"], "exclude each other"),
        (["DATA", "--mean", "0.5", "0.5"], "expected 3 arguments"),
        (["DATA", *NAMED, "--in-chans", "4"], "the data decide it"),
    ],
)
def test_a_run_that_cannot_start_has_an_error_of_one_line(
    colour_data, tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    words = [str(colour_data) if word == "DATA" else word for word in words]
    words += [] if "--precision" in words else ["--precision", "fp32"]
    assert main(["train", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert len([line for line in lines if not line.startswith(("note", "cache"))]) == 1
    assert not (tmp_path / "runs").exists()


def test_one_call_with_data_and_settings_trains_as_the_config(
    tiny_config, colour_data, tmp_path, finished
):
    """Settings by name, a file of them, and a folder to resume."""
    settings = {**flatten(tiny_config(**SHORT)), "weights": None, "num_classes": None}
    given = {name: value for name, value in settings.items() if value is not None}
    named, again = tmp_path / "named", tmp_path / "again"
    train(given.pop("data"), named, **given)
    result = train(named / "config.yaml", again)
    assert equal_models(finished, named, again)
    assert train(out=again, resume=True) == result
    few = {"data": str(colour_data), "epochs": 1}  # the others are those of the run, not planned
    assert train(few, again, resume=True) == result
    with pytest.raises(ConfigError, match="epohcs is not a setting; did you mean epochs"):
        train(colour_data, tmp_path / "no", epohcs=3)
    with pytest.raises(ConfigError, match="epochs"):  # of the dict, as by name
        train(few | {"epochs": 2}, again, resume=True)
    with pytest.raises(ConfigError, match="steps=6 differs from None"):
        train(out=again, resume=True, steps=6)
    with pytest.raises(ConfigError, match="leaves nothing to plan"):
        plan(tiny_config())
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
@pytest.mark.auto_precision
def test_the_settings_of_a_run_train_on_one_class_more(tiny_config, colour_data, tmp_path):
    """As the command does: nobody chose what the data had decided."""
    data = tmp_path / "data"
    shutil.copytree(colour_data, data)
    for split in ("train", "val"):
        shutil.move(data / split / "blue", tmp_path / split)
    config = tiny_config(data=str(data), **SHORT, report="fast")
    settings = train(config, tmp_path / "first").folder / "config.yaml"
    assert "num_classes: 2" in settings.read_text()
    for split in ("train", "val"):
        shutil.move(tmp_path / split, data / split / "blue")
    assert train(settings, tmp_path / "second").classes == ("blue", "green", "red")
    folds = {"data": str(data / "train"), "folds": 2, "num_classes": 2}
    with pytest.raises(ConfigError, match="num_classes=2: the data has 3 classes"):  # if chosen
        vit.cross_validate(settings, tmp_path / "folds", **folds)
    folds.pop("num_classes")
    assert len(vit.cross_validate(settings, tmp_path / "folds", **folds)["scores"]) == 2


def test_images_that_the_run_was_trained_on_are_counted(colour_data, tmp_path, capsys, tiny_config):
    data = tmp_path / "data"
    shutil.copytree(colour_data / "train", data)
    run = train(tiny_config(data=str(data), epochs=2, val_share=0.25), tmp_path / "run").folder
    capsys.readouterr()
    assert main(["evaluate", str(run), str(data), "--precision", "fp32"]) == 0
    assert "was trained on" not in capsys.readouterr().err
    held = json.loads((run / "split.json").read_text())["val"]
    names = sorted({p.relative_to(data).as_posix() for p in data.rglob("*.png")}.difference(held))
    rows = ["image,label", *(f"{name},{name.split('/')[0]}" for name in names)]
    (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
    words = ["evaluate", str(run), str(tmp_path / "list.csv"), "--images", str(data)]
    assert main([*words, "--precision", "fp32"]) == 0
    told = f"was trained on {len(names)} of these {len(names)} images, so the numbers are too good"
    assert told in capsys.readouterr().err
