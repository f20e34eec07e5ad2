"""Collective operations of a distributed training: broadcast, gather and common decisions."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from torch import Tensor

from vit.errors import RunError, VitError

T = TypeVar("T")
BROADCAST_NUMBERS = 2**24
"""Numbers that `broadcast_tensor` sends at a time."""


def on_main(accelerator: Accelerator, act: Callable[[], T]) -> T:
    """Call `act` on the main process; every process returns its result or raises its error."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = act()
        except VitError as error:
            outcome[1] = error
        except Exception as error:
            outcome[1] = RunError(f"{type(error).__name__}: {error}")  # for the waiting processes
            broadcast_object_list(outcome)
            raise
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    answer: T = outcome[0]
    return answer


def gather_lists(mine: list[T]) -> list[T]:
    """Concatenate the lists of all processes, on each of them."""
    found: list[T] = gather_object(mine)
    return found


def max_over_processes(accelerator: Accelerator, number: float) -> float:
    """Maximum of `number` over all processes; waits until the device has finished earlier work."""
    device = accelerator.device
    mine = torch.tensor([number], dtype=widest_float(device), device=device)
    return float(accelerator.gather(mine).max())


def min_over_processes(accelerator: Accelerator, number: int) -> int:
    """The smallest `number` of all processes; waits as `max_over_processes`."""
    return int(-max_over_processes(accelerator, -number))


def all_reduce(accelerator: Accelerator, totals: Tensor, counts: Sequence[float]) -> list[float]:
    """Sum `totals`, on the device, and `counts` over all processes, in one message."""
    if accelerator.num_processes == 1:
        return [*totals.tolist(), *map(float, counts)]
    message = torch.cat([totals, torch.tensor(counts, device=totals.device, dtype=totals.dtype)])
    numbers: list[float] = accelerator.reduce(message).tolist()
    return numbers


def widest_float(device: torch.device) -> torch.dtype:
    """The floating dtype with the highest precision that `device` has, for sums."""
    return torch.float32 if device.type == "mps" else torch.float64


def broadcast_tensor(accelerator: Accelerator, make: Callable[[], Tensor]) -> Tensor:
    """A large matrix that `make` returns on the main process, on the CPU of all processes."""
    made: list[Tensor] = []

    def shape() -> tuple[int, ...]:
        made.append(make())
        return tuple(made[0].shape)

    size = on_main(accelerator, shape)
    if accelerator.num_processes == 1:
        return made[0]
    values = made[0] if made else torch.empty(size)
    for part in torch.split(values, max(BROADCAST_NUMBERS // size[1], 1)):
        part.copy_(broadcast(part.to(accelerator.device)))
    return values


def agreed_signal(accelerator: Accelerator, number: int) -> int:
    """The signal that any process has received, or 0; equal on all processes."""
    if accelerator.num_processes == 1:
        return number
    mine = torch.tensor([number], device=accelerator.device)
    return int(accelerator.gather(mine).max())


def require_same_step(accelerator: Accelerator, step: int) -> None:
    """Check that all processes resume at the same step."""
    mine = torch.tensor([step], device=accelerator.device)
    steps = accelerator.gather(mine).tolist()
    if len(set(steps)) > 1:
        raise RunError(
            f"processes found checkpoints of different steps, {steps}: put --out on a disk that "
            "all of them share"
        )
