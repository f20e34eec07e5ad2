"""How soon does `vit drift` name a difference, and how often where there is none?

    python benchmarks/drift.py rows RUN FOLDER OUT.npz --images 22000    # held-out images
    python benchmarks/drift.py rows RUN FOLDER OUT.npz --images 2000 --alter blur
    python benchmarks/drift.py rows RUN OTHER OUT.npz
    python benchmarks/drift.py measure HELD_OUT.npz photographs=OTHER.npz blur=BLUR.npz
    python benchmarks/drift.py classify HELD_OUT.npz photographs=OTHER.npz blur=BLUR.npz

`rows` stores answers, scores and distances of the images of a folder, in random order; `blur` is a
Gaussian of 1 pixel, `jpeg` a quality of 10. `measure` draws each stream and its reference of other
images from the rows of HELD_OUT, so that both are of one distribution. A stream has lines of 50
images, as `vit serve --watch` writes them, and is looked at after each:

undisturbed   10,000 images
NAME          rows of that file, from the first image on; and after 1,000 undisturbed images
missing       without one class, drawn for each stream; tripled: three times as frequent

Of each: streams with an alarm, images after the change until it, and the estimated first image less
the true one. `classify` is a classifier two-sample test in its place, looked at once: a logistic
regression on half of the embeddings of reference and stream, Mann-Whitney's p on the other half.
"""

import argparse
import io
import json
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from vit.calibration_reference import bin_counts, in_order
from vit.evaluation.drift_detection import ALPHA, find_drift, stream_tests

LINE, STREAMS, LONGEST, BEFORE, AFTER = 50, 100, 10_000, 1000, 2000
Array = NDArray[Any]
Rows = dict[str, Array]


def altered(path: str, how: str) -> Image.Image:
    """An image that was blurred or compressed."""
    image = Image.open(path).convert("RGB")
    if how == "blur":
        return image.filter(ImageFilter.GaussianBlur(1))
    if how == "jpeg":
        file = io.BytesIO()
        image.save(file, "JPEG", quality=10)
        return Image.open(file).convert("RGB")
    return image


def write_rows(run: Path, folder: Path, out: Path, images: int, how: str) -> None:
    """Answers, scores and distances of images of a folder."""
    import vit

    paths = sorted(map(str, folder.rglob("*.jpg")))
    np.random.default_rng(0).shuffle(paths)
    paths = paths[:images]
    predictor = vit.Predictor(run, device="cpu", precision="fp32", embeddings=True)
    predictor.engine.returns_distances = True

    def opened() -> Iterator[Any]:
        for path in paths:
            yield altered(path, how) if how else path

    found = [one for batch in predictor.batches(opened()) for one in batch]
    probabilities = np.stack([one.probabilities for one in found if one.probabilities is not None])
    np.savez(
        out,
        answers=probabilities.argmax(1),
        scores=probabilities.max(1),
        distances=np.array([float(one.distance or 0) for one in found]),
        embeddings=np.stack([np.asarray(one.embedding, np.float16) for one in found]),
        labels=np.array([Path(path).parent.name for path in paths]),
    )


class Simulation:
    """Streams of rows and their references."""

    def __init__(self, held_out: Rows, size: int, seed: int) -> None:
        self.random, self.size = np.random.default_rng(seed), size
        self.held_out = held_out
        self.classes = [str(one) for one in range(1 + int(held_out["answers"].max()))]

    def draw(self) -> tuple[Rows, Rows]:
        """A reference, and all other rows in random order."""
        order = self.random.permutation(len(self.held_out["answers"]))
        parts = order[: self.size], order[self.size :]
        first, rest = ({k: v[one] for k, v in self.held_out.items()} for one in parts)
        return first, rest

    def without(self, rows: Rows, label: str, factor: int) -> Rows:
        """`rows` with images of a label `factor` times as frequent."""
        own = rows["labels"] == label
        places = np.repeat(np.arange(len(own)), np.where(own, factor, 1))
        self.random.shuffle(places)
        return {k: v[places] for k, v in rows.items()}

    def later(self, name: str, rest: Rows, different: dict[str, Rows]) -> Rows:
        """Rows of a kind, of `rest` those that it needs."""
        if name in different:
            places = self.random.permutation(len(different[name]["answers"]))
            return {k: v[places] for k, v in different[name].items()}
        if name == "undisturbed":
            return rest
        label = str(self.random.choice(np.unique(rest["labels"])))
        return self.without(rest, label, 3 * (name == "tripled"))

    def counts(self, rows: Rows, reference: Rows) -> dict[str, torch.Tensor]:
        """Counts of each line."""
        lines = [slice(n, n + LINE) for n in range(0, len(rows["answers"]), LINE)]
        values = {name: in_order(reference[name]) for name in ("scores", "distances")}
        answers = [np.bincount(rows["answers"][one], minlength=len(self.classes)) for one in lines]
        found = {"answers": np.stack(answers)}
        for name, own in values.items():
            found[name] = np.stack([bin_counts(rows[name][one].tolist(), own) for one in lines])
        return {name: torch.from_numpy(one).double() for name, one in found.items()}

    def alarm(self, reference: Rows, rows: Rows) -> dict[str, Any]:
        """Images until the alarm of all tests and of each, and the estimated first image."""
        lines = self.counts(rows, reference)
        own = {name: one.sum(0) for name, one in self.counts(reference, reference).items()}
        windows, tests = stream_tests(own, lines)
        found: dict[str, Any] = {}
        for name, one in tests.items():
            ends = windows.end[one <= np.log(ALPHA)]
            found[name] = int(ends.min()) * LINE if len(ends) else None
        result = find_drift(own, lines, self.classes, [None] * len(lines["answers"]), run="")
        return {"all": result.noticed, **found, "since": result.since}


def summarise(name: str, before: int, found: list[dict[str, Any]]) -> None:
    """A line about the streams of one kind."""
    line: dict[str, Any] = {"stream": name, "undisturbed": before}
    for test in ("all", "answers", "scores", "distances"):
        after = [one[test] - before for one in found if one[test] is not None]
        line[test] = len(after)
        if test == "all" and after:
            early = sum(one <= 0 for one in after)
            line |= {"early": early, "within 200": sum(0 < one <= 200 for one in after)}
            line["median"], line["largest"] = int(np.median(after)), max(after)
            start = [one["since"] - 1 - before for one in found if one["since"] is not None]
            line["start off by"] = [int(np.quantile(start, share)) for share in (0.1, 0.5, 0.9)]
    print(json.dumps(line), flush=True)


def measure(held_out: Path, others: dict[str, Path], sizes: list[int], streams: int) -> None:
    """All kinds of streams."""
    rows, different = dict(np.load(held_out)), {k: dict(np.load(v)) for k, v in others.items()}
    for kept in (rows, *different.values()):
        kept.pop("embeddings")
    for size in sizes:
        simulation, began = Simulation(rows, size, seed=size), time.monotonic()
        print(json.dumps({"reference": size, "streams": streams}))
        found = []
        for _ in range(streams):
            reference, rest = simulation.draw()
            found.append(simulation.alarm(reference, {k: v[:LONGEST] for k, v in rest.items()}))
        summarise("undisturbed", LONGEST, found)
        for name in [*different, "missing", "tripled"]:
            for before in (0, BEFORE):
                found = []
                for _ in range(streams):
                    reference, rest = simulation.draw()
                    others_left = {k: v[before:] for k, v in rest.items()}
                    later = simulation.later(name, others_left, different)
                    mixed = {k: np.concatenate([rest[k][:before], later[k][:AFTER]]) for k in rest}
                    found.append(simulation.alarm(reference, mixed))
                summarise(name, before, found)
        print(json.dumps({"seconds": round(time.monotonic() - began)}), flush=True)


def classify(held_out: Path, others: dict[str, Path], size: int, streams: int) -> None:
    """Streams that a classifier two-sample test names, of each kind and number of images."""
    mannwhitneyu = import_module("scipy.stats").mannwhitneyu
    linear, scaling = map(import_module, ("sklearn.linear_model", "sklearn.preprocessing"))
    rows, different = dict(np.load(held_out)), {k: dict(np.load(v)) for k, v in others.items()}
    simulation = Simulation(rows, size, seed=0)
    for name in ["undisturbed", *different, "missing", "tripled"]:
        for images in (200, 1000, 2000):
            named = 0
            for _ in range(streams):
                reference, rest = simulation.draw()
                later = simulation.later(name, rest, different)["embeddings"][:images]
                features = np.concatenate([reference["embeddings"], later]).astype(np.float32)
                is_later = np.arange(len(features)) >= size
                half = simulation.random.permutation(len(features)) % 2 == 0
                scale = scaling.StandardScaler().fit(features[half])
                model = linear.LogisticRegression(C=0.01, class_weight="balanced")
                model.fit(scale.transform(features[half]), is_later[half])
                found = model.decision_function(scale.transform(features[~half]))
                parts = found[is_later[~half]], found[~is_later[~half]]
                named += int(mannwhitneyu(*parts, alternative="greater").pvalue <= ALPHA)
            print(json.dumps({"classified": name, "images": images, "named": named}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    one = actions.add_parser("rows")
    one.add_argument("run", type=Path)
    one.add_argument("folder", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--images", type=int, default=4000)
    one.add_argument("--alter", choices=["", "blur", "jpeg"], default="")
    for action in ("measure", "classify"):
        one = actions.add_parser(action)
        one.add_argument("held_out", type=Path)
        one.add_argument("others", nargs="*")
        one.add_argument("--references", type=int, nargs="+", default=[2000])
        one.add_argument("--streams", type=int, default=STREAMS)
    given = parser.parse_args()
    if given.action == "rows":
        write_rows(given.run, given.folder, given.out, given.images, given.alter)
    else:
        named = {name: Path(path) for name, path in (one.split("=", 1) for one in given.others)}
        if given.action == "measure":
            measure(given.held_out, named, given.references, given.streams)
        else:
            classify(given.held_out, named, given.references[0], given.streams)
