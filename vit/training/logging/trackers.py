"""Experiment trackers (TensorBoard, MLflow, W&B, Trackio): send each metrics event once.

A thread of the main process follows RUN/metrics.jsonl, so training never waits for a tracker, and a
resumed run sends what is missing. An error of a tracker is logged once, and training continues.

    RUN/tracking/NAME.json    the id by which the tracker NAME finds the record of this run
    RUN/tracking/NAME.sent    the last step and epoch that were sent

Everything goes through accelerate's trackers. To add one: its line in `TRACKERS`, and its name in
the Literal of vit/config/run_config.py.
"""

import contextlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from accelerate.tracking import (
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    get_available_trackers,
)

from vit.atomic_files import explain_write_errors, write_text
from vit.errors import ConfigError, error_text
from vit.training.logging.training_progress import notify

PROJECT = "vit"
TRACKING = "tracking"
POLL_SECONDS = 1.0
CLOSE_SECONDS = 30.0  # at the end, without progress of the tracker
NOTED_BYTES = 100_000
SCORES = (
    *("loss", "top1", "balanced_accuracy", "map", "f1"),
    *("caption_loss", "loss_shuffled", "bleu4", "rouge_l", "cider", "chrf", "distinct", "exact"),
    *("knn", "rankme", "centred_rank", "spread"),
)
"""Validation scores of all tasks."""
NAMES = {
    "step": {"loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm"},
    "epoch": {
        **{f"val_{score}": f"val/{score}" for score in SCORES},
        "images_per_second": "train/images_per_second",
    },
    "soup": {f"val_{score}": f"soup/{score}" for score in SCORES},
    "test": {f"test_{score}": f"test/{score}" for score in SCORES},
}
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
    # steps after the checkpoint are repeated: purge their earlier events
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
    "trackio": lambda r: TrackioTracker(
        PROJECT, name=f"{r.title}-{r.key[:8]}", resume="allow", config=dict(r.settings)
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


def send(name: str, tracker: GeneralTracker, values: Mapping[str, float], step: int) -> None:
    """Send the values of one step to `tracker`."""
    if name == "trackio":
        tracker.tracker.log(dict(values), step=step)  # accelerate drops the step before 1.14
    else:
        tracker.log(dict(values), step=step)


def steps_received(name: str, tracker: GeneralTracker) -> int | None:
    """The last step of a continued record, if the tracker provides it."""
    run = tracker.tracker
    # wandb continues after the last step on its server, and refuses earlier ones
    return int(run.step) - 1 if name == "wandb" and run.resumed else None


def latest_values(name: str, tracker: GeneralTracker) -> dict[str, float]:
    """The latest value of each metric in a continued record, if the tracker provides it."""
    return dict(tracker.tracker.data.metrics) if name == "mlflow" else {}


class Tracking:
    """A thread that sends the events of RUN/metrics.jsonl to a tracker.

    Args:
        step: Optimiser steps made so far. At 0, a tracker that cannot start is an error; a resumed
            run continues without it.
    """

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any], *, step: int) -> None:
        self.name = name
        self.metrics = folder / "metrics.jsonl"
        self.kept = folder / TRACKING / f"{name}.json"
        with explain_write_errors(self.kept):
            self.kept.parent.mkdir(exist_ok=True)
        key = read_key(self.kept)
        self.record = Record(
            folder=self.kept.parent,
            title=folder.resolve().name,
            key=key or uuid.uuid4().hex,
            new=key is None,
            step=step,
            settings={setting: plain(value) for setting, value in settings.items()},
        )
        self.sent = Sent(self.kept.with_suffix(".sent"), self.record)
        self.latest: dict[str, float] = {}
        self.started, self.closing = Future[None](), threading.Event()
        # a daemon: a hanging tracker must not block the exit of the process
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"tracking: {name}")
        self.thread.start()
        if step == 0 and wait([self.started], POLL_SECONDS * 5).not_done:
            notify(f"waiting for {name}")
        # loader processes are forked soon: no thread should be importing then
        wait([self.started], timeout=None if step == 0 else CLOSE_SECONDS)
        if step == 0 and (failure := self.started.exception()) is not None:
            why = error_text(failure)
            raise ConfigError(f"track={name!r} cannot start: {why}; fix it, or leave it out")

    def close(self) -> None:
        """Send the remaining events, as long as the tracker makes progress."""
        self.closing.set()
        while self.thread.is_alive():
            before = self.sent.count
            self.thread.join(CLOSE_SECONDS)
            if self.thread.is_alive() and self.sent.count == before:
                self._report(f"it has accepted nothing for {CLOSE_SECONDS:.0f} s")
                return

    def _run(self) -> None:
        with contextlib.closing(self.sent):
            try:
                tracker = self._start()
            except BaseException as error:  # some raise SystemExit if nobody is logged in
                self.started.set_exception(error)
                if self.record.step:
                    self._report(error_text(error))
                return
            self.started.set_result(None)
            try:
                self._follow(tracker)
            except Exception as error:
                self._report(error_text(error))

    def _start(self) -> GeneralTracker:
        tracker, key = start_tracker(self.name, self.record)
        if self.record.new:
            write_text(self.kept, json.dumps({"key": key}) + "\n")
            return tracker
        if (received := steps_received(self.name, tracker)) is not None:
            self.sent.last = dict.fromkeys(NAMES, received)
        self.latest = latest_values(self.name, tracker)
        return tracker

    def _follow(self, tracker: GeneralTracker) -> None:
        with self.metrics.open("rb") as file:
            closing = False
            while not closing:
                closing = self.closing.is_set()  # before reading, so that the last events are read
                left = os.fstat(file.fileno()).st_size - file.tell()
                if closing and left > NOTED_BYTES:
                    notify(f"sending the rest to {self.name}")
                for line in whole_lines(file):
                    self._send(tracker, json.loads(line))
                self.closing.wait(POLL_SECONDS)
        tracker.finish()

    def _send(self, tracker: GeneralTracker, event: Mapping[str, Any]) -> None:
        kind, names = event["event"], NAMES.get(event["event"], {})
        # fp16 skips a step whose gradient overflows; its norm is None
        values = {n: float(event[key]) for key, n in names.items() if event.get(key) is not None}
        if not values or self.sent.has(kind, event["step"]):
            return
        # a process may have been killed between sending this event and recording it
        known = bool(self.latest) and all(self.latest.get(k) == v for k, v in values.items())
        self.latest = {}
        if not known:
            send(self.name, tracker, values, event["step"])
        self.sent.note(kind, event["step"])

    def _report(self, why: str) -> None:
        notify(
            f"note: {self.name} receives no more events, and the run continues without it: {why}; "
            "metrics.jsonl has everything, and the next --resume sends what is missing"
        )


class Sent:
    """The last step that was sent for each kind of event, in a small file.

    Args:
        path: The file, rewritten in place after each event.
    """

    def __init__(self, path: Path, record: Record) -> None:
        known = {} if record.new else read_json(path)
        # if the file is lost, nothing before the checkpoint is sent again
        unknown = -1 if record.new else record.step  # a probe is recorded at step 0
        self.last = {kind: int(known.get(kind, unknown)) for kind in NAMES}
        if path.stem == "tensorboard":  # it purges the steps after the checkpoint
            self.last = {kind: min(step, record.step) for kind, step in self.last.items()}
        self.count = 0
        with explain_write_errors(path):
            self.file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", 0)
            self._write()

    def has(self, kind: str, step: int) -> bool:
        """Whether the event of `step` was sent already."""
        return step <= self.last[kind]

    def note(self, kind: str, step: int) -> None:
        """Record that the event of `step` was sent."""
        self.last[kind] = step
        self.count += 1
        self._write()

    def _write(self) -> None:
        self.file.seek(0)
        self.file.write(json.dumps(self.last).ljust(100).encode())

    def close(self) -> None:
        self.file.close()


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in `path`; empty if it cannot be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_key(path: Path) -> str | None:
    """The key of an existing record, or None."""
    key = read_json(path).get("key")
    return key if isinstance(key, str) else None


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Complete lines of `file` from its position; a partial last line is left for later."""
    while (line := file.readline()).endswith(b"\n"):
        yield line
    file.seek(-len(line), os.SEEK_CUR)


def plain(value: object) -> bool | int | float | str:
    """Convert a setting to a number or a string, which all trackers accept."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    return "none" if value is None else str(value)
