"""Metrics as rows of name, value and 95 % interval, with their words in commands and tables.

Imports no torch. A metric of another task needs no entry in METRICS: its name is its title.
"""

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

from vit.text import percent, plural


class Metric(NamedTuple):
    """What a number means."""

    title: str
    """Empty of a number that is not printed."""
    share: bool = True
    """Whether it is in [0, 1], and shown in percent."""
    of_images: bool = False
    note: str = ""
    """Follows the value; {} is the calibration error by chance."""
    in_units: bool = False
    """Whether it is in the unit of a target."""
    limits: tuple[float, float] = (-inf, inf)
    """Smallest and largest value of a number that is no share."""

    def text(self, value: float | None, digits: str = "") -> str:
        """A value, or `none`; `digits` is another format of numbers that are no shares."""
        return (
            percent(value)
            if self.share or value is None
            else f"{value:{digits or ('.5g' if self.in_units else '.4f')}}"
        )


METRICS = {
    "score": Metric("score", note="mean of the accuracy of choices and the R² of numbers"),
    "map": Metric("mAP"),
    "mae": Metric("MAE", share=False, note="mean absolute error", in_units=True),
    "rmse": Metric("RMSE", share=False, note="root of the mean squared error", in_units=True),
    "r2": Metric("R²", False, note="share of the variance that is explained", limits=(-inf, 1.0)),
    "spearman": Metric("Spearman", share=False, note="correlation of ranks", limits=(-1.0, 1.0)),
    "coverage": Metric("coverage", note="share of the values in their 90 % interval"),
    "set_coverage": Metric("coverage of sets", note="share of the classes in their 90 % set"),
    "kappa": Metric("weighted kappa", share=False, limits=(-1.0, 1.0)),
    "top1": Metric("top-1", of_images=True),
    "top5": Metric("top-5", of_images=True),
    "balanced_accuracy": Metric("balanced accuracy"),
    "macro_f1": Metric("macro F1"),
    "micro_f1": Metric("micro F1"),
    "subset_accuracy": Metric("all classes right", of_images=True),
    "hamming": Metric("wrong decisions"),
    "class_loss": Metric("loss of classes", share=False),
    "loss": Metric("loss", share=False),
    "loss_shuffled": Metric("of other images", share=False, note="the same captions, shuffled"),
    "bleu1": Metric("BLEU-1"),
    "bleu2": Metric("BLEU-2"),
    "bleu3": Metric("BLEU-3"),
    "bleu4": Metric("BLEU-4"),
    "rouge_l": Metric("ROUGE-L"),
    "cider": Metric("CIDEr", share=False, note="CIDEr-D, of at most 10"),
    "chrf": Metric("chrF"),
    "exact": Metric("exact", of_images=True),
    "distinct": Metric("distinct", note="different captions"),
    "ece": Metric(
        "calibration error", note="mean gap of a score and the share that is right; {} by chance"
    ),
    "brier": Metric("Brier score", share=False),
    "nll": Metric("", share=False),
    **dict.fromkeys(("ece_chance", "ece_debiased"), Metric("")),
}
"""In the order in which they are printed, the score that ranks networks first."""


class MetricRow(NamedTuple):
    """A measured metric."""

    name: str
    value: float | None
    interval: list[float] | None

    @property
    def metric(self) -> Metric:
        return metric_of(self.name)


def metric_of(name: str) -> Metric:
    """The metric of a key such as `top1` or `val_top1`."""
    name = name.removeprefix("val_")
    return METRICS.get(name, Metric(name.replace("_", " "), share=False))


def metric_rows(scores: Mapping[str, Any]) -> list[MetricRow]:
    """The metrics among the scores of an evaluation, the one that ranks networks first."""
    others = (name for name, value in scores.items() if isinstance(value, float))
    return [
        MetricRow(name, scores[name], scores.get(f"{name}_interval"))
        for name in dict.fromkeys([*METRICS, *others])
        if name in scores
    ]


def describe_new_sources(scores: Mapping[str, Any]) -> str:
    """The accuracy on new sources, as `vit.evaluation.new_sources` measures it, in words."""
    low, high = map(percent, scores["top1_interval"])
    known = scores["known_top1"]
    others = "" if known is None else f"; of the others {percent(known)}"
    found = (
        f"new sources: top-1 {percent(scores['top1'])} expected (95 % interval: {low} to {high})"
    )
    images = plural(scores["images"], "image")
    if scores["sources"]:
        sources = f"{plural(scores['sources'], 'source')} (by {scores['by']})"
        return f"{found}, from {images} of {sources} that were not trained on{others}"
    return (
        f"{found}, from the {images} whose background is least like that of any training image, "
        f"since nothing in the files tells new sources apart{others}"
    )
