"""Number of CPU cores that this process may use."""

import os


def usable_cores() -> int:
    """Cores in the affinity mask of this process; all cores where the system has no such masks."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
