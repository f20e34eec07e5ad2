"""Settings of a run from flags or arguments, a YAML file and the run that is resumed."""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vit.config import Config
from vit.config.setting_layers import (
    Settings,
    all_settings,
    checked,
    default_run_folder,
    read_settings,
    settings_with,
    with_effect,
)
from vit.config.settings import as_typed
from vit.config.stored_config import (
    is_stored_file,
    located,
    stored_settings,
)
from vit.config.training_config import download_limit
from vit.config.user_code import USER_CODE_FILE
from vit.errors import ConfigError, RunError
from vit.paths import path_argument
from vit.text import Notify, join_names, print_to_stderr, printable

YAML_SUFFIXES = (".yaml", ".yml")
LENGTH = {"epochs", "steps", "epoch_steps"}
FOLDS_FILE = "folds.json"
"""Record of a cross-validation, in the folder of its runs."""
SOUP_FOLDER = "soup"
"""Folder beside it of the network that is the mean of all folds."""
ROWS_FILE, LABEL_ERRORS_FILE = "rows.jsonl", "label_errors.csv"
"""Predictions of held-out images, there and in the folder of each fold; and the suspected labels,
there."""


def call_settings(
    first: Any,
    settings: Mapping[str, Any],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    notify: Notify = print_to_stderr,
) -> Config | Settings:
    """The settings of a Python call such as `train("photos/", epochs=5)`.

    Args:
        first: DATA; or a YAML file of settings; or settings by name; or a Config; None with
            `resume`, or with `data` among the settings.
        settings: More settings by name, unless `first` is a Config.
        out, resume, notify: As for `collect_settings`, for DATA, a YAML file and None.
    """
    if isinstance(first, Settings) and not settings:
        return first
    if isinstance(first, Config):
        if settings:
            raise ConfigError(
                f"{join_names(settings)}: a Config is complete; give all settings to "
                "vit.make_config, or DATA and settings here"
            )
        return first
    if isinstance(first, Mapping):
        if twice := [name for name in settings if name in first]:
            raise ConfigError(f"{join_names(twice)} is given twice, in the dict and by name")
        return collect_settings({**first, **settings}, out=out, resume=resume, notify=notify)
    chosen, config = dict(settings), None
    if first is not None:
        path = path_argument("data", first, "a folder, a list, a name, a dict or a Config")
        is_yaml = path.lower().endswith(YAML_SUFFIXES)
        if not is_yaml and "data" in chosen:
            raise ConfigError(f"data is given twice: {path} and data=")
        config = path if is_yaml else None
        chosen |= {} if is_yaml else {"data": path}
    elif not (resume and out) and not chosen.get("data"):
        raise ConfigError(
            "no data given: the first argument is a folder, a list or a name; or give resume=True "
            "and the run folder as out"
        )
    values = collect_settings(chosen, config=config, out=out, resume=resume, notify=notify)
    if not values.get("data"):
        where = config or os.fspath(out or "")
        raise ConfigError(f"{where} has no data: give data=")
    return values


def collect_settings(
    chosen: Mapping[str, Any],
    *,
    config: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    notify: Notify = print_to_stderr,
) -> Settings:
    """The settings in `chosen`, over those of a YAML file or of the run to resume.

    Args:
        chosen: Settings by name, as flags give them; may lack `data` if a run is resumed.
    """
    chosen = checked(chosen)
    data = chosen.get("data")
    folder = Path(out or default_run_folder(str(data))) if resume and (out or data) else None
    if config is None and folder is not None:
        if (folder / FOLDS_FILE).is_file():
            stored = checked(read_fold_record(folder / FOLDS_FILE)["settings"])
            stored = with_effect(located(stored, folder / "fold-1", notify))
            return _over_stored("run", stored, _for_resumed_run(chosen, stored))
        if (folder / "config.yaml").is_file():
            stored = _checked_file(folder / "config.yaml", partial(stored_settings, notify=notify))
            if (time := chosen.pop("time", None)) is not None:  # it led to the stored length
                steps = stored.get("steps")
                length = "its length" if steps is None else f"its {steps:,} steps"
                notify(f"note: time={time} is not used: the run keeps {length}")
            return _over_stored("run", stored, _for_resumed_run(chosen, stored))
    if config is None:
        return Settings(flag=chosen)
    values = _checked_file(config)
    if is_stored_file(config):
        values = _settings_of_run(config, values, notify)
    values = _of_that_length(values, chosen, notify)
    # what a flag switches off, but not what a file does itself
    kept = with_effect({**values, **chosen}).keys() | (values.keys() - with_effect(values).keys())
    values = {name: value for name, value in values.items() if name in kept}
    return _over_stored("file", values, chosen)


def _over_stored(origin: str, stored: Mapping[str, Any], flags: Mapping[str, Any]) -> Settings:
    """`flags` over `stored` settings.

    Of config.yaml of a run, the data decided the number of classes, and the epochs of its steps.
    """
    steps = {**stored, **flags}.get("steps")
    decided = ("num_classes",) if steps is None else ("num_classes", "epochs")
    data = {name: stored[name] for name in decided if name in stored}
    rest = {name: value for name, value in stored.items() if name not in data}
    return Settings(**{"data": data, origin: rest, "flag": flags})


def read_fold_record(path: Path) -> dict[str, Any]:
    """The record of a cross-validation: settings, what the plan chose or None, and scores."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        scores = {
            fold: {name: float(value) for name, value in row.items()}
            for fold, row in record["scores"].items()
        }
        settings, planned = dict(record["settings"]), record.get("planned")
        return {"settings": settings, "planned": planned and dict(planned), "scores": scores}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}); delete it") from None


def _checked_file(
    path: str | Path, read: Callable[[str | Path], dict[str, Any]] = read_settings
) -> dict[str, Any]:
    try:
        return checked(read(path))
    except ConfigError as error:
        where = os.fspath(path)
        raise ConfigError(str(error) if where in str(error) else f"{where}: {error}") from None


def _settings_of_run(path: str | Path, values: Mapping[str, Any], notify: Notify) -> dict[str, Any]:
    """Those of `values`, of a run's config.yaml, that its task reads, and a note about the others.

    They are defaults, perhaps of another version, or somebody changed them.
    """
    known = all_settings()
    read = located(with_effect(values), Path(path).parent, notify)
    unread = [
        f"{name}={as_typed(value)}"
        for name, value in values.items()
        if name not in read and value != known[name].default
    ]
    if (code := Path(path).with_name(USER_CODE_FILE)).is_file():
        notify(f"note: {printable(code)}: own code of the run, which its config.yaml does not have")
    if unread:
        notify(f"note: {printable(path)}: not used by this training: {join_names(unread)}")
    return read


def _for_resumed_run(chosen: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """`chosen` without `weights=auto` if the run has chosen its weights."""
    auto = download_limit(chosen.get("weights")) is not None and stored.get("weights") is not None
    return {name: value for name, value in chosen.items() if not (auto and name == "weights")}


def _of_that_length(
    values: Mapping[str, Any], chosen: Mapping[str, Any], notify: Notify
) -> dict[str, Any]:
    """`values` of a file without those that are for the length of its training, if `chosen` has
    another length: the time that decided them, or the epochs of its schedule."""
    timed = settings_with(decided_by="time")
    if "time" in chosen and values.get("steps") is not None:  # another time decided them
        return {name: value for name, value in values.items() if name not in timed}
    if all(chosen.get(name, values.get(name)) == values.get(name) for name in LENGTH & {*values}):
        return dict(values)
    schedule = [name for name in timed if name not in LENGTH and name not in chosen]
    if left_out := [name for name in schedule if values.get(name)]:
        notify(f"note: without the file's {join_names(left_out)}: they are for another length")
    return {name: value for name, value in values.items() if name not in schedule}
