"""Distributed prediction with Ray: a Predictor in each worker, and one output file.

The list is cut into pieces of whole batches. A worker computes one piece at a time and returns its
rows; a worker that dies is restarted, and repeats its unfinished pieces. Pieces come back in order,
and the index of each row is checked. The cluster is a running one, that of RAY_ADDRESS, or a local
one for as long as the prediction takes.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vit.cpu_cores import usable_cores
from vit.errors import ConfigError, RunError, VitError
from vit.generation.caption import Caption
from vit.inference.remote_files import fetched, is_url, missing, write_rows
from vit.output.prediction_results import Layout, Prediction
from vit.text import printable

if TYPE_CHECKING:
    import pyarrow as pa


class AttemptCounter:
    """How often each piece was begun."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def attempt(self, piece: int) -> int:
        """Counts once more, and returns the count."""
        self.counts[piece] = self.counts.get(piece, 0) + 1
        return self.counts[piece]


class SharedAttemptCounter:
    """One Counter that all workers of a cluster ask; it takes no core."""

    def __init__(self) -> None:
        import ray

        self.counter = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(
            AttemptCounter
        ).remote()

    def __call__(self, piece: int) -> int:
        """As `attempt` of the Counter."""
        import ray

        return int(ray.get(self.counter.attempt.remote(piece)))


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
        cores = max(workers or 1, usable_cores())
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
def ordered_and_quiet() -> Iterator[None]:
    """Set Ray Data to ordered rows and no terminal output; restores its settings on exit."""
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
def raise_worker_errors() -> Iterator[None]:
    """Re-raise errors of workers as a VitError of one line.

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


LONGEST_PIECE = 512  # images that are answered again when a worker dies
SHARES = 8  # pieces of each worker, where the list is long enough: none waits long at the end
ATTEMPTS = 3  # at a piece whose worker dies each time: then it is its images that kill
MOST_THREADS = 8  # of a worker, that read images


def predict_with_ray(
    model: str,
    images: Sequence[str],
    out: str,
    *,
    style: str,
    top_k: int,
    settings: dict[str, Any],
    workers: int | None,
    notify: Callable[[str], object],
    separator: str = ",",
    digits: int | None = None,
) -> int:
    """Answer for all `images` into one file; returns how many have an error instead.

    The cluster is that of RAY_ADDRESS, else one of this machine, for as long as it takes. Each
    machine needs this package, and the model and images at the same paths or at URLs.

    Args:
        model: Whatever a Predictor takes, or what vit export wrote.
        images: Paths, or URLs that fsspec opens.
        out: A path, or a URL; it appears when it is complete.
        style: jsonl, csv, table or parquet.
        top_k: Most probable classes to name.
        settings: Of the Predictor.
        workers: Each with one Predictor; one a GPU, or one a core, when left out.
        notify: Called with a line about what is used.
        separator, digits: Of CSV, as in Layout.

    Raises:
        VitError: Ray is not installed or gives up, or the model or a setting cannot be used.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    model = os.path.abspath(model) if os.path.exists(model) else model
    with redirect_stdout(sys.stderr), cluster(workers) as ray, ordered_and_quiet():
        size, share = shares(ray.cluster_resources(), settings.get("device"), workers)
        settings = {"workers": min(share["num_cpus"], MOST_THREADS), **settings}
        with raise_worker_errors():
            about = ray.get(ray.remote(**share)(_about).remote(model, settings))
        if about["several"]:
            raise ConfigError(
                "engine=ray: this network may name several classes of an image, and Ray's workers "
                "write one kind of row; take --engine torch or onnx"
            )
        tables = pieces(images, about["block"], size)
        notify(
            f"ray: {size} workers on {about['device']}, {len(tables)} pieces of {len(tables[0])}"
        )
        layout = Layout(
            min(top_k, len(about["classes"])),
            about["classes"],
            images,
            about["n_best"],
            shares=about["shares"],
            separator=separator,
            digits=digits,
        )
        asked = (model, settings | about["settings"], max(layout.top_k, 1), SharedAttemptCounter())
        return _write(out, style, layout, _rows(tables, images, asked, size, share))


def _write(out: str, style: str, layout: Layout, rows: Iterator[Prediction]) -> int:
    """Write `rows`; returns how many have an error."""
    failed = 0

    def counted() -> Iterator[Prediction]:
        nonlocal failed
        with raise_worker_errors():
            for row in rows:
                failed += row.error is not None
                yield row

    write_rows(out, style, layout, counted())
    return failed


def pieces(images: Sequence[str], block: int, workers: int) -> "list[pa.Table]":
    """The list in pieces with the columns `number` and `path`, each but the last whole blocks.

    Args:
        images: Paths or URLs; paths are made absolute.
        block: Images after which a list may be cut, and every digit stays.
        workers: That share the pieces.
    """
    import pyarrow as pa

    most = max(1, LONGEST_PIECE // block)
    size = block * min(most, max(1, len(images) // (block * workers * SHARES)))
    paths = [os.fsencode(name if is_url(name) else os.path.abspath(name)) for name in images]
    starts = range(0, len(paths), size)
    return [
        pa.table(
            {
                "number": pa.array(range(at, min(at + size, len(paths))), pa.int64()),
                "path": pa.array(paths[at : at + size], pa.binary()),
            }
        )
        for at in starts
    ]


class Worker:
    """Answers for pieces, with one predictor; lives in a process of Ray's.

    Args:
        model: As for `predict_with_ray`.
        settings: Of the predictor.
        top_k: At least 1.
        began: Called with the number of the first image of a piece; returns how often that
            piece was begun, this time included.
    """

    def __init__(
        self, model: str, settings: dict[str, Any], top_k: int, attempt: Callable[[int], int]
    ) -> None:
        self.attempt = attempt
        self.predictor = _opened(model, settings)
        self.draws = getattr(settings.get("search"), "temperature", 0) > 0
        self.top_k = top_k

    def __call__(self, piece: "pa.Table") -> "pa.Table":
        """A table of `pieces` -> its numbers and its answers as JSON."""
        import pyarrow as pa

        numbers = piece["number"].to_pylist()
        if self.attempt(numbers[0]) > ATTEMPTS:
            why = f"workers died {ATTEMPTS} times at this image, or at one of its piece"
            lost = to_text(Prediction("", error=f"{why} of {len(numbers)}"))
            return pa.table({"number": numbers, "answer": [lost] * len(numbers)})
        images = [os.fsdecode(path) for path in piece["path"].to_pylist()]
        return pa.table({"number": numbers, "answer": self.answers(images, numbers[0])})

    def answers(self, images: list[str], first: int) -> list[str]:
        """Of paths or URLs, of which the first has the number `first` in the whole list."""
        more = {"first": first} if self.draws else {}  # words are drawn by this number
        with fetched(images) as (paths, errors):
            found = self.predictor.stream(paths, top_k=self.top_k, **more)
            return [to_text(row, errors.get(place)) for place, row in enumerate(found)]


def to_text(row: Prediction, error: str | None = None) -> str:
    """A prediction without its image; `error` is one that it did not know of."""
    found = {
        "predictions": row.predictions,
        "error": error or row.error,
        "captions": [(caption.text, caption.score, caption.ended) for caption in row.captions],
    }
    return json.dumps(found)


def from_text(image: str, text: str) -> Prediction:
    """The inverse of `to_text`; captions come back without the numbers of their tokens."""
    found = json.loads(text)
    return Prediction(
        image,
        tuple((label, score) for label, score in found["predictions"]),
        error=found["error"],
        captions=tuple(Caption(said, score, (), ended) for said, score, ended in found["captions"]),
    )


def _opened(model: str, settings: dict[str, Any]) -> Any:
    """A Predictor, or a runner of what vit export wrote."""
    from vit.exported.load_exported import EXPORTED, load_exported

    engine = EXPORTED.get(os.path.splitext(model)[1].lower())
    if engine is None:
        from vit.inference.predictor import Predictor

        return Predictor(model, **settings)
    return load_exported(model, engine=engine, **settings)


def _about(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What one worker finds, and all then use."""
    predictor = _opened(model, settings)
    settings = {"batch_size": predictor.batch_size, "precision": predictor.precision}
    return {
        "classes": list(predictor.classes),
        "several": predictor.thresholds is not None,
        "n_best": predictor.n_best,
        "shares": predictor.shares,
        "block": predictor.block_size,
        "device": str(predictor.device),
        "settings": settings,
    }


def _rows(
    tables: "list[pa.Table]",
    images: Sequence[str],
    asked: tuple[str, dict[str, Any], int, Callable[[int], int]],
    size: int,
    share: dict[str, Any],
) -> Iterator[Prediction]:
    """Answers for all `images` in their order.

    Raises:
        RunError: Ray lost or doubled a row.
    """
    import ray.data

    answered = ray.data.from_arrow(tables).map_batches(
        Worker,
        fn_constructor_args=asked,
        batch_size=None,  # a piece stays whole
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=2),
        **share,
    )
    expected = 0
    for table in answered.iter_batches(batch_size=None, batch_format="pyarrow"):
        pairs = zip(table["number"].to_pylist(), table["answer"].to_pylist(), strict=True)
        for number, text in pairs:
            if number != expected:
                raise RunError(f"Ray gave row {number} for row {expected}: please report this")
            yield from_text(images[number], text)
            expected += 1
    if expected != len(images):
        raise RunError(f"Ray gave {expected} rows for {len(images)} images: please report this")
