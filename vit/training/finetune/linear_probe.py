"""Linear probe: logistic regression on frozen features, its L2 penalty cross-validated.

Its head is the result of method=probe, and the first head of a fine-tuning (LP-FT: Kumar et al.,
"Fine-Tuning can Distort Pretrained Features", section 3, arXiv:2202.10054).

    probability = softmax((features - mean) / std W + b)
                = softmax(features weight + bias)          as an ordinary head

Accuracy counts whole images: between neighbouring penalties it differs by a few of them, and its
maximum is luck. So the penalty is that of least log-loss among those whose accuracy is within one
standard error (of the paired difference) of the best.

Source: the protocol of Kornblith et al., "Do Better ImageNet Models Transfer Better?", section 3.1,
arXiv:1805.08974 (L-BFGS over a range of L2 penalties).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit.config import Config
from vit.data.dataset_types import Sample, Splits
from vit.data.random_seed import random_seed
from vit.evaluation.exact_tests import wilson_interval
from vit.stop_signals import Interrupted
from vit.text import Notify, plural
from vit.training.distributed.collectives import agreed_signal, on_main
from vit.training.finetune.feature_extraction import (
    Extractor,
    Features,
    extract,
    network_features,
    weights_digest,
)
from vit.training.finetune.finetune_settings import merged_state_dict
from vit.training.finetune.logistic_regression import Eigenbasis, LogisticProblems, minimise
from vit.training.logging.training_progress import notifier
from vit.training.training_context import TrainingContext

# Enough images for a head that is trained further.
MAX_PROBE_IMAGES = {"train": 20_000, "val": 5_000}
STRENGTHS = tuple(10 ** (1 - step / 2) for step in range(13))
"""L2 penalties that are tried, 10 to 1e-5: weights of |W|^2 / 2 beside the mean loss."""
COARSE_STRENGTHS = STRENGTHS[::2]
DEFAULT_STRENGTH = 0.1
"""The strength of a fit with too few images to choose one."""
FOLDS = 5
MAX_FOLD_PRODUCTS = 5e9
"""Products of a pass over all folds, about half a second on two cores, above which only one fold
is held out."""
SWEEP_TOLERANCE, FIT_TOLERANCE = 1e-5, 1e-9
BLOCK = 2**24
EQUAL_LOSS = 0.01
"""Difference below which two log-losses count as equal."""
ABSENT_MARGIN = 20.0
"""How far the logit of a class without images is below all others."""


@dataclass(frozen=True)
class PenaltyTrial:
    """Predictions for held-out images at one strength; weights are (rank + 1, problems,
    classes)."""

    strength: float
    weights: Tensor
    right: Tensor
    losses: Tensor

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return float(self.right.double().mean())

    @property
    def loss(self) -> float:
        """Mean log-loss of the images whose class was seen."""
        seen = self.losses[self.losses.isfinite()].double()
        return float(seen.mean()) if len(seen) else math.inf


class PenaltySweep:
    """Cross-validates several strengths on the same folds.

    `inputs` are coordinates and a column of ones, (images, rank + 1) float32.
    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        classes: int,
        variance: Tensor,
        seed: int,
    ) -> None:
        self.inputs, self.labels, self.notes = inputs, labels, list[str]()
        counts = torch.bincount(labels, minlength=classes)
        self.useful = bool(counts.max() > 1) and int((counts > 0).sum()) > 1
        """Whether a strength can be chosen."""
        if not self.useful:
            why = "no class has two images" if counts.max() == 1 else "all are of one class"
            self.notes.append(f"no strength can be chosen: {why}")
            self.folds = 0
            return
        parts = min(FOLDS, len(labels))
        large = inputs.numel() * classes * parts > MAX_FOLD_PRODUCTS
        self.folds = 1 if large else parts
        self.strengths = COARSE_STRENGTHS if large else STRENGTHS
        if large:
            self.notes.append(
                f"{len(labels):,} images of {classes:,} classes are too many for {parts} folds: "
                f"held out one part of {parts} instead"
            )
        part = assign_folds(labels.cpu(), parts, seed).to(labels.device)
        numbers = torch.arange(self.folds, device=labels.device)
        self.problems = LogisticProblems(
            inputs, labels, part.unsqueeze(1) != numbers, classes, variance
        )
        self.held = [(part == fold).nonzero().squeeze(1) for fold in range(self.folds)]

    def run(self, strengths: Sequence[float] | None) -> list[PenaltyTrial]:
        """Trials from strong to weak, each started from the weights of the one before."""
        if not self.useful:
            return []
        trials: list[PenaltyTrial] = []
        for strength in sorted(set(strengths or self.strengths), reverse=True):
            start = trials[-1].weights if trials else self.problems.start()
            trials.append(self.fit(strength, start))
        return trials

    def fit(self, strength: float, start: Tensor) -> PenaltyTrial:
        """Fit all folds at `strength` from `start`, and predict the held-out images."""
        weights = minimise(self.problems, start, strength, tolerance=SWEEP_TOLERANCE).weights
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
        return PenaltyTrial(strength, weights, torch.cat(right).cpu(), torch.cat(losses).cpu())


def choose_penalty(trials: Sequence[PenaltyTrial]) -> PenaltyTrial:
    """The strongest trial of nearly the least log-loss among those as accurate as the best one.

    With separable classes, each weaker strength has slightly less log-loss and a head many times
    as large, which is a bad initialisation for fine-tuning.
    """
    best = max(trials, key=lambda trial: int(trial.right.sum()))
    accurate = [trial for trial in trials if within_one_standard_error(trial, best)]
    least = min(trial.loss for trial in accurate)
    alike = [trial for trial in accurate if trial.loss <= least + EQUAL_LOSS]
    return max(alike, key=lambda trial: trial.strength)


def within_one_standard_error(trial: PenaltyTrial, best: PenaltyTrial) -> bool:
    """Whether the difference in accuracy is within the standard error of paired predictions."""
    lost = int((best.right & ~trial.right).sum())
    won = int((trial.right & ~best.right).sum())
    return lost - won <= math.sqrt(lost + won)


def assign_folds(labels: Tensor, parts: int, seed: int) -> Tensor:
    """Stratified folds of equal size: the fold of each image, (images,)."""
    generator = torch.Generator().manual_seed(random_seed(seed, "folds"))
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    part = torch.empty_like(order)
    part[order] = torch.arange(len(order)) % parts
    return part


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A linear head, and its cross-validation.

    Args:
        weight: (classes, dim) float32, for unscaled features.
        strength: L2 penalty, the weight of |W|^2 / 2 beside the mean loss.
        accuracy_by_strength: Accuracy on held-out images, from strong to weak; empty without
            cross-validation.
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
        """Accuracy on held-out images; slightly optimistic, since it decided the strength."""
        return self.cv_correct / self.cv_count if self.cv_count else None

    @property
    def cv_interval(self) -> tuple[float, float] | None:
        """95 % interval of `cv_accuracy`."""
        return wilson_interval(self.cv_correct, self.cv_count) if self.cv_count else None

    def logits(self, features: Tensor) -> Tensor:
        """(images, dim) -> (images, classes)"""
        return F.linear(features, self.weight, self.bias)

    def correct(self, features: Tensor, labels: Tensor) -> int:
        """Number of correct predictions for (images, dim) with labels (images,)."""
        rows = max(BLOCK // len(self.bias), 1)
        parts = zip(torch.split(features, rows), torch.split(labels, rows), strict=True)
        return sum(int((self.logits(some).argmax(1) == own).sum()) for some, own in parts)


def held_out_answers(features: Tensor, labels: Tensor, classes: int, *, seed: int) -> Tensor:
    """Whether a linear head is right on each held-out image of a cross-validation, (images,) bool
    in the order of the folds, which depend on `labels` and `seed` alone; empty without folds."""
    basis = Eigenbasis.of(features.float().cpu())
    inputs = basis.rotate(features.float())
    sweep = PenaltySweep(inputs, labels, classes, basis.variance, seed)
    trials = sweep.run(COARSE_STRENGTHS)
    return choose_penalty(trials).right if trials else torch.zeros(0, dtype=torch.bool)


def fit_probe(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    seed: int,
    strengths: Sequence[float] | None = None,
) -> Probe:
    """Fit a linear head to finite `features`, (images, dim); cross-validation chooses the
    penalty."""
    basis = Eigenbasis.of(features.float().cpu())
    inputs = basis.rotate(features.float())
    sweep = PenaltySweep(inputs, labels, classes, basis.variance, seed)
    trials = sweep.run(strengths)
    best = choose_penalty(trials) if trials else None
    strength = best.strength if best else (strengths or [DEFAULT_STRENGTH])[0]
    everything = (labels >= 0).unsqueeze(1)
    whole = LogisticProblems(inputs, labels, everything, classes, basis.variance)
    start = best.weights.mean(1, keepdim=True) if best else whole.start()
    end = minimise(whole, start, strength, tolerance=FIT_TOLERANCE)
    if not end.converged:
        sweep.notes.append(f"strength {strength:.2g} is so weak that the fit did not converge")
    weight, bias = head_weights(whole, end.weights, basis)
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


def head_weights(
    whole: LogisticProblems, weights: Tensor, basis: Eigenbasis
) -> tuple[Tensor, Tensor]:
    """Weight and bias of the head; a class without images is never predicted."""
    weight, bias = basis.unfold(weights[:, 0])
    absent = whole.absent[0].cpu()
    if absent.any():
        rows = max(BLOCK // len(bias), 1)
        present = ~whole.absent[0]
        logits = (part @ weights[:, 0, present] for part in torch.split(whole.inputs, rows))
        bias[absent] = min(float(part.min()) for part in logits) - ABSENT_MARGIN
    return weight.float(), bias.float()


def probe_summary(probe: Probe, *, correct: int, total: int) -> list[str]:
    """Log lines about a probe with `correct` of `total` validation images."""
    low, high = wilson_interval(correct, total)
    tried = len(probe.accuracy_by_strength)
    chosen = f", strength {probe.strength:.2g}" + (f" of {tried} tried" if tried else "")
    lines = [
        f"probe: {correct / total:.1%} of {plural(total, 'validation image')} "
        f"({low:.1%} to {high:.1%}){chosen}"
    ]
    if probe.cv_accuracy is not None and probe.cv_interval is not None:
        low, high = probe.cv_interval
        how = f"{probe.folds} folds" if probe.folds > 1 else "held out once"
        lines.append(
            f"cross-validation: {probe.cv_accuracy:.1%} of {plural(probe.cv_count, 'image')} for "
            f"training ({low:.1%} to {high:.1%}), {how}"
        )
    return lines + [f"note: {note}" for note in probe.notes]


@dataclass(frozen=True)
class ProbeFit:
    """Training loss of a linear probe."""

    loss: float
    images: int


def init_head_from_probe(run: TrainingContext, splits: Splits) -> ProbeFit:
    """Fit a linear probe to the features of the network, report it, and copy it into the head."""
    config, notify = run.config, notifier(run.accelerator)
    train, val = probe_samples(config, splits, notify)
    state = merged_state_dict(run.network.state_dict(), config)
    key = weights_digest(state, config.model)
    extractor = network_features(run.network, run.preprocessing, config, run.accelerator, key)
    on_train, on_val = (probe_features(run, extractor, samples) for samples in (train, val))

    def fit() -> Probe:
        seed = random_seed(config.training.seed, "probe")
        return fit_probe(on_train.values, on_train.labels, len(splits.classes), seed=seed)

    # on one process, and broadcast: machines may round differently, and all need the same head
    probe = on_main(run.accelerator, fit)
    right = probe.correct(on_val.values, on_val.labels)
    for line in probe_summary(probe, correct=right, total=len(on_val.labels)):
        notify(line)
    if config.finetune.method != "probe":
        notify(f"going on from that head with method={config.finetune.method}")
    set_head(run, probe)
    run.failed |= {**on_train.failed, **on_val.failed}
    loss = F.cross_entropy(probe.logits(on_train.values), on_train.labels)
    return ProbeFit(float(loss), len(on_train.labels))


@torch.no_grad()
def set_head(run: TrainingContext, probe: Probe) -> None:
    """Copy the probe into the head of the network and of its average."""
    assert isinstance(run.network.head, nn.Linear)
    averages = {} if run.average is None else dict(run.average.state_dict())
    for name, value in (("weight", probe.weight), ("bias", probe.bias)):
        run.network.head.get_parameter(name).copy_(value)
        averages[f"head.{name}"] = value
    if run.average is not None:
        run.average.load_state_dict(averages)


def probe_samples(
    config: Config, splits: Splits, notify: Notify = lambda _: None
) -> tuple[list[Sample], list[Sample]]:
    """Images of the probe: all with method=probe, else at most MAX_PROBE_IMAGES."""
    found = {"train": list(splits.train), "val": list(splits.val)}
    if config.finetune.method != "probe":
        for split, most in MAX_PROBE_IMAGES.items():
            if len(found[split]) > most:
                notify(f"note: the probe sees {most:,} of {len(found[split]):,} {split} images")
                found[split] = stratified_subset(found[split], most, seed=config.training.seed)
    return found["train"], found["val"]


def stratified_subset(samples: Sequence[Sample], most: int, *, seed: int) -> list[Sample]:
    """About `most` of `samples`, in order: the same share of each class, at least one image."""
    generator = torch.Generator().manual_seed(random_seed(seed, "probe", len(samples)))
    labels = torch.tensor([sample.label for sample in samples])
    shuffled = torch.randperm(len(samples), generator=generator)
    places = []
    for label in torch.unique(labels):
        own = shuffled[labels[shuffled] == label]
        places.append(own[: max(1, len(own) * most // len(samples))])
    return [samples[place] for place in torch.cat(places).sort().values.tolist()]


def probe_features(
    run: TrainingContext, extractor: Extractor, samples: Sequence[Sample]
) -> Features:
    found = extract(
        samples,
        extractor,
        run.config,
        run.accelerator,
        notifier(run.accelerator),
        stopped=lambda: bool(run.interruption.number),
    )
    if found is None:
        raise Interrupted(
            "interrupted while features were made; they are kept: start again in the same way",
            agreed_signal(run.accelerator, run.interruption.number),
        )
    return found
