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
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vit.atomic_files import open_atomic
from vit.data.image_io import MAX_PIXELS, max_pixels, set_max_pixels
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.list_formats import read_rows
from vit.errors import ConfigError, DataError, RunError, VitError
from vit.generation.generation_config import Caption
from vit.inference.predictor import Predictor
from vit.output.output_file import resolve_link
from vit.output.prediction_results import (
    FORMATS,
    Layout,
    Prediction,
    byte_order_mark,
    check_classes,
    classes_per_row,
)
from vit.process_resources import usable_cores
from vit.text import Notify, printable

if TYPE_CHECKING:
    import pyarrow as pa

LONGEST_PIECE = 512
"""Images that are predicted again when a worker dies."""
PIECES_PER_WORKER = 8
"""Of a list that is long enough, so that no worker waits long at the end."""
MAX_ATTEMPTS = 3
"""Attempts at a piece whose worker dies each time, before its images are failures."""
MAX_READ_THREADS = 8


class AttemptCounter:
    """Counts the attempts at each piece."""

    def __init__(self) -> None:
        self.counts = Counter[int]()

    def attempt(self, piece: int) -> int:
        """Count one more attempt; return their number."""
        self.counts[piece] += 1
        return self.counts[piece]


def shares(
    resources: dict[str, float], device: str | None, workers: int | None
) -> tuple[int, dict[str, Any]]:
    """Number of workers, and the resources of each, as options of `ray.remote`."""
    cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if device is not None and device.startswith("cuda") and not gpus:
        raise ConfigError(f"device={device!r}: this Ray cluster has no GPU")
    if gpus and (device is None or device.startswith("cuda")):
        return workers or gpus, {"num_gpus": 1, "num_cpus": max(1, cores // gpus)}
    return workers or max(1, cores), {"num_cpus": 1}


@contextmanager
def cluster(workers: int | None) -> Iterator[ModuleType]:
    """The connected module ray, which is slow to import, with the cluster of RAY_ADDRESS, or a
    local one until the end of the `with`."""
    # no telemetry, and no messages about failures that Ray recovers from
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise VitError(f"{error.name} is not installed: pip install 'vit-toolkit[ray]'") from None
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
        raise RunError(f"Ray cannot start ({address}): {error}") from None
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
    logger.setLevel(logging.CRITICAL)  # errors are raised too
    try:
        yield
    finally:
        logger.setLevel(level)
        context.execution_options.preserve_order = before[0]
        context.enable_progress_bars, context.print_on_execution_start = before[1:]


@contextmanager
def raise_worker_errors() -> Iterator[None]:
    """Re-raise errors of workers as a VitError of one line."""
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
        lines = str(error).strip().splitlines()
        raise RunError(
            f"Ray gave up: {lines[-1] if lines else type(error).__name__}; the logs of "
            "its workers are in /tmp/ray/session_latest/logs"
        ) from None


def predict_with_ray(
    model: str,
    images: Sequence[str],
    out: str,
    *,
    style: str,
    top_k: int | None,
    settings: Mapping[str, Any],
    notify: Notify,
    **columns: Any,
) -> int:
    """Predict all `images` into one file; return the number of failures.

    Each machine needs this package, and the model and images at the same paths or at URLs. The
    setting `workers` is the number of Predictors, by default one per GPU, or per core.
    """
    workers = settings["workers"]
    model = os.path.abspath(model) if os.path.exists(model) else model
    with redirect_stdout(sys.stderr), cluster(workers) as ray, ordered_and_quiet():
        size, share = shares(ray.cluster_resources(), settings.get("device"), workers)
        threads = min(share["num_cpus"], MAX_READ_THREADS)
        settings = {**settings, "workers": threads, "max_pixels": max_pixels()}
        with raise_worker_errors():
            about = ray.get(ray.remote(**share)(_about).remote(model, settings))
        if about["several"]:
            raise ConfigError(
                "engine=ray: this network may name several classes of an image, or answers with "
                "numbers or nodes, and Ray's workers write one kind of row; take --engine torch "
                "or onnx"
            )
        check_classes(about["classes"], top_k=top_k)
        tables = pieces(images, about["block"], size)
        notify(
            f"ray: {size} workers on {about['device']}, {len(tables)} pieces of {len(tables[0])}"
        )
        layout = Layout(
            classes_per_row(about["classes"], None, top_k),
            about["classes"],
            images,
            about["n_best"],
            shares=about["shares"],
            **columns,
        )
        # one counter for all workers of the cluster, which takes no core
        counter = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(AttemptCounter)
        attempts = counter.remote()

        def attempt(piece: int) -> int:
            return int(ray.get(attempts.attempt.remote(piece)))

        arguments = model, settings | about["settings"], max(layout.top_k, 1), attempt
        with raise_worker_errors():
            rows = _rows(tables, images, arguments, size, share)
            return write_rows(out, style, layout, rows)


def write_rows(out: str, style: str, layout: Layout, rows: Iterator[Prediction]) -> int:
    """Write rows to a file that appears when it is complete; return the number of failures."""
    failed = 0
    header, line = FORMATS[style](layout)
    mark = byte_order_mark(layout) if style == "csv" else ""
    with open_atomic(resolve_link(out)) as file:
        file.write((mark + header).encode())
        for row in rows:
            failed += row.error is not None
            file.write(line(row).encode("utf-8", "backslashreplace"))
    return failed


def pieces(images: Sequence[str], block: int, workers: int) -> "list[pa.Table]":
    """The list as tables of `number` and `path` (absolute, or a URL), of whole blocks but the
    last."""
    import pyarrow as pa

    most = max(1, LONGEST_PIECE // block)
    size = block * min(most, max(1, len(images) // (block * workers * PIECES_PER_WORKER)))
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
    """Predicts pieces; an actor of Ray."""

    def __init__(
        self, model: str, settings: dict[str, Any], top_k: int, attempt: Callable[[int], int]
    ) -> None:
        self.attempt = attempt
        self.predictor = _opened(model, settings)
        self.samples = getattr(settings.get("search"), "temperature", 0) > 0
        self.top_k = top_k

    def __call__(self, piece: "pa.Table") -> "pa.Table":
        """A table of `pieces` -> a table of `number` and `answer`, predictions as JSON."""
        import pyarrow as pa

        numbers = piece["number"].to_pylist()
        if self.attempt(numbers[0]) > MAX_ATTEMPTS:
            why = f"workers died {MAX_ATTEMPTS} times at this image, or at one of its piece"
            lost = to_text(Prediction("", error=f"{why} of {len(numbers)}"))
            return pa.table({"number": numbers, "answer": [lost] * len(numbers)})
        images = [os.fsdecode(path) for path in piece["path"].to_pylist()]
        return pa.table({"number": numbers, "answer": self.answers(images, numbers[0])})

    def answers(self, images: list[str], first: int) -> list[str]:
        """Predictions of paths or URLs as JSON; `first` is the index of the first in the list."""
        start = first if self.samples else 0  # sampling is seeded by the index
        with fetched(images) as (paths, errors):
            found = self.predictor.stream(paths, top_k=self.top_k, first=start)
            return [to_text(row, errors.get(place)) for place, row in enumerate(found)]


def to_text(row: Prediction, error: str | None = None) -> str:
    """A prediction as JSON, without its image; `error` replaces its own."""
    found = {
        "predictions": row.predictions,
        "error": error or row.error,
        "captions": [(caption.text, caption.score, caption.ended) for caption in row.captions],
    }
    return json.dumps(found)


def from_text(image: str, answer: str) -> Prediction:
    """The inverse of `to_text`; captions have no token ids."""
    found = json.loads(answer)
    return Prediction(
        image,
        tuple((label, score) for label, score in found["predictions"]),
        error=found["error"],
        captions=tuple(Caption(text, score, (), ended) for text, score, ended in found["captions"]),
    )


def _opened(model: str, settings: dict[str, Any]) -> Predictor:
    settings = {**settings}
    set_max_pixels(settings.pop("max_pixels", MAX_PIXELS))
    return Predictor(model, **settings)


def _about(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Properties of the network, and settings that all workers use."""
    predictor = _opened(model, settings)
    settings = {"batch_size": predictor.batch_size, "precision": predictor.precision}
    return {
        "classes": list(predictor.classes),
        "several": predictor.thresholds is not None or bool(predictor.answer_columns()),
        "n_best": predictor.n_best,
        "shares": predictor.shares,
        "block": predictor.block_size,
        "device": str(predictor.device),
        "settings": settings,
    }


def _rows(
    tables: "list[pa.Table]",
    images: Sequence[str],
    arguments: tuple[str, dict[str, Any], int, Callable[[int], int]],
    size: int,
    share: dict[str, Any],
) -> Iterator[Prediction]:
    import ray.data

    answered = ray.data.from_arrow(tables).map_batches(
        Worker,
        fn_constructor_args=arguments,
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


COLUMN = "image"


def is_url(name: str) -> bool:
    """Whether fsspec, and not the operating system, opens `name`."""
    return "://" in name


def read_list(path: str) -> list[str]:
    """Names of images: the column `image` of a .jsonl or .csv file, in its order."""
    spec = DatasetSpec(path, image_column=COLUMN)
    rows = [row.values.get(COLUMN) for row in read_rows(path, spec, [])]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, str) or not row:
            raise DataError(f"{path}, row {number}: there is no text in the column {COLUMN!r}")
    return [str(row) for row in rows]


@contextmanager
def fetched(images: Sequence[str]) -> Iterator[tuple[list[str], dict[int, str]]]:
    """Local paths of `images`, and errors by index; downloads are deleted after the `with`."""
    with tempfile.TemporaryDirectory(prefix="vit-") as folder:
        paths, errors = [*images], {}
        for number, image in enumerate(images):
            if is_url(image):
                paths[number] = os.path.join(folder, str(number))
                reason = _fetch(image, paths[number])
                if reason is not None:
                    errors[number] = reason
        yield paths, errors


def _fetch(url: str, path: str) -> str | None:
    """Download `url` to `path`; return the reason if that fails."""
    try:
        import fsspec

        system, inside = fsspec.core.url_to_fs(url)
        system.get_file(inside, path)
    except FileNotFoundError:
        return "no such file"
    except (OSError, ValueError, ImportError) as error:
        return f"cannot be fetched: {printable(error)}"
    return None
