"""report.html of a multi-label run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.evaluation.charts import reliability_chart, robustness_charts
from vit.evaluation.classification_metrics import reliability
from vit.evaluation.classification_report import MAX_MISTAKES, class_table
from vit.evaluation.html_page import thumbnails
from vit.evaluation.multilabel_metrics import calibration_scores, summarize_multilabel
from vit.evaluation.run_report import (
    Event,
    RunFacts,
    learning_charts,
    select_epochs,
    write_run_report,
)


@dataclass(frozen=True, kw_only=True)
class MultilabelOutcomes:
    """Predictions for the validation images that can be read, and their labels.

    Args:
        probabilities: (images, classes), float64.
        targets: 1 where an image has a class, (images, classes).
        raw: Probabilities without calibration; those above if None.
        groups: The group of each image; None of independent images.
    """

    probabilities: Tensor
    targets: Tensor
    thresholds: Sequence[float]
    paths: Sequence[str]
    raw: Tensor | None = None
    held_out: Tensor | None = None
    temperature: float = 1.0
    groups: Tensor | None = None


def write_multilabel_report(
    folder: Path,
    *,
    facts: RunFacts,
    events: Sequence[Event],
    outcomes: MultilabelOutcomes,
    slices: Sequence[Mapping[str, Any]] = (),
    robustness: Mapping[str, Any] | None = None,
) -> None:
    """Write `folder`/report.html; arguments as for `write_classification_report`."""
    scores = summarize_multilabel(
        outcomes.probabilities,
        outcomes.targets,
        facts.classes,
        outcomes.thresholds,
        outcomes.groups,
    )
    epochs = select_epochs(events)
    score = {"score_key": "val_map", "score_name": "Mean average precision"}
    wrong, mistakes = find_mistakes(outcomes, facts)
    write_run_report(
        folder,
        "multilabel_report.html.j2",
        facts=facts,
        epochs=epochs,
        charts=learning_charts(facts, epochs, **score),
        scores=scores,
        classes=class_table(scores["per_class"], "average_precision"),
        reliability=calibration_findings(outcomes),
        slices=slices,
        robustness=robustness,
        severity_charts=robustness_charts(robustness),
        wrong=wrong,
        mistakes=mistakes,
        **score,
    )


def calibration_findings(outcomes: MultilabelOutcomes) -> dict[str, Any]:
    """As the findings of a single-label classifier, over the decisions of all classes."""
    raw = outcomes.probabilities if outcomes.raw is None else outcomes.raw
    shown, targets = raw if outcomes.held_out is None else outcomes.held_out, outcomes.targets
    return {
        "scores": calibration_scores(shown, targets),
        "raw": None if outcomes.held_out is None else calibration_scores(raw, targets),
        "scaling": (outcomes.temperature, 1.0),
        "chart": reliability_chart(
            "Images that have the class", reliability(shown.flatten(), targets.flatten())
        ),
    }


def find_mistakes(
    outcomes: MultilabelOutcomes, facts: RunFacts
) -> tuple[int, list[dict[str, Any]]]:
    """How many images have a wrong decision, and those whose worst is farthest from its threshold.

    Of an image, only the worst decision is shown.
    """
    limits = torch.tensor(outcomes.thresholds, dtype=torch.float64)
    predicted = outcomes.probabilities >= limits
    wrong = predicted != outcomes.targets.bool()
    distances = torch.where(wrong, (outcomes.probabilities - limits).abs(), -1.0)
    farthest, worst = distances.max(dim=1)
    order = farthest.argsort(descending=True, stable=True).tolist()
    images = [index for index in order if farthest[index] >= 0]
    shown = islice(thumbnails(images, outcomes.paths, fast=facts.fast), MAX_MISTAKES)
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
