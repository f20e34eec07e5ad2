"""A Ray cluster for one prediction: found or started, kept quiet, and its errors told in a line."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vit.errors import ConfigError, RunError, VitError, printable
from vit.inference.ray_files import missing


class Counter:
    """How often each piece was begun."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def began(self, piece: int) -> int:
        """Counts once more, and returns the count."""
        self.counts[piece] = self.counts.get(piece, 0) + 1
        return self.counts[piece]


class Beginnings:
    """One Counter that all workers of a cluster ask; it takes no core."""

    def __init__(self) -> None:
        import ray

        self.counter = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(
            Counter
        ).remote()

    def __call__(self, piece: int) -> int:
        """As `began` of the Counter."""
        import ray

        return int(ray.get(self.counter.began.remote(piece)))


def shares(
    resources: dict[str, float], device: str | None, workers: int | None
) -> tuple[int, dict[str, Any]]:
    """How many workers there are, and what each takes of the cluster.

    Raises:
        ConfigError: `device` is a GPU, and the cluster has none.
    """
    cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if device is not None and device.startswith("cuda") and not gpus:
        raise ConfigError(f"device={device!r}: this Ray cluster has no GPU")
    if gpus and (device is None or device.startswith("cuda")):
        return workers or gpus, {"num_gpus": 1, "num_cpus": max(1, cores // gpus)}
    return workers or max(1, cores), {"num_cpus": 1}


@contextmanager
def cluster(workers: int | None) -> Iterator[ModuleType]:
    """The cluster that is there, that of RAY_ADDRESS, or one of this machine for a while.

    Gives the module ray, which is slow to import.

    Raises:
        VitError: Ray is not installed, or cannot start.
    """
    # nothing leaves this machine, and nothing that Ray heals is told
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing(error) from None
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS", "local")
    if address == "local":
        cores = max(workers or 1, os.cpu_count() or 1)
        quiet |= {"include_dashboard": False, "num_cpus": cores}
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise RunError(f"Ray cannot start ({printable(address)}): {printable(error)}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def in_order() -> Iterator[None]:
    """Rows in order and nothing on the terminal; what was set before comes back."""
    import ray.data

    context = ray.data.DataContext.get_current()
    before = (
        context.execution_options.preserve_order,
        context.enable_progress_bars,
        context.print_on_execution_start,
    )
    logger = logging.getLogger("ray.data")
    level = logger.level
    context.execution_options.preserve_order = True
    context.enable_progress_bars = context.print_on_execution_start = False
    logger.setLevel(logging.CRITICAL)  # an error is raised too, and told in one line
    try:
        yield
    finally:
        logger.setLevel(level)
        context.execution_options.preserve_order = before[0]
        context.enable_progress_bars, context.print_on_execution_start = before[1:]


@contextmanager
def told() -> Iterator[None]:
    """What goes wrong in a worker, in one line.

    Raises:
        VitError: That of the worker, or that Ray gave up.
    """
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        cause: BaseException | None = error
        while cause is not None and (
            isinstance(cause, RayError) or not isinstance(cause, VitError)
        ):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if isinstance(cause, VitError):
            raise cause from None
        said = str(error).strip().splitlines()
        raise RunError(
            f"Ray gave up: {printable(said[-1] if said else type(error).__name__)}; the logs of "
            "its workers are in /tmp/ray/session_latest/logs"
        ) from None
