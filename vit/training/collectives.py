"""What several processes must agree on, so that none waits for one that has given up."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from vit.errors import RunError, VitError

T = TypeVar("T")


def on_main(accelerator: Accelerator, act: Callable[[], T]) -> T:
    """Let the main process `act`; all get its answer, or raise its error.

    Args:
        accelerator: Knows the processes.
        act: What to do; answers with something that can be sent.

    Raises:
        VitError: What `act` raised.
    """
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = act()
        except VitError as error:
            outcome[1] = error
        except Exception as error:
            outcome[1] = RunError(f"{type(error).__name__}: {error}")  # for the others, who wait
            broadcast_object_list(outcome)
            raise
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    answer: T = outcome[0]
    return answer


def everyones(mine: list[T]) -> list[T]:
    """The items of the lists of all processes, on each of them."""
    found: list[T] = gather_object(mine)
    return found


def agreed_signal(accelerator: Accelerator, number: int) -> int:
    """The signal that any process has received, or 0; the same answer on all of them."""
    mine = torch.tensor([number], device=accelerator.device)
    return int(accelerator.gather(mine).max())


def require_same_step(accelerator: Accelerator, step: int) -> None:
    """Refuse to start processes at different steps.

    Raises:
        RunError: They do not see the same run folder.
    """
    mine = torch.tensor([step], device=accelerator.device)
    steps = accelerator.gather(mine).tolist()
    if len(set(steps)) > 1:
        raise RunError(
            f"processes found checkpoints of different steps, {steps}: put --out on a disk that "
            "all of them share"
        )
