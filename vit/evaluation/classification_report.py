"""report.html of a classification run: settings, curves, scores, errors and commands.

One offline file: charts are SVG, images are embedded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.errors import printable
from vit.evaluation.classification_metrics import Outcomes, summarize
from vit.evaluation.error_analysis import calibration, class_table, confusions, mistakes
from vit.evaluation.expert_usage import experts
from vit.evaluation.html_page import Html, called, document, hero, join, tag
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


def write_classification_report(
    folder: Path,
    *,
    facts: RunFacts,
    events: Sequence[Mapping[str, Any]],
    outcomes: Outcomes,
    paths: Sequence[str],
) -> None:
    """Write `folder`/report.html.

    Args:
        folder: The run folder.
        facts: What was trained.
        events: Lines of metrics.jsonl, at least one.
        outcomes: Of the validation images that could be read, at least one.
        paths: Their files, in the same order.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    scores = summarize(outcomes, facts.classes)
    epochs = [event for event in events if event["event"] == "epoch"]
    name = printable(folder.resolve().name or folder)
    sections = [
        headline(name, facts, scores, epochs),
        learning(facts, epochs),
        experts(epochs, facts.best_epoch),
        class_table(scores["per_class"]),
        confusions(outcomes, scores["per_class"]),
        calibration(scores, float(outcomes.confidences.mean())),
        mistakes(outcomes, paths, facts.classes, facts.root),
        unreadable(facts),
        settings(facts.config),
        usage(folder),
        tag("footer", f"Written by vit {__version__}. ", PRIVACY, class_="soft small"),
    ]
    write_text(folder / REPORT_FILE, document(f"{name}: {percent(scores['top1'])}", *sections))


def headline(
    name: str, facts: RunFacts, scores: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]
) -> Html:
    """The one number, what it was counted on, and what produced it."""
    low, high = scores["top1_interval"]
    tiles = {
        f"best of {plural(len(epochs), 'epoch')}": facts.best_epoch,
        **({"soup of epochs": ", ".join(map(str, facts.soup))} if facts.soup else {}),
        "validation images": f"{scores['count']:,}",
        "classes": f"{len(facts.classes):,}",
        **({"top-5": percent(scores["top5"])} if len(facts.classes) > 5 else {}),
        "macro F1": percent(scores["macro_f1"]),
        "balanced accuracy": percent(scores["balanced_accuracy"]),
        "loss": f"{scores['loss']:.4f}",
    }
    return join(
        tag("h1", called(name)),
        trained(facts, epochs),
        hero(
            percent(scores["top1"]),
            f"validation top-1; 95% interval {percent(low)} to {percent(high)}",
            tiles,
        ),
        caution(facts, scores),
    )


def caution(facts: RunFacts, scores: Mapping[str, Any]) -> Html:
    """What the headline's number is worth."""
    common = max(scores["per_class"], key=lambda row: row["count"])
    share = percent(facts.config.data.val_share, 0)
    origin = (
        f"images that vit held out of the data ({share} of each class, seed "
        f"{facts.config.training.seed}; split.json names them)"
        if facts.val_held_out
        else "the data's own validation folder"
    )
    whose, chosen = f"epoch {facts.best_epoch}", "The best epoch was"
    if facts.soup:
        members = ", ".join(map(str, facts.soup))
        whose, chosen = f"a soup, the average of epochs {members},", "The soup's epochs were"
    return tag(
        "p",
        f"Measured with the weights of {whose} on {origin}. Always answering “",
        called(common["label"]),
        f"” would reach {percent(common['count'] / scores['count'])}. {chosen} chosen on "
        "these images, which flatters a little; images kept apart tell the rest.",
        class_="soft small",
    )
