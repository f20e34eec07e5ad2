"""Hyperparameter search, started from the plan: `vit tune DATA --time T`.

    plan -> trials: the plan, and changes of it (search_space.py)
         -> rungs of equal time a trial (successive_halving.py), in half of the time
         -> the best trial, trained for the remaining time

    FOLDER/tune.json    settings, trials, rungs and results so far, from which a search resumes
    FOLDER/best.yaml    the best settings          FOLDER/best    their run folder
    FOLDER/tune.html    comparison of the trials   FOLDER/trials  run folders of the trials

Trials and their numbers of steps are fixed before the first one, so a search that was killed
resumes to the same result.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from vit.atomic_files import atomic_file, explain_write_errors, write_text
from vit.config import Config
from vit.config.merge_settings import call_settings
from vit.config.parser import (
    Settings,
    checked,
    default_run_folder,
    make_config,
    settings_with,
    write_settings,
)
from vit.config.settings import PRETRAINING_TASKS
from vit.config.stored_config import has_stored_config
from vit.data.dataset_types import labels_of
from vit.errors import BadImage, ConfigError, DataError, RunError, VitError
from vit.evaluation.tune_report import (
    PAGE_FILE,
    changes_in_words,
    measure_name,
    table_lines,
    tune_page,
    verdict,
)
from vit.event_log import METRICS_FILE, read_event_log
from vit.stop_signals import Interrupted
from vit.tasks.task import get_task
from vit.text import format_duration, percent, plural, printable, quoted
from vit.training.checkpoint.checkpoint import CHECKPOINTS
from vit.training.checkpoint.run_folder import (
    BEST,
    TEACHER_FILE,
    WEIGHTS,
    delete_run,
    delete_unused,
    foreign_files,
    lock_folder,
)
from vit.training.distributed.collectives import max_over_processes, on_main
from vit.training.distributed.devices import make_accelerator
from vit.training.loader_autotune import shared_caches
from vit.training.logging.training_progress import notifier, redirect_lines, write_line
from vit.training.plan import is_planned, plan_training, summary_lines
from vit.training.search_space import SPACE, make_trials
from vit.training.successive_halving import (
    SEARCH_SHARE,
    TRIAL_COUNTS,
    CostMeter,
    count_trials,
    final_results,
    find_result,
    leaderboard,
    make_rungs,
    seconds_spent,
    trials_of_rung,
    with_steps,
)
from vit.training.time_budget import MOST_SECONDS, SHARE
from vit.training.train import resolve, train, translate_errors
from vit.training.trainer import TrainingResult

TUNE_FILE = "tune.json"
RECIPE_FILE = "best.yaml"
BEST_RUN = "best"
TRIALS = "trials"
COMMAND = "vit tune"

MAX_SEARCH_SHARE = 0.75
"""Share of the time after which a search that is slower than measured ends."""
RECIPE = "The best settings that vit tune found.\nTrain them: vit train --config THIS"

Record = dict[str, Any]
"""The content of tune.json."""


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The result of a search.

    Args:
        best: Number of the best trial; 0 is the plan.
    """

    folder: Path
    best: int
    settings: dict[str, Any]
    training: TrainingResult
    record: dict[str, Any]
    lines: tuple[str, ...]


def tune(
    settings: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    out: str | Path | None = None,
    *,
    trials: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
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
        trials: Number of trials, the plan among them; chosen by the time if omitted.
        resume: Continue the search in `out`, or start if there is none.
        overwrite: Replace the search in `out`, once the new one has its plan.
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
    values, trials, folder = resumed_settings(checked(chosen), out, trials, resume=resume)
    seconds = check_tunable(values, trials)
    accelerator = make_accelerator(device_settings(values).run)
    notify = notifier(accelerator)
    with shared_caches(), contextlib.ExitStack() as stack:
        claim = partial(claim_tuning, folder, values, trials, stack)
        record = on_main(accelerator, partial(claim, resume=resume, overwrite=overwrite))
        if record is None:
            if resume:
                notify(f"note: no tuning in {printable(folder)} yet: starting one")
            try:
                with translate_errors():
                    record = plan_search(values, seconds, trials, accelerator, began)
            except VitError:
                if accelerator.is_main_process:
                    delete_unused(folder)
                raise
            on_main(accelerator, partial(delete_search, folder))
            record["seconds"] = time.monotonic() - began
            record = save(accelerator, folder, record)
        rungs = [
            f"{one['trials']} of {format_duration(one['seconds'])} each" for one in record["rungs"]
        ]
        notify(f"search: {len(record['trials'])} trials, in rungs of {', then '.join(rungs)}")
        search(record, folder, seconds, accelerator)
        best = final_results(record)[0]["trial"]
        record["best"] = best
        if "time" not in record:
            left = seconds - seconds_spent(record)
            record["time"] = f"{max(left, (1 - MAX_SEARCH_SHARE) * seconds / 2):.1f}s"
        record = save(accelerator, folder, record)
        trial = record["trials"][best]
        config = make_config({**trial["settings"], "time": record["time"]})
        on_main(accelerator, partial(write_search_results, folder, record, config))
        name = f"trial {best} ({changes_in_words(trial)})" if best else "the plan"
        run_folder = folder / BEST_RUN
        notify(f"best: {name}; training it for {record['time']}, in {printable(run_folder)}")
        result = train(
            config,
            run_folder,
            resume=resume and has_stored_config(run_folder),
            resumed_by=(COMMAND, folder),
        )
        record["result"] = {"epoch": result.epoch, "scores": result.scores}
        record = save(accelerator, folder, record)
        on_main(accelerator, partial(write_report, folder, record))
    notify(f"comparison of the trials: {printable(folder / PAGE_FILE)}")
    return TuneResult(
        folder=folder,
        best=best,
        settings=dict(trial["settings"]),
        training=result,
        record=record,
        lines=tuple(result_lines(record, result, folder)),
    )


def resumed_settings(
    values: dict[str, Any], out: str | Path | None, trials: int | None, *, resume: bool
) -> tuple[dict[str, Any], int | None, Path]:
    """Settings and number of trials, completed by the search to resume, and its folder."""
    if not (values.get("data") or (resume and out)):
        raise ConfigError("data is missing: name a folder of images, a list or a known set")
    folder = Path(out or f"{default_run_folder(values['data'])}-tune")
    if resume and (folder / TUNE_FILE).is_file():
        record = read_record(folder / TUNE_FILE)
        values = {**record["settings"], **values}
        trials = record["asked"] if trials is None else trials
    if not values.get("data"):
        raise ConfigError(f"{folder}: no tuning to resume there; give the --out of one, or DATA")
    return values, trials, folder


def check_tunable(values: Mapping[str, Any], trials: int | None) -> float:
    """The time in seconds of a search with these settings."""
    if not is_planned(values):
        raise ConfigError(
            "tuning begins with a plan, which chooses the network of a classifier: leave out "
            "--model, --weights and --method"
        )
    task = values.get("task", "classify")
    if get_task(task).writes_captions:
        raise ConfigError(
            f"task={task}: a search needs the score of classes; vit train has a plan for captions"
        )
    if task in PRETRAINING_TASKS:
        raise ConfigError(
            f"task={task}: a search needs the score of classes; tune the training with labels that "
            "follows"
        )
    if values.get("folds") is not None:
        raise ConfigError(
            f"folds={values['folds']}: a tuning validates on one part; leave it out, and train the "
            f"{RECIPE_FILE} that it writes with --folds"
        )
    for name in (*settings_with(decided_by="time"), "patience"):  # they count epochs
        if values.get(name):
            raise ConfigError(
                f"{name}={values[name]!r}: trials have lengths of their own, by the time; leave it "
                "out"
            )
    if trials is not None and trials < 2:
        raise ConfigError(f"trials={trials}: a search compares at least 2, the plan among them")
    if values.get("time") is None:
        raise ConfigError("time is missing: say how long the whole tuning may take: --time 30m")
    if all(dimension.is_fixed(values) for dimension in SPACE):
        raise ConfigError(
            "every setting that a tuning searches is given: leave one of them out "
            f"({', '.join(one.name for one in SPACE)}), or use vit train"
        )
    seconds = device_settings(values).training.seconds
    assert seconds is not None
    return seconds


def device_settings(values: Mapping[str, Any]) -> Config:
    """The settings of devices and time, before there is a network."""
    names = ("device", "precision", "deterministic", "time")
    return make_config({name: values[name] for name in names if name in values})


def claim_tuning(
    folder: Path,
    values: Mapping[str, Any],
    trials: int | None,
    stack: contextlib.ExitStack,
    *,
    resume: bool,
    overwrite: bool,
) -> dict[str, Any] | None:
    """Lock `folder` until `stack` closes; returns the record of the search to resume, if any."""
    where, path = printable(folder), folder / TUNE_FILE
    if resume and overwrite:
        raise RunError("resume and overwrite exclude each other: choose one")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{where} is a file: give a folder")
    ours = {TUNE_FILE, PAGE_FILE, RECIPE_FILE, BEST_RUN, TRIALS, ".lock"}
    with explain_write_errors(folder):
        names = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
    if has_stored_config(folder) or (folder / WEIGHTS).exists():
        raise RunError(f"{where} is a run folder itself: give another --out")
    if others := sorted(name for name in names - ours if not name.endswith(".tmp")):
        raise RunError(f"{where} has files that no tuning wrote ({others[0]}): give another --out")
    stack.enter_context(lock_folder(folder))
    if path.is_file() and not (resume or overwrite):
        raise RunError(f"{path} exists: --resume continues it, --overwrite starts anew")
    if not path.is_file() or overwrite:
        for run in search_runs(folder):
            if foreign := foreign_files(run):
                raise RunError(
                    f"{foreign[0]} was written by no tuning, which trains there: move "
                    "it, or give another --out"
                )
        return None  # the new one deletes what is there, if its plan is no refusal
    record = read_record(path)
    require_same(values, trials, record, path)
    change_settings(record, values)
    return record


def change_settings(record: Record, values: Mapping[str, Any]) -> None:
    """Apply those of `values` that may change on resume to a search and all of its trials."""
    changes = {name: values[name] for name in values if name in settings_with(resumable=True)}
    for settings in (record["settings"], *(trial["settings"] for trial in record["trials"])):
        settings.update(changes)
    for trial in record["trials"]:
        make_config(trial["settings"])


def search_runs(folder: Path) -> list[Path]:
    """The run folders of a search in `folder`: its trials', and that of the best settings."""
    runs = [*(folder / TRIALS).glob("*-rung*"), folder / BEST_RUN]
    return [run for run in runs if run.is_dir()]


def delete_search(folder: Path) -> None:
    """Delete what a search wrote in `folder`, and nothing else."""
    with explain_write_errors(folder):
        for run in search_runs(folder):
            delete_run(run)
            (run / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # with other files in it
                run.rmdir()
        with contextlib.suppress(OSError):
            (folder / TRIALS).rmdir()
        for name in (PAGE_FILE, RECIPE_FILE, TUNE_FILE):
            (folder / name).unlink(missing_ok=True)


def read_record(path: Path) -> Record:
    """Read tune.json."""
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        needed = {"settings", "asked", "trials", "rungs", "results", "seconds", "validation"}
        if missing := needed - record.keys():
            raise KeyError(min(missing))
        record["settings"] = checked(record["settings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}); start anew with --overwrite") from None
    return record


def require_same(
    values: Mapping[str, Any], trials: int | None, record: Mapping[str, Any], path: Path
) -> None:
    """Refuse to resume a search with other settings."""
    now, before = (
        json.loads(json.dumps(every))  # tuples are lists there
        for every in (
            {**values, "trials": trials},
            {**record["settings"], "trials": record["asked"]},
        )
    )
    changed = [
        name
        for name in sorted({*now, *before})
        if now.get(name) != before.get(name) and name not in settings_with(resumable=True)
    ]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{name}={now.get(name)!r} differs from {before.get(name)!r} in {path}: a "
            "tuning resumes with its own settings; leave the flag out, or give another --out"
        )


def plan_search(
    values: Mapping[str, Any],
    seconds: float,
    requested: int | None,
    accelerator: Accelerator,
    began: float,
) -> Record:
    """The record of a search before its first trial: trials, and their steps in each rung."""
    config, plan = plan_training({**values, "time": f"{SEARCH_SHARE * seconds:.1f}s"})
    for line in summary_lines(plan):
        notifier(accelerator)(line)
    with contextlib.ExitStack() as repeated:
        if config.distillation.teacher is not None:  # its pass over the images, which is made once
            resolve(with_steps(config, 1), accelerator, began=time.monotonic())
            repeated.enter_context(redirect_lines(lambda _line: None))
        setup_began = time.monotonic()
        resolved = resolve(with_steps(config, 1), accelerator, began=setup_began)
    startup = max_over_processes(accelerator, time.monotonic() - setup_began)
    config, splits = resolved.config, resolved.splits
    if config.training.multilabel and not any(map(labels_of, splits.val)):
        raise DataError(
            f"none of {plural(len(splits.val), 'validation image')} has a class, and trials are "
            "compared by the mean average precision of classes: give others, or use vit train"
        )
    drawn = make_trials(plan, values, int(values.get("seed", 0)), requested or max(TRIAL_COUNTS))
    cost_of = CostMeter(
        resolved.config, resolved.splits, accelerator, min(SHARE * seconds, MOST_SECONDS)
    )

    def remaining() -> float:
        return SEARCH_SHARE * seconds - max_over_processes(accelerator, time.monotonic() - began)

    number = count_trials(
        len(drawn),
        cost_of(drawn[0]),
        images=len(splits.train),
        startup=startup,
        seconds=remaining(),
        requested=requested,
    )
    trials = drawn[:number]
    costs = [cost_of(trial) for trial in trials]
    return {
        "settings": dict(values),
        "asked": requested,
        "validation": len(splits.val),
        "trials": [{"trial": n, **trial} for n, trial in enumerate(trials)],
        "rungs": make_rungs(
            costs,
            startup=startup,
            seconds=remaining(),
            total_seconds=seconds,
            requested=requested is not None,
        ),
        "results": [],
    }


def search(record: Record, folder: Path, seconds: float, accelerator: Accelerator) -> None:
    """Train the remaining trials, rung after rung, and add their results to `record`."""
    notify = notifier(accelerator)
    notes = DistinctNotes()
    for rung, size in enumerate(record["rungs"], 1):
        for place, trial in enumerate(trials_of_rung(record, rung), 1):
            finished = find_result(record, rung, trial) is not None
            if finished:  # a kill may have come before its weights were deleted
                on_main(accelerator, partial(drop_weights, trial_folder(folder, trial, rung)))
            if finished or record.get("stopped"):
                continue
            too_slow = seconds_spent(record) + size["seconds"] > MAX_SEARCH_SHARE * seconds
            if too_slow and (rung, place) != (1, 1):
                record["stopped"] = (
                    f"the search ended in rung {rung}, before trial {trial}: trials took longer "
                    "than was measured"
                )
                save(accelerator, folder, record)
                notify(f"note: {record['stopped']}")
                continue
            began = time.monotonic()
            with redirect_lines(notes):
                result = run_trial(record, rung, trial, folder, accelerator)
            taken = max_over_processes(accelerator, time.monotonic() - began)
            result["seconds"] = round(taken, 2)
            record["results"].append(result)
            save(accelerator, folder, record)
            notify(trial_line(record, rung, place, result))
            on_main(accelerator, partial(drop_weights, trial_folder(folder, trial, rung)))


def run_trial(
    record: Record,
    rung: int,
    trial: int,
    folder: Path,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Train or resume one trial of a rung; returns its result for tune.json, without seconds."""
    steps = record["rungs"][rung - 1]["steps"][trial]
    config = with_steps(make_config(record["trials"][trial]["settings"]), steps)
    result: dict[str, Any] = {"rung": rung, "trial": trial, "steps": steps}
    where = trial_folder(folder, trial, rung)
    resume = on_main(accelerator, lambda: has_stored_config(where))
    try:
        training = train(
            config,
            where,
            resume=resume,
            resumed_by=(COMMAND, folder),
            report=False,
        )
    except (Interrupted, BadImage):
        raise
    except VitError as error:
        on_one_process = accelerator.num_processes > 1 and not error.on_all_processes
        if trial == 0 or on_one_process:
            raise
        return {**result, "error": printable(error)}
    epochs = on_main(accelerator, lambda: read_event_log(where / METRICS_FILE, "epoch").events)
    measure = str(epochs[-1].get("chosen_by", "val_top1")).removeprefix("val_")
    return {
        **result,
        "epoch": training.epoch,
        "measure": measure,
        "score": training.scores[measure],
        "loss": training.scores["loss"],
        "scores": training.scores,
        "epochs": [event[f"val_{measure}"] for event in epochs],
    }


class DistinctNotes:
    """Passes the notes of trials to standard error, those that differ in numbers only once."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, line: str) -> None:
        key = re.sub(r"[\d.,]+", "", line)
        if line.startswith("note:") and "no run in" not in line and key not in self.seen:
            self.seen.add(key)
            write_line(line)


def trial_folder(folder: Path, trial: int, rung: int) -> Path:
    """The run folder of a trial in a rung."""
    return folder / TRIALS / f"{trial:02d}-rung{rung}"


def drop_weights(folder: Path) -> None:
    """Delete weights and teacher's answers of a finished trial; its settings and metrics stay."""
    with explain_write_errors(folder):
        for name in (CHECKPOINTS, BEST):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (WEIGHTS, "config.json", TEACHER_FILE):
            (folder / name).unlink(missing_ok=True)


def save(accelerator: Accelerator, folder: Path, record: Record) -> Record:
    """Write tune.json on the main process; returns its record on all."""

    def write() -> Record:
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        write_text(folder / TUNE_FILE, text)
        stored: Record = json.loads(text)
        return stored

    return on_main(accelerator, write)


def write_search_results(folder: Path, record: Record, config: Config) -> None:
    """Write the best settings as a recipe, and the page."""
    with atomic_file(folder / RECIPE_FILE) as path:
        write_settings(path, config, RECIPE)
    write_report(folder, record)


def write_report(folder: Path, record: Record) -> None:
    """Write FOLDER/tune.html."""
    plan = find_result(record, final_results(record)[0]["rung"], 0)
    write_text(folder / PAGE_FILE, tune_page(record, leaderboard(record), plan, folder))


def result_lines(record: Record, result: TrainingResult, folder: Path) -> Iterator[str]:
    """A table of the trials, the verdict, and the result of the final training."""
    best = final_results(record)[0]
    yield from table_lines(record, leaderboard(record))
    if "stopped" in record:
        yield f"note: {record['stopped']}"
    yield verdict(record, best, find_result(record, best["rung"], 0))
    score = percent(result.scores[best["measure"]])
    yield (
        f"trained for {record['time']}: validation {measure_name(best)} {score}, "
        f"run folder {quoted(folder / BEST_RUN)}"
    )


def trial_line(record: Record, rung: int, place: int, result: Mapping[str, Any]) -> str:
    """Log line of a trial."""
    outcome = (
        f"failed: {result['error']}"
        if "error" in result
        else f"val {measure_name(result)} {percent(result['score'])}"
    )
    return (
        f"rung {rung}, {place}/{record['rungs'][rung - 1]['trials']}: trial {result['trial']}  "
        f"{outcome}  in {result['seconds']:.0f} s  "
        f"{changes_in_words(record['trials'][result['trial']])}"
    )
