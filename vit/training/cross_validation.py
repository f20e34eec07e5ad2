"""Cross-validation: one run folder a fold, and the mean of each score with an interval.

    mean ± t s sqrt(1/k + 1/(k - 1))      s: standard deviation over k folds

Student's t interval, widened since folds share most of their training images: 1/(k - 1) is the
ratio of validation to training images. That of a share of images is at least Wilson's of all
held-out images, or of their groups; another score has none where the folds do not differ.

Source: Nadeau and Bengio, "Inference for the Generalization Error", Machine Learning 52, 2003.
"""

import contextlib
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from vit.atomic_files import explain_write_errors, write_text
from vit.config import Config
from vit.config.collect_settings import FOLDS_FILE, LABEL_ERRORS_FILE, ROWS_FILE, read_fold_record
from vit.config.data_config import CHANNEL_SETTINGS
from vit.config.setting_layers import (
    Settings,
    changed_settings,
    default_run_folder,
    flatten,
    make_config,
    settings_with,
    with_effect,
    with_origins,
    with_settings,
)
from vit.config.stored_config import PATHS, has_stored_config, located, stored_config
from vit.config.training_config import download_limit
from vit.errors import ConfigError, RunError
from vit.evaluation.exact_tests import wilson_interval
from vit.evaluation.intervals import student_tails
from vit.evaluation.metric_rows import metric_of
from vit.text import printable
from vit.training.checkpoint.run_folder import (
    WEIGHTS,
    delete_run,
    delete_unused,
    foreign_files,
    lock_folder,
)
from vit.training.distributed.collectives import on_main
from vit.training.distributed.devices import make_accelerator
from vit.training.logging.training_progress import notifier
from vit.training.plan import with_chosen_weights
from vit.training.train import OuterCommand, resolve_plan, train
from vit.weights.model_soup import delete_fold_soup

LEVEL = 0.95
COUNTS = ("count", "groups")
"""Numbers beside the scores, which have no interval."""
HOW = "Student's t with the variance of Nadeau and Bengio (2003); of a share at least Wilson's"

Measure = Callable[[Path], Mapping[str, Any]]
"""Returns the scores of a run folder on its validation images."""


def train_folds(
    config: Config | Settings,
    out: str | Path | None = None,
    *,
    measure: Measure,
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Train once for each fold, which validates; run folders are OUT/fold-1, OUT/fold-2 and so on.

    Returns the content of folds.json, and `failed`, unreadable images with the reason.
    """
    refuse_time(config)
    data = config.get("data")
    if not data:
        raise ConfigError("no data given: give a folder, a list or a name as data")
    folder = Path(out or default_run_folder(data))
    if resume:
        config = with_recorded_plan(config, folder)
    config, _ = resolve_plan(config)
    folds = config.data.folds
    assert folds is not None
    accelerator = make_accelerator(config.run)
    notify = notifier(accelerator)
    config = resolve_weights_once(config, accelerator, folder, resume=resume)
    flat, pretrained = flatten(config), config.finetune.weights is not None
    # what the plan chose for weights is found in the record when the folds are resumed
    settings = {name: flat[name] for name in config.settled if pretrained or config.chosen(name)}
    planned = {name: flat[name] for name in changed_settings(config) if name not in settings}
    find = partial(finished_folds, folder, settings, resume=resume, overwrite=overwrite)
    scores = on_main(accelerator, find)
    failed: dict[str, str] = {}

    def record() -> dict[str, Any]:
        found = {"folds": folds, "settings": settings, "planned": planned, "scores": scores}
        return {**found, **summary([*scores.values()])}

    def begin() -> None:
        if overwrite:
            delete_folds(folder, locked=folder / "fold-1")
        delete_fold_soup(folder)
        write_record(folder, record())

    claimed: Callable[[], None] | None = begin
    for fold in range(1, folds + 1):
        run_folder = folder / f"fold-{fold}"
        if str(fold) in scores:
            notify(f"fold {fold} of {folds} is finished: {printable(run_folder)}")
            continue
        notify(f"fold {fold} of {folds}: {printable(run_folder)}")
        of_data: dict[str, Any] = {}
        if fold > 1:  # of images of instruments, measured once for all
            first = stored_config(folder / "fold-1").data
            of_data = {
                name: getattr(first, name) for name in ("intensity_range", *CHANNEL_SETTINGS)
            }
        origins = {**config.origins, **dict.fromkeys(of_data, "data")}
        result = train(
            dataclasses.replace(with_settings(config, fold=fold, **of_data), origins=origins),
            run_folder,
            resume=resume,
            overwrite=overwrite,
            part_of=OuterCommand("vit train", folder, claimed),
        )
        claimed = None
        failed |= result.failed
        scores[str(fold)] = on_main(accelerator, partial(numeric_scores, measure, run_folder))
        on_main(accelerator, lambda: write_record(folder, record()))
    return {**record(), "failed": failed}


def refuse_time(config: Config | Settings) -> None:
    """Raise ConfigError if `config` has a time, before a plan measures anything."""
    time = config.get("time")
    if time is None:
        return
    raise ConfigError(
        f"time={time}: it would be that of each fold; leave --time out, and the length of a fold "
        "is chosen for the data, give --epochs, or train the folds one by one with --fold 1, "
        "--fold 2 and so on"
    )


def with_recorded_plan(config: Config | Settings, folder: Path) -> Config | Settings:
    """`config` with what the plan decided for the folds that are there: it is made once for all."""
    path = folder / FOLDS_FILE
    planned = read_fold_record(path)["planned"] if path.is_file() else None
    if planned is None:
        return config
    chosen = Settings.of(with_origins(config)) if isinstance(config, Config) else config
    return Settings(**{"plan": planned, **{n: v for n, v in chosen.layers.items() if n != "plan"}})


def resolve_weights_once(
    config: Config, accelerator: Accelerator, folder: Path, *, resume: bool
) -> Config:
    """Settings with what the plan chooses for `--weights`, once for all folds."""
    weights = config.finetune.weights
    if weights is not None and resume and (folder / FOLDS_FILE).is_file():
        flat, settings = flatten(config), read_fold_record(folder / FOLDS_FILE)["settings"]
        auto = download_limit(weights) is not None
        kept = {name: flat[name] for name in config.settled if not (auto and name == "weights")}
        settings |= kept
        return make_config(settings)
    return with_chosen_weights(config, accelerator)[0]


def finished_folds(
    folder: Path, settings: Mapping[str, Any], *, resume: bool, overwrite: bool
) -> dict[str, dict[str, float]]:
    path = folder / FOLDS_FILE
    if (folder / WEIGHTS).exists():  # of a training without folds
        raise RunError(f"{folder} is a run folder itself: give another --out")
    if overwrite:
        for run in fold_runs(folder):
            if foreign := [file for file in foreign_files(run) if file.name != ROWS_FILE]:
                raise RunError(
                    f"{foreign[0]} was written by no training, and its folder is "
                    "deleted: move it, or give another --out"
                )
        return {}
    if not path.is_file():
        return {}
    if not resume:
        raise RunError(f"{path} exists: --resume continues it, --overwrite starts anew")
    record = read_fold_record(path)
    before = located(with_effect(record["settings"]), folder / "fold-1")
    settings = with_effect(settings)
    names = sorted({*settings, *before} - {*settings_with(resumable=True)})
    now, then = (
        {**one, **{name: os.path.realpath(one[name]) for name in PATHS if one.get(name)}}
        for one in (settings, before)
    )
    changed = [name for name in names if now.get(name) != then.get(name)]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{name}={settings.get(name)!r} differs from {before.get(name)!r} in "
            f"{path}: all folds have the same settings; give another --out"
        )
    scores = record["scores"].items()
    return {fold: row for fold, row in scores if (folder / f"fold-{fold}" / WEIGHTS).exists()}


def numeric_scores(measure: Measure, folder: Path) -> dict[str, float]:
    scores = measure(folder)
    return {
        name: value
        for name, value in scores.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Mean and interval over folds of each score that all folds have."""
    if not rows:
        return {}
    names = [name for name in rows[0] if name not in COUNTS and all(name in row for row in rows)]
    images, groups = (int(sum(row.get(name, 0) for row in rows)) for name in COUNTS)
    spread = {}
    for name in names:
        metric = metric_of(name)
        trials = (groups or images) if metric.of_images else 0
        limits = (0.0, 1.0) if metric.share else metric.limits
        spread[name] = interval([row[name] for row in rows], limits=limits, trials=trials)
    return {
        "mean": {name: statistics.fmean(row[name] for row in rows) for name in names},
        "interval": spread,
        "level": LEVEL,
        "method": HOW,
    }


def interval(
    values: Sequence[float], *, limits: tuple[float, float] = (-math.inf, math.inf), trials: int = 0
) -> list[float] | None:
    """Interval of the mean over folds, clipped to `limits`; at least Wilson's of
    `trials`, if given. None with one fold, and of equal values without `trials`."""
    count = len(values)
    if count < 2:
        return None
    middle = statistics.fmean(values)
    width = t_quantile((1 + LEVEL) / 2, count - 1) * statistics.stdev(values)
    width *= math.sqrt(1 / count + 1 / (count - 1))
    if not (width or trials):
        return None
    ends = wilson_interval(middle * trials, trials) if trials else (middle, middle)
    low, high = min(middle - width, ends[0]), max(middle + width, ends[1])
    return [max(low, limits[0]), min(high, limits[1])]


def t_quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t distribution at `share`, above a half; by bisection."""
    low, high = 0.0, 1.0
    while student_tails(high, freedom) > 2 * (1 - share):
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        above = student_tails(middle, freedom) > 2 * (1 - share)
        low, high = (middle, high) if above else (low, middle)
    return (low + high) / 2


def fold_runs(folder: Path) -> list[Path]:
    """The run folders of all folds in `folder`, also of another number of folds."""
    return [run for run in folder.glob("fold-*") if has_stored_config(run)]


def delete_folds(folder: Path, *, locked: Path) -> None:
    """Delete the runs of folds in `folder`, and what was made of them, and nothing else.

    A command that is killed before its last fold would else resume with folds of the one before.
    """
    runs = fold_runs(folder)
    others = [run for run in runs if run != locked]
    with explain_write_errors(folder):
        with contextlib.ExitStack() as stack:
            for run in others:
                stack.enter_context(lock_folder(run))
            for run in runs:
                (run / ROWS_FILE).unlink(missing_ok=True)
                delete_run(run)
        for run in others:
            delete_unused(run)
        for name in (ROWS_FILE, LABEL_ERRORS_FILE):
            (folder / name).unlink(missing_ok=True)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FOLDS_FILE, json.dumps(record, indent=1, allow_nan=False) + "\n")
