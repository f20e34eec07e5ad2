"""Metrics of the server in the text format of Prometheus, the only user of prometheus_client.

Processes that share an address write theirs to files in the folder that the environment variable
SHARED_FOLDER names, and each of them answers with the sums.

`vit serve --watch FILE` appends a line for some images to FILE, for `vit drift RUN FILE`: the time,
and counts in the bins of the reference (vit/calibration_reference.py). {"time", "calibration",
"images", "answers": {CLASS: IMAGES}, "scores": [IMAGES], "distances": [IMAGES]}.
"""

import asyncio
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from vit.atomic_files import explain_write_errors
from vit.calibration_reference import CalibrationReference
from vit.errors import BadImage, RunError
from vit.output.prediction_results import ImageOutput, to_json
from vit.score_calibration import UNCERTAIN, UNLIKE
from vit.text import Notify, plural

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Set before this module is imported."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """Counters of one process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "vit_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "vit_request_seconds",
            "Seconds from the header of a request to its answer",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.refused = Counter(
            "vit_refused",
            "Requests and connections that were refused",
            ["reason"],
            registry=registry,
        )
        self.limits_reached = Counter(
            "vit_limit_reached",
            "Requests and connections that were answered 429, by the limit",
            ["limit"],
            registry=registry,
        )
        for limit in ("max_queue", "max_memory_mb", "max_connections"):
            self.limits_reached.labels(limit)
        self.images = Counter(
            "vit_images", "Images by their outcome", ["model", "outcome"], registry=registry
        )
        self.rejections = Counter(
            "vit_reject_images",
            "Images of requests with reject=true, by their answer",
            ["model", "answer"],
            registry=registry,
        )
        self.waiting = Gauge(
            "vit_waiting_images", "Accepted images", registry=registry, multiprocess_mode="livesum"
        )
        self.memory = Gauge(
            "vit_request_bytes",
            "Bytes of requests in memory",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.batch_images = Histogram(
            "vit_batch_images", "Images of a batch", ["model"], buckets=SIZES, registry=registry
        )
        self.batch_seconds = Histogram(
            "vit_batch_seconds", "Seconds of a batch", ["model"], buckets=SECONDS, registry=registry
        )
        self.reloads = Counter(
            "vit_reloads", "Reloads of a model", ["model", "outcome"], registry=registry
        )

    def add_model(self, name: str, *, rejects: bool) -> None:
        """Start the counters of a model at 0, since a rate needs a value before the first event."""
        for outcome in ("done", "failed"):
            self.reloads.labels(name, outcome)
        for outcome in ("answered", "unreadable", "failed"):
            self.images.labels(name, outcome)
        for answer in ("class", UNCERTAIN, UNLIKE) if rejects else ():
            self.rejections.labels(name, answer)

    def text(self) -> bytes:
        """All metrics, in the text format."""
        registry = self.registry
        if SHARED_FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


def forget_process(process: int, folder: str) -> None:
    """Take a process that has ended out of the gauges; what it counted stays."""
    mark_process_dead(process, folder)  # type: ignore[no-untyped-call]


LINE_IMAGES = 50
"""Images of a line."""
LINE_SECONDS = 3600.0
"""Seconds after the first image of a line until it is written with fewer."""


class WatchFile:
    """A file that lines are appended to."""

    def __init__(self, path: str, notify: Notify) -> None:
        self.path, self.notify = path, notify
        self.reference: CalibrationReference | None = None
        self.rows: list[ImageOutput] = []
        self.timer: asyncio.TimerHandle | None = None
        with explain_write_errors(path), open(path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # half a line, of a server that was killed
                    file.write(b"\n")

    def add(self, reference: CalibrationReference, outputs: Sequence[Any]) -> None:
        """Count the outputs of some images of a model with this reference."""
        if reference is not self.reference:
            self.flush()
            self.reference = reference
        self.rows += [
            ImageOutput("", one.probabilities, distance=one.distance)
            for one in outputs
            if not isinstance(one, BadImage)
        ]
        if len(self.rows) >= LINE_IMAGES:
            self.flush()
        elif self.rows and self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(LINE_SECONDS, self.flush)

    def flush(self) -> None:
        """Write a line of what was counted since the last one."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.reference is None or not self.rows:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "calibration": self.reference.calibration,
            "images": len(self.rows),
            **self.reference.count(self.rows),
        }
        rows, self.rows = self.rows, []
        try:
            with explain_write_errors(self.path), open(self.path, "ab") as file:
                file.write((to_json(line) + "\n").encode())
        except RunError as error:
            self.notify(f"{error}; {plural(len(rows), 'image')} not counted")
