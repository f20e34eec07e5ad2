"""What differs between experiment trackers: how each begins the record of a run and continues it.

Everything goes through accelerate's trackers. To add one: its line in `TRACKERS`, and its name in
the Literal of vit/config/run.py.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.tracking import (
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    get_available_trackers,
)

from vit.errors import ConfigError

PROJECT = "vit"
# What these tell their makers of their own accord; whoever has set the variable decides.
QUIET = {
    "mlflow": ("MLFLOW_DISABLE_TELEMETRY", "true"),
    "wandb": ("WANDB_ERROR_REPORTING", "false"),
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a tracker needs to begin the record of a run, or to go on with it.

    Args:
        folder: RUN/tracking.
        title: What people see.
        key: By which the tracker finds the record again.
        new: Whether it begins here.
        step: Optimiser steps that the run has made.
        settings: All settings, as numbers and words.
    """

    folder: Path
    title: str
    key: str
    new: bool
    step: int
    settings: dict[str, Any]


TRACKERS: dict[str, Callable[[Record], GeneralTracker]] = {
    # steps after the checkpoint come again: the reader drops what was written of them before
    "tensorboard": lambda r: TensorBoardTracker(
        "", str(r.folder), purge_step=None if r.new else r.step + 1
    ),
    "mlflow": lambda r: MLflowTracker(PROJECT, run_name=r.title, run_id=None if r.new else r.key),
    # what accelerate passes on would hide the variables that wandb reads
    "wandb": lambda r: WandBTracker(
        os.environ.get("WANDB_PROJECT") or PROJECT,
        dir=os.environ.get("WANDB_DIR") or str(r.folder),
        name=r.title,
        id=r.key,
        resume="allow",
        config=dict(r.settings),
    ),
    "trackio": lambda r: TrackioTracker(
        PROJECT, name=f"{r.title}-{r.key[:8]}", resume="allow", config=dict(r.settings)
    ),
}


def require_tracker(name: str | None) -> None:
    """Refuse a tracker that is not installed; accelerate would go on without it, silently.

    Raises:
        ConfigError: The message has the command that installs it.
    """
    if name is not None and name not in [str(each) for each in get_available_trackers()]:
        raise ConfigError(f"track={name!r} is not installed: pip install {name}")


def start_tracker(name: str, record: Record) -> tuple[GeneralTracker, str]:
    """Begin or continue `record`; returns the tracker, and the key of the record."""
    if name in QUIET:
        os.environ.setdefault(*QUIET[name])
    tracker = TRACKERS[name](record)
    tracker.start()
    if name == "mlflow" and record.new:
        tracker.store_init_configuration(dict(record.settings))
    if name == "tensorboard" and record.new:
        _store_in_tensorboard(tracker.tracker, record.settings)
    return tracker, tracker.tracker.info.run_id if name == "mlflow" else record.key


def _store_in_tensorboard(writer: Any, settings: Mapping[str, Any]) -> None:
    """Settings for its HPARAMS page; accelerate's way leaves two folders with times for names."""
    from torch.utils.tensorboard import summary

    hparams: Any = summary.hparams
    for part in hparams(dict(settings), {"val/top1": 0.0}):
        writer.file_writer.add_summary(part)


def send(name: str, tracker: GeneralTracker, values: Mapping[str, float], step: int) -> None:
    """Give `tracker` the values of one step."""
    if name == "trackio":
        tracker.tracker.log(dict(values), step=step)  # accelerate drops the step before 1.14
    else:
        tracker.log(dict(values), step=step)


def steps_received(name: str, tracker: GeneralTracker) -> int | None:
    """The last step that a continued record has, where the tracker says it."""
    run = tracker.tracker
    # wandb goes on after the last step that its server has, and refuses earlier ones
    return int(run.step) - 1 if name == "wandb" and run.resumed else None


def latest_values(name: str, tracker: GeneralTracker) -> dict[str, float]:
    """The newest value of each name in a continued record, where the tracker says it."""
    return dict(tracker.tracker.data.metrics) if name == "mlflow" else {}
