"""How much fits: on a disk, or into the memory that this process may use."""

import shutil
from pathlib import Path

from vit.text import format_bytes

SPARED = 0.1
"""Share of what is free that stays free."""
GROUP = Path("/sys/fs/cgroup")
PLENTY = 2**62


def room_in(folder: Path, *, memory: bool = False) -> int:
    """Bytes that may be written into `folder`.

    Args:
        folder: An existing one.
        memory: Whether its files lie in memory, which then has to be free too.
    """
    room = shutil.disk_usage(folder).free
    if memory:
        room = min(room, _free_memory(), _free_in_group())
    return int(room * (1 - SPARED))


def _free_memory() -> int:
    """Bytes of memory that the system could give; of Linux."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return PLENTY


def _free_in_group() -> int:
    """Bytes left to the container that this process runs in, if any."""
    try:
        most = (GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((GROUP / "memory.current").read_text(encoding="ascii"))
        return PLENTY if most == "max" else int(most) - used
    except (OSError, ValueError):
        return PLENTY


shown_bytes = format_bytes  # plan_rules.py imports it by this name
