"""report.html of a classification run: settings, curves, scores, errors and commands.

One offline file: charts are SVG, images are embedded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.config import Config
from vit.config.parser import all_settings, flatten, make_config
from vit.errors import printable, quoted
from vit.evaluation.charts import Curve, curves
from vit.evaluation.classification_metrics import Outcomes, summarize
from vit.evaluation.error_analysis import calibration, class_table, confusions, mistakes
from vit.evaluation.expert_usage import experts
from vit.evaluation.html_page import Html, called, document, hero, join, numbers, table, tag
from vit.text import format_count, format_duration, percent, plural
from vit.version import __version__
from vit.weights.safetensors_io import write_text

REPORT_FILE = "report.html"
MOST_NAMES = 50
TOLD = {"data", "model", "num_classes", "workers"}  # elsewhere, or no choice about the network
PRIVACY = "This file loads nothing from anywhere, and may show images of the data set."


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a report tells of a run beside its scores.

    Args:
        config: The completed settings.
        classes: Names, by output of the network.
        parameters: Numbers in the network.
        machine: Devices and arithmetic, such as `1 x cuda, bf16`.
        train_images: Number of training images.
        root: Folder of the data, from which images are named.
        made: Whether we chose the validation images.
        epoch: The best epoch, whose weights are measured, from 1.
        soup: Epochs, the average of whose weights is measured instead, if any.
        left_out: Images that could not be read, and why.
    """

    config: Config
    classes: Sequence[str]
    parameters: int
    machine: str
    train_images: int
    root: Path
    made: bool
    epoch: int
    soup: Sequence[int] = ()
    left_out: Mapping[str, str]


def write_report(
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
        experts(epochs, facts.epoch),
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
        f"best of {plural(len(epochs), 'epoch')}": facts.epoch,
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


def trained(facts: RunFacts, epochs: Sequence[Mapping[str, Any]]) -> Html:
    """What network it is, and what it was trained on, for how long."""
    model, training = facts.config.model, facts.config.training
    seconds = sum(event["seconds"] for event in epochs)
    return tag(
        "p",
        f"Vision Transformer of {format_count(facts.parameters)} parameters (preset "
        f"{training.model}): images of {model.image_size} px in patches of "
        f"{model.patch_size}, {model.depth} blocks of width {model.dim} with "
        f"{plural(model.num_heads, 'head')}. Trained on "
        f"{plural(facts.train_images, 'image')} of ",
        tag("code", called(facts.config.data.data)),
        f" for {plural(len(epochs), 'epoch')}, {format_duration(seconds)} on {facts.machine}.",
        class_="soft",
    )


def caution(facts: RunFacts, scores: Mapping[str, Any]) -> Html:
    """What the headline's number is worth."""
    common = max(scores["per_class"], key=lambda row: row["count"])
    share = percent(facts.config.data.val_share, 0)
    origin = (
        f"images that vit held out of the data ({share} of each class, seed "
        f"{facts.config.training.seed}; split.json names them)"
        if facts.made
        else "the data's own validation folder"
    )
    whose, chosen = f"epoch {facts.epoch}", "The best epoch was"
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


def learning(
    facts: RunFacts,
    epochs: Sequence[Mapping[str, Any]],
    score: tuple[str, str] = ("val_top1", "Top-1"),
) -> Html:
    """Curves over epochs of the losses and of a score, by its key and name; and their numbers."""
    key, name = score
    numbers_of = [int(event["epoch"]) for event in epochs]
    loss = [
        Curve("training", "train", [event["train_loss"] for event in epochs]),
        Curve("validation", "val", [event["val_loss"] for event in epochs]),
    ]
    shares = [Curve("validation", "val", [event[key] for event in epochs])]
    rows = [
        numbers(
            event["epoch"],
            f"{event['train_loss']:.4f}",
            f"{event['val_loss']:.4f}",
            percent(event[key]),
            f"{event['lr']:.2e}",
            f"{event['images_per_second']:,.0f}",
        )
        for event in epochs
    ]
    heads = (
        "epoch",
        "training loss",
        "validation loss",
        name[0].lower() + name[1:],
        "lr",
        "images/s",
    )
    head = [tag("th", text, class_="n") for text in heads]
    return tag(
        "section",
        tag("h2", "How it learned"),
        tag(
            "div",
            tag("figure", curves("Loss", numbers_of, loss, best=facts.epoch)),
            tag("figure", curves(name, numbers_of, shares, best=facts.epoch, unit="%")),
            class_="pair",
        ),
        tag(
            "p",
            f"The dotted line marks epoch {facts.epoch}, the best. The training loss is taken on "
            "augmented images while the network still changes, so it may lie above the other.",
            class_="soft small",
        ),
        tag("details", tag("summary", "All epochs in numbers"), table(head, rows)),
    )


def unreadable(facts: RunFacts) -> Html:
    """Images that took no part, where there are any."""
    if not facts.left_out:
        return Html("")
    named = list(facts.left_out.items())[:MOST_NAMES]
    rows = [[tag("th", called(path), class_="name"), tag("td", why)] for path, why in named]
    lead = f"{plural(len(facts.left_out), 'image')} could not be read and took no part."
    if len(named) < len(facts.left_out):
        lead += f" The first {len(named)}:"
    body = table([tag("th", "file"), tag("th", "why")], rows, class_="wide")
    return tag("section", tag("h2", "Left out"), tag("p", lead), body)


def settings(config: Config) -> Html:
    """What was chosen, beside what is the default of the same preset."""
    chosen, default = flatten(config), flatten(make_config({"model": config.training.model}))
    changed = [n for n in chosen if chosen[n] != default[n] and n not in TOLD]
    lead = (
        f"Settings that differ from the defaults of {config.training.model}; config.yaml has all."
        if changed
        else f"All settings are the defaults of {config.training.model}."
    )
    head = [tag("th", text) for text in ("setting", "value", "default")]
    head.append(tag("th", "meaning", class_="wordy"))
    rows = [
        [
            tag("th", tag("code", name)),
            tag("td", tag("code", written(chosen[name]))),
            tag("td", tag("code", written(default[name])), class_="soft"),
            tag("td", all_settings()[name].help, class_="soft wordy"),
        ]
        for name in changed
    ]
    shown = [table(head, rows, class_="wide")] if rows else []
    return tag("section", tag("h2", "Settings"), tag("p", lead), *shown)


def written(value: object) -> str:
    """A setting's value as a person would type it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def usage(folder: Path) -> Html:
    """How to ask the network, measure it elsewhere, and train it again."""
    where, config = quoted(folder), quoted(folder / "config.yaml")
    commands = {
        "Label images:": f"vit predict {where} IMAGE...",
        "Measure it on other images, with a folder for each class:": (
            f"vit evaluate {where} FOLDER"
        ),
        "Train it again:": f"vit train --config {config} --out ANOTHER_FOLDER",
        "From Python:": f"import vit; vit.Predictor({str(folder)!r})(['image.jpg'])",
    }
    lines = [
        join(tag("p", title), tag("pre", tag("code", command)))
        for title, command in commands.items()
    ]
    return tag("section", tag("h2", "Use it"), *lines)
