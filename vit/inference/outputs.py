"""What a network says of an image, and what people are told of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vit.evaluation.classification_metrics import ranking
from vit.generation.caption import Caption
from vit.output.prediction_results import Prediction


@dataclass(frozen=True)
class Answer:
    """All that the network says of one image, or why it says nothing.

    Args:
        image: The image's path.
        probabilities: Of the classes, (classes,) float64; of none, where it has no head.
        error: Why there is no answer, or None.
        captions: The best first; none from a classifier.
        memory: What a captioner's decoder looked at, (tokens, dim) on the device.
        pixels: What the encoder looked at, bytes (channels, height, width); of five crops all.
        embedding: What the head reads, (dim,) float32, where it was asked for.
    """

    image: str
    probabilities: Tensor | None
    error: str | None = None
    captions: tuple[Caption, ...] = ()
    memory: Tensor | None = None
    pixels: Tensor | None = None
    embedding: Tensor | None = None


def named(
    answers: Sequence[Answer],
    classes: Sequence[str],
    top_k: int,
    thresholds: Sequence[float] | None = None,
) -> list[Prediction]:
    """What people are told of each answer, with the names of its `top_k` best classes.

    With `thresholds`, one a class, those below them are not named.
    """
    rows = [a.probabilities for a in answers if a.probabilities is not None]
    pairs: Iterator[tuple[list[int], list[float]]] = iter(())
    if rows:
        table = torch.stack(rows)
        best = ranking(table)[:, :top_k]
        pairs = zip(best.tolist(), table.gather(1, best).tolist(), strict=True)
    least = [0.0] * len(classes) if thresholds is None else thresholds
    told = (
        tuple(
            (classes[index], score)
            for index, score in zip(*pair, strict=True)
            if score >= least[index]
        )
        for pair in pairs
    )
    return [
        Prediction(a.image, error=a.error)
        if a.probabilities is None
        else Prediction(a.image, next(told), captions=a.captions, embedding=a.embedding)
        for a in answers
    ]
