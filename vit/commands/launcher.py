"""Launch of several processes.

Without MPI, `accelerate launch --cpu --num_processes N` starts one process without a warning. N is
only on the command line of accelerate's launcher, so it is read there, and torch's launcher starts
the processes.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


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
