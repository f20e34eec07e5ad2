"""config.yaml of a run folder: the completed settings of its training."""

import itertools
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from vit.config import ONLY_CAPTIONS, ONLY_EXPERTS, SECTIONS, Config, TrainingConfig
from vit.config.data_config import RANDAUGMENT
from vit.config.parser import make_config, read_stored_settings
from vit.config.pretraining_config import SETTINGS_OF

HEADER = "Settings of a finished or running training."
"""The first line of the file, a comment."""


def run_folder_of(source: str | os.PathLike[str]) -> Path:
    """The run folder that `source` names, or whose weights file it names."""
    path = Path(source)
    return path.parent if path.is_file() else path


def has_stored_config(folder: Path) -> bool:
    """Whether `folder` is a run folder, whose training has begun."""
    return (folder / "config.yaml").is_file()


def stored_config(folder: Path) -> Config:
    """Read the completed settings of the run in `folder`.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    return make_config(stored_settings(folder / "config.yaml"), complete=True)


def is_stored_file(path: str | Path) -> bool:
    """Whether a training wrote the file of settings, which then has all of them."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().rstrip() == f"# {HEADER}"
    except (OSError, ValueError):  # reading it says why
        return False


def stored_settings(path: str | Path) -> dict[str, Any]:
    """Flat values of the config.yaml of a run, without those that the run did not read.

    It has all settings; those of other tasks are the defaults of the version that wrote it, which
    another version would take for settings that somebody chose, and refuse.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    return settings_of_task(read_stored_settings(path))


def settings_of_task(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of all settings that the task in them reads."""
    task = str(values.get("task", TrainingConfig.task))
    unread = {*itertools.chain(*SETTINGS_OF.values())} - {*SETTINGS_OF.get(task, ())}
    if values.get("feedforward") != "moe":
        unread |= {*ONLY_EXPERTS}
    if not TrainingConfig(task=task).captions:
        for section, names in ONLY_CAPTIONS.items():
            unread |= {*(names or [each.name for each in fields(SECTIONS[section])])}
    read = {name: value for name, value in values.items() if name not in unread}
    return with_effect(read)


def with_effect(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without settings of augmentation that the others switch off."""
    unread = set() if values.get("auto_augment") == "randaugment" else {*RANDAUGMENT}
    mixing = bool(values.get("mixup")) + bool(values.get("cutmix"))
    unread |= {*("mix_probability", "cutmix_share")[mixing:]}
    if not values.get("local_views"):
        unread |= {"local_crop"} | ({"crop_ratio"} if values.get("min_crop") == 1 else set())
    return {name: value for name, value in values.items() if name not in unread}
