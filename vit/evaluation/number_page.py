"""report.html of a regression run: errors of each target, and the images with the largest ones."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from vit.evaluation.charts import scatter_chart
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
    """Write report.html of a regression run.

    Args:
        values: Predicted numbers in units, (images, targets) float64.
        true: As `values`, NaN where an image has none.
        groups: The group of each image, (images,); None of independent images.
    """
    scores = summarize_targets(answers, values, true, groups)
    score = {"score_key": "val_mae", "score_name": "Mean absolute error"}
    write_run_report(
        facts,
        "number_report.html.j2",
        charts=learning_charts(facts, **score, unit=""),
        scores=scores,
        coverage=COVERAGE,
        targets=[
            {
                "name": name,
                "scores": scores.get("questions", {name: scores})[name],
                **target_findings(facts, answers, target, values, true, paths),
            }
            for target, name in enumerate(answers.names)
        ],
        **score,
    )


def target_findings(
    facts: RunFacts,
    answers: NumberAnswers,
    target: int,
    values: Tensor,
    true: Tensor,
    paths: Sequence[str],
) -> dict[str, Any]:
    """The chart of a target, and the images with the largest errors, of logarithms where these are
    learned: of a true number without one, which is not drawn, it is infinite."""
    places = (~true[:, target].isnan()).nonzero().flatten()
    pairs = torch.stack([true[places, target], values[places, target]])
    log, widths = answers.log[target], answers.half_widths.get(COVERAGE)
    true_scaled, scaled = pairs.log() if log else pairs
    errors = (scaled - true_scaled).abs().nan_to_num(torch.inf, torch.inf)
    shown = pairs[:, errors.isfinite()]
    points = shown[:, :: 1 + shown.shape[1] * len(answers.names) // MAX_POINTS]
    chart = scatter_chart(
        *points.tolist(), half_width=None if widths is None else widths[target], log=log
    )
    order = places[errors.argsort(descending=True, stable=True)].tolist()
    images = facts.thumbnails(order, paths)
    return {
        "unit": answers.units[target],
        "log": log,
        "chart": chart,
        "drawn": points.shape[1],
        "errors": [
            (image, paths[index], float(true[index, target]), float(values[index, target]))
            for index, image in islice(images, max(MAX_ERRORS // len(answers.names), 3))
        ],
    }
