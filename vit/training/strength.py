"""How strongly a linear head is held back, chosen by pictures that it has not seen.

Accuracy counts whole pictures: between neighbouring strengths it differs by a few of them, and its
largest value is luck. The log-loss of the same pictures tells such strengths apart, but is not what
was asked for. So: among the strengths whose accuracy is less than one standard error (of the paired
difference) below the best one, the least log-loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vit.data.seeding import random_seed
from vit.training.logistic import Problems, minimise

STRENGTHS = tuple(10 ** (1 - step / 2) for step in range(13))
"""From 10 to 1e-5; of the squared weights of standardised features, beside the mean loss."""
COARSE = STRENGTHS[::2]
EXTENSIONS = 4
"""How often a sweep goes on where its last strength was the best."""
WORK = 5e9
"""Products of one pass over all folds, about half a second on two cores, above which one part is
held out, once."""
TOLERANCE = 1e-5
BLOCK = 2**24
NO_DIFFERENCE = 0.01
"""Of two log-losses: one in a hundred of a probability."""


@dataclass(frozen=True)
class Trial:
    """What one strength does to held-out pictures.

    Args:
        strength: The strength.
        weights: (rank + 1, problems, classes); the next trial begins there.
        right: Whether each held-out picture was labelled right, (held out,).
        losses: -log of the probability of its class, (held out,); infinite for unseen classes.
    """

    strength: float
    weights: Tensor
    right: Tensor
    losses: Tensor

    @property
    def accuracy(self) -> float:
        """Share of right labels."""
        return float(self.right.double().mean())

    @property
    def loss(self) -> float:
        """Mean log-loss of the pictures whose class was seen."""
        seen = self.losses[self.losses.isfinite()].double()
        return float(seen.mean()) if len(seen) else math.inf


class Sweep:
    """Trials of several strengths on the same held-out pictures.

    Args:
        inputs: Coordinates and a column of ones, (pictures, rank + 1) float32.
        labels: Classes, (pictures,).
        classes: Number of classes.
        variance: Of the coordinates, (rank,).
        folds: Parts that are held out in turn.
        seed: Decides which pictures are held out together.
    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        classes: int,
        variance: Tensor,
        *,
        folds: int,
        seed: int,
    ) -> None:
        self.inputs, self.labels, self.notes = inputs, labels, list[str]()
        counts = torch.bincount(labels, minlength=classes)
        self.useful = bool(counts.max() > 1) and int((counts > 0).sum()) > 1
        """Whether there is something to choose by."""
        if not self.useful:
            why = "no class has two pictures" if counts.max() == 1 else "all are of one class"
            self.notes.append(f"no strength can be chosen: {why}")
            self.folds = 0
            return
        parts = min(folds, len(labels))
        large = inputs.numel() * classes * parts > WORK
        self.folds = 1 if large else parts
        self.strengths = COARSE if large else STRENGTHS
        if large:
            self.notes.append(
                f"{len(labels):,} pictures of {classes:,} classes are too many for {parts} folds: "
                f"held out one part of {parts} instead"
            )
        if single := int((counts == 1).sum()):
            verb = "has" if single == 1 else "have"
            noun = "class" if single == 1 else "classes"
            self.notes.append(
                f"{single} {noun} {verb} only one picture, which counts as wrong when held out"
            )
        part = deal(labels.cpu(), parts, seed).to(labels.device)
        numbers = torch.arange(self.folds, device=labels.device)
        self.problems = Problems(inputs, labels, part.unsqueeze(1) != numbers, classes, variance)
        self.held = [(part == fold).nonzero().squeeze(1) for fold in range(self.folds)]

    def run(self, strengths: Sequence[float] | None) -> list[Trial]:
        """Trials from strong to weak, each from where the one before ended.

        Args:
            strengths: What to try; our own where left out, and further where the best is last.
        """
        if not self.useful:
            return []
        trials: list[Trial] = []
        for strength in sorted(set(strengths or self.strengths), reverse=True):
            start = trials[-1].weights if trials else self.problems.start()
            trials.append(self.attempt(strength, start))
        if strengths is None:
            self.extend(trials)
        best = choose(trials).strength
        ends = {trials[0].strength: "strongest", trials[-1].strength: "weakest"}
        if len(trials) > 1 and best in ends:
            self.notes.append(f"the best strength, {best:.2g}, is the {ends[best]} that was tried")
        return trials

    def extend(self, trials: list[Trial]) -> None:
        """Go on at the end where the best one is."""
        ratio = trials[0].strength / trials[1].strength
        for _ in range(EXTENSIONS):
            best = choose(trials)
            if best is trials[-1]:
                trials.append(self.attempt(best.strength / ratio, best.weights))
            elif best is trials[0]:
                trials.insert(0, self.attempt(best.strength * ratio, best.weights))
            else:
                return

    def attempt(self, strength: float, start: Tensor) -> Trial:
        """Solve all folds at `strength`, and look at the pictures that each held out."""
        weights = minimise(self.problems, start, strength, tolerance=TOLERANCE).weights
        right, losses = [], []
        rows = max(BLOCK // weights.shape[2], 1)
        for fold, held in enumerate(self.held):
            for some in torch.split(held, rows):
                labels = self.labels[some]
                logits = self.inputs[some] @ weights[:, fold]
                logits.masked_fill_(self.problems.absent[fold], -torch.inf)
                own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
                right.append(logits.argmax(1) == labels)
                losses.append(logits.logsumexp(1) - own)
        return Trial(strength, weights, torch.cat(right).cpu(), torch.cat(losses).cpu())


def choose(trials: Sequence[Trial]) -> Trial:
    """The strongest trial of about the least log-loss among those as accurate as the best one.

    Where a line separates the classes, each weaker strength has a little less log-loss and a head
    many times as large, which is a bad start for training further.
    """
    best = max(trials, key=lambda trial: int(trial.right.sum()))
    accurate = [trial for trial in trials if as_good(trial, best)]
    least = min(trial.loss for trial in accurate)
    alike = [trial for trial in accurate if trial.loss <= least + NO_DIFFERENCE]
    return max(alike, key=lambda trial: trial.strength)


def as_good(trial: Trial, best: Trial) -> bool:
    """Whether the pictures on which two trials differ do not tell that `best` is better."""
    lost = int((best.right & ~trial.right).sum())
    won = int((trial.right & ~best.right).sum())
    return lost - won <= math.sqrt(lost + won)


def deal(labels: Tensor, parts: int, seed: int) -> Tensor:
    """A part for each picture, (pictures,): each class spread evenly, and all parts of one size."""
    generator = torch.Generator().manual_seed(random_seed(seed, "folds"))
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    part = torch.empty_like(order)
    part[order] = torch.arange(len(order)) % parts
    return part
