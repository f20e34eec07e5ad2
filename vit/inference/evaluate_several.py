"""Measures a network whose pictures may have several classes, through the predictor of users."""

from collections.abc import Callable
from typing import Any

import torch

from vit.data.samples import Sample
from vit.data.several import MultiHot, has_several, labels_of
from vit.errors import ConfigError, printable
from vit.evaluation.several_metrics import summarise_several
from vit.inference.predictor import Predictor


def check_kind(thresholds: object, samples: tuple[Sample, ...], where: str) -> None:
    """Refuse pictures with several classes for a network that gives each one class.

    Pictures with one class are fine for a network that names several.

    Args:
        thresholds: Of the network; None where a picture has one class.
        samples: The pictures.
        where: The data.

    Raises:
        ConfigError: It is so.
    """
    if thresholds is None and has_several(samples):
        raise ConfigError(
            f"{printable(where)}: pictures have several classes, or none, and this network gives "
            "each one; train it with --task multilabel, or give data with one class a picture"
        )


def measure_several(
    predictor: Predictor, samples: tuple[Sample, ...], progress: Callable[[int, int], object]
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Scores of the readable pictures, none where there are none, and {"image", "error"} of others.

    All probabilities are held: 8 bytes a picture and class.
    """
    assert predictor.thresholds is not None, "a picture may have several classes"
    rows, kept, done = [], [], 0
    failed: list[dict[str, str]] = []
    for answers in predictor.batches([sample.path for sample in samples]):
        for answer, sample in zip(answers, samples[done : done + len(answers)], strict=True):
            if answer.probabilities is not None:
                rows.append(answer.probabilities)
                kept.append(labels_of(sample))
            if answer.error is not None:
                failed.append({"image": answer.image, "error": answer.error})
        done += len(answers)
        progress(done, len(samples))
    if not rows:
        return {}, failed
    targets = MultiHot(kept, len(predictor.classes))[torch.arange(len(kept))]
    scores = summarise_several(torch.stack(rows), targets, predictor.classes, predictor.thresholds)
    return scores, failed
