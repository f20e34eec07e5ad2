"""Free space on a disk, and free memory of this machine or container."""

import shutil
from pathlib import Path

RESERVED = 0.1
"""Share of the free space that is left free."""
CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 2**62


def free_bytes(folder: Path, *, memory: bool = False) -> int:
    """Bytes that may be written into `folder`; `memory` if its files are in memory (tmpfs)."""
    free = shutil.disk_usage(folder).free
    if memory:
        free = min(free, _free_system_memory(), _free_cgroup_memory())
    return int(free * (1 - RESERVED))


def _free_system_memory() -> int:
    """Bytes of memory available on Linux."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return UNLIMITED


def _free_cgroup_memory() -> int:
    """Bytes left to the container of this process, if any."""
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        return UNLIMITED if limit == "max" else int(limit) - used
    except (OSError, ValueError):
        return UNLIMITED
