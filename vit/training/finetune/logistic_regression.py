"""Multinomial logistic regression by L-BFGS, several problems over the same images at once.

    min over W, b:  mean over images of -log softmax(x W + b)[label]  +  penalty/2 |W|^2

The initial Hessian approximation of L-BFGS is Böhning's bound, diagonal in the eigenvectors of the
features' covariance: ill-conditioned features cost few more steps.

Source: Nocedal and Wright, "Numerical Optimization", algorithm 7.4; Böhning, "Multinomial logistic
regression algorithm", Annals of the Institute of Statistical Mathematics 44, 1992.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 2**22
"""Logits computed at a time."""
MEMORY = 10
"""History of L-BFGS: pairs of steps and gradient changes."""
DECREASE = 1e-4
"""Armijo's constant of the line search."""
SLACK = 1e-7
"""Relative rounding error of the loss in float32."""
HALVINGS = 8
SMALL = 1e-2
"""Loss that is added to the scale of `tolerance`."""


@dataclass(frozen=True)
class Eigenbasis:
    """Affine map from features to uncorrelated coordinates.

    Args:
        mean: Of the features, (dim,) float64.
        std: Of the features, 1 where they are constant, (dim,) float64.
        basis: Eigenvectors of the covariance of standardised features, (dim, rank) float64.
        variance: Variance of the coordinates, (rank,) float64.
    """

    mean: Tensor
    std: Tensor
    basis: Tensor
    variance: Tensor

    @staticmethod
    def of(features: Tensor) -> "Eigenbasis":
        """The basis of (images, dim) features on the CPU, without constant directions."""
        dim, count = features.shape[1], len(features)
        mean, square = torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)
        parts = torch.split(features, max(BLOCK // dim, 1))
        for part in parts:
            mean += part.double().sum(0) / count
        for part in parts:
            square += (part.double() - mean).square().sum(0) / count
        # differences below the rounding error of float32 do not count
        constant = square.sqrt() <= 1e-6 * mean.abs()
        std = torch.where(constant, 1.0, square.sqrt())
        covariance = torch.zeros(dim, dim, dtype=torch.float64)
        for part in parts:
            scaled = ((part.double() - mean) / std).masked_fill(constant, 0.0)
            covariance.addmm_(scaled.T, scaled, alpha=1 / count)
        variance, basis = torch.linalg.eigh(covariance)
        kept = variance > 1e-10 * variance[-1].clamp(min=1e-300)
        return Eigenbasis(
            mean, std, (basis * ~constant.unsqueeze(1))[:, kept].contiguous(), variance[kept]
        )

    def rotate(self, features: Tensor) -> Tensor:
        """Coordinates of (images, dim) features and a column of ones, (images, rank + 1)."""
        matrix = (self.basis / self.std.unsqueeze(1)).float().to(features.device)
        mean = self.mean.float().to(features.device)
        coordinates = torch.ones(len(features), matrix.shape[1] + 1, device=features.device)
        rows = 2**16
        for source, target in zip(
            torch.split(features, rows), torch.split(coordinates, rows), strict=True
        ):
            target[:, :-1] = (source - mean) @ matrix
        return coordinates

    def unfold(self, solution: Tensor) -> tuple[Tensor, Tensor]:
        """Weight (classes, dim) and bias (classes,) for untransformed features, float64."""
        solved = solution.double().cpu()
        weight = ((self.basis @ solved[:-1]) / self.std.unsqueeze(1)).T
        return weight, solved[-1] - weight @ self.mean


class LogisticProblems:
    """Several logistic regressions over subsets of the same images.

    Args:
        inputs: Coordinates and a column of ones, (images, rank + 1) float32.
        included: Whether an image is part of a problem, (images, problems).
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, included: Tensor, classes: int, variance: Tensor
    ) -> None:
        self.inputs, self.labels = inputs, labels.unsqueeze(1)
        self.shape = inputs.shape[1], included.shape[1], classes
        self.shares = included.float() / included.sum(0)
        present = torch.stack(
            [torch.bincount(labels[column], minlength=classes) for column in included.T]
        )
        self.absent = present == 0
        """Classes without images in a problem, (problems, classes); their logits are masked."""
        one = torch.ones(1, dtype=variance.dtype)
        self.curvature = (torch.cat([variance, one]) / 2).float().to(inputs.device)

    def start(self) -> Tensor:
        """Weights of zero, (rank + 1, problems, classes)."""
        return torch.zeros(self.shape, device=self.inputs.device)

    def logits(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """(images, rank + 1) and weights -> (images, problems, classes)"""
        flat = inputs @ weights.flatten(1)
        return flat.view(len(inputs), *self.shape[1:]).masked_fill_(self.absent, -torch.inf)

    def loss(self, weights: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each problem, (problems,) float64, and its gradient, of the shape of `weights`,
        which is (rank + 1, problems, classes)."""
        gradient = penalty * weights
        loss = (gradient * weights).sum((0, 2), dtype=torch.float64) / 2
        rows = max(BLOCK // (self.shape[1] * self.shape[2]), 1)
        parts = (torch.split(whole, rows) for whole in (self.inputs, self.labels, self.shares))
        for inputs, labels, shares in zip(*parts, strict=True):
            logits = self.logits(inputs, weights)
            index = labels.unsqueeze(1).expand(-1, self.shape[1], 1)
            total = logits.logsumexp(2, keepdim=True)
            own = (total - logits.gather(2, index)).squeeze(2)
            errors = logits.sub_(total).exp_().scatter_(2, index, 0.0)
            # 1 - p from the other classes: float32 loses p where it is nearly 1
            wrong = errors.sum(2)
            losses = torch.where(wrong < 0.5, -torch.log1p(-wrong), own)
            loss += torch.where(shares > 0, losses * shares, 0.0).sum(0, dtype=torch.float64)
            errors.scatter_(2, index, -wrong.unsqueeze(2))
            errors *= shares.unsqueeze(2)
            gradient.flatten(1).addmm_(inputs.T, errors.flatten(1))
        return loss, gradient


@dataclass(frozen=True)
class Minimum:
    """Result of `minimise`: weights (rank + 1, problems, classes), and whether all converged."""

    weights: Tensor
    converged: bool


def minimise(
    problems: LogisticProblems, start: Tensor, strength: float, *, tolerance: float, most: int = 500
) -> Minimum:
    """Solve all problems by L-BFGS, each with a step length of its own.

    `tolerance` is the largest distance from the minimum, by a quadratic estimate, relative to loss
    + SMALL.
    """
    penalty = torch.full((problems.shape[0], 1, 1), strength, device=start.device)
    penalty[-1] = 0.0  # the bias
    inverse = 1 / (problems.curvature[:, None, None] + penalty)
    weights = start
    loss, gradient = problems.loss(weights, penalty)
    past: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=MEMORY)
    scale = torch.ones_like(loss)
    active = torch.ones_like(loss, dtype=torch.bool)
    for _ in range(most):
        towards = lbfgs_direction(gradient, past, inverse, scale)
        slope = dot(gradient, towards)
        # before the first step the curvature is only a bound, which underestimates the distance
        active &= -slope / 2 > (tolerance * (loss + SMALL) if past else 0.0)
        if not active.any():
            return Minimum(weights, True)
        length = active.double()
        for _ in range(HALVINGS):
            step = towards * length.float()[:, None]
            new_loss, new_gradient = problems.loss(weights + step, penalty)
            failing = ~(new_loss <= loss + DECREASE * length * slope + SLACK * loss) & active
            if not failing.any():
                break
            length = torch.where(failing, length / 2, length)
        else:
            active &= ~failing  # as low as float32 resolves
            step = towards * torch.where(failing, 0.0, length).float()[:, None]
            new_loss, new_gradient = problems.loss(weights + step, penalty)
        change = new_gradient - gradient
        along = dot(step, change)
        useful = along > 1e-30
        past.append((step, change, torch.where(useful, 1 / along.clamp(min=1e-30), 0.0)))
        newest = along / dot(change, inverse * change).clamp(min=1e-30)
        scale = torch.where(useful, newest, scale)
        weights, loss, gradient = weights + step, new_loss, new_gradient
    return Minimum(weights, False)


def lbfgs_direction(
    gradient: Tensor, past: deque[tuple[Tensor, Tensor, Tensor]], inverse: Tensor, scale: Tensor
) -> Tensor:
    """The two-loop recursion; `scale * inverse` is the initial inverse Hessian."""
    towards = -gradient
    shares = []
    for step, change, factor in reversed(past):
        share = (factor * dot(step, towards)).float()[:, None]
        towards = towards - share * change
        shares.append(share)
    towards = towards * inverse * scale.float()[:, None]
    for (step, change, factor), share in zip(past, reversed(shares), strict=True):
        towards = towards + step * (share - (factor * dot(change, towards)).float()[:, None])
    return towards


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Inner product in each problem: twice (rank + 1, problems, classes) -> (problems,) float64"""
    return (first * second).sum((0, 2), dtype=torch.float64)
