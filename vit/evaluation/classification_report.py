"""report.html of a classification run: scores, confused classes, calibration and mistakes."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from vit.evaluation.charts import reliability_chart, robustness_charts
from vit.evaluation.class_increment import RecallRow
from vit.evaluation.classification_metrics import (
    CalibratedOutcomes,
    Outcomes,
    reliability,
    summarize,
)
from vit.evaluation.confusion_matrix import FEW_CLASSES, confusion_findings
from vit.evaluation.html_page import thumbnails
from vit.evaluation.image_groups import share_interval
from vit.evaluation.run_report import (
    Event,
    RunFacts,
    learning_charts,
    select_epochs,
    write_run_report,
)
from vit.evaluation.temperature_scaling import MIN_IMAGES

MAX_MISTAKES = 24
MAX_ROWS = 2000


def write_classification_report(
    folder: Path,
    *,
    facts: RunFacts,
    events: Sequence[Event],
    outcomes: Outcomes,
    paths: Sequence[str],
    recall: Sequence[RecallRow] = (),
    calibrated: CalibratedOutcomes | None = None,
    groups: Tensor | None = None,
    slices: Sequence[Mapping[str, Any]] = (),
    robustness: Mapping[str, Any] | None = None,
) -> None:
    """Write `folder`/report.html.

    Args:
        events: Lines of metrics.jsonl, with at least one epoch.
        outcomes: Of the validation images that could be read, at least one, with raw scores.
        paths: Their files, in the same order.
        groups: The group of each image; None of independent images.
    """
    epochs = select_epochs(events)
    score = {"score_key": "val_top1", "score_name": "Top-1"}
    write_run_report(
        folder,
        "classification_report.html.j2",
        facts=facts,
        epochs=epochs,
        charts=learning_charts(facts, epochs, **score),
        mistakes=find_mistakes(calibrated.outcomes if calibrated else outcomes, paths, facts),
        images=len(outcomes),
        wrong=int((outcomes.ranks > 0).sum()),
        recall=recall[:MAX_ROWS],
        slices=slices,
        robustness=robustness,
        severity_charts=robustness_charts(robustness),
        **score,
        **class_findings(
            outcomes, facts.classes, calibrated, paths=() if facts.fast else paths, groups=groups
        ),
    )


def class_findings(
    outcomes: Outcomes,
    classes: Sequence[str],
    calibrated: CalibratedOutcomes | None = None,
    *,
    paths: Sequence[str] = (),
    groups: Tensor | None = None,
) -> dict[str, Any]:
    """What class_findings.html.j2 shows: scores, confusions and calibration; see above."""
    scores = summarize(outcomes, classes)
    scores["top1_interval"] = share_interval(outcomes.ranks == 0, groups)
    shown = calibrated.outcomes if calibrated else outcomes
    return {
        "scores": scores,
        "classes": class_table(scores["per_class"], "f1"),
        "reliability": calibration_findings(outcomes, classes, calibrated),
        "confusion_matrix": confusion_findings(shown, classes, paths),
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
    outcomes: Outcomes, paths: Sequence[str], facts: RunFacts
) -> list[dict[str, Any]]:
    """The wrong predictions of highest confidence whose images can be read."""
    order = outcomes.confidences.argsort(descending=True, stable=True).tolist()
    wrong = (index for index in order if outcomes.ranks[index] > 0)
    shown = islice(thumbnails(wrong, paths, fast=facts.fast), MAX_MISTAKES)
    return [
        {
            "image": image,
            "label": facts.classes[int(outcomes.labels[index])],
            "answer": facts.classes[int(outcomes.answers[index])],
            "confidence": float(outcomes.confidences[index]),
            "likelihood": float(outcomes.likelihoods[index]),
            "path": paths[index],
        }
        for index, image in shown
    ]
