"""config.yaml of a run folder: the completed settings of its training, and where its files are.

Paths in it are as they were typed. paths.json has them absolute and relative to the run, so that
they are found from any working folder, also where run and data were moved together; `lists/` has
copies of the lists that people edit.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit.atomic_files import write_text
from vit.config import Config
from vit.config.setting_layers import flatten, make_config, read_stored_settings, with_effect
from vit.errors import RunError
from vit.paths import is_group_list
from vit.text import Notify, printable

HEADER = "Settings of a finished or running training."
"""The first line of the file, a comment."""
PATHS_FILE, LISTS, COPY = "paths.json", "lists", "copy-"
"""The last begins the names of copies in LISTS."""
EDITED_LISTS = ("labels", "corrections", "exclude")
"""Settings that name a list which people edit."""
DATA_PATHS = ("data", "images", "taxonomy", *EDITED_LISTS)
PATHS = (*DATA_PATHS, "weights", "teacher")


def run_folder_of(source: str | os.PathLike[str]) -> Path:
    """The run folder that `source` names, or whose weights file it names."""
    path = Path(source)
    return path.parent if path.is_file() else path


def has_stored_config(folder: Path) -> bool:
    """Whether `folder` is a run folder, whose training has begun."""
    return (folder / "config.yaml").is_file()


def stored_config(folder: Path, notify: Notify = lambda _note: None) -> Config:
    """Read the completed settings of the run in `folder`; `notify` is that of `located`."""
    return make_config(stored_settings(folder / "config.yaml", notify), origins={})


def is_stored_file(path: str | Path) -> bool:
    """Whether a training wrote the file of settings, which then has all of them."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().rstrip() == f"# {HEADER}"
    except (OSError, ValueError):  # reading it says why
        return False


def stored_settings(path: str | Path, notify: Notify = lambda _note: None) -> dict[str, Any]:
    """Flat values of the config.yaml of a run, without those that the run did not read.

    It has all settings; those of other tasks are the defaults of the version that wrote it, which
    another version would take for settings that somebody chose, and refuse.
    """
    return located(with_effect(read_stored_settings(path)), Path(path).parent, notify)


def write_paths(folder: Path, config: Config) -> None:
    """Write paths.json of the run in `folder`, and copies of the lists that people edit."""
    record, values = {}, flatten(config)
    for name in (*PATHS, *(["group"] if is_group_list(config.data.group) else [])):
        if (given := values[name]) is not None:
            path = from_run = os.path.abspath(given)
            with contextlib.suppress(ValueError):  # another drive of Windows
                from_run = os.path.relpath(path, os.path.realpath(folder))
            record[name] = {"given": given, "from_run": from_run, "absolute": path}
            if name in EDITED_LISTS:
                copy, content = f"{LISTS}/{COPY}{name}{Path(path).suffix}", Path(path).read_bytes()
                (folder / LISTS).mkdir(exist_ok=True)
                (folder / copy).write_bytes(content)
                record[name] |= {"copy": copy, "sha256": hashlib.sha256(content).hexdigest()}
    write_text(folder / PATHS_FILE, json.dumps(record, indent=1) + "\n")


def located(
    values: Mapping[str, Any], folder: Path, notify: Notify = lambda _note: None
) -> dict[str, Any]:
    """Settings of the run in `folder`, with paths that lead to its files from any working folder.

    A list that was changed since the training is its copy in the run; `notify` is called with it.
    """
    found, path = dict(values), folder / PATHS_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        places = {
            name: (one["given"], *find_path(folder, one))
            for name, one in record.items()
            if values.get(name) in (one["given"], one["absolute"])
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}); delete it") from None
    for name, (given, key, place) in places.items():
        if place and os.path.realpath(given) != place:
            found[name] = place
            if key == "copy":
                notify(
                    f"note: {name}={printable(given)} has changed since the training, or is gone: "
                    f"its copy {printable(place)} is used"
                )
    return found


def find_path(folder: Path, entry: Mapping[str, str]) -> tuple[str, str]:
    """Where a file of the training is now: a key of its entry in paths.json and a path, or ""."""
    order = ("absolute", "from_run") if os.path.isabs(entry["given"]) else ("from_run", "absolute")
    for key in (*order, *["copy"] * ("copy" in entry)):
        path = Path(os.path.realpath(folder / entry[key]))
        if "copy" in entry:
            content = path.read_bytes() if path.is_file() and os.access(path, os.R_OK) else b""
            there = hashlib.sha256(content).hexdigest() == entry["sha256"]
        else:
            pattern = not {*"*?{"}.isdisjoint(path.name)  # of shards
            there = path.exists() or (pattern and path.parent.is_dir())
        if there:
            return key, str(path)
    return "", ""
