"""The folder a training writes: settings, split, metrics, checkpoints, and whose it is."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from vit.config import Config
from vit.data.samples import Splits
from vit.data.sources import relative
from vit.errors import ConfigError, RunError, printable
from vit.evaluation.report import REPORT_FILE
from vit.settings import flatten, make_config, read_settings, write_settings
from vit.weights.tensorfile import naming, write_safely, write_text

FILES = (
    *("config.yaml", "config.json", "model.safetensors", "metrics.jsonl", "split.json"),
    REPORT_FILE,
)
CHECKPOINTS = "checkpoints"

# settings that change how fast a run goes, not what it computes
FREE = {"workers", "device", "compile", "checkpoint_minutes"}


def default_folder(data: str) -> Path:
    """Where a run goes when nobody says: `runs/<name of the data>`."""
    return Path("runs") / (Path(data).resolve().name or "run")


def prepare_folder(folder: Path, config: Config, *, resume: bool, overwrite: bool) -> bool:
    """Make `folder` ours, before anything costs time.

    Returns:
        True where an earlier run is there to continue.

    Raises:
        RunError: The folder is taken, and neither `resume` nor `overwrite` was asked for; or it is
            not a run and would be overwritten; or it cannot be written.
        ConfigError: The run to continue has other settings.
    """
    where = printable(folder)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"--out {where} is a file: give a folder")
    taken = folder.is_dir() and any(folder.iterdir())
    ours = (folder / "config.yaml").is_file()
    if taken and not ours:
        raise RunError(f"--out {where} has files that no training wrote: give another folder")
    if taken and not (resume or overwrite):
        raise RunError(f"--out {where} exists: --resume continues it, --overwrite starts anew")
    if taken and resume:
        require_same_settings(config, stored_config(folder), where)
        return True
    with naming(folder):
        if taken:
            clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
    return False


def clear(folder: Path) -> None:
    """Delete what a training wrote in `folder`, and nothing else."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def stored_config(folder: Path) -> Config:
    """The completed settings of the run in `folder`."""
    return make_config(read_settings(folder / "config.yaml"))


def require_same_settings(config: Config, stored: Config, where: str) -> None:
    """Refuse to continue a run with settings that would make it another run.

    Raises:
        ConfigError: The message has the first setting that differs, with both values.
    """
    ours, theirs = flatten(config), flatten(stored)
    changed = [name for name in ours if ours[name] != theirs[name] and name not in FREE]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{name}={ours[name]!r} differs from {theirs[name]!r} in {where}: a run resumes with "
            "its own settings; leave the flag out, or start a new run with another --out"
        )


def write_start(folder: Path, config: Config, splits: Splits) -> None:
    """Record what reproduces the run: the completed settings, and our own split."""
    header = "Settings of a finished or running training.\nRepeat it: vit train --config THIS"
    write_safely(folder / "config.yaml", lambda beside: write_settings(beside, config, header))
    if splits.made:
        record = {
            "root": str(Path(splits.root).resolve()),
            "seed": config.training.seed,
            "val_share": config.data.val_share,
            "val": [relative(sample.path, splits.root) for sample in splits.val],
        }
        write_text(folder / "split.json", json.dumps(record, indent=1) + "\n")


class Metrics:
    """Appends events to metrics.jsonl; on resume, what came after the checkpoint is cut off.

    Args:
        path: The file.
        size: Bytes that the checkpoint knows of; the rest is dropped.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        with naming(path):
            self.file = path.open("ab")
            self.file.truncate(size)

    def write(self, event: dict[str, Any]) -> None:
        """Add one line."""
        line = json.dumps(event, allow_nan=False) + "\n"
        with naming(Path(self.file.name)):
            self.file.write(line.encode())
            self.file.flush()

    def size(self) -> int:
        """Bytes so far, all of them on the disk."""
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        self.file.close()
