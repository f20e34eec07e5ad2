"""report.html of a run with targets: errors of each, and the images with the largest ones."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from vit.evaluation.charts import scatter_chart
from vit.evaluation.classification_metrics import Outcomes, summarize
from vit.evaluation.classification_page import class_table, find_mistakes
from vit.evaluation.confusion_matrix import confusion_findings
from vit.evaluation.number_metrics import summarize_targets
from vit.evaluation.run_report import RunFacts, learning_charts, write_run_report
from vit.number_answers import COVERAGE, NumberAnswers

MAX_ERRORS, MAX_POINTS = 24, 3000
"""Images with the largest errors, and points, of all targets together."""


def write_number_report(
    facts: RunFacts,
    answers: NumberAnswers,
    values: Tensor,
    true: Tensor,
    paths: Sequence[str],
    groups: Tensor | None = None,
) -> None:
    """Write report.html of a run of numbers, or of several questions.

    Args:
        values: Numbers in units, probabilities of classes, (images, outputs) float64.
        true: Numbers in units, indices of classes, (images, targets) float64; NaN where an image
            has none.
        groups: The group of each image, (images,); None of independent images.
    """
    scores = summarize_targets(answers, values, true, groups)
    score = {"score_key": "val_mae", "score_name": "Mean absolute error"}
    if answers.classes:
        score = {"score_key": "val_score", "score_name": "Mean score"}
    targets = []
    for target, (name, classes) in enumerate(zip(answers.names, answers.choices, strict=True)):
        places = (~true[:, target].isnan()).nonzero().flatten()
        found, wanted = values[places, answers.parts[target]], true[places, target]
        shown = [paths[place] for place in places.tolist()]
        findings = choice_findings if classes else number_findings
        row = findings(facts, answers, target, found, wanted, shown)
        scored = scores.get("questions", {name: scores})[name]
        targets.append({"name": name, "scores": scored, **row})
    write_run_report(
        facts,
        "number_report.html.j2",
        charts=learning_charts(facts, **score, unit="%" if answers.classes else ""),
        scores=scores,
        coverage=COVERAGE,
        targets=targets,
        **score,
    )


def choice_findings(
    facts: RunFacts,
    answers: NumberAnswers,
    target: int,
    probabilities: Tensor,
    true: Tensor,
    paths: Sequence[str],
) -> dict[str, Any]:
    """Scores of the classes of a target, what is taken for what, and the surest mistakes."""
    if not len(true):
        return {"classes": None, "drawn": 0, "errors": ()}
    classes, outcomes = answers.choices[target], Outcomes.of(probabilities, true.long())
    most = max(MAX_ERRORS // len(answers.names), 3)
    return {
        "classes": class_table(summarize(outcomes, classes)["per_class"], "f1"),
        "confusion": confusion_findings(outcomes, classes),
        "errors": find_mistakes(outcomes, paths, facts, classes, most),
    }


def number_findings(
    facts: RunFacts,
    answers: NumberAnswers,
    target: int,
    values: Tensor,
    true: Tensor,
    paths: Sequence[str],
) -> dict[str, Any]:
    """The chart of a target, and the images with the largest errors, of logarithms where these are
    learned: of a true number without one, which is not drawn, it is infinite."""
    pairs = torch.stack([true, values[:, 0]])
    log, widths = answers.log[target], answers.half_widths.get(COVERAGE)
    true_scaled, scaled = pairs.log() if log else pairs
    errors = (scaled - true_scaled).abs().nan_to_num(torch.inf, torch.inf)
    shown = pairs[:, errors.isfinite()]
    points = shown[:, :: 1 + shown.shape[1] * len(answers.names) // MAX_POINTS]
    chart = scatter_chart(
        *points.tolist(), half_width=None if widths is None else widths[target], log=log
    )
    images = facts.thumbnails(errors.argsort(descending=True, stable=True).tolist(), paths)
    return {
        "classes": None,
        "unit": answers.units[target],
        "log": log,
        "chart": chart,
        "drawn": points.shape[1],
        "errors": [
            (image, paths[index], float(true[index]), float(values[index, 0]))
            for index, image in islice(images, max(MAX_ERRORS // len(answers.names), 3))
        ],
    }
