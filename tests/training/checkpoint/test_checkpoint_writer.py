"""When checkpoints are due, and the first one, in the middle of an epoch."""

import pytest

from tests.training.children import differences
from tests.training.runs import SHORT, equal_models
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


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """The run that nothing disturbs."""
    return train(tiny_config(**SHORT), tmp_path_factory.mktemp("whole") / "run").folder


@pytest.mark.slow
def test_a_run_killed_after_its_first_checkpoint_resumes_exactly(tiny_config, tmp_path, whole):
    killed, after_step = tmp_path / "killed", Trainer.after_step

    def kill(trainer, step):
        after_step(trainer, step)
        if trainer.run.step == 3:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint_writer, "FIRST_MINUTES", 0.0)
        patched.setattr(Trainer, "after_step", kill)
        train(tiny_config(**SHORT), killed)
    assert [path.stem for path in (killed / "checkpoints").iterdir()] == ["step-00000001"]
    assert equal_models(train(tiny_config(**SHORT), killed, resume=True).folder, whole)


def test_a_run_killed_while_its_first_weights_are_written_resumes_exactly(
    tiny_config, tmp_path, whole
):
    """Without a checkpoint such weights would look like those of a run that lost it."""
    killed = tmp_path / "killed"

    def full(*_):
        raise RunError("the disk is full")

    with pytest.MonkeyPatch.context() as patched, pytest.raises(RunError, match="is full"):
        patched.setattr(SerializedModel, "write", full)
        train(tiny_config(**SHORT), killed)
    (killed / "model.safetensors").touch()
    assert differences(train(tiny_config(**SHORT), killed, resume=True).folder, whole) == []
