"""When checkpoints are due, and the first one, in the middle of an epoch."""

import pytest

from tests.training.children import differences
from vit.errors import RunError
from vit.training.checkpoint import checkpoint_writer
from vit.training.train import train
from vit.training.trainer import Trainer
from vit.weights.saved_model import SerializedModel


def due_after(monkeypatch, trainer, minutes: float) -> bool:
    now = trainer.checkpoints.saved + 60 * minutes
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_writer.time, "monotonic", lambda: now)
        return trainer.checkpoints.due()


@pytest.mark.parametrize(("minutes", "first"), [(10.0, 1.0), (0.5, 0.5)])
def test_the_first_checkpoint_is_due_after_a_minute(
    tiny_config, tmp_path, monkeypatch, minutes, first
):
    seen = []

    def look(trainer, _step):
        for number in (first, minutes):
            seen.append(due_after(monkeypatch, trainer, 0.99 * number))
            seen.append(due_after(monkeypatch, trainer, 1.01 * number))
            trainer.save()
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "after_step", look)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(checkpoint_minutes=minutes), tmp_path)
    assert seen == [False, True] * 2


def test_a_run_killed_after_its_first_checkpoint_resumes_exactly(
    tiny_config, tmp_path, monkeypatch
):
    config = tiny_config(epochs=1, warmup_epochs=0)
    whole = train(config, tmp_path / "whole").folder
    after_step = Trainer.after_step

    def killed(trainer, step):
        after_step(trainer, step)
        if trainer.run.step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_writer, "FIRST_MINUTES", 0.0)
        patched.setattr(Trainer, "after_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "killed")
    steps = [path.stem for path in (tmp_path / "killed/checkpoints").iterdir()]
    assert steps == ["step-00000001"]
    resumed = train(config, tmp_path / "killed", resume=True).folder
    name = "model.safetensors"
    assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_a_run_killed_while_its_first_weights_are_written_resumes_exactly(
    tiny_config, tmp_path, monkeypatch
):
    """Without a checkpoint such weights would look like those of a run that lost it."""
    config = tiny_config(epochs=2, warmup_epochs=0)
    whole = train(config, tmp_path / "whole").folder

    def full(*_):
        raise RunError("the disk is full")

    with monkeypatch.context() as patched, pytest.raises(RunError, match="is full"):
        patched.setattr(SerializedModel, "write", full)
        train(config, tmp_path / "killed")
    (tmp_path / "killed/model.safetensors").touch()
    resumed = train(config, tmp_path / "killed", resume=True).folder
    assert differences(resumed, whole) == []
