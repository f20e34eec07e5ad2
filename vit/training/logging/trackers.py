"""Experiment trackers (TensorBoard, MLflow, W&B): each event is sent when it is logged.

A thread of the main process sends them, so training never waits for a tracker. A resumed run
continues its record, by the id in RUN/tracking/NAME.json; steps since the checkpoint are sent
again. An error of a tracker is logged once, and training continues.

Everything goes through accelerate's trackers. To add one: its line in `TRACKERS`, and its name in
the Literal of vit/config/training_config.py.
"""

import json
import os
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

from accelerate.tracking import (
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
    get_available_trackers,
)

from vit.atomic_files import explain_write_errors, write_text
from vit.errors import ConfigError, error_text
from vit.training.logging.training_progress import notify

PROJECT = "vit"
TRACKING = "tracking"
CLOSE_SECONDS = 30.0
"""Time for the events that are left at the end of a run."""
OF_TRAINING = {"loss", "lr", "grad_norm", "balance_loss", "router_z_loss", "images_per_second"}
# telemetry that is switched off unless the user has set the variable
TELEMETRY_OFF = {
    "mlflow": ("MLFLOW_DISABLE_TELEMETRY", "true"),
    "wandb": ("WANDB_ERROR_REPORTING", "false"),
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of a run in a tracker, to start or to continue."""

    folder: Path
    title: str
    key: str
    new: bool
    step: int
    settings: dict[str, Any]


TRACKERS: dict[str, Callable[[Record], GeneralTracker]] = {
    # it purges the steps after the checkpoint, which are repeated
    "tensorboard": lambda r: TensorBoardTracker(
        "", str(r.folder), purge_step=None if r.new else r.step + 1
    ),
    "mlflow": lambda r: MLflowTracker(PROJECT, run_name=r.title, run_id=None if r.new else r.key),
    # arguments of accelerate would override the variables that wandb reads
    "wandb": lambda r: WandBTracker(
        os.environ.get("WANDB_PROJECT") or PROJECT,
        dir=os.environ.get("WANDB_DIR") or str(r.folder),
        name=r.title,
        id=r.key,
        resume="allow",
        config=dict(r.settings),
    ),
}


def require_tracker(name: str | None) -> None:
    """Refuse a tracker that is not installed, which accelerate would silently ignore."""
    if name is not None and name not in [str(each) for each in get_available_trackers()]:
        raise ConfigError(f"track={name!r} is not installed: pip install {name}")


def start_tracker(name: str, record: Record) -> tuple[GeneralTracker, str]:
    """Start or continue `record`; returns the tracker and the key of the record."""
    if name in TELEMETRY_OFF:
        os.environ.setdefault(*TELEMETRY_OFF[name])
    tracker = TRACKERS[name](record)
    tracker.start()
    if name == "mlflow" and record.new:
        tracker.store_init_configuration(dict(record.settings))
    if name == "tensorboard" and record.new:
        _store_in_tensorboard(tracker.tracker, record.settings)
    return tracker, tracker.tracker.info.run_id if name == "mlflow" else record.key


def _store_in_tensorboard(writer: Any, settings: Mapping[str, Any]) -> None:
    """Write settings for the HPARAMS page; accelerate's method creates two extra folders."""
    from torch.utils.tensorboard import summary

    hparams: Any = summary.hparams
    for part in hparams(dict(settings), {"val/top1": 0.0}):
        writer.file_writer.add_summary(part)


class Tracking:
    """A thread that sends events to a tracker.

    Args:
        step: Optimiser steps made so far. At 0, a tracker that cannot start is an error; a resumed
            run continues without it.
    """

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any], *, step: int) -> None:
        self.name, self.events = name, Queue[Mapping[str, Any] | None]()
        stored = folder / TRACKING / f"{name}.json"
        with explain_write_errors(stored):
            stored.parent.mkdir(exist_ok=True)
        new = not stored.exists()
        record = Record(
            folder=stored.parent,
            title=folder.resolve().name,
            key=uuid.uuid4().hex if new else json.loads(stored.read_bytes())["key"],
            new=new,
            step=step,
            settings={setting: plain(value) for setting, value in settings.items()},
        )
        started = Future[str]()
        # a daemon: a hanging tracker must not block the exit of the process
        self.thread = Thread(target=self._run, args=(record, started), daemon=True)
        self.thread.start()
        try:
            write_text(stored, json.dumps({"key": started.result()}) + "\n")
        except Exception as error:
            if step == 0:
                why = error_text(error)
                raise ConfigError(
                    f"track={name!r} cannot start: {why}; fix it, or leave it out"
                ) from None
            self._report(error_text(error))

    def send(self, event: Mapping[str, Any]) -> None:
        """Send an event of metrics.jsonl, as soon as those before it are sent."""
        self.events.put(event)

    def close(self) -> None:
        """Send the remaining events."""
        self.events.put(None)
        self.thread.join(CLOSE_SECONDS)
        if self.thread.is_alive():
            self._report(f"{self.events.qsize()} events were left after {CLOSE_SECONDS:.0f} s")

    def _run(self, record: Record, started: Future[str]) -> None:
        try:
            tracker, key = start_tracker(self.name, record)
        except BaseException as error:  # some raise SystemExit if nobody is logged in
            started.set_exception(RuntimeError(error_text(error)))
            return
        started.set_result(key)
        try:
            while (event := self.events.get()) is not None:
                tracker.log(values_of(event), step=event["step"])
            tracker.finish()
        except Exception as error:
            self._report(error_text(error))

    def _report(self, why: str) -> None:
        notify(
            f"note: {self.name} receives no more events, and the run continues without it: {why}; "
            "metrics.jsonl has everything"
        )


def values_of(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event as trackers show them: `train/loss`, `val/top1`, `soup/top1`."""
    values = {}
    for key, value in event.items():
        if event["event"] == "callback":
            if isinstance(value, int | float) and key != "step":
                values[f"{event['callback']}/{key}"] = float(value)
            continue
        split, _, score = key.partition("_")
        if isinstance(value, int | float) and key in OF_TRAINING:
            values[f"train/{key}"] = float(value)
        elif isinstance(value, int | float) and split in ("val", "test"):
            values[f"{'soup' if event['event'] == 'soup' else split}/{score}"] = float(value)
    return values


def plain(value: object) -> bool | int | float | str:
    """Convert a setting to a number or a string, which all trackers accept."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    return "none" if value is None else str(value)
