"""report.html of a captioning run: scores, frequent captions, and captions beside their images.

Shows whether the decoder uses the image, and the findings of the class report too if the network
has a classification head.
"""

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vit.evaluation.caption_metrics import caption_scores, ignores_image, normalize, rouge_l, words
from vit.evaluation.charts import Chart
from vit.evaluation.classification_metrics import Outcomes
from vit.evaluation.classification_page import class_findings
from vit.evaluation.html_page import Thumbnail
from vit.evaluation.run_report import RunFacts, epoch_chart, write_run_report

MAX_EXAMPLES = 8
"""Examples of the best, of the worst, and of all captions."""


@dataclass(frozen=True, kw_only=True)
class CaptionedImage:
    """The caption of one image, with at least one reference."""

    path: str
    caption: str
    score: float
    ended: bool
    references: tuple[str, ...]
    loss: float


@dataclass(frozen=True, kw_only=True)
class CaptionOutcomes:
    """Captions of all images that were measured."""

    images: Sequence[CaptionedImage]
    loss: float
    shuffled_loss: float


@dataclass(frozen=True, kw_only=True)
class CaptionFacts:
    """Facts about the captions of a run; maybe only some of the `val_images` are measured."""

    captions: int
    mean_tokens: float
    val_images: int
    advice: str


def write_caption_report(
    facts: RunFacts,
    caption_facts: CaptionFacts,
    outcomes: CaptionOutcomes,
    class_outcomes: Outcomes | None,
) -> None:
    """Write report.html of a captioner, from the captions of at least one image."""
    images, loss, shuffled = outcomes.images, outcomes.loss, outcomes.shuffled_loss
    scores = caption_scores([one.caption for one in images], [one.references for one in images])
    write_run_report(
        facts,
        "caption_report.html.j2",
        charts=caption_charts(facts),
        decoder=facts.config.decoder.block_config(facts.config.model),
        caption_facts=caption_facts,
        outcomes=outcomes,
        ignores_image=ignores_image(loss, shuffled, scores["exact"]),
        loss_gap=(shuffled - loss) / loss if loss else math.inf,
        token_ratio=math.exp(min(shuffled - loss, 50)),
        caption_scores=scores,
        captions=ranked(one.caption for one in images),
        references=ranked(one.references[0] for one in images),
        lengths=[
            ("captions", count_words(one.caption for one in images)),
            ("references", count_words(text for one in images for text in one.references)),
        ],
        unended=sum(not one.ended for one in images),
        examples=choose_examples(images, facts),
        findings=None if class_outcomes is None else class_findings(class_outcomes, facts.classes),
    )


def caption_charts(facts: RunFacts) -> list[Chart]:
    """Charts of the losses and of the scores over epochs."""
    curves = {
        "Loss": {"training": ["train_loss"], "validation": ["val_loss"]},
        "Loss of captions": {
            "other images": ["val_loss_shuffled"],
            # the first is there where classes are learned too
            "own images": ["val_caption_loss", "val_loss"],
        },
        "CIDEr": {"validation": ["val_cider"]},
        "BLEU-4": {"validation": ["val_bleu4"]},
    }
    charts = [epoch_chart(facts, *chart) for chart in curves.items()]
    if facts.config.training.classifies:
        charts.append(epoch_chart(facts, "Top-1", {"validation": ["val_top1"]}, "%"))
    return charts


def ranked(captions: Iterable[str]) -> list[tuple[str, int]]:
    """Each of `captions` with its number, the most frequent first; white space does not matter."""
    counts = Counter(map(normalize, captions))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def count_words(captions: Iterable[str]) -> dict[str, float]:
    """The number of captions, their lengths in words, and the number of different words."""
    found = [words(caption) for caption in captions]
    lengths = [len(caption) for caption in found]
    return {
        "count": len(lengths),
        "mean": statistics.fmean(lengths),
        "min": min(lengths),
        "median": statistics.median(lengths),
        "max": max(lengths),
        "vocabulary": len({word for caption in found for word in caption}),
    }


def choose_examples(
    images: Sequence[CaptionedImage], facts: RunFacts
) -> dict[str, list[tuple[Thumbnail | None, CaptionedImage, float]]]:
    """Examples with their ROUGE-L by title: some drawn by chance, the best and the worst."""
    fits = [rouge_l(words(one.caption), [*map(words, one.references)]) for one in images]
    order = sorted(
        range(len(images)), key=lambda index: (-fits[index], images[index].loss, images[index].path)
    )
    half = min(MAX_EXAMPLES, len(order) // 2)
    draw = random.Random(facts.config.training.seed)
    chosen = {
        "Any": draw.sample(order, min(MAX_EXAMPLES, len(order))),
        "The best": order[:half],
        "The worst": order[::-1][:half],
    }
    paths = [one.path for one in images]
    return {
        title: [
            (image, images[index], fits[index]) for index, image in facts.thumbnails(indices, paths)
        ]
        for title, indices in chosen.items()
        if indices
    }
