"""Sections that the reports of all tasks share: the network, curves, settings, commands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.config import Config
from vit.config.parser import all_settings, flatten, make_config
from vit.errors import quoted
from vit.evaluation.charts import Curve, curves
from vit.evaluation.html_page import Html, called, join, numbers, table, tag
from vit.text import format_count, format_duration, percent, plural

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
        val_held_out: Whether we chose the validation images.
        best_epoch: The best epoch, whose weights are measured, from 1.
        soup: Epochs, the average of whose weights is measured instead, if any.
        unreadable: Images that could not be read, and why.
    """

    config: Config
    classes: Sequence[str]
    parameters: int
    machine: str
    train_images: int
    root: Path
    val_held_out: bool
    best_epoch: int
    soup: Sequence[int] = ()
    unreadable: Mapping[str, str]


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
            tag("figure", curves("Loss", numbers_of, loss, best=facts.best_epoch)),
            tag("figure", curves(name, numbers_of, shares, best=facts.best_epoch, unit="%")),
            class_="pair",
        ),
        tag(
            "p",
            f"The dotted line marks epoch {facts.best_epoch}, the best. The training loss is taken "
            "on augmented images while the network still changes, so it may lie above the other.",
            class_="soft small",
        ),
        tag("details", tag("summary", "All epochs in numbers"), table(head, rows)),
    )


def unreadable(facts: RunFacts) -> Html:
    """Images that took no part, where there are any."""
    if not facts.unreadable:
        return Html("")
    named = list(facts.unreadable.items())[:MOST_NAMES]
    rows = [[tag("th", called(path), class_="name"), tag("td", why)] for path, why in named]
    lead = f"{plural(len(facts.unreadable), 'image')} could not be read and took no part."
    if len(named) < len(facts.unreadable):
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
