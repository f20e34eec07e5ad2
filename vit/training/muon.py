"""Muon optimiser: momentum orthogonalised by Newton-Schulz, matrices of equal shape batched.

    M <- momentum * M + (1 - momentum) * G
    W <- (1 - lr * weight_decay) * W - lr * scale * UV^T        where M = U S V^T

Source: Jordan et al., "Muon", 2024, kellerjordan.github.io/posts/muon; the scale is that of Liu et
al., arXiv:2502.16982, section 2.2. Settings, defaults and state are those of timm's `muon`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

Coefficients = tuple[tuple[float, float, float], ...]

# of the polynomials a X + b (X X^T) X + c (X X^T)^2 X, one an iteration:
# leloykun.github.io/ponder/muon-opt-coeffs, as in timm
COEFFICIENTS: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# iterations after which a Gram matrix in bf16 is computed anew
RESTART = 2

# numbers in a stack: larger matrices fill a device alone, and stacks of them would fill its memory,
# or leave the caches of a CPU
STACK = {"cpu": 2**22}
STACK_OF_OTHERS = 2**24


class Update(NamedTuple):
    """A matrix, the momentum that moves it, both (rows, cols), and the factor on its direction."""

    parameter: Tensor
    momentum: Tensor
    factor: float


class Muon(Optimizer):
    """Muon for matrices, AdamW for everything else.

    `step` never waits for a GPU.

    Its state is timm's: `momentum_buffer` of a matrix; `step`, `exp_avg` and `exp_avg_sq` of
    anything else.

    Args:
        params: Parameters or groups of them. Those of a group with `use_fallback` go to AdamW; the
            others must be matrices (rows, cols), whole on each process.
        weight_decay: Decoupled: a step multiplies weights by 1 - lr * weight_decay.
        ns_dtype: Type in which the iterations compute. By default bf16 on GPUs, as in Jordan et
            al., and float32 on CPUs, many of which are slow in bf16; always float64 for parameters
            in float64.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        *,
        nesterov: bool = False,
        eps: float = 1e-7,
        betas: tuple[float, float] = (0.9, 0.95),
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": "quintic",  # as checkpoints name them
            "adjust_lr_fn": "match_rms_adamw",
            "eps": eps,
            "betas": betas,
            "use_fallback": False,
        }
        super().__init__(params, defaults)
        self.ns_dtype = ns_dtype  # of this machine, so not of its state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        shapes = [tuple(p.shape) for p in group["params"] if p.ndim != 2]
        if shapes and not group["use_fallback"]:
            raise ValueError(f"{shapes[0]} is no matrix: its group needs use_fallback")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        alike: dict[tuple[Any, ...], list[Update]] = defaultdict(list)
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            if group["use_fallback"]:
                self._step_adamw(group, learning)
                continue
            for update in self._step_momentum(group, learning):
                alike[_kind(update.parameter, group)].append(update)
        for (shape, device, _, eps), updates in alike.items():
            numbers = STACK.get(device.type, STACK_OF_OTHERS)
            size = max(1, numbers // shape.numel())
            for start in range(0, len(updates), size):
                _apply(updates[start : start + size], eps, self.ns_dtype)
        return loss

    def _step_momentum(self, group: dict[str, Any], parameters: list[Tensor]) -> Iterator[Update]:
        """Decay matrices and update their momentum."""
        if not parameters:
            return
        gradients = [_gradient(p) for p in parameters]
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        momenta = buffers
        if group["nesterov"]:
            momenta = list(torch._foreach_lerp(gradients, buffers, group["momentum"]))
        for p, momentum in zip(parameters, momenta, strict=True):
            # updates as large as AdamW's are, so that both take the same learning rate
            yield Update(p, momentum, -group["lr"] * (0.2 * max(p.shape) ** 0.5))

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """AdamW (Loshchilov and Hutter, arXiv:1711.05101), by torch's kernels for many tensors."""
        if not parameters:
            return
        fused = has_fused_adamw(parameters)
        for p in parameters:
            state = self.state[p]
            if "step" not in state:
                state["step"] = p.new_zeros((), dtype=torch.get_default_dtype())
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
            # one kernel needs the step counts beside the parameters, a loop reads them
            place = p.device if fused else torch.device("cpu")
            if state["step"].device != place:
                state["step"] = state["step"].to(place)
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [_gradient(p) for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalize(matrices: Tensor, coefficients: Coefficients, eps: float = 1e-7) -> Tensor:
    """About U V^T of each matrix U S V^T: its singular values are brought near 1.

    Matrices at least twice as wide as tall are multiplied by polynomials of their Gram matrices
    X X^T, which is the same with fewer products of the long side: Zhang et al., "Gram
    Newton-Schulz", 2026, dao-ailab.github.io/blog/2026/gram-newton-schulz.

    Args:
        matrices: (batch, rows, cols), rows <= cols; changed in place.
    """
    x = matrices
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=eps))
    if x.shape[-1] < 2 * x.shape[-2]:
        return _iterate(x, coefficients)
    # rounding of a Gram matrix is multiplied by a^2 in each iteration, up to 10^5: too much in
    # bf16, so that a new one is computed after two iterations, as there
    until = len(coefficients) if x.element_size() >= 4 else RESTART
    spare = torch.empty_like(x)
    for part in (coefficients[:until], coefficients[until:]):
        if part:
            torch.bmm(_gram_polynomial(x, part), x, out=spare)
            x, spare = spare, x
    return x


def _iterate(x: Tensor, coefficients: Coefficients) -> Tensor:
    """X <- a X + b (X X^T) X + c (X X^T)^2 X, in the memory of `x` and once more."""
    spare = torch.empty_like(x)
    gram = x.new_empty(*x.shape[:-1], x.shape[-2])
    polynomial = torch.empty_like(gram)
    for a, b, c in coefficients:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=spare)
        x, spare = spare, x
    return x


def _gram_polynomial(x: Tensor, coefficients: Coefficients) -> Tensor:
    """The Q (batch, rows, rows) with which Q X is what the iterations make of X."""
    gram = torch.bmm(x, x.mT)
    product, spare, polynomial = (torch.empty_like(gram) for _ in range(3))
    for number, (a, b, c) in enumerate(coefficients, 1):
        factor = product if number == 1 else polynomial
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=factor)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        if number > 1:
            torch.bmm(factor, product, out=spare)
            product, spare = spare, product
        if number < len(coefficients):
            torch.bmm(factor, gram, out=spare)
            torch.bmm(spare, factor, out=gram)
    return product


def has_fused_adamw(parameters: Iterable[Tensor]) -> bool:
    """Whether torch updates all of `parameters` in one kernel: all on CPUs, or all on GPUs."""
    return {parameter.device.type for parameter in parameters} in ({"cpu"}, {"cuda"})


def compute_dtype(parameter: Tensor, chosen: torch.dtype | None = None) -> torch.dtype:
    """Of the iterations: as chosen, or bf16 on GPUs and float32 elsewhere; float64 of float64."""
    if parameter.dtype == torch.float64:
        return torch.float64
    return chosen or (torch.bfloat16 if parameter.device.type == "cuda" else torch.float32)


def _kind(parameter: Tensor, group: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for matrices that one stack can hold; tall ones lie on their side in it."""
    shape = torch.Size(sorted(parameter.shape))
    return shape, parameter.device, parameter.dtype, group["eps"]


def _apply(updates: Sequence[Update], eps: float, dtype: torch.dtype | None) -> None:
    """Move matrices of one size, tall or wide, along their orthogonal directions."""
    parameters = [update.parameter for update in updates]
    tall = [p.shape[0] > p.shape[1] for p in parameters]
    sides = zip(updates, tall, strict=True)
    stack = torch.stack([u.momentum.mT if turned else u.momentum for u, turned in sides])
    stack = orthogonalize(stack.to(compute_dtype(stack, dtype)), COEFFICIENTS, eps)
    moves = list(stack.to(parameters[0].dtype).unbind())
    torch._foreach_mul_(moves, [update.factor for update in updates])
    turns = zip(moves, tall, strict=True)
    torch._foreach_add_(parameters, [move.mT if turned else move for move, turned in turns])


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
