"""Hyperparameter search around the plan: `vit tune DATA --time T`.

    plan -> trials: the plan, and random changes of it -> rungs of equal time a trial, in half of
    the time: the best third goes on, three times as long -> the best, trained for the rest

    FOLDER/tune.json        settings, plan and trials, from which a search resumes
    FOLDER/rungR-trialNN    run folders of the trials; `vit runs FOLDER` compares them
    FOLDER/best             run folder of the best one

Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization", arXiv:1502.07943.
"""

import contextlib
import json
import math
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from vit.atomic_files import write_text
from vit.config import Config, TrainingConfig
from vit.config.collect_settings import call_settings
from vit.config.setting_layers import (
    Settings,
    checked,
    default_run_folder,
    make_config,
    settings_with,
)
from vit.config.stored_config import has_stored_config
from vit.data.random_seed import random_seed
from vit.errors import BadImage, ConfigError, RunError, VitError
from vit.evaluation.runs_table import FINISHED, RunRecord, rank_of, read_run
from vit.stop_signals import Interrupted
from vit.text import format_duration, quoted
from vit.training.checkpoint.run_folder import LOCK, delete_unused, lock_folder
from vit.training.distributed.collectives import max_over_processes, on_main
from vit.training.distributed.devices import make_accelerator
from vit.training.logging.training_progress import notifier, silent_log
from vit.training.plan import is_planned, plan_training, summary_lines, with_target_task
from vit.training.train import OuterCommand, train, translate_errors
from vit.training.trainer import TrainingResult

TUNE_FILE, BEST_RUN = "tune.json", "best"
SEARCH_SHARE = 0.5
FACTOR, MAX_FINAL_TRIALS = 3, 3
"""Reduction factor: each rung has 1/3 of the trials of the one before, each 3 times as long; the
last one has at most three."""
TRIAL_COUNTS, MIN_TRIAL_SECONDS = (18, 9, 6, 3), 60.0
"""Numbers of trials: the largest whose trials of the first rung take a minute, else the least."""
CHANGE_PROBABILITY, MAX_DRAWS = 0.5, 100
FACTORS = {"lr": (0.4, 0.6, 1.6, 2.5), "weight_decay": (0.25, 0.5, 2.0, 4.0)}
"""Changes of a setting as factors on its planned value; fallback_lr follows lr."""
VALUES = {
    "min_crop": (0.2, 0.35, 0.6, 0.8),
    "drop_path": (0.0, 0.05, 0.1, 0.2),
    "smoothing": (0.0, 0.05, 0.1, 0.2),
}
"""Values that a setting may have in a trial."""


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The result of a search; `best` is the number of the best trial, 0 that of the plan."""

    folder: Path
    best: int
    changes: dict[str, Any]
    settings: dict[str, Any]
    training: TrainingResult


def tune(
    settings: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    began: float | None = None,
    **more: Any,
) -> TuneResult:
    """Search settings for the data in half of a time, and train the best in the rest: `vit tune`.

        vit.tune("photos/", "runs/tuned", time="2h")

    Args:
        settings: DATA; or the user's settings by name, `data` and `time` among them. None of them
            is searched. A search that is resumed adds its own.
        out: The folder; `runs/<name of the data>-tune` if omitted. The trained network is the run
            folder `best` in it.
        resume: Continue the search in `out`, or start a new one.
        began: Start of the time, by `time.monotonic`; now if omitted.
        more: More settings by name.

    Raises:
        VitError: An error that the user can fix; the message has the remedy.
    """
    began = time.monotonic() if began is None else began
    resumes = resume and settings is None
    chosen = Settings(call=more) if resumes else call_settings(settings, more)
    if isinstance(chosen, Config):
        raise ConfigError("a Config is complete, and leaves nothing to search: give DATA")
    values = checked(with_target_task(chosen))
    if not (values.get("data") or (resume and out)):
        raise ConfigError("data is missing: name a folder of images, a list or a known set")
    folder = Path(out or f"{default_run_folder(values['data'])}-tune")
    record = read_record(folder, values) if resume else {}
    values = record.get("settings", values)
    seconds = check_tunable(values, folder)
    names = ("device", "precision", "deterministic")
    devices = make_config({name: values[name] for name in names if name in values})
    accelerator = make_accelerator(devices.run)
    on_main(accelerator, partial(check_folder, folder, resumes=bool(record)))
    if not record:
        with translate_errors():
            record = plan_search(values, seconds, accelerator)
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            stack.enter_context(lock_folder(folder))

        on_main(accelerator, lock)
        search = Search(folder, record, seconds, accelerator, began)
        if "best" not in record:
            record["best"] = search.run()
            search.save()
        best, left = record["best"], max(seconds - search.spent, 0.25 * seconds)
        changes = record["trials"][best]
        search.notify(f"best: {in_words(changes)}; training it for {format_duration(left)}")
        config = search.config(best, left)
        training = search.train(config, folder / BEST_RUN)
    return TuneResult(
        folder=folder,
        best=best,
        changes=changes,
        settings=dict(Settings.of(config)),
        training=training,
    )


def check_tunable(values: Mapping[str, Any], folder: Path) -> float:
    """The time in seconds of a search with these settings."""
    if not values.get("data"):
        raise ConfigError(f"{folder}: no tuning to resume there; give the --out of one, or DATA")
    if not is_planned(values):
        raise ConfigError(
            "tuning begins with a plan, which chooses the network of a classifier: leave out "
            "--model, --weights and --method"
        )
    training = TrainingConfig(**{n: values[n] for n in ("task", "time") if n in values})
    if not (training.single_label or training.multilabel):
        raise ConfigError(f"task={training.task}: a search compares classifiers; use vit train")
    if values.get("folds") is not None:
        raise ConfigError(f"folds={values['folds']}: a tuning validates on one part; leave it out")
    if training.seconds is None:
        raise ConfigError("time is missing: say how long the whole tuning may take: --time 30m")
    return training.seconds


def check_folder(folder: Path, *, resumes: bool) -> None:
    """Refuse a folder with other files than those of the search that is resumed."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file: give a folder")
    if not resumes and folder.is_dir() and {path.name for path in folder.iterdir()} - {LOCK}:
        raise RunError(f"{folder} is not empty: --resume continues a search; or give another --out")


def read_record(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The search in `folder` with `values`, of which it may change some, or {}."""
    path = folder / TUNE_FILE
    if not path.is_file():
        return {}
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        before = checked(record["settings"])
        assert {"plan", "trials", "rungs", "seconds"} <= record.keys()
    except (OSError, ValueError, KeyError, TypeError, AssertionError, VitError) as error:
        raise RunError(f"{path} is damaged ({error}); give another --out") from None
    for name, value in values.items():
        if value != before.get(name) and name not in settings_with(resumable=True):
            raise ConfigError(
                f"{name}={value!r} differs from {before.get(name)!r} in {path}: a tuning resumes "
                "with its own settings; leave it out, or give another --out"
            )
    return {**record, "settings": {**before, **values}}


def plan_search(
    values: Mapping[str, Any], seconds: float, accelerator: Accelerator
) -> dict[str, Any]:
    """The record of a search before its first trial."""
    config, plan = plan_training({**values, "time": f"{SEARCH_SHARE * seconds:.1f}s"})
    for line in summary_lines(plan):
        notifier(accelerator)(line)
    trials = draw_trials(config, values)
    number = next(
        (n for n in TRIAL_COUNTS if SEARCH_SHARE * seconds / relative_cost(n) >= MIN_TRIAL_SECONDS),
        TRIAL_COUNTS[-1],
    )
    return {
        "settings": dict(values),
        "plan": {name: value for name, value in plan.settings.items() if name != "time"},
        "trials": trials[:number],
        "rungs": [],
        "seconds": 0.0,
    }


def draw_trials(config: Config, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Different changes of the plan, {} first; those in `values` stay as they are.

    A change is a function of (seed, draw, setting): a setting that was chosen leaves the others as
    they were.
    """
    trials: list[dict[str, Any]] = [{}]
    for draw in range(MAX_DRAWS):
        changes = draw_changes(config, values, draw)
        with contextlib.suppress(ConfigError):  # with settings that were chosen
            make_config(Settings(plan=config.values(), call=values, trial=changes))
            if changes not in trials:
                trials.append(changes)
    if len(trials) == 1:
        raise ConfigError(
            "every setting that a tuning searches is given: leave out one of "
            f"{', '.join([*FACTORS, *VALUES])}, or use vit train"
        )
    return trials


def draw_changes(config: Config, values: Mapping[str, Any], draw: int) -> dict[str, Any]:
    """Each setting of the search space with probability 1/2, at another value than the plan's."""
    planned, changes = config.values(), {}
    for name, choices in {**FACTORS, **VALUES}.items():
        generator = random.Random(random_seed(config.training.seed, draw, "tune", name))
        changed, value = generator.random() < CHANGE_PROBABILITY, generator.choice(choices)
        if not changed or (name == "min_crop" and planned[name] == 1):  # would cut characters
            continue
        followers = ("lr", "fallback_lr") if name == "lr" else (name,)
        for follower in followers:
            now = planned[follower]
            if follower not in values and now is not None:
                changes[follower] = float(f"{now * value:.3g}") if name in FACTORS else value
    return {name: value for name, value in changes.items() if value != planned[name]}


def rung_sizes(trials: int) -> list[int]:
    sizes = [trials]
    while sizes[-1] > MAX_FINAL_TRIALS:
        sizes.append(max(sizes[-1] // FACTOR, 2))
    return sizes


def relative_cost(trials: int) -> int:
    """Time of all rungs, in trials of the first one."""
    return sum(size * FACTOR**rung for rung, size in enumerate(rung_sizes(trials)))


class Search:
    """Trains trials, rung after rung.

    Args:
        seconds: Time of search and final training.
        began: Start of this call, by `time.monotonic`.
    """

    def __init__(
        self,
        folder: Path,
        record: dict[str, Any],
        seconds: float,
        accelerator: Accelerator,
        began: float,
    ) -> None:
        self.folder, self.record, self.seconds = folder, record, seconds
        self.accelerator, self.began, self.before = accelerator, began, record["seconds"]
        self.notify = notifier(accelerator)
        self.save()

    @property
    def spent(self) -> float:
        """Seconds of the search so far, the same on all processes."""
        now = max_over_processes(self.accelerator, time.monotonic() - self.began)
        return float(self.before + now)

    def save(self) -> None:
        """Write tune.json on the main process."""
        self.record["seconds"] = self.spent
        text = json.dumps(self.record, indent=1, allow_nan=False) + "\n"
        on_main(self.accelerator, partial(write_text, self.folder / TUNE_FILE, text))

    def discard(self) -> None:
        """Delete tune.json, and the folder with it unless something else is there."""
        (self.folder / TUNE_FILE).unlink()
        delete_unused(self.folder)

    def config(self, trial: int, seconds: float) -> Config:
        record = self.record
        chosen = {**record["settings"], "time": f"{seconds:.1f}s"}
        return make_config(
            Settings(plan={**record["plan"], **record["trials"][trial]}, call=chosen)
        )

    def run(self) -> int:
        """Train the trials that are left; returns the best one."""
        sizes = rung_sizes(len(self.record["trials"]))
        rungs: list[float] = self.record["rungs"]
        trials, best = [*range(sizes[0])], 0
        for rung, size in enumerate(sizes):
            if rung == len(rungs):
                share = sum(n * FACTOR**later for later, n in enumerate(sizes[rung:]))
                each = (SEARCH_SHARE * self.seconds - self.spent) / share
                if rungs and each <= rungs[-1]:  # so slow that nothing new would be learned
                    break
                rungs.append(each)
                self.save()
            self.notify(f"rung {rung + 1}: {size} trials of {format_duration(rungs[rung])} each")
            runs = {}
            for trial in trials:
                run = self.run_trial(trial, rung)
                if run is not None:
                    runs[trial] = run
            ranked = sorted(runs, key=lambda trial: rank_of(runs[trial]))
            best = ranked[0]
            if rung + 1 < len(sizes):
                trials = ranked[: sizes[rung + 1]]
                if 0 not in trials:  # the plan is compared to the end
                    trials[-1] = 0
                trials.sort()
        return best

    def run_trial(self, trial: int, rung: int) -> RunRecord | None:
        """Train a trial unless it is finished; returns its run, None if it failed."""
        folder = self.folder / f"rung{rung + 1}-trial{trial:02d}"
        name = f"{folder.name} ({in_words(self.record['trials'][trial])})"
        seconds = self.record["rungs"][rung]
        read = partial(read_run, folder, self.folder)
        run = on_main(self.accelerator, read)
        if run.state != FINISHED:
            try:
                with silent_log():
                    self.train(self.config(trial, seconds), folder, report=False)
            except (Interrupted, BadImage):
                raise
            except VitError as error:
                alone = self.accelerator.num_processes > 1 and not error.on_all_processes
                if isinstance(error, ConfigError) and trial == rung == 0:  # nothing was trained
                    on_main(self.accelerator, self.discard)
                    times = math.ceil(self.seconds / seconds)
                    why = f"{name} has {seconds:.0f} s, and the tuning {times} times as long"
                    raise ConfigError(f"{why}: {error}") from None
                if trial == 0 or alone:
                    raise
                self.notify(f"{name}: failed: {error}")
                return None
            self.save()
            run = on_main(self.accelerator, read)
        self.notify(f"{name}: validation {run.score_text}")
        return run

    def train(self, config: Config, folder: Path, **options: Any) -> TrainingResult:
        """Train in a run folder, or go on there."""
        resume = on_main(self.accelerator, partial(has_stored_config, folder))
        part_of = OuterCommand("vit tune", self.folder)
        return train(config, folder, resume=resume, part_of=part_of, **options)


def in_words(changes: Mapping[str, Any]) -> str:
    """The settings in which a trial differs from the plan."""
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "the plan"


def result_line(result: TuneResult) -> str:
    run = read_run(result.training.folder, result.folder)
    return (
        f"best: {in_words(result.changes)}: validation {run.score_text}, run folder "
        f"{quoted(run.folder)}; vit runs {quoted(result.folder)} compares the trials"
    )
