"""The run folder: its files, its lock, and the settings stored in it."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from vit.atomic_files import atomic_file, explain_write_errors, lock_file, write_text
from vit.calibration_reference import REFERENCE_FILE
from vit.config import Config
from vit.config.data_config import CHANNEL_SETTINGS
from vit.config.setting_layers import (
    as_typed_flag,
    flatten,
    make_config,
    settings_with,
    with_settings,
    write_settings,
)
from vit.config.stored_config import (
    COPY,
    DATA_PATHS,
    HEADER,
    LISTS,
    PATHS_FILE,
    has_stored_config,
    stored_config,
    write_paths,
)
from vit.config.user_code import USER_CODE_FILE
from vit.data.dataset_types import Splits
from vit.data.sources.scene_groups import write_groups
from vit.data.sources.split_file import SPLIT_FILE, read_split, split_record
from vit.errors import ConfigError, DataError, RunError
from vit.evaluation.run_report import BACKBONES_FILE, REPORT_FILE
from vit.evaluation.runs_table import SUMMARY_FILE
from vit.paths import GROUPS_FILE
from vit.tasks.task import get_task
from vit.text import quoted
from vit.training.checkpoint.checkpoint import CHECKPOINTS
from vit.training.logging.environment import ENVIRONMENT_FILE
from vit.training.logging.trackers import TRACKING
from vit.weights.safetensors_io import write_tensors
from vit.weights.saved_model import DISTANCE_FILE, PRETRAINING_FILE, TOKENIZER_FILE

TEACHER_FILE, TEACHER_ANSWERS = "teacher.safetensors", "answers"
"""Answers of a teacher for the training images, in their order; and the name of their tensor."""
FILES = (
    *("config.yaml", "config.json", "model.safetensors", "metrics.jsonl", SPLIT_FILE),
    *(TOKENIZER_FILE, REPORT_FILE, ENVIRONMENT_FILE, PRETRAINING_FILE, TEACHER_FILE),
    *(DISTANCE_FILE, REFERENCE_FILE, PATHS_FILE, SUMMARY_FILE, GROUPS_FILE, USER_CODE_FILE),
    BACKBONES_FILE,
)
WEIGHTS = "model.safetensors"
BEST = "best"
LOCK = ".lock"
PATTERNS = {CHECKPOINTS: "step-*", BEST: "epoch-*", LISTS: f"{COPY}*"}
"""Folders in a run folder, and the names of the files that a training writes there."""


def check_run_folder(folder: Path, *, resume: bool, overwrite: bool) -> bool:
    """Check the run folder before any expensive work; returns whether it holds a run to resume.

    A run that stopped before its first weights does not count.
    """
    if resume and overwrite:
        raise RunError("resume and overwrite exclude each other: choose one")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"run folder {folder} is a file: give a folder")
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        which = "it" if place == folder else place
        raise RunError(f"run folder {folder} cannot be written: {which} is read-only")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    taken = any(name != LOCK and not name.endswith(".tmp") for name in names)
    if taken and not has_stored_config(folder):
        raise RunError(f"{folder} has files that no training wrote: give another folder")
    resumable = any((folder / CHECKPOINTS).glob("*.safetensors"))
    has_run = resumable or (folder / WEIGHTS).is_file()
    if has_run and not (resume or overwrite):
        raise RunError(f"{folder} exists: --resume continues it, --overwrite starts anew")
    if has_run and resume and not resumable:  # one is written before the weights
        raise RunError(
            f"{folder} has weights, but its checkpoints were deleted: --weights {quoted(folder)} "
            "--out OTHER trains on from the weights, --overwrite starts anew"
        )
    return has_run and resume


def lock_folder(folder: Path) -> BinaryIO:
    """Lock `folder` until the returned file is closed or this process ends."""
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
    with contextlib.suppress(OSError):  # a file system without locks
        # loader processes must not inherit it: they may outlive this one by seconds
        if not lock_file(file, inherited=False):
            file.close()
            raise RunError(f"{folder} is being trained by another process: stop that one")
    return file


def delete_unused(folder: Path) -> None:
    """Delete a locked folder of a command that was refused, if nothing else is in it."""
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} == {LOCK}:
            (folder / LOCK).unlink()
            folder.rmdir()


def delete_run(folder: Path) -> None:
    """Delete what a training wrote in `folder`, and nothing else."""
    clean_leftovers(folder)
    shutil.rmtree(folder / TRACKING, ignore_errors=True)
    for name, pattern in PATTERNS.items():
        for path in folder.glob(f"{name}/{pattern}"):
            path.unlink()
        with contextlib.suppress(OSError):  # missing, or with files of somebody else
            (folder / name).rmdir()
    # config.yaml identifies a run folder: deleted last, since a kill may come in between
    for name in reversed(FILES):
        (folder / name).unlink(missing_ok=True)


def foreign_files(folder: Path) -> list[Path]:
    """What `delete_run` leaves in `folder`; a new run is then refused there."""
    known = {*FILES, *PATTERNS, TRACKING, LOCK}
    found = [path for path in folder.glob("*") if path.name not in known]
    for name, pattern in PATTERNS.items():
        found += [path for path in folder.glob(f"{name}/*") if not path.match(pattern)]
    return sorted(path for path in found if path.suffix != ".tmp")


def clean_leftovers(folder: Path) -> None:
    """Delete temporary files of a killed process in a run folder."""
    with explain_write_errors(folder):
        for place in (folder, folder / CHECKPOINTS, folder / BEST):
            for path in place.glob(".*.tmp"):
                path.unlink(missing_ok=True)


def with_stored_settings(config: Config, folder: Path) -> Config:
    """`config` with settings of config.yaml that were measured when the run in `folder` began.

    These are the number of epochs that fits `time`, of micro-batches that fits the memory, and the
    range of the values of deep images, which older runs do not have.
    With pretrained weights, all settings that the user did not choose: the weights may be gone.
    """
    stored = stored_config(folder)
    if config.finetune.weights is not None:
        chosen = flatten(config)
        kept = {name: chosen[name] for name in config.settled}
        config = make_config({**flatten(stored), **kept}, origins=config.origins)
    measured: dict[str, Any] = {}
    if config.training.time is not None:
        measured = {
            name: getattr(stored.training, name) for name in settings_with(decided_by="time")
        }
        measured["time"] = None
    if config.data.accumulate is None:
        measured["accumulate"] = stored.data.accumulate
    if not config.chosen("group"):  # none where an earlier version began it
        measured["group"] = stored.data.group
    if not config.chosen("intensity_range"):
        measured["intensity_range"] = stored.data.intensity_range
    order, theirs = config.data.channel_order, stored.data
    if not config.chosen("channel_order") or order in (theirs.channel_order, theirs.channel_names):
        own = ("axes",) if config.chosen("axes") else ()
        measured |= {name: getattr(theirs, name) for name in CHANNEL_SETTINGS if name not in own}
        measured["channels"] = stored.model.channels
    if stored.data.value_type is not None:  # which replaced the colours of the task
        names = [one for one in ("auto_augment", "color_jitter") if not config.chosen(one)]
        measured |= {name: getattr(stored.augment, name) for name in names}
    return with_settings(config, **measured)


def require_same_settings(config: Config, folder: Path, splits: Splits) -> None:
    """Refuse to resume a run with settings that change what it computes.

    Data and lists may be in another place: a checkpoint has the names and labels of their images.
    """
    split = read_split(folder)
    if split is not None and split.root != splits.root.resolve():  # else a checkpoint knows
        require_held_out(folder, splits)
    ours, theirs = flatten(config), flatten(stored_config(folder))
    fixed = {"accumulate"} if get_task(config.training.task).compares_images else set()
    allowed = {*settings_with(resumable=True), *DATA_PATHS} - fixed
    changed = [name for name in ours if ours[name] != theirs[name] and name not in allowed]
    by_data = {*settings_with(decided_by="data"), "epochs"}
    given = [name for name in changed if config.chosen(name) or name not in by_data]
    if given and "num_classes" not in changed:  # which config.yaml of a run has, too
        name, mine = as_typed_flag(given[0], ours[given[0]])
        _, before = as_typed_flag(given[0], theirs[given[0]])
        raise ConfigError(
            f"{name}={mine!r} differs from {before!r} in {folder}: a run resumes with "
            "its own settings; leave the flag out, or start a new run with another --out"
        )
    if changed:
        name = "num_classes" if "num_classes" in changed else changed[0]
        was = f"{name}={theirs[name]!r} then, {ours[name]!r} now"
        raise DataError(
            f"the data set changed since this run began ({was}): restore it to resume, or "
            f"{train_on(folder, config.data.data)}"
        )


def require_held_out(folder: Path, splits: Splits) -> None:
    """Refuse data with other validation images than the run in `folder` held out, if it did."""
    split = read_split(folder)
    if split is None:
        return
    match = split.find((one.path for one in splits.val), splits.root)
    if match.known and not len(match.paths) == match.recorded == len(splits.val):
        raise DataError(
            f"the {len(splits.val):,} validation images of {splits.root} have "
            f"{len(match.paths):,} of the {match.recorded:,} that {folder} held out: give the data "
            "as it was in the training"
        )


def train_on(folder: Path, data: str | None = None) -> str:
    """The remedy for a changed data set: more images or classes are learned by a new run."""
    data = stored_config(folder).data.data if data is None else data
    return (
        "train a new run, from its weights if it has any: "
        f"vit train {quoted(data)} --weights {quoted(folder)} --out ANOTHER_FOLDER"
    )


def write_config(folder: Path, config: Config) -> None:
    """Write the settings that reproduce the run to config.yaml, atomically."""
    header = f"{HEADER}\nRepeat it: vit train --config THIS"
    with atomic_file(folder / "config.yaml") as path:
        write_settings(path, config, header)


def write_new_run(folder: Path, config: Config, splits: Splits) -> None:
    """Empty a locked folder, and write settings, tokenizer, teacher's answers, and a made split."""
    # read before the run exists: one that is resumed without split.json held no images out
    val = [sample.path for sample in splits.val] if splits.made else []
    held_out = split_record(val, splits.root)
    with explain_write_errors(folder):
        delete_run(folder)
        write_config(folder, config)
        write_paths(folder, config)
    if code := config.user_code.record():
        write_text(folder / USER_CODE_FILE, json.dumps(code, indent=1) + "\n")
    if splits.groups:
        write_groups(folder, splits.groups)
    if splits.made:
        record = {
            "seed": config.training.seed,
            "val_share": config.data.val_share,
            "group": config.data.group,
            "folds": config.data.folds,
            "fold": config.data.fold,
            **held_out,
        }
        write_text(folder / SPLIT_FILE, json.dumps(record, indent=1) + "\n")
    if splits.tokenizer is not None:
        write_text(folder / TOKENIZER_FILE, splits.tokenizer.to_json())
    if splits.teacher_answers is not None:
        answers = {TEACHER_ANSWERS: splits.teacher_answers}
        write_tensors(folder / TEACHER_FILE, answers, {"format": "pt"})
