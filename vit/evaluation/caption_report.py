"""report.html of a captioning run: what was trained, whether it looks, what it says.

It is made of the same pieces as that of a classifier, and shows its findings too where the network
has a head for classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.errors import printable, quoted
from vit.evaluation.caption_findings import (
    CaptionOutcomes,
    examples,
    looking,
    metrics,
    most_said,
    quote,
    said_most,
)
from vit.evaluation.captions import caption_scores
from vit.evaluation.charts import Curve, curves
from vit.evaluation.experts import experts
from vit.evaluation.findings import calibration, class_table, confusions
from vit.evaluation.metrics import Outcomes, summarise
from vit.evaluation.page import (
    Html,
    called,
    document,
    duration,
    hero,
    join,
    magnitude,
    numbers,
    percent,
    plural,
    table,
    tag,
)
from vit.evaluation.report import PRIVACY, REPORT_FILE, RunFacts, settings, unreadable
from vit.version import __version__
from vit.weights.tensorfile import write_text

SAME = 0.2
"""Share of the pictures of which one caption is said, from which the headline warns."""
LOSSES = ("val_caption_loss", "val_loss")
"""The loss of captions: the first is there where classes are learned too."""


@dataclass(frozen=True, kw_only=True)
class WordFacts:
    """What a report tells of the words beside `RunFacts`.

    Args:
        captions: Number of training captions.
        mean_tokens: Mean number of tokens of one, the end included.
        val_pictures: Validation pictures there are; maybe only some of them are measured.
        least_gap: Share of the loss by which other pictures must be worse for a decoder that looks.
    """

    captions: int
    mean_tokens: float
    val_pictures: int
    least_gap: float


def write_caption_report(
    folder: Path,
    *,
    facts: RunFacts,
    word_facts: WordFacts,
    events: Sequence[Mapping[str, Any]],
    outcomes: CaptionOutcomes,
    answers: Outcomes | None,
) -> None:
    """Write `folder`/report.html.

    Args:
        folder: The run folder.
        facts: What was trained.
        word_facts: On which words.
        events: Lines of metrics.jsonl, with at least one epoch.
        outcomes: Captions of the validation pictures that were measured, at least one.
        answers: Classes of the same pictures, where the network has a head.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    pictures = outcomes.pictures
    scores = caption_scores([one.caption for one in pictures], [one.references for one in pictures])
    epochs = [event for event in events if event["event"] == "epoch"]
    name = printable(folder.resolve().name or folder)
    sections = [
        tag("h1", called(name)),
        trained(facts, word_facts, epochs),
        headline(facts, scores, outcomes, epochs, answers),
        caution(facts, word_facts, outcomes),
        looking(outcomes, word_facts.least_gap),
        most_said(outcomes),
        learning(facts, epochs),
        experts(epochs, facts.epoch),
        metrics(scores, outcomes),
        examples(outcomes, facts.root, facts.config.training.seed),
        *(() if answers is None else class_findings(answers, facts.classes)),
        unreadable(facts),
        settings(facts.config),
        usage(folder),
        tag("footer", f"Written by vit {__version__}. ", PRIVACY, class_="soft small"),
    ]
    write_text(folder / REPORT_FILE, document(f"{name}: CIDEr {scores['cider']:.3f}", *sections))


def trained(facts: RunFacts, word_facts: WordFacts, epochs: Sequence[Mapping[str, Any]]) -> Html:
    """The network, the data, the words and the time it took, in a few sentences."""
    model, training, decoder = facts.config.model, facts.config.training, facts.config.decoder
    writer = decoder.blocks_beside(model)
    seconds = sum(event["seconds"] for event in epochs)
    return tag(
        "p",
        f"Captioner of {magnitude(facts.parameters)} parameters (preset {training.model}): "
        f"pictures of {model.image_size} px in patches of {model.patch_size}; an encoder of "
        f"{plural(model.depth, 'block')} of width {model.dim} with "
        f"{plural(model.num_heads, 'head')}, and a decoder of {plural(writer.depth, 'block')} of "
        f"width {writer.dim} with {plural(writer.num_heads, 'head')}. Trained on "
        f"{plural(facts.train_images, 'picture')} of ",
        tag("code", called(facts.config.data.data)),
        f" with {plural(word_facts.captions, 'caption')} of {word_facts.mean_tokens:.1f} tokens on "
        f"average, cut into {decoder.vocab_size or 0:,} different tokens by the tokenizer ",
        tag("code", called(decoder.tokenizer)),
        f", for {plural(len(epochs), 'epoch')}, {duration(seconds)} on {facts.machine}.",
        class_="soft",
    )


def headline(
    facts: RunFacts,
    scores: Mapping[str, float],
    outcomes: CaptionOutcomes,
    epochs: Sequence[Mapping[str, Any]],
    answers: Outcomes | None,
) -> Html:
    """The numbers that count."""
    right = None if answers is None else float((answers.ranks == 0).double().mean())
    tiles = {
        f"best of {plural(len(epochs), 'epoch')}": facts.epoch,
        **({"soup of epochs": ", ".join(map(str, facts.soup))} if facts.soup else {}),
        "pictures measured": f"{len(outcomes.pictures):,}",
        "BLEU-4": f"{scores['bleu4']:.3f}",
        **({"exact": percent(scores["exact"])} if scores["exact"] else {}),
        "loss of a token": f"{outcomes.loss:.4f}",
        "with other pictures": f"{outcomes.other_loss:.4f}",
        "different captions": percent(scores["distinct"], 1),
        **({} if right is None else {"top-1": percent(right)}),
    }
    words = "validation CIDEr, from 0 to 10; the likeliest word each time"
    return hero(f"{scores['cider']:.3f}", words, tiles)


def caution(facts: RunFacts, word_facts: WordFacts, outcomes: CaptionOutcomes) -> Html:
    """What the headline's numbers are worth, and aloud where one caption does for many pictures."""
    measured, there = len(outcomes.pictures), word_facts.val_pictures
    few = f"{measured:,} (evenly spread) of " if there > measured else ""
    origin = (
        f"{few}the pictures that vit held out of the data (seed {facts.config.training.seed}; "
        "split.json names them)"
        if facts.made
        else f"{few}the data's own validation pictures"
    )
    whose = f"epoch {facts.epoch}"
    if facts.soup:
        whose = f"a soup, the average of epochs {', '.join(map(str, facts.soup))},"
    most, count = said_most(outcomes)
    share = count / measured
    loud = f"One caption is said of {percent(share, 0)} of the pictures: "
    alarm = tag("p", tag("b", loud, "“", quote(most), "”."))
    words = (
        f"Measured with the weights of {whose} on {origin}, which also chose the epoch: that "
        "flatters a little. Scores depend on the data; compare them on the same pictures alone."
    )
    shown = [alarm] if share >= SAME and measured > 1 else []
    return join(*shown, tag("p", words, class_="soft small"))


def learning(facts: RunFacts, epochs: Sequence[Mapping[str, Any]]) -> Html:
    """Curves over epochs, and the numbers behind them."""
    at = [int(event["epoch"]) for event in epochs]

    def curve(label: str, style: str, *names: str) -> Curve:
        return Curve(label, style, [of(event, *names) for event in epochs])

    charts = {
        "Loss": [curve("training", "train", "train_loss"), curve("validation", "val", "val_loss")],
        "Loss of captions": [
            curve("other pictures", "train", "val_loss_shuffled"),
            curve("own pictures", "val", *LOSSES),
        ],
        "CIDEr": [curve("validation", "val", "val_cider")],
        "BLEU-4": [curve("validation", "val", "val_bleu4")],
    }
    if facts.config.training.classifies:
        charts["Top-1"] = [curve("validation", "val", "val_top1")]
    figures = [
        tag(
            "figure",
            curves(title, at, lines, best=facts.epoch, unit="%" if title == "Top-1" else ""),
        )
        for title, lines in charts.items()
    ]
    return tag(
        "section",
        tag("h2", "How it learned"),
        tag("div", *figures, class_="pair"),
        tag(
            "p",
            f"The dotted line marks epoch {facts.epoch}, the best. Where the loss of captions is "
            "the same with other pictures as with their own, the decoder does not look.",
            class_="soft small",
        ),
        tag("details", tag("summary", "All epochs in numbers"), epoch_table(facts, epochs)),
    )


def epoch_table(facts: RunFacts, epochs: Sequence[Mapping[str, Any]]) -> Html:
    """A row an epoch."""
    shares = ("val_top1", "val_distinct") if facts.config.training.classifies else ("val_distinct",)
    heads = {"val_top1": "top-1", "val_distinct": "different"}
    names = ["epoch", "training loss", "validation loss", "captions", "other pictures"]
    names += ["BLEU-4", "ROUGE-L", "CIDEr", *(heads[share] for share in shares)]
    rows = [
        numbers(
            event["epoch"],
            f"{event['train_loss']:.4f}",
            f"{event['val_loss']:.4f}",
            f"{of(event, *LOSSES):.4f}",
            f"{event['val_loss_shuffled']:.4f}",
            *(f"{event[name]:.3f}" for name in ("val_bleu4", "val_rouge_l", "val_cider")),
            *(percent(event[share], 1) for share in shares),
            f"{event['lr']:.2e}",
            f"{event['images_per_second']:,.0f}",
        )
        for event in epochs
    ]
    return table([tag("th", text, class_="n") for text in (*names, "lr", "pictures/s")], rows)


def of(event: Mapping[str, Any], *names: str) -> float:
    """The first of these numbers that an epoch has."""
    return float(next(event[name] for name in names if name in event))


def class_findings(answers: Outcomes, classes: Sequence[str]) -> tuple[Html, ...]:
    """What the head for classes gets right and wrong."""
    scores = summarise(answers, classes)
    low, high = scores["top1_interval"]
    line = (
        f"Top-1 of the same pictures is {percent(scores['top1'])} (95% interval {percent(low)} to "
        f"{percent(high)}), macro F1 {percent(scores['macro_f1'])}, balanced accuracy "
        f"{percent(scores['balanced_accuracy'])}, loss {scores['loss']:.4f}."
    )
    return (
        tag("section", tag("h2", "The head for classes"), tag("p", line)),
        class_table(scores["per_class"]),
        confusions(answers, scores["per_class"]),
        calibration(scores, float(answers.confidences.mean())),
    )


def usage(folder: Path) -> Html:
    """How to ask the network, measure it elsewhere, and train it again."""
    where, config = quoted(folder), quoted(folder / "config.yaml")
    commands = {
        "Describe pictures:": f"vit predict {where} IMAGE...",
        "With a wider search:": f"vit predict {where} IMAGE... --beams 4",
        "Measure it on other pictures with captions:": f"vit evaluate {where} DATA",
        "Train it again:": f"vit train --config {config} --out ANOTHER_FOLDER",
        "From Python:": f"import vit; vit.Predictor({str(folder)!r})(['picture.jpg'])",
    }
    lines = [
        join(tag("p", title), tag("pre", tag("code", command)))
        for title, command in commands.items()
    ]
    return tag("section", tag("h2", "Use it"), *lines)
