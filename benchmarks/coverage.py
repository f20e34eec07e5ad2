"""Do the promises about scores hold? Intervals, sets and thresholds on predictions of real runs.

    python -m benchmarks coverage --runs RUN [RUN ...] [--predictions FOLDER] [--draws 1000]
    python -m benchmarks calibration --runs RUN [RUN ...] [--predictions FOLDER]

Each run predicts its validation images once, as they are and with four corruptions; `--predictions`
keeps that. The rest is arithmetic:

    intervals    images are drawn with replacement; how often the interval of a draw holds the value
                 of all images
    sets         levels from a random half, coverage of the other half
    thresholds   the whole calibration of a random half, share of right answers of the other half
    calibration  a fit to a random half, calibration error of the other half
"""

import argparse
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from vit.config.setting_layers import make_config, read_settings
from vit.data.corruptions import CORRUPTIONS, Corruption
from vit.data.sources.dataset_spec import DatasetSpec
from vit.evaluation.classification_metrics import (
    Outcomes,
    calibration_error,
    chance_calibration_error,
    class_intervals,
    debiased_error,
    summarize,
)
from vit.evaluation.exact_tests import binomial_tail, wilson_interval
from vit.evaluation.fit_calibration import class_set_levels, fit_calibration, set_levels, set_scores
from vit.evaluation.multilabel_metrics import multilabel_intervals, summarize_multilabel
from vit.evaluation.paired_comparison import PairedComparison
from vit.evaluation.temperature_scaling import (
    Scaling,
    best_temperature,
    fit_temperature,
    scale_logits,
)
from vit.inference.evaluation_data import load_samples
from vit.inference.predictor import Predictor
from vit.score_calibration import ROUNDING
from vit.weights.saved_model import load_run

KINDS = ("clean", "gaussian_blur 1", "gaussian_blur 3", "jpeg 1", "jpeg 3")
"""Images as they are, and corruptions with their severity."""
SPLITS = 100
SHARES = (0.8, 0.9, 0.95, 0.99)
TARGETS = (0.98, 0.95, 0.9)
MIN_ANSWERS = 20
"""Answers of a class from which on it has a temperature of its own."""


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Logits (up to a constant of each image), labels and distances of the validation images.

    The images are the same ones for every kind.
    """

    name: str
    logits: Mapping[str, Tensor]
    labels: Tensor
    distances: Mapping[str, Tensor]

    @cached_property
    def scaling(self) -> Scaling:
        """Of all images."""
        fitted = fit_temperature(self.logits["clean"], self.labels)
        return Scaling() if fitted is None else fitted.scaling

    def probabilities(self, kind: str = "clean") -> Tensor:
        """(images, classes)"""
        return scale_logits(self.logits[kind], *self.scaling).softmax(dim=1)


def predict(run: Path, file: Path) -> None:
    """Save the predictions of the validation images of `run`, with and without corruptions."""
    loaded = load_run(run)
    plain = dataclasses.replace(loaded.without_calibration(), distance=loaded.distance)
    predictor = Predictor(plain, precision="fp32")
    predictor.engine.returns_distances = True
    config = make_config(read_settings(run / "config.yaml"))
    spec = dataclasses.replace(DatasetSpec.from_config(config.data), split="val")
    samples = load_samples(predictor.task, run, spec, predictor.classes, print)
    found: dict[str, Any] = {"labels": np.array([sample.label for sample in samples])}
    for kind in KINDS:
        name, _, severity = kind.partition(" ")
        if name in CORRUPTIONS:
            predictor.read.transform = Corruption(
                name=name, severity=int(severity), preprocessing=predictor.preprocessing
            )
        outputs = [
            output for batch in predictor.batches([one.path for one in samples]) for output in batch
        ]
        probabilities = [one.probabilities for one in outputs if one.probabilities is not None]
        if len(probabilities) < len(outputs):
            raise SystemExit(f"{run}: validation images that cannot be read")
        rows = torch.from_numpy(np.stack(probabilities))
        found[f"{kind} logits"] = rows.clamp(min=1e-300).log().numpy()
        distances = [math.nan if one.distance is None else one.distance for one in outputs]
        found[f"{kind} distances"] = np.array(distances)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **found)


def read_all(options: argparse.Namespace) -> list[Predictions]:
    """The predictions of `--runs`, from `--predictions` where they are there."""
    if not options.runs:
        raise SystemExit("coverage and calibration: give run folders with --runs")
    found = []
    for run in options.runs:
        file = (options.predictions or options.folder) / f"{run.name}.npz"
        if not file.is_file():
            predict(run, file)
        with np.load(file) as stored:
            table = {name: torch.from_numpy(stored[name]) for name in stored}
        logits, distances = (
            {kind: table[f"{kind} {name}"] for kind in KINDS} for name in ("logits", "distances")
        )
        found.append(Predictions(run.name, logits, table["labels"], distances))
    return found


def coverage(options: argparse.Namespace) -> Iterator[str]:
    """Tables of intervals, sets and thresholds."""
    yield markdown(
        "Wilson's interval, exactly: share of draws that hold the true share",
        ["images", *(f"{share:g}" for share in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99))],
        [
            [count, *(percent(wilson_coverage(share, count)) for share in WILSON_SHARES)]
            for count in (20, 50, 200, 1000, 5000)
        ],
    )
    runs = read_all(options)
    rows = []
    for run in runs:
        images = len(run.labels)
        counts = sorted({200, 1000, images} if images >= 1000 else {100, 200, images})
        rows += [
            [run.name, count, *interval_coverage(run, count, options.draws)] for count in counts
        ]
    head = ["run", "images of a draw", *INTERVALS]
    yield markdown("Intervals by the bootstrap (in brackets: draws that have none)", head, rows)
    yield markdown(
        "Intervals of several labels an image, simulated",
        ["images of a draw", *MULTILABEL],
        [[count, *multilabel_coverage(count, options.draws)] for count in (200, 600)],
    )
    rows = []
    for run in runs:
        rows += [[run.name, kind, *difference(run, kind, options.draws)] for kind in KINDS[1:]]
    head = ["run", "clean against", "difference", "interval holds it"]
    yield markdown("Intervals of vit compare, 200 images of a draw", head, rows)
    for run in runs:
        yield sets_table(run, options.draws)
    for run in runs:
        yield thresholds_table(run)


WILSON_SHARES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
INTERVALS = ("top1", "nll", "brier", "balanced_accuracy", "macro_f1")
MULTILABEL = ("map", "nll", "brier", "hamming", "micro_f1")


def wilson_coverage(share: float, count: int) -> float:
    """Probability that the interval holds `share`."""
    inside = [
        hits
        for hits in range(count + 1)
        if wilson_interval(hits, count)[0] <= share <= wilson_interval(hits, count)[1]
    ]
    first, last = inside[0], inside[-1]
    below = binomial_tail(first - 1, count, share) if first else 0.0
    return binomial_tail(last, count, share) - below


def draws_of(images: int, count: int, draws: int) -> Iterator[Tensor]:
    """Indices of `count` of the images, with replacement."""
    for seed in range(draws):
        yield torch.randint(images, (count,), generator=torch.Generator().manual_seed(seed))


def interval_coverage(run: Predictions, count: int, draws: int) -> list[str]:
    """Coverage of each of INTERVALS."""
    probabilities, names = run.probabilities(), [*map(str, range(run.logits["clean"].shape[1]))]
    truth = summarize(Outcomes.of(probabilities, run.labels), names)
    held: dict[str, list[bool | None]] = defaultdict(list)
    for drawn in draws_of(len(run.labels), count, draws):
        outcomes = Outcomes.of(probabilities[drawn], run.labels[drawn])
        found = {**summarize(outcomes, names), **class_intervals(outcomes)}
        note(held, found, truth, INTERVALS)
    return [held_text(held[name]) for name in INTERVALS]


def note(
    held: dict[str, list[bool | None]],
    found: Mapping[str, object],
    truth: Mapping[str, float],
    names: Sequence[str],
) -> None:
    """Add to `held` whether each interval holds the truth; None where there is no interval."""
    for name in names:
        limits = found[f"{name}_interval"]
        assert limits is None or isinstance(limits, Sequence)
        held[name].append(None if limits is None else limits[0] <= truth[name] <= limits[1])


def held_text(held: Sequence[bool | None]) -> str:
    """Share of the intervals that hold the truth, and of draws without one."""
    known = [one for one in held if one is not None]
    none = 1 - len(known) / len(held)
    text = "-" if len(known) < 100 else percent(sum(known) / len(known))
    return text + (f" ({none:.0%} none)" if none else "")


def multilabel_coverage(count: int, draws: int) -> list[str]:
    """Coverage of each of MULTILABEL, of eight correlated classes that 8 to 50 % of images have."""
    generator = torch.Generator().manual_seed(1)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    logits = normal(20_000, 2) @ normal(2, 8)
    logits += normal(20_000, 8) + torch.linspace(-3, 0, 8, dtype=torch.float64)
    targets, probabilities = (
        torch.bernoulli(logits.sigmoid(), generator=generator),
        logits.sigmoid(),
    )
    names, limits = [*map(str, range(8))], [0.5] * 8
    truth = summarize_multilabel(probabilities, targets, names, limits)
    held: dict[str, list[bool | None]] = defaultdict(list)
    for drawn in draws_of(20_000, count, draws):
        scores, own = probabilities[drawn], targets[drawn]
        found = summarize_multilabel(scores, own, names, limits)
        note(held, found | multilabel_intervals(scores, own, scores >= 0.5), truth, MULTILABEL)
    return [held_text(held[name]) for name in MULTILABEL]


def difference(run: Predictions, kind: str, draws: int) -> list[str]:
    """Difference of accuracy on corrupted images, and coverage of its paired interval."""
    right = [run.logits[one].argmax(dim=1) == run.labels for one in ("clean", kind)]
    truth = PairedComparison.of(*right).difference
    held = []
    for drawn in draws_of(len(run.labels), 200, draws):
        low, high = PairedComparison.of(*(one[drawn] for one in right)).interval
        held.append(low <= truth <= high)
    return [f"{100 * truth:+.1f}", percent(np.mean(held))]


def halves(images: int, splits: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random halves."""
    for seed in range(splits):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
        yield order[: images // 2], order[images // 2 :]


def sets_table(run: Predictions, draws: int) -> str:
    """Coverage and size of sets, with the scaling of all images, which no draw changes."""
    labels, classes = run.labels, run.logits["clean"].shape[1]
    scores = {kind: set_scores(run.probabilities(kind), labels) for kind in KINDS}
    table = class_scores(run.probabilities())
    sums: dict[tuple[str, float], Tensor] = defaultdict(lambda: torch.zeros(3 + len(KINDS)))
    for seen, rest in halves(len(labels), draws):
        together = set_levels(scores["clean"][seen], SHARES)
        apart = class_set_levels(scores["clean"][seen], labels[seen], classes, SHARES)
        rows: dict[str, list[Tensor | None]] = {
            "together": [limits_of([one] * classes) for one in together],
            "each class": [
                None if row is None else limits_of(row) for row in apart or [None] * len(SHARES)
            ],
        }
        for name, levels in rows.items():
            for share, level in zip(SHARES, levels, strict=True):
                if level is None:
                    continue
                limits = level
                covered = scores["clean"][rest] <= limits[labels[rest]]
                hits = torch.zeros(classes).index_add(0, labels[rest], covered.float())
                counts = labels[rest].bincount(minlength=classes).clamp(min=1)
                size = (table[rest] <= limits).sum(dim=1).double().mean()
                shifted = [
                    (scores[kind][rest] <= limits[labels[rest]]).double().mean() for kind in KINDS
                ]
                found = [size, (hits / counts).mean(), torch.tensor(1.0), *shifted]
                sums[name, share] += torch.tensor(found)
                sums[f"{name} classes", share] = _pad(sums, name, share, hits / counts)
    rows_out = []
    for name in ("together", "each class"):
        for share in SHARES:
            total = sums[name, share]
            if not total[2]:
                continue
            mean = total / total[2]
            worst = (sums[f"{name} classes", share] / total[2]).min()
            rows_out.append(
                [f"{share:g}", name, f"{mean[0]:.2f}", *map(percent, mean[3:]), percent(worst)]
            )
    head = ["coverage", "sets cover", "mean size", *KINDS, "worst class"]
    return markdown(f"Prediction sets of {run.name}, mean of {draws} halves", head, rows_out)


def limits_of(levels: Sequence[float | None]) -> Tensor:
    """Largest score of a class in the set, (classes,) float64."""
    limits = [math.inf if one is None else one + ROUNDING for one in levels]
    return torch.tensor(limits, dtype=torch.float64)


def _pad(sums: dict[tuple[str, float], Tensor], name: str, share: float, more: Tensor) -> Tensor:
    before = sums.get((f"{name} classes", share))
    return more if before is None else before + more


def class_scores(probabilities: Tensor) -> Tensor:
    """Score of every class of every image, (images, classes)."""
    columns = [
        set_scores(probabilities, torch.full((len(probabilities),), index))
        for index in range(probabilities.shape[1])
    ]
    return torch.stack(columns, dim=1)


def thresholds_table(run: Predictions) -> str:
    """Of each target: how often the other half keeps it, and shares of answers and right ones."""
    rows = []
    for target in TARGETS:
        counts: dict[str, list[tuple[float, float]]] = defaultdict(list)
        proven = 0
        for seen, rest in halves(len(run.labels), SPLITS):
            known = run.distances["clean"][seen]
            fitted = fit_calibration(
                run.logits["clean"][seen],
                run.labels[seen],
                distances=None if bool(known.isnan().any()) else known,
                target_precision=target,
            )
            assert fitted is not None
            calibration = fitted.calibration
            proven += calibration.threshold is not None
            for kind in KINDS:
                scaled = scale_logits(run.logits[kind][rest], *fitted.temperature.scaling)
                confidences, answers = scaled.softmax(dim=1).max(dim=1)
                pairs = zip(confidences.tolist(), run.distances[kind][rest].tolist(), strict=True)
                given = torch.tensor(
                    [
                        calibration.reject_reason(one, None if math.isnan(far) else far) is None
                        for one, far in pairs
                    ]
                )
                right = (answers == run.labels[rest])[given].double()
                share = float(right.mean()) if len(right) else math.nan
                counts[kind].append((float(given.double().mean()), share))
        row: list[object] = [f"{target:g}", proven]
        for kind in KINDS:
            shares = [share for _, share in counts[kind] if not math.isnan(share)]
            kept = sum(not share < target for _, share in counts[kind])
            answered = np.mean([given for given, _ in counts[kind]])
            mean = percent(np.mean(shares)) if shares else "-"
            row.append(f"{kept} kept; {mean} of {answered:.0%}")
        rows.append(row)
    head = ["target", "proven", *(f"{kind}: kept; right of answered" for kind in KINDS)]
    return markdown(f"Thresholds of {run.name}, {SPLITS} halves", head, rows)


def calibration(options: argparse.Namespace) -> Iterator[str]:
    """Calibration errors of the half that a fit has not seen."""
    ways = {
        "raw": lambda _logits, _labels: lambda other: other,
        "temperature": one_temperature,
        "temperature, exponent (vit)": chosen_scaling,
        "temperature of each answer": temperature_by_answer,
        "vector scaling": vector_scaling,
    }
    rows = []
    for run in read_all(options):
        errors: dict[str, list[float]] = defaultdict(list)
        chances: dict[str, list[float]] = defaultdict(list)
        losses: dict[str, list[float]] = defaultdict(list)
        changed: dict[str, list[float]] = defaultdict(list)
        logits, labels = run.logits["clean"], run.labels
        for seen, rest in halves(len(labels), SPLITS):
            for name, fit in ways.items():
                scaled = fit(logits[seen], labels[seen])(logits[rest])
                found = scaled.softmax(dim=1)
                confidences, answers = found.max(dim=1)
                errors[name].append(calibration_error(confidences, answers == labels[rest]))
                chances[name].append(chance_calibration_error(confidences))
                own = found.gather(1, labels[rest, None]).clamp(min=1e-300)
                losses[name].append(float(-own.log().mean()))
                same = answers == logits[rest].argmax(dim=1)
                changed[name].append(float((~same).double().mean()))
        pure = {name: [*map(debiased_error, errors[name], chances[name])] for name in ways}
        for name, values in errors.items():
            low, high = np.quantile(values, [0.025, 0.975])
            halved = sum(2 * now <= raw for now, raw in zip(pure[name], pure["raw"], strict=True))
            rows.append(
                [
                    *(run.name, len(labels) - len(labels) // 2, name),
                    f"{np.mean(values):.4f} ({low:.4f} to {high:.4f})",
                    f"{np.mean(chances[name]):.4f}",
                    f"{np.mean(pure[name]):.4f}",
                    f"{halved} of {SPLITS}" if name != "raw" else "",
                    f"{np.mean(losses[name]):.4f}",
                    f"{np.mean(changed[name]):.2%}",
                ]
            )
    head = ["run", "images of a half", "scores", "ECE (95 % of halves)", "by chance", "without it"]
    head += ["halved in", "log loss", "other answers"]
    yield markdown("Calibration error", head, rows)


Scale = Callable[[Tensor], Tensor]
"""Logits -> scaled logits, (images, classes) -> the same."""


def one_temperature(logits: Tensor, labels: Tensor) -> Scale:
    """The temperature of the smallest loss."""
    scaling = best_temperature(logits, labels)
    return lambda other: scale_logits(other, *scaling)


def chosen_scaling(logits: Tensor, labels: Tensor) -> Scale:
    """What vit calibrate chooses."""
    fitted = fit_temperature(logits, labels)
    scaling = Scaling() if fitted is None else fitted.scaling
    return lambda other: scale_logits(other, *scaling)


def temperature_by_answer(logits: Tensor, labels: Tensor) -> Scale:
    """A temperature for each predicted class, which keeps the answers; see MIN_ANSWERS."""
    answers = logits.argmax(dim=1)
    common = best_temperature(logits, labels).temperature
    each = torch.full((logits.shape[1],), common, dtype=torch.float64)
    for index in range(logits.shape[1]):
        own = answers == index
        if int(own.sum()) >= MIN_ANSWERS:
            each[index] = best_temperature(logits[own], labels[own]).temperature
    return lambda other: other / each[other.argmax(dim=1)].unsqueeze(1)


def vector_scaling(logits: Tensor, labels: Tensor) -> Scale:
    """A factor and an offset for each class (Guo et al., section 4.2), which changes answers."""
    factors = torch.ones(logits.shape[1], dtype=torch.float64, requires_grad=True)
    offsets = torch.zeros(logits.shape[1], dtype=torch.float64, requires_grad=True)
    gaps = logits - logits.amax(dim=1, keepdim=True)
    optimizer = torch.optim.LBFGS([factors, offsets], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = torch.nn.functional.cross_entropy(gaps * factors + offsets, labels)
        found = found + 1e-3 * ((factors - 1).square().mean() + offsets.square().mean())
        found.backward()
        return found

    optimizer.step(loss)
    with torch.no_grad():
        scale, shift = factors.clone(), offsets.clone()
    return lambda other: (other - other.amax(dim=1, keepdim=True)) * scale + shift


def percent(share: SupportsFloat) -> str:
    return f"{100 * float(share):.1f}"


def markdown(title: str, head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table with its title."""
    lines = [f"**{title}**", "", "| " + " | ".join(map(str, head)) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""])
