"""A linear head on features that stay as they are, its strength chosen by cross-validation; k-NN.

    probability = softmax((features - mean) / std W + b)
                = softmax(features weight + bias)          what is given back is an ordinary head

Source: the protocol of Kornblith et al., "Do Better ImageNet Models Transfer Better?", section 3.1,
arXiv:1805.08974 (L-BFGS over a range of L2 strengths); k-NN: Caron et al., "Emerging Properties in
Self-Supervised Vision Transformers", section 4.1, arXiv:2104.14294.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.data.sources.folders import count
from vit.evaluation.metrics import wilson_interval
from vit.training.logistic import Problems, Rotation, minimise
from vit.training.strength import Sweep, choose

FEW = 0.1
"""The strength where there are too few pictures to choose one."""
TOLERANCE = 1e-9
TEMPERATURE = 0.07
BLOCK = 2**24
UNLIKELY = 20.0
"""How far below all other logits that of a class without a picture is."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A linear head, and how it was chosen.

    Args:
        weight: (classes, dim) float32, of features as they are.
        bias: (classes,) float32.
        strength: Weight of |W|^2 / 2 beside the mean loss.
        accuracy_by_strength: Share of held-out pictures that each strength labels right, in the
            order from strong to weak; empty where there was nothing to choose by.
        loss_by_strength: Their mean log-loss, without pictures whose class was held out entirely.
        cv_correct: How many held-out pictures `strength` labels right.
        cv_count: Of how many, all folds together.
        folds: How many parts were held out in turn; 1 is a single one, 0 none.
        notes: What the user should know.
    """

    weight: Tensor
    bias: Tensor
    strength: float
    accuracy_by_strength: dict[float, float]
    loss_by_strength: dict[float, float]
    cv_correct: int
    cv_count: int
    folds: int
    notes: tuple[str, ...]

    @property
    def cv_accuracy(self) -> float | None:
        """Share of held-out pictures labelled right; a little high, as it decided the strength."""
        return self.cv_correct / self.cv_count if self.cv_count else None

    @property
    def cv_interval(self) -> tuple[float, float] | None:
        """95 % interval of `cv_accuracy`."""
        return wilson_interval(self.cv_correct, self.cv_count) if self.cv_count else None

    def logits(self, features: Tensor) -> Tensor:
        """(pictures, dim) -> (pictures, classes)"""
        return F.linear(features, self.weight, self.bias)

    def correct(self, features: Tensor, labels: Tensor) -> int:
        """How many pictures it labels right, of (pictures, dim) with labels (pictures,)."""
        rows = max(BLOCK // len(self.bias), 1)
        parts = zip(torch.split(features, rows), torch.split(labels, rows), strict=True)
        return sum(int((self.logits(some).argmax(1) == own).sum()) for some, own in parts)


def fit_probe(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    seed: int,
    folds: int = 5,
    strengths: Sequence[float] | None = None,
    device: torch.device | str = "cpu",
) -> Probe:
    """Fit a linear head, and choose its strength by stratified cross-validation.

    Args:
        features: (pictures, dim), at least one picture, all finite; their means and deviations
            are those of all pictures, held out or not.
        labels: (pictures,) int64.
        classes: Number of classes; some may have no picture.
        seed: Decides which pictures are held out together.
        folds: Parts that are held out in turn, at least 2.
        strengths: What to try; where left out 10 to 1e-5, and further where the best is at an end.
        device: Where to compute, cpu or cuda.

    Raises:
        ValueError: What was given is impossible.
    """
    check(features, labels, classes, folds, strengths)
    rotation = Rotation.of(features.float().cpu())
    inputs, labels = rotation.rotate(features.float().to(device)), labels.to(device)
    sweep = Sweep(inputs, labels, classes, rotation.variance, folds=folds, seed=seed)
    trials = sweep.run(strengths)
    best = choose(trials) if trials else None
    strength = best.strength if best else (strengths or [FEW])[0]
    everything = (labels >= 0).unsqueeze(1)
    whole = Problems(inputs, labels, everything, classes, rotation.variance)
    start = best.weights.mean(1, keepdim=True) if best else whole.start()
    end = minimise(whole, start, strength, tolerance=TOLERANCE)
    if not end.converged:
        sweep.notes.append(f"strength {strength:.2g} is so weak that the fit did not converge")
    weight, bias = finished(whole, end.weights, rotation)
    return Probe(
        weight=weight,
        bias=bias,
        strength=strength,
        accuracy_by_strength={trial.strength: trial.accuracy for trial in trials},
        loss_by_strength={trial.strength: trial.loss for trial in trials},
        cv_correct=int(best.right.sum()) if best else 0,
        cv_count=len(best.right) if best else 0,
        folds=sweep.folds,
        notes=tuple(sweep.notes),
    )


def check(
    features: Tensor, labels: Tensor, classes: int, folds: int, strengths: Sequence[float] | None
) -> None:
    """Refuse what cannot be fitted.

    Raises:
        ValueError: The shapes do not fit, or a value is impossible.
    """
    if features.ndim != 2 or not len(features) or labels.shape != features.shape[:1]:
        raise ValueError(
            f"features {tuple(features.shape)} and labels {tuple(labels.shape)}: need "
            "(pictures, dim) and (pictures,)"
        )
    if not features.isfinite().all():
        raise ValueError("a feature is not a finite number")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"labels must be from 0 to {classes - 1}, one of {classes} classes")
    if folds < 2:
        raise ValueError(f"folds={folds}: must be at least 2")
    if strengths is not None and not (strengths and all(0 < s < math.inf for s in strengths)):
        raise ValueError(f"strengths={strengths!r}: need some, all above 0")


def finished(whole: Problems, weights: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Weight and bias of the head; a class without a picture is never the answer."""
    weight, bias = rotation.unfold(weights[:, 0])
    absent = whole.absent[0].cpu()
    if absent.any():
        rows = max(BLOCK // len(bias), 1)
        present = ~whole.absent[0]
        logits = (part @ weights[:, 0, present] for part in torch.split(whole.inputs, rows))
        bias[absent] = min(float(part.min()) for part in logits) - UNLIKELY
    return weight.float(), bias.float()


@torch.no_grad()
def knn_accuracy(
    train: Tensor,
    labels: Tensor,
    val: Tensor,
    val_labels: Tensor,
    *,
    k: int = 20,
    device: torch.device | str = "cpu",
) -> float:
    """Share of `val` whose class wins among its `k` nearest in `train`, by cosine similarity.

    A neighbour has exp(similarity / 0.07) votes; of equal classes the first wins.

    Args:
        train: (pictures, dim), on the CPU like all of these.
        labels: Classes of `train`, (pictures,).
        val: (other pictures, dim), at least one.
        val_labels: Classes of `val`.
        k: Neighbours; all of `train` where it has fewer.
        device: Where to compute.
    """
    known = F.normalize(train.float().to(device), dim=1)
    classes = int(labels.max()) + 1
    rows = max(BLOCK // max(len(known), classes), 1)
    correct = 0
    for some, own in zip(torch.split(val, rows), torch.split(val_labels, rows), strict=True):
        similar = F.normalize(some.float().to(device), dim=1) @ known.T
        nearest, which = (found.cpu() for found in similar.topk(min(k, len(known)), dim=1))
        # all votes of a picture divided by the same number, so that none overflows
        power = ((nearest - nearest[:, :1]) / TEMPERATURE).exp()
        votes = power.new_zeros(len(some), classes).scatter_add_(1, labels[which], power)
        correct += int((votes.argmax(1) == own).sum())
    return correct / len(val)


def probe_summary(probe: Probe, *, correct: int, total: int, knn: float | None = None) -> list[str]:
    """What a user sees of a probe.

    Args:
        probe: The head.
        correct: How many validation pictures it labels right.
        total: Of how many.
        knn: From `knn_accuracy`.
    """
    low, high = wilson_interval(correct, total)
    tried = len(probe.accuracy_by_strength)
    chosen = f", strength {probe.strength:.2g}" + (f" of {tried} tried" if tried else "")
    nearest = "" if knn is None else f"; k-NN {knn:.1%}"
    lines = [
        f"probe: {correct / total:.1%} of {count(total, 'validation picture')} "
        f"({low:.1%} to {high:.1%}){chosen}{nearest}"
    ]
    if probe.cv_accuracy is not None and probe.cv_interval is not None:
        low, high = probe.cv_interval
        how = f"{probe.folds} folds" if probe.folds > 1 else "held out once"
        lines.append(
            f"cross-validation: {probe.cv_accuracy:.1%} of {count(probe.cv_count, 'picture')} for "
            f"training ({low:.1%} to {high:.1%}), {how}"
        )
    return lines + [f"note: {note}" for note in probe.notes]
