"""What a captioner says: what it says most, how long, and picture by picture."""

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vit.data.containers import relative
from vit.errors import printable
from vit.evaluation.captions import plain, rouge_l
from vit.evaluation.findings import thumbnail
from vit.evaluation.page import Html, called, numbers, percent, plural, table, tag
from vit.evaluation.words import words

MOST_SAID = 12
EXAMPLES = 8  # of the best, of the worst, and of all
MOST_REFERENCES = 3
LITTLE = 0.1  # share of the loss by which other pictures are worse
LONGEST = 300  # characters of a caption that are shown
WALL = "grid-template-columns: repeat(auto-fill, minmax(min(100%, 12.5rem), 1fr))"
MEANINGS = {
    "cider": "CIDEr-D, 0 to 10: likeness to the references in what few other pictures have",
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
class Captioned:
    """What was found of one picture.

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
    """What was found of all pictures that were measured.

    Args:
        pictures: At least one.
        loss: Mean loss of a token of the first references.
        other_loss: The same captions, each against another picture.
    """

    pictures: Sequence[Captioned]
    loss: float
    other_loss: float


def looking(outcomes: CaptionOutcomes, least: float) -> Html:
    """Whether the decoder looks at the picture, in words.

    Args:
        outcomes: Of the pictures.
        least: Share of the loss by which other pictures must be worse for a decoder that looks.
    """
    loss, other = outcomes.loss, outcomes.other_loss
    gap = (other - loss) / loss if loss else math.inf
    numbers_said = f"A token of a true caption costs {loss:.4f} beside its own picture and "
    numbers_said += f"{other:.4f} beside another"
    if len(outcomes.pictures) == 1:
        verdict = "One picture alone cannot tell: there is no other to compare it with."
    elif gap <= least:
        verdict = (
            f"No. {numbers_said}, as good as the same: it writes what captions usually say, "
            "whatever the picture shows. Train for longer, or with --caption-dropout 0.3, which "
            "hides words; start from pretrained weights (--weights); or give it more pictures."
        )
    else:
        answer = "Yes" if gap > LITTLE else "A little"
        verdict = (
            f"{answer}. {numbers_said}, {gap:.1%} more: with its own picture in view, such a "
            f"token is {math.exp(min(other - loss, 50)):.3g} times as probable. "
            "A decoder that does not look has two equal losses."
        )
    return tag("section", tag("h2", "Does it look at the picture?"), tag("p", verdict))


def said_most(outcomes: CaptionOutcomes) -> tuple[str, int]:
    """The most frequent caption, and of how many pictures it is said."""
    return ranked(plain(one.caption) for one in outcomes.pictures)[0]


def ranked(texts: Iterable[str]) -> list[tuple[str, int]]:
    """How often each of `texts` occurs, the most frequent first."""
    return sorted(Counter(texts).items(), key=lambda item: (-item[1], item[0]))


def most_said(outcomes: CaptionOutcomes) -> Html:
    """How often each of the most frequent captions is said, and how often people say theirs."""
    total = len(outcomes.pictures)
    said = ranked(plain(one.caption) for one in outcomes.pictures)
    true = ranked(plain(one.references[0]) for one in outcomes.pictures)
    lead = (
        f"{plural(len(said), 'different caption')} for {plural(total, 'picture')} "
        f"({percent(len(said) / total, 1)}); the first references of the same pictures have "
        f"{len(true):,}. The most frequent caption is said of "
        f"{percent(said[0][1] / total, 1)} of the pictures, the most frequent reference of "
        f"{percent(true[0][1] / total, 1)}."
    )
    if len(said) == 1 < total:
        lead = f"It says the same of all {plural(total, 'picture')}."
    head = [tag("th", "caption"), *(tag("th", t, class_="n") for t in ("pictures", "share"))]
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
    told = [words(one.caption) for one in outcomes.pictures]
    true = [words(text) for one in outcomes.pictures for text in one.references]
    heads = ("number", "mean", "shortest", "median", "longest", "different words")
    length_head = [tag("th", "words of"), *(tag("th", text, class_="n") for text in heads)]
    lengths = [_lengths("captions", told), _lengths("references", true)]
    full = sum(not one.ended for one in outcomes.pictures)
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
    """The best, the worst and some of all pictures with their captions.

    Args:
        outcomes: Of the pictures.
        root: Folder from which the files are named.
        seed: Decides which of all are shown.
    """
    fits = {id(one): _fit(one) for one in outcomes.pictures}
    order = sorted(outcomes.pictures, key=lambda one: (-fits[id(one)], one.loss, one.path))
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


def _fit(one: Captioned) -> float:
    return rouge_l(words(one.caption), [words(text) for text in one.references])


def _wall(title: str, chosen: Sequence[Captioned], fits: Mapping[int, float], root: Path) -> Html:
    figures = []
    for one in chosen:
        picture = thumbnail(one.path, shortened(one.caption))
        if picture is None:
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
        figures.append(tag("figure", picture, caption))
    wall = tag("div", *figures, class_="wall", style=WALL)
    return tag("div", tag("h3", title), wall if figures else tag("p", "No picture can be read."))


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
