"""The cores and the memory of this process: how threads wait, and what is kept of freed memory."""

import os
import sys

SPIN_COUNT = 10_000
"""Rounds in which a thread of OpenMP waits actively for the others, then it sleeps: microseconds.

The default of GNU's OpenMP, which PyTorch uses, is 30 times as many: wherever another program has
one of the cores, each operation waits for the thread that it has stopped.
"""
# of mallopt, in malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_KEPT = 2**30
"""Bytes of free memory that stay with the process."""
MAX_BLOCK = 2**25
"""Size in bytes up to which a block is kept; the largest that glibc takes."""


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


def keep_freed_memory() -> bool:
    """Set glibc's allocator for the rest of the process; whether it did.

    glibc returns large blocks to the system when they are freed, and each step gets them back page
    by page, zeroed by the kernel: a sixth to a third of the time of a step or of a forward pass.
    Does nothing without glibc, or where the environment has settings for the allocator.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, MAX_KEPT) and mallopt(M_MMAP_THRESHOLD, MAX_BLOCK))
