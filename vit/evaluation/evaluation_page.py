"""The page of `vit evaluate --html`: scores, classes, slices and robustness."""

import os
from collections.abc import Mapping
from typing import Any

from vit.errors import ConfigError
from vit.evaluation.charts import SCORES, robustness_charts
from vit.evaluation.classification_report import class_table
from vit.evaluation.confusion_matrix import counted_findings
from vit.evaluation.html_page import render_page

CLASS_SCORES = {"top1": "f1", "map": "average_precision"}
"""Key of the score of a classifier -> that of a class."""


def check_page(score: str, *, captions: bool) -> None:
    """Refuse a network whose scores have no page."""
    if score not in SCORES or captions:
        raise ConfigError("html: pages show classifiers; --json FILE has all scores")


def score_rows(scores: Mapping[str, Any]) -> list[tuple[str, float, Any]]:
    """Key, value and 95 % interval of each score that is a fraction; None without an interval."""
    return [
        (key, value, scores.get(f"{key}_interval"))
        for key, value in scores.items()
        if isinstance(value, float)
    ]


def evaluation_page(
    model: str | os.PathLike[str], data: str | os.PathLike[str], scores: Mapping[str, Any]
) -> str:
    """The whole page."""
    key = next((name for name in SCORES if name in scores), "")
    check_page(key, captions="bleu4" in scores)
    names, counts = [row["label"] for row in scores["per_class"]], scores.get("confusion")
    return render_page(
        "evaluation_page.html.j2",
        heading=os.path.basename(os.path.normpath(model)) or model,
        model=model,
        data=data,
        scores=scores,
        key=key,
        interval=scores[f"{key}_interval"],
        numbers=score_rows(scores),
        classes=class_table(scores["per_class"], CLASS_SCORES[key]),
        confusions=counted_findings(counts, names) if counts else None,
        slices=scores.get("slices", ()),
        robustness=scores.get("robustness"),
        severity_charts=robustness_charts(scores.get("robustness")),
    )
