"""report.html of a multi-label run: one offline file."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.errors import printable
from vit.evaluation.error_analysis import FEW_CLASSES, MOST_MISTAKES, MOST_ROWS, thumbnail
from vit.evaluation.expert_usage import experts
from vit.evaluation.html_page import Html, called, document, hero, join, numbers, table, tag
from vit.evaluation.multilabel_metrics import summarize_multilabel
from vit.evaluation.run_report import (
    PRIVACY,
    REPORT_FILE,
    RunFacts,
    learning,
    settings,
    trained,
    unreadable,
    usage,
)
from vit.text import percent, plural
from vit.version import __version__
from vit.weights.safetensors_io import write_text


@dataclass(frozen=True, kw_only=True)
class MultilabelOutcomes:
    """What the network says of the validation images that can be read, and what they are.

    Args:
        probabilities: (images, classes), float64.
        targets: 1 where an image has a class, (images, classes).
        thresholds: Probability from which on a class is said.
        paths: Files of the images.
    """

    probabilities: Tensor
    targets: Tensor
    thresholds: Sequence[float]
    paths: Sequence[str]


def write_multilabel_report(
    folder: Path,
    *,
    facts: RunFacts,
    events: Sequence[Mapping[str, Any]],
    outcomes: MultilabelOutcomes,
) -> None:
    """Write `folder`/report.html; arguments as for `write_classification_report`.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    scores = summarize_multilabel(
        outcomes.probabilities, outcomes.targets, facts.classes, outcomes.thresholds
    )
    epochs = [event for event in events if event["event"] == "epoch"]
    name = printable(folder.resolve().name or folder)
    sections = [
        headline(name, facts, scores, epochs),
        learning(facts, epochs, ("val_map", "Mean average precision")),
        experts(epochs, facts.best_epoch),
        class_table(scores["per_class"]),
        mistakes(outcomes, facts),
        unreadable(facts),
        settings(facts.config),
        usage(folder),
        tag("footer", f"Written by vit {__version__}. ", PRIVACY, class_="soft small"),
    ]
    write_text(folder / REPORT_FILE, document(f"{name}: mAP {percent(scores['map'])}", *sections))


def headline(
    name: str, facts: RunFacts, scores: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]
) -> Html:
    """The one number, what it was counted on, and what produced it."""
    interval = scores["map_interval"]
    between = f"; 95% interval {percent(interval[0])} to {percent(interval[1])}" if interval else ""
    tiles = {
        f"best of {plural(len(epochs), 'epoch')}": facts.best_epoch,
        **({"soup of epochs": ", ".join(map(str, facts.soup))} if facts.soup else {}),
        "validation images": f"{scores['count']:,}",
        "classes": f"{len(facts.classes):,}",
        "macro F1": percent(scores["macro_f1"]),
        "micro F1": percent(scores["micro_f1"]),
        "all classes right": percent(scores["subset_accuracy"]),
        "wrong decisions": percent(scores["hamming"]),
        "loss": f"{scores['loss']:.4f}",
    }
    caution = (
        "Measured on the validation images, on which the epoch and the thresholds of the classes "
        "were chosen: that flatters a little; images kept apart tell the rest."
    )
    return join(
        tag("h1", called(name)),
        trained(facts, epochs),
        hero(percent(scores["map"]), f"validation mean average precision{between}", tiles),
        tag("p", caution, class_="soft small"),
    )


def class_table(rows: Sequence[Mapping[str, Any]]) -> Html:
    """Scores of each class; where there are many, the worst first and most of them folded."""
    many = len(rows) > FEW_CLASSES
    order = sorted(rows, key=_worth) if many else list(rows)
    head = [tag("th", "class")]
    names = ("images", "average precision", "threshold", "precision", "recall", "F1")
    head += [tag("th", text, class_="n") for text in names]
    cells = [_class_row(row) for row in order[:MOST_ROWS]]
    parts = [table(head, cells[:FEW_CLASSES], class_="wide")]
    if many:
        folded = table(head, cells[FEW_CLASSES:], class_="wide")
        others = f"The other {len(cells) - FEW_CLASSES:,}"
        parts.append(tag("details", tag("summary", others), folded))
    if len(rows) > MOST_ROWS:
        left = f"{len(rows) - MOST_ROWS:,} more are left out here: vit evaluate --json has all."
        parts.append(tag("p", left, class_="soft small"))
    title = f"Classes, the worst of {len(rows):,} first" if many else "Classes"
    return tag("section", tag("h2", title), *parts)


def _worth(row: Mapping[str, Any]) -> tuple[bool, float]:
    precision = row["average_precision"]
    return precision is None, precision or 0.0


def _class_row(row: Mapping[str, Any]) -> list[Html]:
    name, precision = tag("th", called(row["label"]), class_="name"), row["average_precision"]
    shares = [percent(row[key], 1) for key in ("precision", "recall", "f1")]
    return [
        name,
        *numbers(
            f"{row['count']:,}",
            "-" if precision is None else percent(precision, 1),
            f"{row['threshold']:.3f}",
            *(shares if row["count"] else 3 * ["-"]),
        ),
    ]


def mistakes(outcomes: MultilabelOutcomes, facts: RunFacts) -> Html:
    """The images with the surest wrong decision, one an image."""
    limits = torch.tensor(outcomes.thresholds, dtype=torch.float64)
    said = outcomes.probabilities >= limits
    wrong = said != outcomes.targets.bool()
    apart = torch.where(wrong, (outcomes.probabilities - limits).abs(), -1.0)
    surest, which = apart.max(dim=1)
    order = [at for at in surest.argsort(descending=True, stable=True).tolist() if surest[at] >= 0]
    figures: list[Html] = []
    for at in order:
        if len(figures) == MOST_MISTAKES:
            break
        label, path = facts.classes[int(which[at])], outcomes.paths[at]
        verdict = "said, not labelled" if said[at, which[at]] else "labelled, not said"
        image = thumbnail(path, f"{label}: {verdict}")
        if image is None:
            continue
        caption = tag(
            "figcaption",
            tag("b", called(label)),
            f" {percent(float(outcomes.probabilities[at, which[at]]), 1)}",
            tag("br"),
            verdict,
            tag("br"),
            tag("span", called(os.path.relpath(path, facts.root)), class_="soft"),
        )
        figures.append(tag("figure", image, caption))
    lead = (
        f"{plural(len(order), 'image')} of {len(wrong):,} have a wrong decision; here are the "
        f"{len(figures)} surest, each with its worst class. Look for wrong labels among them first."
    )
    wall = [tag("div", *figures, class_="wall")] if figures else []
    return tag("section", tag("h2", "The surest mistakes"), tag("p", lead), *wall)
