"""report.html of a captioning run: settings, curves, scores, and captions beside their images.

Shows whether the decoder uses the image, the most frequent captions, the best and the worst ones,
and the class report too if the network has a classification head.
"""

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.data.archives import relative
from vit.errors import printable, quoted
from vit.evaluation.caption_metrics import caption_scores, plain, rouge_l, words
from vit.evaluation.charts import Curve, curves
from vit.evaluation.classification_metrics import Outcomes, summarize
from vit.evaluation.error_analysis import calibration, class_table, confusions, thumbnail
from vit.evaluation.expert_usage import experts
from vit.evaluation.html_page import Html, called, document, hero, join, numbers, table, tag
from vit.evaluation.run_report import (
    PRIVACY,
    REPORT_FILE,
    RunFacts,
    settings,
    unreadable,
)
from vit.text import format_count, format_duration, percent, plural
from vit.version import __version__
from vit.weights.safetensors_io import write_text

MOST_SAID = 12
EXAMPLES = 8  # of the best, of the worst, and of all
MOST_REFERENCES = 3
LITTLE = 0.1  # share of the loss by which other images are worse
LONGEST = 300  # characters of a caption that are shown
WALL = "grid-template-columns: repeat(auto-fill, minmax(min(100%, 12.5rem), 1fr))"
MEANINGS = {
    "cider": "CIDEr-D, 0 to 10: likeness to the references in what few other images have",
    "bleu1": "BLEU-1: share of right words, less where captions are too short",
    "bleu2": "BLEU-2: the same of words and pairs",
    "bleu3": "BLEU-3: up to three words in a row",
    "bleu4": "BLEU-4: up to four words in a row",
    "rouge_l": "ROUGE-L: the longest common run of words, gaps allowed",
    "chrf": "chrF2: runs of up to six characters, for any language",
    "exact": "equal to a reference, word for word",
    "distinct": "different captions, over all",
}


@dataclass(frozen=True, kw_only=True)
class CaptionedImage:
    """What was found of one image.

    Args:
        path: Its file.
        caption: What the network wrote.
        score: Sum of the log probabilities of the caption's tokens, the end included.
        ended: Whether the network ended it.
        references: What people wrote, at least one.
        loss: Mean loss of a token of the first reference.
    """

    path: str
    caption: str
    score: float
    ended: bool
    references: tuple[str, ...]
    loss: float


@dataclass(frozen=True, kw_only=True)
class CaptionOutcomes:
    """What was found of all images that were measured.

    Args:
        images: At least one.
        loss: Mean loss of a token of the first references.
        other_loss: The same captions, each against another image.
    """

    images: Sequence[CaptionedImage]
    loss: float
    shuffled_loss: float


def looking(outcomes: CaptionOutcomes, least: float) -> Html:
    """Whether the decoder looks at the image, in words.

    Args:
        outcomes: Of the images.
        least: Share of the loss by which other images must be worse for a decoder that looks.
    """
    loss, other = outcomes.loss, outcomes.shuffled_loss
    gap = (other - loss) / loss if loss else math.inf
    numbers_said = f"A token of a true caption costs {loss:.4f} beside its own image and "
    numbers_said += f"{other:.4f} beside another"
    if len(outcomes.images) == 1:
        verdict = "One image alone cannot tell: there is no other to compare it with."
    elif gap <= least:
        verdict = (
            f"No. {numbers_said}, as good as the same: it writes what captions usually say, "
            "whatever the image shows. Train for longer, or with --caption-dropout 0.3, which "
            "hides words; start from pretrained weights (--weights); or give it more images."
        )
    else:
        answer = "Yes" if gap > LITTLE else "A little"
        verdict = (
            f"{answer}. {numbers_said}, {gap:.1%} more: with its own image in view, such a "
            f"token is {math.exp(min(other - loss, 50)):.3g} times as probable. "
            "A decoder that does not look has two equal losses."
        )
    return tag("section", tag("h2", "Does it look at the image?"), tag("p", verdict))


def said_most(outcomes: CaptionOutcomes) -> tuple[str, int]:
    """The most frequent caption, and of how many images it is said."""
    return ranked(plain(one.caption) for one in outcomes.images)[0]


def ranked(texts: Iterable[str]) -> list[tuple[str, int]]:
    """How often each of `texts` occurs, the most frequent first."""
    return sorted(Counter(texts).items(), key=lambda item: (-item[1], item[0]))


def most_said(outcomes: CaptionOutcomes) -> Html:
    """How often each of the most frequent captions is said, and how often people say theirs."""
    total = len(outcomes.images)
    said = ranked(plain(one.caption) for one in outcomes.images)
    true = ranked(plain(one.references[0]) for one in outcomes.images)
    lead = (
        f"{plural(len(said), 'different caption')} for {plural(total, 'image')} "
        f"({percent(len(said) / total, 1)}); the first references of the same images have "
        f"{len(true):,}. The most frequent caption is said of "
        f"{percent(said[0][1] / total, 1)} of the images, the most frequent reference of "
        f"{percent(true[0][1] / total, 1)}."
    )
    if len(said) == 1 < total:
        lead = f"It says the same of all {plural(total, 'image')}."
    head = [tag("th", "caption"), *(tag("th", t, class_="n") for t in ("images", "share"))]
    rows = []
    for caption, count in said[:MOST_SAID]:
        style = f"background-size: {100 * count / total:.1f}% 100%"
        told = tag("td", quote(caption), class_="bar", style=style)
        rows.append([told, *numbers(f"{count:,}", percent(count / total, 1))])
    body = table(head, rows, class_="wide")
    return tag("section", tag("h2", "What it says most"), tag("p", lead), body)


def metrics(scores: Mapping[str, float], outcomes: CaptionOutcomes) -> Html:
    """Every score, and the lengths of captions beside those of references."""
    head = [tag("th", "score"), tag("th", "value", class_="n"), tag("th", "meaning")]
    rows = [
        [tag("th", tag("code", name)), *numbers(f"{scores[name]:.4f}"), tag("td", meaning)]
        for name, meaning in MEANINGS.items()
    ]
    told = [words(one.caption) for one in outcomes.images]
    true = [words(text) for one in outcomes.images for text in one.references]
    heads = ("number", "mean", "shortest", "median", "longest", "different words")
    length_head = [tag("th", "words of"), *(tag("th", text, class_="n") for text in heads)]
    lengths = [_lengths("captions", told), _lengths("references", true)]
    full = sum(not one.ended for one in outcomes.images)
    note = f"{plural(full, 'caption')} took all tokens that the decoder may write; some may be cut."
    return tag(
        "section",
        tag("h2", "How good the captions are"),
        table(head, rows, class_="wide"),
        tag("h2", "How long they are"),
        table(length_head, lengths, class_="wide"),
        *([tag("p", note, class_="soft small")] if full else []),
    )


def _lengths(name: str, captions: Sequence[Sequence[str]]) -> list[Html]:
    counts = [len(caption) for caption in captions]
    known = len({word for caption in captions for word in caption})
    cells = numbers(
        f"{len(counts):,}",
        f"{statistics.fmean(counts):.2f}",
        f"{min(counts):,}",
        f"{statistics.median(counts):g}",
        f"{max(counts):,}",
        f"{known:,}",
    )
    return [tag("th", name), *cells]


def examples(outcomes: CaptionOutcomes, root: Path, seed: int) -> Html:
    """The best, the worst and some of all images with their captions.

    Args:
        outcomes: Of the images.
        root: Folder from which the files are named.
        seed: Decides which of all are shown.
    """
    fits = {id(one): _fit(one) for one in outcomes.images}
    order = sorted(outcomes.images, key=lambda one: (-fits[id(one)], one.loss, one.path))
    half = min(EXAMPLES, len(order) // 2)
    drawn = random.Random(seed).sample(order, min(EXAMPLES, len(order)))
    walls = {
        "Any": drawn,
        "The best": order[:half],
        "The worst": order[::-1][:half],
    }
    parts = [_wall(title, chosen, fits, root) for title, chosen in walls.items() if chosen]
    lead = (
        "The caption, then what people wrote. Any: drawn by chance. The best and the worst: by "
        "ROUGE-L with their references, of equal ones by the loss of the first reference; a true "
        "caption in other words looks bad here. The score is the caption's log probability."
    )
    return tag("section", tag("h2", "Examples"), tag("p", lead), *parts)


def _fit(one: CaptionedImage) -> float:
    return rouge_l(words(one.caption), [words(text) for text in one.references])


def _wall(
    title: str, chosen: Sequence[CaptionedImage], fits: Mapping[int, float], root: Path
) -> Html:
    figures = []
    for one in chosen:
        image = thumbnail(one.path, shortened(one.caption))
        if image is None:
            continue
        told = [own_line(quote(text)) for text in one.references[:MOST_REFERENCES]]
        if len(one.references) > MOST_REFERENCES:
            told.append(own_line(f"and {len(one.references) - MOST_REFERENCES} more"))
        caption = tag(
            "figcaption",
            tag("b", quote(one.caption)),
            tag("br"),
            f"ROUGE-L {fits[id(one)]:.2f}, score {one.score:.2f}",
            *told,
            tag("br"),
            tag("span", called(relative(one.path, root)), class_="soft"),
        )
        figures.append(tag("figure", image, caption))
    wall = tag("div", *figures, class_="wall", style=WALL)
    return tag("div", tag("h3", title), wall if figures else tag("p", "No image can be read."))


def own_line(text: object) -> Html:
    """`text` on a line of its own, after what was before."""
    return tag("span", tag("br"), text, class_="soft")


def shortened(text: str) -> str:
    """A caption of any length, cut where it is very long, on one line."""
    shown = printable(" ".join(text.split()))
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} ..."


def quote(text: str) -> Html:
    """A caption that anybody wrote; its writing direction does not reach its neighbours."""
    return tag("bdi", shortened(text) or "(nothing)")


SAME = 0.2
"""Share of the images of which one caption is said, from which the headline warns."""
LOSSES = ("val_caption_loss", "val_loss")
"""The loss of captions: the first is there where classes are learned too."""


@dataclass(frozen=True, kw_only=True)
class CaptionFacts:
    """What a report tells of the words beside `RunFacts`.

    Args:
        captions: Number of training captions.
        mean_tokens: Mean number of tokens of one, the end included.
        val_images: Validation images there are; maybe only some of them are measured.
        least_gap: Share of the loss by which other images must be worse for a decoder that looks.
    """

    captions: int
    mean_tokens: float
    val_images: int
    min_shuffled_gap: float


def write_caption_report(
    folder: Path,
    *,
    facts: RunFacts,
    caption_facts: CaptionFacts,
    events: Sequence[Mapping[str, Any]],
    outcomes: CaptionOutcomes,
    class_outcomes: Outcomes | None,
) -> None:
    """Write `folder`/report.html.

    Args:
        folder: The run folder.
        facts: What was trained.
        word_facts: On which words.
        events: Lines of metrics.jsonl, with at least one epoch.
        outcomes: Captions of the validation images that were measured, at least one.
        class_outcomes: Classes of the same images, where the network has a head.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    images = outcomes.images
    scores = caption_scores([one.caption for one in images], [one.references for one in images])
    epochs = [event for event in events if event["event"] == "epoch"]
    name = printable(folder.resolve().name or folder)
    sections = [
        tag("h1", called(name)),
        trained(facts, caption_facts, epochs),
        headline(facts, scores, outcomes, epochs, class_outcomes),
        caution(facts, caption_facts, outcomes),
        looking(outcomes, caption_facts.min_shuffled_gap),
        most_said(outcomes),
        learning(facts, epochs),
        experts(epochs, facts.best_epoch),
        metrics(scores, outcomes),
        examples(outcomes, facts.root, facts.config.training.seed),
        *(() if class_outcomes is None else class_findings(class_outcomes, facts.classes)),
        unreadable(facts),
        settings(facts.config),
        usage(folder),
        tag("footer", f"Written by vit {__version__}. ", PRIVACY, class_="soft small"),
    ]
    write_text(folder / REPORT_FILE, document(f"{name}: CIDEr {scores['cider']:.3f}", *sections))


def trained(
    facts: RunFacts, caption_facts: CaptionFacts, epochs: Sequence[Mapping[str, Any]]
) -> Html:
    """The network, the data, the words and the time it took, in a few sentences."""
    model, training, decoder = facts.config.model, facts.config.training, facts.config.decoder
    writer = decoder.block_config(model)
    seconds = sum(event["seconds"] for event in epochs)
    return tag(
        "p",
        f"Captioner of {format_count(facts.parameters)} parameters (preset {training.model}): "
        f"images of {model.image_size} px in patches of {model.patch_size}; an encoder of "
        f"{plural(model.depth, 'block')} of width {model.dim} with "
        f"{plural(model.num_heads, 'head')}, and a decoder of {plural(writer.depth, 'block')} of "
        f"width {writer.dim} with {plural(writer.num_heads, 'head')}. Trained on "
        f"{plural(facts.train_images, 'image')} of ",
        tag("code", called(facts.config.data.data)),
        f" with {plural(caption_facts.captions, 'caption')} of {caption_facts.mean_tokens:.1f} "
        f"tokens on average, cut into {decoder.vocab_size or 0:,} different tokens by the "
        "tokenizer ",
        tag("code", called(decoder.tokenizer)),
        f", for {plural(len(epochs), 'epoch')}, {format_duration(seconds)} on {facts.machine}.",
        class_="soft",
    )


def headline(
    facts: RunFacts,
    scores: Mapping[str, float],
    outcomes: CaptionOutcomes,
    epochs: Sequence[Mapping[str, Any]],
    class_outcomes: Outcomes | None,
) -> Html:
    """The numbers that count."""
    right = None if class_outcomes is None else float((class_outcomes.ranks == 0).double().mean())
    tiles = {
        f"best of {plural(len(epochs), 'epoch')}": facts.best_epoch,
        **({"soup of epochs": ", ".join(map(str, facts.soup))} if facts.soup else {}),
        "images measured": f"{len(outcomes.images):,}",
        "BLEU-4": f"{scores['bleu4']:.3f}",
        **({"exact": percent(scores["exact"])} if scores["exact"] else {}),
        "loss of a token": f"{outcomes.loss:.4f}",
        "with other images": f"{outcomes.shuffled_loss:.4f}",
        "different captions": percent(scores["distinct"], 1),
        **({} if right is None else {"top-1": percent(right)}),
    }
    words = "validation CIDEr, from 0 to 10; the likeliest word each time"
    return hero(f"{scores['cider']:.3f}", words, tiles)


def caution(facts: RunFacts, caption_facts: CaptionFacts, outcomes: CaptionOutcomes) -> Html:
    """What the headline's numbers are worth, and aloud where one caption does for many images."""
    measured, there = len(outcomes.images), caption_facts.val_images
    few = f"{measured:,} (evenly spread) of " if there > measured else ""
    origin = (
        f"{few}the images that vit held out of the data (seed {facts.config.training.seed}; "
        "split.json names them)"
        if facts.val_held_out
        else f"{few}the data's own validation images"
    )
    whose = f"epoch {facts.best_epoch}"
    if facts.soup:
        whose = f"a soup, the average of epochs {', '.join(map(str, facts.soup))},"
    most, count = said_most(outcomes)
    share = count / measured
    loud = f"One caption is said of {percent(share, 0)} of the images: "
    alarm = tag("p", tag("b", loud, "“", quote(most), "”."))
    words = (
        f"Measured with the weights of {whose} on {origin}, which also chose the epoch: that "
        "flatters a little. Scores depend on the data; compare them on the same images alone."
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
            curve("other images", "train", "val_loss_shuffled"),
            curve("own images", "val", *LOSSES),
        ],
        "CIDEr": [curve("validation", "val", "val_cider")],
        "BLEU-4": [curve("validation", "val", "val_bleu4")],
    }
    if facts.config.training.classifies:
        charts["Top-1"] = [curve("validation", "val", "val_top1")]
    figures = [
        tag(
            "figure",
            curves(title, at, lines, best=facts.best_epoch, unit="%" if title == "Top-1" else ""),
        )
        for title, lines in charts.items()
    ]
    return tag(
        "section",
        tag("h2", "How it learned"),
        tag("div", *figures, class_="pair"),
        tag(
            "p",
            f"The dotted line marks epoch {facts.best_epoch}, the best. Where the loss of captions "
            "is the same with other images as with their own, the decoder does not look.",
            class_="soft small",
        ),
        tag("details", tag("summary", "All epochs in numbers"), epoch_table(facts, epochs)),
    )


def epoch_table(facts: RunFacts, epochs: Sequence[Mapping[str, Any]]) -> Html:
    """A row an epoch."""
    shares = ("val_top1", "val_distinct") if facts.config.training.classifies else ("val_distinct",)
    heads = {"val_top1": "top-1", "val_distinct": "different"}
    names = ["epoch", "training loss", "validation loss", "captions", "other images"]
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
    return table([tag("th", text, class_="n") for text in (*names, "lr", "images/s")], rows)


def of(event: Mapping[str, Any], *names: str) -> float:
    """The first of these numbers that an epoch has."""
    return float(next(event[name] for name in names if name in event))


def class_findings(class_outcomes: Outcomes, classes: Sequence[str]) -> tuple[Html, ...]:
    """What the head for classes gets right and wrong."""
    scores = summarize(class_outcomes, classes)
    low, high = scores["top1_interval"]
    line = (
        f"Top-1 of the same images is {percent(scores['top1'])} (95% interval {percent(low)} to "
        f"{percent(high)}), macro F1 {percent(scores['macro_f1'])}, balanced accuracy "
        f"{percent(scores['balanced_accuracy'])}, loss {scores['loss']:.4f}."
    )
    return (
        tag("section", tag("h2", "The head for classes"), tag("p", line)),
        class_table(scores["per_class"]),
        confusions(class_outcomes, scores["per_class"]),
        calibration(scores, float(class_outcomes.confidences.mean())),
    )


def usage(folder: Path) -> Html:
    """How to ask the network, measure it elsewhere, and train it again."""
    where, config = quoted(folder), quoted(folder / "config.yaml")
    commands = {
        "Describe images:": f"vit predict {where} IMAGE...",
        "With a wider search:": f"vit predict {where} IMAGE... --beams 4",
        "Measure it on other images with captions:": f"vit evaluate {where} DATA",
        "Train it again:": f"vit train --config {config} --out ANOTHER_FOLDER",
        "From Python:": f"import vit; vit.Predictor({str(folder)!r})(['image.jpg'])",
    }
    lines = [
        join(tag("p", title), tag("pre", tag("code", command)))
        for title, command in commands.items()
    ]
    return tag("section", tag("h2", "Use it"), *lines)
