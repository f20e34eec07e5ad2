"""Whether a command works alone, or as one of several processes that a launcher has started.

Several processes on CPUs, where `accelerate launch --cpu --num_processes N` starts only one.

Without MPI, accelerate's launcher runs the script once however many processes were asked for, and
says nothing. The number stands only on its own command line, so it is read there, and torch's
launcher starts the processes.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vit.inference.process_group import ProcessGroup


def requested_processes(environment: Mapping[str, str], parent: Sequence[str]) -> int:
    """How many processes accelerate's launcher was asked for, where it started a single one.

    Args:
        environment: That of this process; the launcher marks CPU runs, and gives the address where
            processes meet only when they are several.
        parent: Command line of the parent process.

    Returns:
        Their number, or 1 where this process is one of several already or nobody asked.
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
    """Become torch's launcher where accelerate's was asked for several processes on CPUs."""
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


T = TypeVar("T")


class SingleProcess:
    """A single process, with the interface of a ProcessGroup."""

    rank, processes = 0, 1

    def device(self, asked: str | None) -> str | None:
        return asked

    def run_on_main(self, act: Callable[[], T]) -> T:
        return act()

    def run_on_all(self, act: Callable[[], T]) -> T:
        return act()

    def all_gather(self, mine: T) -> list[T]:
        return [mine]


def world_size() -> int:
    """How many processes a launcher has started."""
    word = os.environ.get("WORLD_SIZE", "1")
    return int(word) if word.isdecimal() else 1


def current_process_group() -> "SingleProcess | ProcessGroup":
    """The processes of this launch, or this one alone."""
    if world_size() == 1:
        return SingleProcess()
    from vit.inference.process_group import ProcessGroup

    return ProcessGroup()
