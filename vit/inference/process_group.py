"""Distributed prediction: a group of processes that share one list of images.

Predictions go through files, so the processes exchange only small Python objects, over gloo on the
CPU whatever device computes. A single process needs neither torch nor accelerate.
"""

import atexit
import datetime
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vit.errors import ConfigError, RunError, VitError

T = TypeVar("T")
TIMEOUT = datetime.timedelta(days=30)  # one process may finish long before another


class ProcessFailed(VitError):
    """Error of one process, raised in all of them."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


class ProcessGroup:
    """The processes started by a launcher, seen from one of them; or this one.

    Attributes:
        rank: Index of this process.
        processes: Number of processes.
    """

    def __init__(self) -> None:
        self.rank, self.processes = 0, 1
        if (started := world_size()) == 1:
            return
        from accelerate import PartialState

        with warnings.catch_warnings():  # accelerate warns about its choice of OMP_NUM_THREADS
            warnings.simplefilter("ignore")
            state = PartialState(cpu=True, timeout=TIMEOUT)
        self.rank, self.processes = int(state.process_index), int(state.num_processes)
        if self.processes != started:
            raise RunError(
                f"{started} processes were started, and {self.processes} can work together"
            )
        atexit.register(destroy_process_group)

    def device(self, requested: str | None) -> str | None:
        """Device of this process: one GPU each, where there are GPUs and no other is requested."""
        if self.processes == 1:
            return requested
        if requested is not None and ":" in requested:
            raise ConfigError(
                f"device={requested!r}: {self.processes} processes take a device each; "
                "use --device cuda or cpu"
            )
        import torch

        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
        if requested not in (None, "cuda") or (requested is None and on_cpu):
            return requested or "cpu"
        if not torch.cuda.is_available():
            return requested
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"

    def run_on_main(self, function: Callable[[], T]) -> T:
        """Call `function` in process 0 and return its result, or raise its error, in all."""
        result: Any = self.run_on_all(function if self.rank == 0 else lambda: None)
        first: T = self.all_gather(result)[0]
        return first

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Call `function` in every process and return its local result once all have finished."""
        if self.processes == 1:
            return function()
        try:
            result = function()
        except VitError as error:
            self._raise_first((str(error), error.exit_code))
            raise
        except Exception as error:
            self._raise_first((f"process {self.rank}: {type(error).__name__}: {error}", 1))
            raise
        self._raise_first(None)
        return result

    def all_gather(self, value: T) -> list[T]:
        """`value` of every process, by rank."""
        if self.processes == 1:
            return [value]
        from accelerate.utils import gather_object

        try:
            values: list[T] = gather_object([value])
        except RuntimeError:  # its connection is closed
            raise RunError("another process has ended; what is written is kept") from None
        return values

    def _raise_first(self, failure: tuple[str, int] | None) -> None:
        """Raise the failure of any process; one with an empty message only followed another."""
        failures = [one for one in self.all_gather(failure) if one is not None]
        for message, code in sorted(failures, key=lambda one: not one[0]):
            raise ProcessFailed(message, code)


def destroy_process_group() -> None:
    """Leave the group before the interpreter exits: running gloo threads may abort it."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def world_size() -> int:
    """How many processes a launcher has started."""
    word = os.environ.get("WORLD_SIZE", "1")
    return int(word) if word.isdecimal() else 1


def requested_processes(environment: Mapping[str, str], parent: Sequence[str]) -> int:
    """Number of processes requested from accelerate's launcher, if it started a single one.

    Args:
        environment: Environment of this process; the launcher marks CPU runs, and sets the address
            of the main process for several processes only.

    Returns:
        The number, or 1 if this process is one of several already, or none were requested.
    """
    marked = environment.get("ACCELERATE_USE_CPU") == "True" and "MASTER_ADDR" in environment
    if not marked or "WORLD_SIZE" in environment or "accelerate" not in " ".join(parent):
        return 1
    for word, following in zip(parent, [*parent[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in ("--num_processes", "--num-processes"):
            number = value or following
            return int(number) if number.isdecimal() else 1
    return 1


def launch_if_requested() -> None:
    """Replace this process by torch's launcher if accelerate's should start several on CPUs."""
    if "ACCELERATE_USE_CPU" not in os.environ or "MASTER_ADDR" not in os.environ:
        return
    import psutil  # accelerate brings it

    parent = psutil.Process().parent()
    count = requested_processes(os.environ, parent.cmdline() if parent else [])
    if count == 1:
        return
    print(f"starting {count} processes with torch.distributed.run", file=sys.stderr, flush=True)
    script = Path(sys.argv[0])
    # by its path: `-m` would let modules in the current folder stand in for installed ones
    program = ["-m", "vit"] if script.name == "__main__.py" else [str(script)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(count), *program, *sys.argv[1:]]
    os.execv(sys.executable, launcher)
