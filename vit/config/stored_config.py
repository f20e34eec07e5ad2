"""config.yaml of a run folder: the completed settings of its training, and where its files are.

Paths in it are as they were typed. paths.json has them absolute and relative to the run, so that
they are found from any working folder, also where run and data were moved together; `lists/` has
copies of the lists that people edit.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from vit.config import ONLY_CAPTIONS, ONLY_EXPERTS, SECTIONS, Config, TrainingConfig
from vit.config.data_config import RANDAUGMENT
from vit.config.parser import flatten, make_config, read_settings
from vit.config.pretraining_config import SETTINGS_OF
from vit.errors import RunError
from vit.text import printable

HEADER = "Settings of a finished or running training."
"""The first line of the file, a comment."""
PATHS_FILE, LISTS = "paths.json", "lists"
EDITED_LISTS = ("labels", "corrections", "exclude")
"""Settings that name a list which people edit."""
DATA_PATHS = ("data", "images", *EDITED_LISTS)
PATHS = (*DATA_PATHS, "weights", "teacher")
"""Settings that may be paths."""


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
    return located(settings_of_task(read_settings(path)), Path(path).parent)


def write_paths(folder: Path, config: Config) -> None:
    """Write paths.json of the run in `folder`, and copies of the lists that people edit."""
    record, start = {}, os.path.realpath(folder)
    for name, given in flatten(config).items():
        if name in PATHS and given is not None:
            path = os.path.abspath(given)
            places = {"absolute": path, "from_run": os.path.relpath(path, start)}
            record[name] = {"given": given, **places}
        if name in EDITED_LISTS and given is not None:
            content, copy = Path(given).read_bytes(), f"{LISTS}/{name}{Path(given).suffix}"
            (folder / LISTS).mkdir(exist_ok=True)
            (folder / copy).write_bytes(content)
            record[name] |= {"copy": copy, "sha256": hashlib.sha256(content).hexdigest()}
    (folder / PATHS_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_paths(folder: Path) -> dict[str, dict[str, str]]:
    """The content of paths.json; runs of earlier versions have none.

    Raises:
        RunError: The file is damaged.
    """
    path = folder / PATHS_FILE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{printable(path)} is damaged ({printable(error)}); delete it") from None


def located(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Settings of the run in `folder`, with paths that lead to its files from any working folder.

    A list that was changed since the training is its copy in the run.
    """
    found = dict(values)
    for name, entry in read_paths(folder).items():
        place, given = find_path(folder, entry)[1], entry["given"]
        if place and values.get(name) == given and os.path.realpath(given) != place:
            found[name] = place
    return found


def find_path(folder: Path, entry: Mapping[str, str]) -> tuple[str, str]:
    """Where a file of the training is now: a key of its entry in paths.json and a path, or ""."""
    order = ("absolute", "from_run") if os.path.isabs(entry["given"]) else ("from_run", "absolute")
    for key in (*order, "copy"):
        path = Path(os.path.realpath(folder / entry.get(key, "")))
        shards = not {*"*?{"}.isdisjoint(path.name) and path.parent.is_dir()
        if key in entry and (shards or path.exists()):
            same = (
                "sha256" not in entry
                or key == "copy"
                or hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
            )
            if same:
                return key, str(path)
    return "", ""


def changed_lists(folder: Path) -> list[str]:
    """A note about each list of the run in `folder` that was changed since its training."""
    return [
        f"note: {name}={printable(entry['given'])} has changed since the training, or is gone: its "
        f"copy {printable(folder / entry['copy'])} is used"
        for name, entry in read_paths(folder).items()
        if find_path(folder, entry)[0] == "copy"
    ]


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
