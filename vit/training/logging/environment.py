"""environment.jsonl of a run folder: command, versions, devices and git commits.

One line for the start of the training, and one for each time it was resumed by another command or
in another environment. It serves the report and the reproduction of a run; no result depends on it.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from vit.atomic_files import explain_write_errors
from vit.event_log import read_event_log
from vit.process_resources import usable_cores
from vit.text import printable
from vit.version import __version__

ENVIRONMENT_FILE = "environment.jsonl"
LIBRARIES = ("torchvision", "timm", "accelerate", "numpy", "pillow")
GIT_SECONDS = 5.0
"""A git that has not answered by then is not waited for."""


def record_environment(folder: Path) -> None:
    """Append a line to environment.jsonl of the run in `folder`, if more than the time differs."""
    path = folder / ENVIRONMENT_FILE
    found = describe_environment()
    known = read_environment(folder)
    if known and {**known[-1], "began": found["began"]} == found:
        return
    line = json.dumps(found) + "\n"
    with explain_write_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(line)


def read_environment(folder: Path) -> list[dict[str, Any]]:
    """The lines of environment.jsonl, oldest first; none of a run that has no such file."""
    return read_event_log(folder / ENVIRONMENT_FILE, key="command").events


def describe_environment() -> dict[str, Any]:
    """One line of environment.jsonl."""
    package = Path(__file__).resolve().parents[3]
    code = {}
    if (package / ".git").exists():
        code = {
            "commit": _git(package, "rev-parse", "HEAD"),
            "changed": bool(_git(package, "status", "--porcelain", "--untracked-files=no")),
        }
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = range(torch.cuda.device_count() if begun else 0)
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "directory": printable(Path.cwd()),
        "versions": {
            "vit": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,  # with that of CUDA, which the package's metadata lack
            **{name: metadata.version(name) for name in LIBRARIES},
        },
        "system": platform.platform(terse=True),
        "processor": processor_name(),
        "cores": usable_cores(),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "git": {"vit": code or None},
    }


def command_line() -> str:
    """The command of this process, as typed in a shell: `vit train ...`, `python train.py ...`."""
    program, *arguments = sys.orig_argv
    script = Path(sys.argv[0])
    if script.stem == "vit":
        return shlex.join(["vit", *map(printable, sys.argv[1:])])
    return shlex.join([Path(program).name, *map(printable, arguments)])


def processor_name() -> str:
    """The model of the CPU; its architecture where the system does not name it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints about the repository of `folder`; None without one."""
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()
