"""Trainings on a small disk of their own: one that gets full, and one that gets read-only.

The disk is a tmpfs that only the process and its loaders see, so nothing is left when they end.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.training.children import command, watch_steps

NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000
READ_ONLY, REMOUNT, PRIVATE_TREE = 0x1, 0x20, 0x44000
SIZE = 8 * 2**20
CANNOT = 77


def mount(place: Path) -> None:
    """Put an empty disk of SIZE bytes at `place`, if this machine lets us."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", NEW_MOUNTS if user == 0 else NEW_MOUNTS | NEW_USER)
    if user != 0:  # who is root only in a world of its own must say whom that is outside
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", None, b"/", None, PRIVATE_TREE, None)
    _call("mount", b"tmpfs", bytes(place), b"tmpfs", 0, f"size={SIZE}".encode())


def remount(place: Path, flags: int) -> None:
    """Let the disk at `place` be read-only, or writable again."""
    _call("mount", None, bytes(place), None, REMOUNT | flags, f"size={SIZE}".encode())


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def fill(place: Path, left: int) -> None:
    """Let somebody else take all of the disk at `place` but `left` bytes."""
    taken = 0
    with (place / "others").open("wb") as file:
        # more than once: a file frees its room a moment after its name is gone
        for _ in range(3):
            room = os.statvfs(place)
            more = room.f_bavail * room.f_frsize - left
            if more > 0:
                os.posix_fallocate(file.fileno(), taken, more)
                taken += more
            time.sleep(0.02)


def full(words: list[str], place: Path, kept: Path, step: int, left: int, saved: int) -> int:
    """Train on a disk that gets full; make room, and resume.

    Args:
        kept: Gets copies of the run folder, `stopped` and `ended`, and the exit codes.
        step: The disk gets full before this one, but for the bytes `left`.
        saved: Number of checkpoints that are written by then, one a step.
    """
    at = [step]

    def before(now: int) -> None:
        if at == [now]:
            at.clear()
            wait_for_checkpoints(place / "run/checkpoints", saved)
            fill(place, left)

    if not mounted(place):
        return CANNOT
    watch_steps(before)
    first = command(words)
    shutil.copytree(place / "run", kept / "stopped")
    (place / "others").unlink()
    notify("resumed")
    second = command([*words, "--resume"])
    shutil.copytree(place / "run", kept / "ended")
    (kept / "codes").write_text(json.dumps([first, second]))
    return 0


def wait_for_checkpoints(folder: Path, newest: int) -> None:
    """Return when the newest two are there and nothing else is."""
    expected = {f"step-{step:08d}.safetensors" for step in (newest - 1, newest) if step > 0}
    while {path.name for path in folder.glob("*")} != expected:
        time.sleep(0.001)


def read_only(words: list[str], place: Path, kept: Path, step: int) -> int:
    """Stop a training at `step`, make its disk read-only, try to resume, and to start another.

    Then the disk can be written again, and the training is resumed. Arguments as in `full`.
    """
    if not mounted(place):
        return CANNOT
    watch_steps(lambda now: os.kill(os.getpid(), signal.SIGTERM) if now == step else None)
    codes = [command(words)]
    watch_steps(lambda _: None)
    remount(place, READ_ONLY)
    notify("resumed")
    codes.append(command([*words, "--resume"]))
    notify("another")
    codes.append(command([*words[:-1], str(place / "another")]))
    shutil.copytree(place, kept / "stopped")
    remount(place, 0)
    notify("writable")
    codes.append(command([*words, "--resume"]))
    shutil.copytree(place / "run", kept / "ended")
    (kept / "codes").write_text(json.dumps(codes))
    return 0


def mounted(place: Path) -> bool:
    """Whether there is a small disk at `place` now."""
    try:
        mount(place)
    except OSError as error:
        print(error, file=sys.stderr)
        return False
    return True


def notify(what: str) -> None:
    """Part the log."""
    print(f"-- {what}", file=sys.stderr, flush=True)
