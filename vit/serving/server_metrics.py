"""Metrics of the server in the text format of Prometheus, the only user of prometheus_client.

Processes that share an address write theirs to files in the folder that the environment variable
SHARED_FOLDER names, and each of them answers with the sums.
"""

import os

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from vit.score_calibration import UNCERTAIN, UNLIKE

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
