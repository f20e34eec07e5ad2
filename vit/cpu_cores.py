"""The CPU cores that this process may use, and how its threads wait for each other on them."""

import os

SPIN_COUNT = 10_000
"""Rounds in which a thread of OpenMP waits actively for the others, then it sleeps: microseconds.

The default of GNU's OpenMP, which PyTorch uses, is 30 times as many: wherever another program has
one of the cores, each operation waits for the thread that it has stopped.
"""


def usable_cores() -> int:
    """Cores in the affinity mask of this process; all cores where the system has no such masks."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def limit_active_waiting() -> None:
    """Let threads of OpenMP sleep soon, unless the environment sets how they wait.

    Takes effect in processes that have not imported torch.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
