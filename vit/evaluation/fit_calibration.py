"""Everything that a calibration measures on labelled images: temperature, threshold and sets.

Prediction sets contain the true class with a stated probability (split conformal, RAPS):

    s(x, k) = sum of the probabilities of the classes before k  +  penalty max(0, rank of k - 5)
            = 1 - p(k)                                              of a multi-label network
    set     = the classes of s(x, k) <= q,   q = the ceil((n + 1) coverage)-th smallest s(x, true)
            = the classes of s(x, k) <= q_k  with q_k of the n_k images of class k

For images that are drawn as those of the calibration, the set contains the true class with
probability of at least the coverage. The best class has s = 0 and is in every set, so a network
that is right more often than the coverage has sets of one class. Nothing is drawn at random: the
same image has the same set.

The second rule holds for the images of each class on its own, the first for all together. A level
of few images overshoots, by up to 1 / (n_k + 1), so each class needs 100 of them, and as many as
its coverage takes. A multi-label set has to contain all true classes of an image: s(x, true) is the
largest of theirs, and 0 without errors.

Where images come in groups, the probability is that of an image of a new group: in q, an image of a
group of n_g counts 1 / n_g, and n is the number of groups.

Where the accuracy on new sources is measured, the set contains the true class of their images too:
q is at least so large that, were the share of misses on new sources 1 - coverage, so few of them
would occur with a probability of at most NEW_SOURCE_ERROR, among `NewSources.effective` images.

Source: Angelopoulos et al., "Uncertainty Sets for Image Classifiers using Conformal Prediction",
section 2, arXiv:2009.14193; Romano et al., arXiv:2006.02544; by class: Vovk, "Conditional Validity
of Inductive Conformal Predictors", section 4, arXiv:1209.2673; Ding et al., section 2,
arXiv:2306.09335; multi-label: Cauchois et al., section 3, arXiv:2004.10181; groups: Lee, Barber and
Willett, "Distribution-Free Inference with Hierarchical Data", section 3, arXiv:2306.06342.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vit.calibration_reference import CalibrationReference
from vit.class_tree import ROOT, ClassTree, Path, answer_of, wrong_from
from vit.evaluation.classification_metrics import calibration_error, ranking
from vit.evaluation.exact_tests import binomial_tail
from vit.evaluation.intervals import count_groups, count_present
from vit.evaluation.multilabel_metrics import choose_thresholds
from vit.evaluation.new_sources import NewSources
from vit.evaluation.selective_prediction import (
    ALLOWED_ERROR,
    TARGET_PRECISIONS,
    needed_images,
    precision_threshold,
)
from vit.evaluation.temperature_scaling import (
    FOLDS,
    MIN_IMAGES,
    FittedTemperature,
    fit_temperature,
    fold_numbers,
    scale_logits,
)
from vit.score_calibration import (
    COVERAGES,
    FREE_CLASSES,
    SET_PENALTY,
    UNLIKE,
    ScoreCalibration,
    node_threshold,
)
from vit.text import plural, printable

FALSE_ALARMS = 0.01
"""Share of ordinary images that are unlike those of training."""
NEW_SOURCE_ERROR = 0.15
"""Probability that sets cover fewer images of new sources, over draws of the sources."""
SIZED = 0.9
"""Coverage of the sets whose size a calibration tells."""
MIN_DISTANCES = 2
"""Held-out images from which on distances are measured."""


class FittedCalibration(NamedTuple):
    """A calibration, and what it was chosen on."""

    calibration: ScoreCalibration
    temperature: FittedTemperature
    error: float
    """Calibration error (ECE) of scores that the other images calibrated."""
    lower: Mapping[float, float]
    """Share of the images that `--reject` would answer with lower shares of right answers."""
    fewest: int | None = None
    """Images of the rarest class, or groups with one; None of a multi-label network."""
    kinds: tuple[float, float] | None = None
    """Shares of the images that a leaf of the tree and a higher node answers."""
    set_sizes: tuple[float, float] | None = None
    """Mean number of classes of sets for SIZED, and of those for images of known sources."""


def fit_calibration(
    logits: Tensor,
    targets: Tensor,
    *,
    fitted: FittedTemperature | None = None,
    distances: Tensor | None = None,
    target_precision: float | None = None,
    target_classes: Mapping[str, int] | None = None,
    thresholds: Sequence[float] | None = None,
    groups: Tensor | None = None,
    tree: ClassTree | None = None,
    new: NewSources | None = None,
) -> FittedCalibration | None:
    """Calibrate a network on labelled images; None as for `fit_temperature`.

    Threshold and sets are learned on scores as a calibration on the other images gives them.

    Args:
        fitted: What it returns for them, if it was called before.
        distances: Of the images from those of training, (images,), of a single-label network. They
            give a largest one, which FALSE_ALARMS of images like these exceed (of a new group, from
            99 groups on; with n < 99 images 1 of n + 1); the threshold is of the images that do
            not, of nodes of all, as these are answers without `reject` too.
        target_precision: Share of the answers that has to be right; None: the highest of
            TARGET_PRECISIONS that these images prove, of as many `target_classes` as possible.
        target_classes: Indices of classes whose answers keep this share each on its own, by name;
            those of the other classes keep it together. The allowed error is divided equally, so
            that all hold at once.
        groups: The group of each image, (images,), such as a patient; None of independent ones.
            Threshold and sets then hold for images of a new group, whose errors the scaling of
            other groups measures.
        tree: Of the classes, if the threshold is that of its nodes: an answer is the deepest one
            that reaches it, and right if it is the class or above it.
        new: Which of the images are of new sources, for which the sets hold then.
    """
    fitted, images = fitted or fit_temperature(logits, targets, groups), len(logits)
    if fitted is None:
        return None
    if targets.ndim == 2:
        return _fit_multilabel(logits, targets, fitted, target_precision, thresholds, groups)
    probabilities = fitted.held_out.softmax(dim=1)
    confidences, answers = probabilities.max(dim=1)
    right = answers == targets
    error = calibration_error(confidences, right)
    nodes: dict[str, Tensor] = {}
    paths = [] if tree is None else tree.paths(probabilities.double().numpy())
    if tree is not None:
        confidences, wrong, ends = node_confidences(
            paths, [tree.classes[n] for n in targets.tolist()]
        )
        right, nodes = wrong < 0, {"wrong_from": wrong, "tested": ends}
    farthest = None
    if distances is not None:  # of a new group, if there are enough of them
        levels = [set_levels(distances, [1 - FALSE_ALARMS], which)[0] for which in (groups, None)]
        farthest = next((one for one in levels if one is not None), float(distances.max()))
        if tree is None:
            confidences = torch.where(distances <= farthest, confidences, -1.0)
    named = target_classes or {}
    parts = [answers == index for index in named.values()]
    parts.append(~torch.stack(parts).any(dim=0) if parts else torch.ones(images, dtype=torch.bool))
    proof, lower = prove_thresholds(confidences, right, parts, target_precision, groups, nodes)
    *own, rest = proof.thresholds
    scores = set_scores(probabilities, targets)
    levels = set_levels(scores, COVERAGES, groups)
    class_levels = class_set_levels(scores, targets, logits.shape[1], COVERAGES, groups)
    set_sizes = None
    if new is not None:
        least = new_source_levels(scores[new.images], COVERAGES, new.effective)
        before = levels[COVERAGES.index(SIZED)]
        levels = [_larger(*pair) for pair in zip(levels, least, strict=True)]
        class_levels = [
            row and tuple(_larger(level, one) for level in row)
            for row, one in zip(class_levels, least, strict=False)
        ]
        after = levels[COVERAGES.index(SIZED)]
        set_sizes = mean_set_size(probabilities, after), mean_set_size(probabilities, before)
    calibration = ScoreCalibration(
        temperature=fitted.scaling.temperature,
        exponent=fitted.scaling.exponent,
        images=images,
        target_precision=proof.target,
        threshold=rest,
        answered=proof.answered,
        farthest=farthest,
        set_levels=tuple(levels),
        class_thresholds=dict(zip(named, own, strict=True)),
        class_set_levels=tuple(class_levels),
        groups=None if groups is None else count_groups(groups),
    )
    fewest = count_rarest(targets, logits.shape[1], groups)
    kinds = None if tree is None else _kinds(tree, paths, node_threshold(calibration))
    return FittedCalibration(calibration, fitted, error, lower, fewest, kinds, set_sizes)


def calibration_reference(
    logits: Tensor,
    distances: Tensor | None,
    classes: Sequence[str],
    calibration: ScoreCalibration,
    groups: Tensor | None = None,
) -> CalibrationReference | None:
    """The images of a calibration as a reference, of each group the first one, since later images
    are compared as independent ones; None of a multi-label network."""
    if calibration.multilabel:
        return None
    if groups is not None:
        firsts = torch.from_numpy(np.unique(groups.numpy(), return_index=True)[1])
        logits = logits[firsts]
        distances = None if distances is None else distances[firsts]
    scaled = scale_logits(logits.double(), calibration.temperature, calibration.exponent)
    if calibration.farthest is None:  # the run keeps no distance
        distances = None
    return CalibrationReference.of(
        scaled.softmax(dim=1).numpy(),
        None if distances is None else distances.numpy(),
        classes,
        calibration,
    )


class Proof(NamedTuple):
    """What images prove of the answers that reach a threshold."""

    target: float
    """Share of these that is right."""
    thresholds: tuple[float | None, ...]
    """Of the answers of each part; None if none is proven."""
    answered: float
    """Share of the images that reach them."""


def prove_thresholds(
    confidences: Tensor,
    right: Tensor,
    parts: Sequence[Tensor],
    target: float | None,
    groups: Tensor | None,
    nodes: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Proof, dict[float, float]]:
    """The threshold of the answers of each part, for the highest share of right answers that is
    proven for most parts; and the shares of images that lower ones answer.

    Args:
        parts: Which images are in it, (images,).
        target: The only share to try; None: those of TARGET_PRECISIONS.
        nodes: More arguments of `precision_threshold`, of answers that are nodes.
    """
    proofs = []
    for share in TARGET_PRECISIONS if target is None else (target,):
        found = [
            precision_threshold(
                confidences[part],
                right[part],
                share,
                error=ALLOWED_ERROR / len(parts),
                groups=None if groups is None else groups[part],
                **{name: values[part] for name, values in nodes.items()},
            )
            for part in parts
        ]
        answered = sum(
            one.answered * int(part.sum()) / len(right) if one else 0.0
            for one, part in zip(found, parts, strict=True)
        )
        proofs.append(Proof(share, tuple(one and one.threshold for one in found), answered))
    unproven = [proof.thresholds.count(None) for proof in proofs]
    best = unproven.index(min(unproven)) if min(unproven) < len(parts) else -1
    return proofs[best], {proof.target: proof.answered for proof in proofs[best:][1:]}


def _kinds(tree: ClassTree, paths: Sequence[Path], threshold: float) -> tuple[float, float]:
    answers = [answer_of(path, threshold)[0] for path in paths]
    leaves = sum(not tree.children[node] for node in answers)
    return leaves / len(answers), (len(answers) - answers.count(ROOT) - leaves) / len(answers)


def node_confidences(paths: Sequence[Path], labels: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Highest thresholds, (images,), at which an image has an answer, a wrong one (-1: none is),
    and the end of its path."""
    rows = [
        (path[0][1], wrong_from(path, name), min(one for _, one in path))
        for path, name in zip(paths, labels, strict=True)
    ]
    answered, wrong, ends = torch.tensor(rows, dtype=torch.float64).unbind(dim=1)
    return answered, wrong, ends


def _fit_multilabel(
    logits: Tensor,
    targets: Tensor,
    fitted: FittedTemperature,
    target_precision: float | None,
    thresholds: Sequence[float] | None,
    groups: Tensor | None,
) -> FittedCalibration:
    """The calibration of a multi-label network: an answer is right where each class is."""
    raw, probabilities = logits.double().sigmoid(), fitted.held_out.sigmoid()
    limits = torch.empty_like(raw)
    if thresholds is None:
        folds = fold_numbers(len(targets), groups)
        for fold in range(FOLDS):
            rest = folds != fold
            chosen, _ = choose_thresholds(raw[rest], targets[rest])
            limits[~rest] = torch.tensor(chosen, dtype=limits.dtype)
    else:
        limits[:] = torch.tensor(thresholds, dtype=limits.dtype)
    decided = raw >= limits
    confidences = torch.where(decided, probabilities, 1 - probabilities).prod(dim=1)
    right = (decided == targets.bool()).all(dim=1)
    whole = torch.ones(len(targets), dtype=torch.bool)
    proof, lower = prove_thresholds(confidences, right, [whole], target_precision, groups)
    calibration = ScoreCalibration(
        temperature=fitted.scaling.temperature,
        images=len(targets),
        target_precision=proof.target,
        threshold=proof.thresholds[0],
        answered=proof.answered,
        set_levels=tuple(set_levels(set_scores(probabilities, targets), COVERAGES, groups)),
        multilabel=True,
        groups=None if groups is None else count_groups(groups),
    )
    error = calibration_error(probabilities.flatten(), targets.double().flatten())
    return FittedCalibration(calibration, fitted, error, lower)


def describe_calibration(fitted: FittedCalibration) -> list[str]:
    """Log lines about a calibration."""
    calibration, temperature = fitted.calibration, fitted.temperature
    if temperature.loss_after < temperature.loss_before:
        first = (
            f"calibration: temperature {calibration.temperature:.3f}, exponent "
            f"{calibration.exponent:.3f}; loss of held-out images {temperature.loss_before:.4f} "
            f"before, {temperature.loss_after:.4f} after"
        )
    elif calibration.images < MIN_IMAGES:
        first = (
            "note: scores are not calibrated, and may be far from the share that is right: that "
            f"takes {MIN_IMAGES} validation images, and there are {calibration.images}"
        )
    else:
        first = (
            "calibration: raw scores are kept, since no temperature is better on held-out images"
        )
    lines = [first]
    target, thresholds = calibration.target_precision, calibration.class_thresholds
    if target is None:
        return lines
    share, count, unit, new = f"{100 * target:.4g}%", calibration.images, "image", ""
    if calibration.groups is not None:
        count, unit, new = calibration.groups, "group", " in a new group"
    parts = {f" of class {printable(name)}": one for name, one in thresholds.items()}
    parts[" of the other classes" if thresholds else ""] = calibration.threshold
    needed = needed_images(target, error=ALLOWED_ERROR / len(parts))
    for name, threshold in parts.items():
        if threshold is None:
            lines.append(
                f"note: no score from which on {share} of the answers{name} are proven to be "
                f"right; that takes {needed:,} {unit}s without a mistake, or more with some: vit "
                f"calibrate with more than these {plural(count, unit)}, or a lower "
                "--target-precision"
            )
        elif fitted.kinds is None:
            lines.append(
                f"--reject gives answers{name} from a score of {threshold:.4f} on, where at least "
                f"{share} of them are right{new}"
            )
    if fitted.kinds is not None:
        promise = f"{share} of them are right{new}"
        return [*lines, describe_nodes(calibration, fitted.kinds, promise)]
    if calibration.rejects:
        lower = [
            f"{answered:.1%} with {share:g}"
            for share, answered in fitted.lower.items()
            if answered > calibration.answered
        ]
        more = f"; vit calibrate --target-precision gives more: {', '.join(lower)}" if lower else ""
        lines.append(f"--reject answers {calibration.answered:.1%} of these images{more}")
    elif calibration.farthest is not None:
        alarms = max(FALSE_ALARMS, 1 / (calibration.images + 1))
        lines.append(
            f"--reject answers all images but those {UNLIKE}, as {alarms:.0%} of images like the "
            "validation images are taken to be"
        )
    if fitted.set_sizes is not None:
        sizes = "{:.2f} classes on average, {:.2f} for known ones".format(*fitted.set_sizes)
        lines.append(f"--sets holds for images of new sources too: sets of 90% have {sizes}")
    if calibration.class_set_levels:
        lines.append("--sets covers each class on its own")
    elif fitted.fewest is not None:
        lines.append(
            "--sets covers all classes together, not each on its own: that takes "
            f"{MIN_CLASS_IMAGES} {unit}s of each, and the rarest has {fitted.fewest}"
        )
    return lines


def describe_nodes(calibration: ScoreCalibration, kinds: tuple[float, float], promise: str) -> str:
    """A log line about answers that are nodes of a tree."""
    leaves, higher = kinds
    least = f"{node_threshold(calibration):.4f}"
    proven = f", where at least {promise}" if calibration.threshold is not None else ""
    return (
        f"answers are the deepest node of probability >= {least}{proven}; "
        f"{leaves:.0%} of these images get a leaf of the tree, {higher:.0%} a higher node, "
        f"{1 - leaves - higher:.0%} unknown"
    )


MIN_CLASS_IMAGES = 100
"""Images of each class from which on sets cover each class on its own."""
LEVEL_DIGITS = 6
"""Decimal digits of the levels of classes, which are rounded up."""


def set_scores(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Score s of the true class (or multi-hot true classes) of each image, (images,) float64."""
    table = probabilities.double()
    if labels.ndim == 2:
        return torch.where(labels.bool(), 1 - table, 0.0).amax(dim=1)
    order = ranking(table)
    rank = order.argsort(dim=1).gather(1, labels.unsqueeze(1)).squeeze(1)
    sums = table.gather(1, order).cumsum(dim=1)
    before = torch.cat([torch.zeros(len(sums), 1, dtype=torch.float64), sums], dim=1)
    own = before.gather(1, rank.unsqueeze(1)).squeeze(1)
    return own + SET_PENALTY * (rank - FREE_CLASSES).clamp(min=0).double()


def set_levels(
    scores: Tensor, coverages: Sequence[float], groups: Tensor | None = None
) -> list[float | None]:
    """The level q of each coverage; None if there are too few images for less than all classes."""
    if groups is not None:  # the smallest score below which are groups enough, counted by parts
        ordered_scores, order = scores.sort()
        reached = groups.bincount().double().reciprocal()[groups[order]].cumsum(0)
        needed = (count_present(groups) + 1) * torch.tensor(coverages, dtype=torch.float64) - 1e-9
        places = torch.searchsorted(reached, needed).tolist()
        return [float(ordered_scores[place]) if place < len(scores) else None for place in places]
    ordered, count = scores.sort().values.tolist(), len(scores)
    ranks = [math.ceil((count + 1) * coverage - 1e-9) for coverage in coverages]
    return [ordered[rank - 1] if rank <= count else None for rank in ranks]


def new_source_levels(scores: Tensor, coverages: Sequence[float], effective: float) -> list[float]:
    """The level q of each coverage from the `scores` of images of new sources, which are as certain
    as `effective` independent ones; the largest score where they prove no lower one."""
    ordered, images, trials = scores.sort().values.tolist(), len(scores), round(effective)
    found = []
    for coverage in coverages:
        misses = 0  # of as many images as are independent
        while binomial_tail(misses, trials, 1 - coverage) <= NEW_SOURCE_ERROR:
            misses += 1
        left_out = max(math.ceil(misses * images / effective) - 1, 0)
        found.append(ordered[images - 1 - left_out])
    return found


def mean_set_size(probabilities: Tensor, level: float | None) -> float:
    """Mean number of classes of the sets with a level; None: all classes."""
    classes = probabilities.shape[1]
    if level is None:
        return float(classes)
    ordered = probabilities.double().sort(dim=1, descending=True).values
    penalty = SET_PENALTY * (torch.arange(classes) - FREE_CLASSES).clamp(min=0)
    scores = ordered.cumsum(dim=1) - ordered + penalty
    return float((scores <= level).sum()) / len(scores)


def _larger(level: float | None, other: float) -> float | None:
    return None if level is None else max(level, other)


def class_set_levels(
    scores: Tensor,
    labels: Tensor,
    classes: int,
    coverages: Sequence[float],
    groups: Tensor | None = None,
) -> list[tuple[float | None, ...] | None]:
    """Level of each class for each coverage, from `set_scores`; None of too few images."""
    of_class = [labels == index for index in range(classes)]
    fewest = count_rarest(labels, classes, groups)
    enough = [
        fewest >= MIN_CLASS_IMAGES and math.ceil((fewest + 1) * coverage - 1e-9) <= fewest
        for coverage in coverages
    ]
    chosen = [coverage for coverage, one in zip(coverages, enough, strict=True) if one]
    columns = [
        set_levels(scores[one], chosen, None if groups is None else groups[one])
        for one in of_class
        if chosen
    ]
    scale = 10**LEVEL_DIGITS
    rounded = [
        [None if level is None else math.ceil(level * scale) / scale for level in column]
        for column in columns
    ]
    rows = iter(zip(*rounded, strict=True))
    found = [next(rows) if one else None for one in enough]
    return found if chosen else []


def count_rarest(labels: Tensor, classes: int, groups: Tensor | None = None) -> int:
    """Images of the rarest class, or groups that have an image of it."""
    if groups is None:
        return int(labels.bincount(minlength=classes).min())
    return min(count_present(groups[labels == index]) for index in range(classes))
