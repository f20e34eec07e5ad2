"""report.html of classification and multi-label runs, and the page of `vit evaluate --html`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from vit.evaluation.charts import reliability_chart, robustness_charts
from vit.evaluation.classification_metrics import (
    CalibratedOutcomes,
    Outcomes,
    RecallRow,
    kappa_with_interval,
    reliability,
    summarize,
)
from vit.evaluation.confusion_matrix import FEW_CLASSES, confusion_findings, counted_findings
from vit.evaluation.html_page import render_page
from vit.evaluation.metric_rows import metric_rows
from vit.evaluation.multilabel_metrics import calibration_scores, summarize_multilabel
from vit.evaluation.run_report import RunFacts, learning_charts, write_run_report
from vit.evaluation.temperature_scaling import MIN_IMAGES

MAX_MISTAKES = 24
MAX_ROWS = 2000
FEW_MAPS = 6  # of a run with tiles, where no answer is wrong


def write_classification_report(
    facts: RunFacts,
    outcomes: Outcomes,
    paths: Sequence[str],
    *,
    recall: Sequence[RecallRow] = (),
    calibrated: CalibratedOutcomes | None = None,
    groups: Tensor | None = None,
    slices: Sequence[Mapping[str, Any]] = (),
    nodes: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write report.html of a single-label run; `outcomes` has raw scores of at least one image."""
    shown, axes = () if facts.fast else paths, facts.config.data.axes
    ordered = bool(facts.config.data.order)
    key, name = ("val_kappa", "Weighted kappa") if ordered else ("val_top1", "Top-1")
    write_run_report(
        facts,
        "classification_report.html.j2",
        charts=learning_charts(facts, key, name, unit="" if ordered else "%"),
        mistakes=find_mistakes(calibrated.outcomes if calibrated else outcomes, paths, facts),
        images=len(outcomes),
        wrong=int((outcomes.ranks > 0).sum()),
        recall=recall[:MAX_ROWS],
        slices=slices,
        score_key=key,
        score_name=name,
        nodes=nodes[:MAX_ROWS],
        **class_findings(
            outcomes,
            facts.classes,
            calibrated,
            paths=shown,
            groups=groups,
            axes=axes,
            ordered=ordered,
        ),
    )


def class_findings(
    outcomes: Outcomes,
    classes: Sequence[str],
    calibrated: CalibratedOutcomes | None = None,
    *,
    paths: Sequence[str] = (),
    groups: Tensor | None = None,
    axes: str = "",
    ordered: bool = False,
) -> dict[str, Any]:
    """What class_findings.html.j2 shows: scores, confusions and calibration; see above."""
    scores = summarize(outcomes, classes, groups)
    if ordered:
        scores |= kappa_with_interval(outcomes, groups)
    shown = calibrated.outcomes if calibrated else outcomes
    return {
        "scores": scores,
        "classes": class_table(scores["per_class"], "f1"),
        "reliability": calibration_findings(outcomes, classes, calibrated),
        "confusion_matrix": confusion_findings(shown, classes, paths, axes, ordered=ordered),
    }


def calibration_findings(
    outcomes: Outcomes, classes: Sequence[str], calibrated: CalibratedOutcomes | None
) -> dict[str, Any]:
    """Scores of held-out images with calibration if there is one, of raw ones, and their chart."""
    shown = outcomes if calibrated is None else calibrated.held_out
    return {
        "scores": summarize(shown, classes),
        "raw": None if calibrated is None else summarize(outcomes, classes),
        "scaling": None if calibrated is None else calibrated.scaling,
        # images that a calibration needs, where these are fewer
        "needed": MIN_IMAGES if calibrated is None and len(outcomes) < MIN_IMAGES else None,
        "confidence": float(shown.confidences.mean()),
        "chart": reliability_chart(
            "Right answers", reliability(shown.confidences, shown.ranks == 0)
        ),
    }


def class_table(rows: Sequence[Mapping[str, Any]], measure: str) -> dict[str, Any]:
    """Scores of each class; where there are many, the worst by `measure` first."""
    many = len(rows) > FEW_CLASSES
    if many:
        rows = sorted(rows, key=lambda row: (not row["count"], row[measure] or 0.0))
    return {
        "total": len(rows),
        "rows": rows[:MAX_ROWS],
        "worst_first": many,
        "left_out": max(len(rows) - MAX_ROWS, 0),
    }


def find_mistakes(
    outcomes: Outcomes,
    paths: Sequence[str],
    facts: RunFacts,
    classes: Sequence[str] | None = None,
    most: int = MAX_MISTAKES,
) -> list[dict[str, Any]]:
    """The wrong predictions of highest confidence whose images can be read; if there are none, the
    surest ones of a run with tiles, for their maps."""
    classes = facts.classes if classes is None else classes
    order = outcomes.confidences.argsort(descending=True, stable=True).tolist()
    wrong = [index for index in order if outcomes.ranks[index] > 0]
    some = wrong or (order[:FEW_MAPS] if facts.tile_map and not facts.fast else [])
    shown = islice(facts.thumbnails(some, paths, outcomes.answers), most)
    return [
        {
            "image": image,
            "label": classes[int(outcomes.labels[index])],
            "answer": classes[int(outcomes.answers[index])],
            "confidence": float(outcomes.confidences[index]),
            "likelihood": float(outcomes.likelihoods[index]),
            "path": paths[index],
        }
        for index, image in shown
    ]


@dataclass(frozen=True, kw_only=True)
class MultilabelOutcomes:
    """Predictions for the readable validation images, (images, classes) float64, and their labels;
    `raw` is without calibration."""

    probabilities: Tensor
    targets: Tensor
    thresholds: Sequence[float]
    paths: Sequence[str]
    raw: Tensor
    held_out: Tensor | None = None
    temperature: float = 1.0
    groups: Tensor | None = None


def write_multilabel_report(
    facts: RunFacts, outcomes: MultilabelOutcomes, slices: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write report.html of a multi-label run."""
    scores = summarize_multilabel(
        outcomes.probabilities,
        outcomes.targets,
        facts.classes,
        outcomes.thresholds,
        outcomes.groups,
    )
    score = {"score_key": "val_map", "score_name": "Mean average precision"}
    wrong, mistakes = multilabel_mistakes(outcomes, facts)
    write_run_report(
        facts,
        "multilabel_report.html.j2",
        charts=learning_charts(facts, **score),
        scores=scores,
        classes=class_table(scores["per_class"], "average_precision"),
        reliability=multilabel_calibration(outcomes),
        slices=slices,
        wrong=wrong,
        mistakes=mistakes,
        **score,
    )


def multilabel_calibration(outcomes: MultilabelOutcomes) -> dict[str, Any]:
    """As the findings of a single-label classifier, over the decisions of all classes."""
    raw, targets = outcomes.raw, outcomes.targets
    shown = raw if outcomes.held_out is None else outcomes.held_out
    return {
        "scores": calibration_scores(shown, targets),
        "raw": None if outcomes.held_out is None else calibration_scores(raw, targets),
        "scaling": (outcomes.temperature, 1.0),
        "chart": reliability_chart(
            "Images that have the class", reliability(shown.flatten(), targets.flatten())
        ),
    }


def multilabel_mistakes(
    outcomes: MultilabelOutcomes, facts: RunFacts
) -> tuple[int, list[dict[str, Any]]]:
    """How many images are wrong, and those whose worst decision is farthest from its threshold."""
    limits = torch.tensor(outcomes.thresholds, dtype=torch.float64)
    predicted = outcomes.probabilities >= limits
    wrong = predicted != outcomes.targets.bool()
    distances = torch.where(wrong, (outcomes.probabilities - limits).abs(), -1.0)
    farthest, worst = distances.max(dim=1)
    order = farthest.argsort(descending=True, stable=True).tolist()
    images = [index for index in order if farthest[index] >= 0]
    shown = islice(facts.thumbnails(images, outcomes.paths, worst), MAX_MISTAKES)
    return len(images), [
        {
            "image": image,
            "label": facts.classes[int(worst[index])],
            "probability": float(outcomes.probabilities[index, worst[index]]),
            "predicted": bool(predicted[index, worst[index]]),
            "path": outcomes.paths[index],
        }
        for index, image in shown
    ]


def evaluation_page(
    model: str | os.PathLike[str], data: str | os.PathLike[str], scores: Mapping[str, Any]
) -> str:
    """The whole page of a classifier, or of a network of numbers or several questions."""
    shown = {
        "heading": os.path.basename(os.path.normpath(model)) or model,
        "model": model,
        "data": data,
        "scores": scores,
    }
    if "per_class" not in scores:
        choices = {
            name: {
                "classes": class_table(found["per_class"], "f1"),
                "confusions": counted_findings(
                    found["confusion"], [row["label"] for row in found["per_class"]]
                ),
            }
            for name, found in scores.get("questions", {}).items()
            if "per_class" in found
        }
        return render_page("number_evaluation.html.j2", **shown, choices=choices)
    key = "top1" if "top1" in scores else metric_rows(scores)[0].name
    rows, counts = scores["per_class"], scores.get("confusion")
    by = "average_precision" if "average_precision" in rows[0] else "f1"
    return render_page(
        "evaluation_page.html.j2",
        **shown,
        key=key,
        interval=scores.get(f"{key}_interval"),
        numbers=[
            (name, value, scores.get(f"{name}_interval"))
            for name, value in scores.items()
            if isinstance(value, float)
        ],
        classes=class_table(rows, by),
        confusions=counted_findings(
            counts, [row["label"] for row in rows], ordered="kappa" in scores
        )
        if counts
        else None,
        slices=scores.get("slices", ()),
        robustness=scores.get("robustness"),
        severity_charts=robustness_charts(scores.get("robustness")),
    )
