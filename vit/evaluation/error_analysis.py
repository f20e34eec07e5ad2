"""Error analysis of a classifier: scores by class, confused pairs, calibration, worst images."""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.data.archives import relative
from vit.data.image_io import read_image
from vit.errors import BadImage
from vit.evaluation.charts import Confusion, heat_table
from vit.evaluation.classification_metrics import Outcomes
from vit.evaluation.html_page import Html, called, numbers, table, tag
from vit.text import percent, plural

MOST_MISTAKES = 24
MOST_PAIRS = 30
MOST_ROWS = 2000
FEW_CLASSES = 20  # a table of all of them is read at a glance
THUMBNAIL, TINY = 240, 96  # pixels


def class_table(rows: Sequence[Mapping[str, Any]]) -> Html:
    """Scores of each class; where there are many, the worst first and most of them folded."""
    many = len(rows) > FEW_CLASSES
    order = sorted(rows, key=lambda row: (not row["count"], row["f1"])) if many else list(rows)
    head = [tag("th", "class")]
    head += [tag("th", text, class_="n") for text in ("images", "precision", "recall", "F1")]
    cells = [_class_row(row) for row in order[:MOST_ROWS]]
    parts = [table(head, cells[:FEW_CLASSES], class_="wide")]
    if many:
        rest = len(rows) - FEW_CLASSES
        folded = table(head, cells[FEW_CLASSES:], class_="wide")
        parts.append(tag("details", tag("summary", f"The other {rest:,}"), folded))
    if len(rows) > MOST_ROWS:
        left = f"{len(rows) - MOST_ROWS:,} more are left out here: vit evaluate --json has all."
        parts.append(tag("p", left, class_="soft small"))
    title = f"Classes, the worst of {len(rows):,} first" if many else "Classes"
    return tag("section", tag("h2", title), *parts)


def _class_row(row: Mapping[str, Any]) -> list[Html]:
    name = tag("th", called(row["label"]), class_="name")
    if not row["count"]:
        return [name, *numbers(0, *3 * ["-"])]
    f1 = tag(
        "td",
        percent(row["f1"], 1),
        class_="n bar",
        style=f"background-size: {100 * row['f1']:.1f}% 100%",
    )
    shares = numbers(f"{row['count']:,}", percent(row["precision"], 1), percent(row["recall"], 1))
    return [name, *shares, f1]


def confusion_counts(outcomes: Outcomes) -> Confusion:
    """How many images there are of each (true class, answer) that occurs."""
    return Counter(zip(outcomes.labels.tolist(), outcomes.answers.tolist(), strict=True))


def confusions(outcomes: Outcomes, rows: Sequence[Mapping[str, Any]]) -> Html:
    """Which classes are taken for which: all of them, or the most frequent pairs."""
    classes = [row["label"] for row in rows]
    counts = confusion_counts(outcomes)
    if len(classes) <= FEW_CLASSES:
        hint = (
            "A row is a true class, a column an answer; blue is right, orange is wrong, and the "
            "darker a cell, the larger its share of the row."
        )
        shown = [heat_table(counts, classes), tag("p", hint, class_="soft small")]
    else:
        shown = _worst_pairs(counts, rows)
    return tag("section", tag("h2", "What is taken for what"), *shown)


def _worst_pairs(counts: Confusion, rows: Sequence[Mapping[str, Any]]) -> list[Html]:
    wrong = {pair: count for pair, count in counts.items() if pair[0] != pair[1]}
    if not wrong:
        return [tag("p", "Nothing: every answer is right.")]
    head = [tag("th", "true class"), tag("th", "answer")]
    head += [tag("th", text, class_="n") for text in ("images", "of the class")]
    cells = []
    for label, answer in sorted(wrong, key=lambda pair: (-wrong[pair], pair))[:MOST_PAIRS]:
        count, true, said = wrong[label, answer], rows[label], rows[answer]
        share = percent(count / true["count"], 1)
        names = [tag("td", called(row["label"]), class_="name") for row in (true, said)]
        cells.append([*names, *numbers(f"{count:,}", share)])
    title = (
        f"The {min(len(wrong), MOST_PAIRS)} most frequent of {plural(len(wrong), 'wrong pair')}."
    )
    return [tag("p", title, class_="soft small"), table(head, cells, class_="wide")]


def calibration(scores: Mapping[str, Any], confidence: float) -> Html:
    """Whether a score means what it says.

    Args:
        scores: As `summarize` gives them.
        confidence: Mean probability of the answers.
    """
    gap = confidence - scores["top1"]
    if scores["ece"] < 0.02:
        verdict = "A score can be read as the probability of being right."
    elif gap > scores["ece"] / 2:
        verdict = "The network is too sure of itself: read its scores as upper bounds."
    elif -gap > scores["ece"] / 2:
        verdict = "The network is more often right than its scores say: it is too careful."
    else:
        verdict = "Some scores are too high and others too low; on average they even out."
    return tag(
        "section",
        tag("h2", "Can its scores be trusted?"),
        tag(
            "p",
            f"The mean score of an answer is {percent(confidence, 1)}, and "
            f"{percent(scores['top1'], 1)} of the answers are right. Scores and accuracy differ by "
            f"{100 * scores['ece']:.1f} points on average (expected calibration error "
            f"{scores['ece']:.4f}, 15 bins). {verdict}",
        ),
    )


def mistakes(outcomes: Outcomes, paths: Sequence[str], classes: Sequence[str], root: Path) -> Html:
    """The wrong answers that the network was surest of, as images.

    Args:
        outcomes: Of all images.
        paths: Their files; those that cannot be read are passed over.
        classes: Names of classes.
        root: Folder from which the files are named.
    """
    surest = outcomes.confidences.argsort(descending=True, stable=True).tolist()
    wrong = [at for at in surest if outcomes.ranks[at] > 0]
    figures: list[Html] = []
    for at in wrong:
        if len(figures) == MOST_MISTAKES:
            break
        true, said = (classes[int(i[at])] for i in (outcomes.labels, outcomes.answers))
        image = thumbnail(paths[at], f"{true}, taken for {said}")
        if image is None:
            continue
        caption = tag(
            "figcaption",
            tag("b", called(said)),
            f" {percent(float(outcomes.confidences[at]), 1)}",
            tag("br"),
            "is ",
            called(true),
            f" ({percent(float(outcomes.likelihoods[at]), 1)})",
            tag("br"),
            tag("span", called(relative(paths[at], root)), class_="soft"),
        )
        figures.append(tag("figure", image, caption))
    if not wrong:
        lead = f"None: all of {plural(len(outcomes), 'answer')} are right."
    else:
        some = f"these are the {len(figures)} surest" if len(figures) < len(wrong) else "all shown"
        lead = (
            f"{len(wrong):,} of {plural(len(outcomes), 'answer')} are wrong, {some}: the answer "
            "with its score, then what the data say. Look for wrong labels among them first."
        )
    wall = [tag("div", *figures, class_="wall")] if figures else []
    return tag("section", tag("h2", "The surest mistakes"), tag("p", lead), *wall)


def thumbnail(path: str, words: str) -> Html | None:
    """A small copy of the image in the file `path`, inside the page; None where it is unreadable.

    Nothing but its pixels is copied: no place, no comment, no name of a camera.
    """
    try:
        image = read_image(path)
        image.thumbnail((THUMBNAIL, THUMBNAIL))
    except (BadImage, OSError, ValueError, MemoryError):
        return None
    image.info = {}
    content = io.BytesIO()
    image.save(content, "JPEG", quality=88)
    source = "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode("ascii")
    tiny = "tiny" if max(image.size) < TINY else None
    return tag(
        "img", src=Html(source), alt=words, class_=tiny, width=image.width, height=image.height
    )
