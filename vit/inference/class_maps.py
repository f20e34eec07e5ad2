"""What speaks for the classes that a classifier finds most likely, and whether that is so.

All is computed in float32 of the picture as the network saw it: resized and cut.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vit.errors import RunError, printable
from vit.evaluation.metrics import ranking
from vit.inference.deletion import RANDOM_ORDERS, Curve, Deletion, deletions
from vit.inference.explanation import relevance
from vit.inference.predictor import Answer, Predictor

EXPLAINED = 2  # classes: the best and the one that it was nearly
MOST_EXPLAINED = 5  # of those that a picture has
DIGITS = 6


@dataclass(frozen=True)
class SeenClass:
    """What speaks for a class in one picture.

    Args:
        label: Of the class.
        weights: Relevance above that of the weakest patch, (rows, cols), as shares that sum to 1;
            all 0 where no patch speaks for it more than another.
        deletion: Whether that is so.
    """

    label: str
    weights: Tensor
    deletion: Deletion

    @property
    def lines(self) -> list[str]:
        """What is written below the drawing."""
        verdict = "" if self.deletion.better else "not "
        return [
            f"{self.label} {self.deletion.curve.probabilities[0]:.3f}",
            f"deletion {self.deletion.curve.score:.3f}",
            f"random {self.deletion.chance:.3f}",
            f"{verdict}better than chance",
        ]


def class_maps(predictor: Predictor, answer: Answer) -> list[SeenClass]:
    """What speaks for the two best classes of `answer`, the best first; one if it has no other.

    Where a picture may have several classes, for those that are named, at most five; for the best
    one where none is.

    Raises:
        RunError: The network overflowed.
    """
    assert answer.probabilities is not None, "an answer without an error has probabilities"
    assert answer.picture is not None, "an answer without an error has a picture"
    classes = explained_classes(answer.probabilities, predictor.thresholds)
    picture = answer.picture.to(predictor.device)
    image = predictor.preprocessing.normalise(picture)
    found = relevance(predictor.model, image.expand(len(classes), -1, -1, -1), classes)
    if not found.isfinite().all():
        raise RunError(f"{printable(answer.image)}: gradients overflowed, so nothing is explained")
    tested = deletions(
        predictor.model,
        image,
        found,
        classes,
        batch_size=predictor.batch_size,
        seed=zlib.crc32(answer.picture.numpy().tobytes()),  # the same picture, the same numbers
        several=predictor.thresholds is not None,
    )
    return [
        SeenClass(predictor.classes[index], _shares(weights.cpu()), deletion)
        for index, weights, deletion in zip(classes, found, tested, strict=True)
    ]


def explained_classes(probabilities: Tensor, thresholds: Sequence[float] | None) -> list[int]:
    """The classes of which something is drawn, the best first; at least one."""
    order: list[int] = ranking(probabilities.unsqueeze(0))[0].tolist()
    if thresholds is None:
        return order[:EXPLAINED]
    named = [index for index in order if probabilities[index] >= thresholds[index]]
    return named[:MOST_EXPLAINED] or order[:1]


def _shares(weights: Tensor) -> Tensor:
    """What all patches have alike is left out: with mean pooling, the identity in R_0."""
    above = weights.double() - weights.double().min()
    return above / above.sum() if above.any() else above


def class_record(predictor: Predictor, answer: Answer, seen: list[SeenClass]) -> dict[str, Any]:
    """All of it as JSON has it."""
    preparing = predictor.preprocessing
    return {
        "image": answer.image,
        "seen": {
            "size": list(preparing.image_size),
            "resize": preparing.resize,
            "crop_share": preparing.crop_share,
        },
        "classes": [
            {
                "label": one.label,
                "probability": _short(one.deletion.curve.probabilities[0]),
                "weights": [
                    [round(share, DIGITS) for share in row] for row in one.weights.tolist()
                ],
                "deletion": {
                    "deleted": [round(share, DIGITS) for share in one.deletion.curve.deleted],
                    **_curve(one.deletion.curve),
                    "reverse": _curve(one.deletion.reverse),
                    "random_scores": [_short(score) for score in one.deletion.random],
                    "better_than_chance": one.deletion.better,
                },
            }
            for one in seen
        ],
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {"score": _short(curve.score), "curve": [*map(_short, curve.probabilities)]}


def _short(value: float) -> float:
    """With as many significant digits as float32 is worth: some classes have 1e-9."""
    return float(f"{value:.{DIGITS}g}")


def seen_lines(predictor: Predictor) -> list[str]:
    """What is written below the plain picture: which part of the file it shows."""
    preparing = predictor.preprocessing
    height, width = preparing.image_size
    share = f"{100 * preparing.crop_share:.0f} %"
    part = f"centre crop, {share}" if preparing.resize == "crop" else f"squashed, {share}"
    return [f"seen: {width} x {height} pixels", part]


def closing_line(tested: list[Deletion]) -> str:
    """For how many pictures the map of the best class was better than chance."""
    better = sum(deletion.better for deletion in tested)
    score = sum(deletion.curve.score for deletion in tested) / len(tested)
    chance = sum(deletion.chance for deletion in tested) / len(tested)
    return (
        f"the map of the best class beat all {RANDOM_ORDERS} random orders for {better} of "
        f"{len(tested)} pictures (by chance {len(tested) / (RANDOM_ORDERS + 1):.0f}); mean "
        f"deletion score {score:.3f}, random {chance:.3f}, less is better"
    )
