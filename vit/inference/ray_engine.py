"""Predictions by the workers of a Ray cluster: the same Predictor in each, one file in the end.

The list is cut into pieces of whole batches. A worker answers one piece at a time and hands back
its rows; one that dies is started again, and its unfinished pieces with it. Pieces come in their
order, and each row has its number, which is checked.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from vit.errors import ConfigError, RunError
from vit.generation.caption import Caption
from vit.inference.ray_cluster import Beginnings, cluster, in_order, shares, told
from vit.inference.ray_files import fetched, is_url, write_rows
from vit.runtime.results import Layout, Prediction

if TYPE_CHECKING:
    import pyarrow as pa

LONGEST_PIECE = 512  # pictures that are answered again when a worker dies
SHARES = 8  # pieces of each worker, where the list is long enough: none waits long at the end
ATTEMPTS = 3  # at a piece whose worker dies each time: then it is its pictures that kill
MOST_THREADS = 8  # of a worker, that read pictures


def predict_with_ray(
    model: str,
    images: Sequence[str],
    out: str,
    *,
    style: str,
    top_k: int,
    settings: dict[str, Any],
    workers: int | None,
    say: Callable[[str], object],
) -> int:
    """Answer for all `images` into one file; returns how many have an error instead.

    The cluster is that of RAY_ADDRESS, else one of this machine, for as long as it takes. Each
    machine needs this package, and the model and pictures at the same paths or at URLs.

    Args:
        model: Whatever a Predictor takes, or what vit export wrote.
        images: Paths, or URLs that fsspec opens.
        out: A path, or a URL; it appears when it is complete.
        style: jsonl, csv, table or parquet.
        top_k: Most probable classes to name.
        settings: Of the Predictor.
        workers: Each with one Predictor; one a GPU, or one a core, when left out.
        say: Receives a line about what is used.

    Raises:
        VitError: Ray is not installed or gives up, or the model or a setting cannot be used.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    model = os.path.abspath(model) if os.path.exists(model) else model
    with redirect_stdout(sys.stderr), cluster(workers) as ray, in_order():
        size, share = shares(ray.cluster_resources(), settings.get("device"), workers)
        settings = {"workers": min(share["num_cpus"], MOST_THREADS), **settings}
        with told():
            about = ray.get(ray.remote(**share)(_about).remote(model, settings))
        if about["several"]:
            raise ConfigError(
                "engine=ray: this network may name several classes of a picture, and Ray's workers "
                "write one kind of row; take --engine torch or onnx"
            )
        tables = pieces(images, about["block"], size)
        say(f"ray: {size} workers on {about['device']}, {len(tables)} pieces of {len(tables[0])}")
        layout = Layout(
            min(top_k, len(about["classes"])), about["classes"], images, about["n_best"]
        )
        asked = (model, settings | about["settings"], max(layout.top_k, 1), Beginnings())
        return _write(out, style, layout, _rows(tables, images, asked, size, share))


def _write(out: str, style: str, layout: Layout, rows: Iterator[Prediction]) -> int:
    """Write `rows`; returns how many have an error."""
    failed = 0

    def counted() -> Iterator[Prediction]:
        nonlocal failed
        with told():
            for row in rows:
                failed += row.error is not None
                yield row

    write_rows(out, style, layout, counted())
    return failed


def pieces(images: Sequence[str], block: int, workers: int) -> "list[pa.Table]":
    """The list in pieces with the columns `number` and `path`, each but the last whole blocks.

    Args:
        images: Paths or URLs; paths are made absolute.
        block: Pictures after which a list may be cut, and every digit stays.
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
        began: Called with the number of the first picture of a piece; returns how often that
            piece was begun, this time included.
    """

    def __init__(
        self, model: str, settings: dict[str, Any], top_k: int, began: Callable[[int], int]
    ) -> None:
        self.began = began
        self.predictor = _opened(model, settings)
        self.draws = getattr(settings.get("search"), "temperature", 0) > 0
        self.top_k = top_k

    def __call__(self, piece: "pa.Table") -> "pa.Table":
        """A table of `pieces` -> its numbers and its answers as JSON."""
        import pyarrow as pa

        numbers = piece["number"].to_pylist()
        if self.began(numbers[0]) > ATTEMPTS:
            why = f"workers died {ATTEMPTS} times at this picture, or at one of its piece"
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
    """A prediction without its picture; `error` is one that it did not know of."""
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
    from vit.runtime.opening import EXPORTED, runner_like

    engine = EXPORTED.get(os.path.splitext(model)[1].lower())
    if engine is None:
        from vit.inference.predictor import Predictor

        return Predictor(model, **settings)
    return runner_like(model, engine=engine, **settings)


def _about(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What one worker finds, and all then use."""
    predictor = _opened(model, settings)
    device = getattr(predictor, "device", None)
    settings = {"batch_size": predictor.batch_size}
    if device is not None:  # an exported network has its own precision, which is no setting
        settings["precision"] = predictor.precision
    return {
        "classes": list(predictor.classes),
        "several": getattr(predictor, "thresholds", None) is not None,
        "n_best": predictor.n_best,
        "block": getattr(predictor, "block", predictor.batch_size),
        "device": str(device or "cpu"),
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
