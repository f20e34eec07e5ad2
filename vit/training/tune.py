"""Hyperparameter search by successive halving, started from the plan: `vit tune DATA --time T`.

plan -> trials: the plan, and mutations of it -> rungs of equal time a trial -> the best, trained
for the remaining time

    rung r:  n / 3^r trials, 3^r times as long each; the best third advances, and always the plan

Half of the time is for the search. A trial's mutations are a function of (seed, trial, setting),
and its number of optimiser steps is fixed before the first trial, so a search that was killed
resumes from tune.json and gives the same result.

Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization", arXiv:1502.07943 (successive halving); Li et al., "Hyperband", arXiv:1603.06560.
"""

import contextlib
import dataclasses
import json
import math
import random
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator

from vit.config import Config
from vit.config.parser import checked, default_run_folder, make_config, write_settings
from vit.config.training_config import TIME_DECIDES
from vit.data.dataset_types import Splits
from vit.data.random_seed import random_seed
from vit.errors import BadImage, ConfigError, RunError, VitError, printable, quoted
from vit.evaluation.tune_report import (
    PAGE_FILE,
    changes_in_words,
    measure_name,
    table_lines,
    tune_page,
    verdict,
)
from vit.text import format_duration, percent
from vit.training.autotune.loader_autotune import shared_caches
from vit.training.checkpoint.checkpoint import CHECKPOINTS
from vit.training.checkpoint.run_folder import BEST, RESUMABLE_CHANGES, WEIGHTS, claim_folder, clear
from vit.training.distributed.collectives import max_over_processes, on_main
from vit.training.distributed.devices import make_accelerator
from vit.training.distributed.stop_signals import Interrupted
from vit.training.final_report import read_events
from vit.training.logging.training_progress import notifier, redirect_lines, write_line
from vit.training.plan import is_planned, plan_training, summary_lines
from vit.training.plan_rules import Plan, make_plan, neighbours
from vit.training.time_budget import MOST_SECONDS, REPORT, SHARE, Costs, costs_of, count_that_fit
from vit.training.train import complete_settings, train
from vit.training.trainer import TrainingResult
from vit.weights.safetensors_io import atomic_write, explain_write_errors, write_text

TUNE_FILE = "tune.json"
RECIPE_FILE = "best.yaml"
BEST_RUN = "best"
TRIALS = "trials"
COMMAND = "vit tune"

# Of the time, what searches; beyond the second share a search that is slower than measured ends.
SEARCH_SHARE, MOST_SEARCH = 0.5, 0.75
# A rung has this many times fewer trials than the one before, each this many times as long; the
# last one has at most so many, the plan among them.
FACTOR, LAST = 3, 3
# Trials that are tried where nobody gives a number, the most that are worth their time.
NUMBERS = (18, 9, 6, 3)
# A trial of the first rung takes this many times what it costs to begin one, and sees each image
# once; of three trials, half of that.
BEGINNINGS = 4.0
# Fewest optimiser steps of a trial, and how often it is validated, the last time at its end.
LEAST_STEPS, VALIDATIONS = 8, 4
# A trial changes each setting with this probability: it stays in the neighbourhood of the plan.
CHANGE = 0.5
# Draws of a trial that may fail, because settings contradict each other or are tried already.
ATTEMPTS = 50
RECIPE = "The best settings that vit tune found.\nTrain them: vit train --config THIS"
# Settings that the tuning decides: they count in epochs, which trials have few of.
REFUSED = (*TIME_DECIDES, "patience")


@dataclass(frozen=True, kw_only=True)
class SearchDimension:
    """A setting that trials change.

    Args:
        name: The setting.
        kind: How its values are drawn: `factor` is log-uniform between two factors on the plan's
            value, `times` one of some factors on it, `choice` one of some values, `network` one of
            the networks beside that of the plan on its ladder.
        values: The factors or the values.
        chosen: Settings of which one that somebody chose leaves nothing to search.
    """

    name: str
    kind: Literal["factor", "times", "choice", "network"]
    values: tuple[float, ...] = ()
    chosen: tuple[str, ...] = ()


# fallback_lr goes with lr; and lr, before its factor, with the batch as the plan has it
SPACE = (
    SearchDimension(name="lr", kind="factor", values=(0.4, 2.5), chosen=("lr", "fallback_lr")),
    SearchDimension(
        name="network",
        kind="network",
        chosen=(
            *("image_size", "patch_size", "dim", "depth", "num_heads", "hidden_dim"),
            *("stem", "stem_depth", "stem_width", "stem_stride"),
        ),
    ),
    SearchDimension(name="batch_size", kind="times", values=(0.5, 2.0)),
    SearchDimension(
        name="min_crop", kind="choice", values=(0.2, 0.35, 0.6, 0.8), chosen=("random_crop",)
    ),
    SearchDimension(name="drop_path", kind="choice", values=(0.0, 0.05, 0.1, 0.2)),
    SearchDimension(name="smoothing", kind="choice", values=(0.0, 0.05, 0.1, 0.2)),
    SearchDimension(name="weight_decay", kind="factor", values=(0.25, 4.0)),
)


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What a tuning ended with.

    Args:
        folder: Its folder.
        best: Number of the best trial; 0 is the plan.
        settings: Those of the best trial: `vit.make_config` takes them.
        training: The training of the best, whose run folder is FOLDER/best.
        record: What tune.json has.
        lines: What it came to, for reading.
    """

    folder: Path
    best: int
    settings: dict[str, Any]
    training: TrainingResult
    record: dict[str, Any]
    lines: tuple[str, ...]


def tune(
    settings: Mapping[str, Any],
    out: str | Path | None = None,
    *,
    trials: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    began: float | None = None,
) -> TuneResult:
    """Search settings for the data in half of a time, and train the best in the rest.

    Args:
        settings: Those that somebody chose, by name: `data` and `time` among them. None of them is
            searched. A search that is resumed adds its own.
        out: The folder; `runs/<name of the data>-tune` where left out. The trained network is the
            run folder `best` in it.
        trials: How many settings are tried, the plan among them; by the time where left out.
        resume: Go on with what is in `out`; begin where there is nothing.
        overwrite: Delete the tuning that is in `out`.
        began: When the time began, by `time.monotonic`; now if left out.

    Raises:
        VitError: Something the caller can mend: see the message.
    """
    began = time.monotonic() if began is None else began
    values, trials, folder = resumed_settings(checked(settings), out, trials, resume=resume)
    seconds = check_tunable(values, trials)
    accelerator = make_accelerator(before_plan(values).run)
    tell = notifier(accelerator)
    with shared_caches(), contextlib.ExitStack() as stack:
        look = partial(claim, folder, values, trials, stack, resume=resume, overwrite=overwrite)
        record = on_main(accelerator, look)
        if record is None:
            if resume:
                tell(f"note: no tuning in {printable(folder)} yet: starting one")
            record = prepare(values, seconds, trials, accelerator, began)
            record["seconds"] = time.monotonic() - began
            record = save(accelerator, folder, record)
        tell(opening(record))
        search(record, folder, seconds, accelerator)
        best = leaders(record)[0]["trial"]
        record["best"] = best
        if "time" not in record:
            left = seconds - seconds_spent(record)
            record["time"] = f"{max(left, (1 - MOST_SEARCH) * seconds / 2):.1f}s"
        record = save(accelerator, folder, record)
        chosen = record["trials"][best]["settings"]
        config = make_config({**chosen, "time": record["time"]})
        on_main(accelerator, partial(write_search_settings, folder, record, config))
        words = f"trial {best} ({changes_in_words(record['trials'][best])})" if best else "the plan"
        tell(f"best: {words}; training it for {record['time']}, in {printable(folder / BEST_RUN)}")
        result = train_best(config, folder, [*values, "time"], resume=resume)
        record["result"] = {"epoch": result.epoch, "scores": result.scores}
        record = save(accelerator, folder, record)
        on_main(accelerator, partial(write_report, folder, record))
    tell(f"comparison of the trials: {printable(folder / PAGE_FILE)}")
    return TuneResult(
        folder=folder,
        best=best,
        settings=dict(chosen),
        training=result,
        record=record,
        lines=tuple(result_lines(record, result, folder)),
    )


def resumed_settings(
    values: dict[str, Any], out: str | Path | None, trials: int | None, *, resume: bool
) -> tuple[dict[str, Any], int | None, Path]:
    """Settings and number of trials, completed by the search to resume, and its folder.

    Raises:
        ConfigError: `values` have no data, and there is no search to resume.
        RunError: The record of the search is damaged.
    """
    if not (values.get("data") or (resume and out)):
        raise ConfigError("data is missing: name a folder of images, a list or a known set")
    folder = Path(out or f"{default_run_folder(values['data'])}-tune")
    if resume and (folder / TUNE_FILE).is_file():
        record = read_record(folder / TUNE_FILE)
        values = {**record["settings"], **values}
        trials = record["asked"] if trials is None else trials
    if not values.get("data"):
        raise ConfigError(
            f"{printable(folder)}: no tuning to resume there; give the --out of one, or DATA"
        )
    return values, trials, folder


def check_tunable(values: Mapping[str, Any], trials: int | None) -> float:
    """Seconds of a tuning with these settings.

    Raises:
        ConfigError: They leave nothing to tune, or need another command.
    """
    if not is_planned(values):
        raise ConfigError(
            "tuning begins with a plan, which chooses the network of a classifier: leave out "
            "--model, --weights and --method; captions have no plan"
        )
    if values.get("folds") is not None:
        raise ConfigError(
            f"folds={values['folds']}: a tuning validates on one part; leave it out, and train the "
            f"{RECIPE_FILE} that it writes with --folds"
        )
    for name in REFUSED:
        if values.get(name):
            raise ConfigError(
                f"{name}={values[name]!r}: trials have lengths of their own, by the time; leave it "
                "out"
            )
    if trials is not None and trials < 2:
        raise ConfigError(f"trials={trials}: a search compares at least 2, the plan among them")
    if values.get("time") is None:
        raise ConfigError("time is missing: say how long the whole tuning may take: --time 30m")
    if all(is_chosen(one, values) for one in SPACE):
        raise ConfigError(
            "every setting that a tuning searches is given: leave one of them out "
            f"({', '.join(one.name for one in SPACE)}), or use vit train"
        )
    seconds = before_plan(values).training.seconds
    assert seconds is not None
    return seconds


def before_plan(values: Mapping[str, Any]) -> Config:
    """Settings of the devices and the time, before there is a network."""
    names = ("device", "precision", "deterministic", "time")
    return make_config({name: values[name] for name in names if name in values})


def is_chosen(one: SearchDimension, values: Mapping[str, Any]) -> bool:
    """Whether somebody chose what `one` would change."""
    return bool({one.name, *one.chosen} & set(values))


def claim(
    folder: Path,
    values: Mapping[str, Any],
    trials: int | None,
    stack: contextlib.ExitStack,
    *,
    resume: bool,
    overwrite: bool,
) -> dict[str, Any] | None:
    """Make `folder` ours until `stack` ends; what tune.json has of a tuning to go on with.

    Raises:
        RunError: The folder is taken.
        ConfigError: The tuning there was begun with other settings.
    """
    where, path = printable(folder), folder / TUNE_FILE
    if resume and overwrite:
        raise RunError("resume and overwrite exclude each other: choose one")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{where} is a file: give a folder")
    ours = {TUNE_FILE, PAGE_FILE, RECIPE_FILE, BEST_RUN, TRIALS, ".lock"}
    with explain_write_errors(folder):
        names = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
    if (folder / "config.yaml").is_file() or (folder / WEIGHTS).exists():
        raise RunError(f"{where} is a run folder itself: give another --out")
    if foreign := sorted(name for name in names - ours if not name.endswith(".tmp")):
        raise RunError(f"{where} has files that no tuning wrote ({foreign[0]}): give another --out")
    stack.enter_context(claim_folder(folder))
    if path.is_file() and not (resume or overwrite):
        raise RunError(f"{printable(path)} exists: --resume continues it, --overwrite starts anew")
    if not path.is_file() or overwrite:
        with explain_write_errors(folder):
            delete(folder)
        return None
    record = read_record(path)
    require_same(values, trials, record, path)
    return record


def delete(folder: Path) -> None:
    """Delete what a tuning wrote in `folder`, and nothing else."""
    for run in [*(folder / TRIALS).glob("*-rung*"), folder / BEST_RUN]:
        if run.is_dir():
            clear(run)
            (run / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody's files are in it
                run.rmdir()
    with contextlib.suppress(OSError):
        (folder / TRIALS).rmdir()
    for name in (PAGE_FILE, RECIPE_FILE, TUNE_FILE):
        (folder / name).unlink(missing_ok=True)


def read_record(path: Path) -> dict[str, Any]:
    """What tune.json has.

    Raises:
        RunError: It is damaged.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        needed = {"settings", "asked", "trials", "rungs", "results", "seconds", "validation"}
        if missing := needed - record.keys():
            raise KeyError(min(missing))
        record["settings"] = checked(record["settings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{printable(path)} is damaged ({printable(error)}); start anew with --overwrite"
        ) from None
    return record


def require_same(
    values: Mapping[str, Any], trials: int | None, record: Mapping[str, Any], path: Path
) -> None:
    """Refuse to go on with settings that would make it another tuning.

    Raises:
        ConfigError: The message has the first one that differs.
    """
    plain = json.loads(json.dumps({**values, "trials": trials}))
    before = {**record["settings"], "trials": record["asked"]}
    changed = [
        name
        for name in sorted({*plain, *before})
        if plain.get(name) != before.get(name) and name not in RESUMABLE_CHANGES
    ]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{name}={plain.get(name)!r} differs from {before.get(name)!r} in {printable(path)}: a "
            "tuning resumes with its own settings; leave the flag out, or give another --out"
        )


def prepare(
    values: Mapping[str, Any],
    seconds: float,
    trials: int | None,
    accelerator: Accelerator,
    began: float,
) -> dict[str, Any]:
    """The record of a tuning before its first trial: what is tried, in how many steps."""
    tell = notifier(accelerator)
    config, plan = plan_training({**values, "time": f"{SEARCH_SHARE * seconds:.1f}s"})
    for line in summary_lines(plan):
        tell(line)
    beginning = time.monotonic()
    given = [name for name in values if name != "time"]
    completed, splits, *_ = complete_settings(
        with_steps(config, 1), given, accelerator, None, beginning
    )
    start = max_over_processes(accelerator, time.monotonic() - beginning)
    made = make_trials(plan, values, int(values.get("seed", 0)), trials or max(NUMBERS))
    meter = CostMeter(completed, splits, accelerator, min(SHARE * seconds, MOST_SECONDS))

    def room() -> float:
        return SEARCH_SHARE * seconds - max_over_processes(accelerator, time.monotonic() - began)

    number = count_trials(
        len(made), meter(made[0]), images=len(splits.train), start=start, room=room(), asked=trials
    )
    kept = made[:number]
    costs = [meter(one) for one in kept]
    return {
        "settings": dict(values),
        "asked": trials,
        "validation": len(splits.val),
        "trials": [{"trial": n, **one} for n, one in enumerate(kept)],
        "rungs": make_rungs(
            costs, start=start, room=room(), seconds=seconds, asked=trials is not None
        ),
        "results": [],
    }


def make_trials(
    plan: Plan, values: Mapping[str, Any], seed: int, most: int
) -> list[dict[str, Any]]:
    """Settings of at most so many trials, all different, the plan first; a function of the seed.

    Returns:
        For each its `settings`, with which `make_config` makes its training, the `values` of those
        that are searched, and which of these are `changes` of the plan.
    """
    base = settings_of_plan(plan, values, {})
    made = [{"values": values_of(base), "changes": {}, "settings": base}]
    for trial in range(1, most):
        for attempt in range(ATTEMPTS):
            drawn, factors = draw(plan, base, values, (seed, trial, attempt))
            try:
                settings = settings_of_plan(plan, values, drawn, factors)
                make_config(settings)
            except ConfigError:  # with settings that somebody chose
                continue
            if all(settings != other["settings"] for other in made):
                tried, plans = values_of(settings), values_of(base)
                changes = {name: v for name, v in tried.items() if v != plans.get(name)}
                made.append({"values": tried, "changes": changes, "settings": settings})
                break
        else:
            break
    return made


def draw(
    plan: Plan, base: Mapping[str, Any], values: Mapping[str, Any], seed: tuple[int, int, int]
) -> tuple[dict[str, Any], dict[str, float]]:
    """What a trial changes: settings that the plan takes as given, and factors on what it plans.

    A draw of its own for each setting: one that somebody chose leaves the others as they were.
    """
    drawn: dict[str, Any] = {}
    factors: dict[str, float] = {}
    for one in SPACE:
        if is_chosen(one, values):
            continue
        dice = random.Random(random_seed(*seed, "tune", one.name))
        if dice.random() >= CHANGE:
            continue
        now = base.get(one.name)
        if one.kind == "network":
            if beside := neighbours(plan):
                drawn |= dice.choice(beside)
        elif now is None or (one.name == "min_crop" and now == 1):
            continue  # the plan has no such setting, or crops would cut characters
        elif one.kind == "choice":
            drawn[one.name] = dice.choice([value for value in one.values if value != now])
        elif one.kind == "times":
            drawn[one.name] = min(max(round(now * dice.choice(one.values)), 1), plan.facts.images)
        else:
            low, high = map(math.log, one.values)
            factor = math.exp(dice.uniform(low, high))
            if one.name == "lr":
                factors["lr"] = factor
            else:
                drawn[one.name] = rounded(now * factor)
    return drawn, factors


def settings_of_plan(
    plan: Plan,
    values: Mapping[str, Any],
    drawn: Mapping[str, Any],
    factors: Mapping[str, float] = {},
) -> dict[str, Any]:
    """Settings of a training by the plan, with those that were `drawn` as if they were chosen."""
    given = {name: value for name, value in values.items() if name != "time"}
    planned = make_plan(plan.facts, {**plan.given, **drawn}).settings
    settings = {**given, **planned, **drawn}
    settings.pop("time", None)
    settings.setdefault("smoothing", make_config({}).training.smoothing)
    if "lr" not in values:
        usual = make_config({}).training
        for name in ("lr", "fallback_lr"):
            peak = settings.get(name, getattr(usual, name))
            if peak is not None and name not in values:
                least = settings.get("min_lr", usual.min_lr)
                settings[name] = max(rounded(peak * factors.get("lr", 1.0)), least)
    return settings


def rounded(value: float) -> float:
    """`value` in three digits, which is what a person reads and types."""
    return float(f"{value:.3g}")


def values_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are searched, the network in words."""
    names = [one.name for one in SPACE if one.kind != "network" and one.name in settings]
    return {"network": network_key(settings), **{name: settings[name] for name in names}}


def network_key(settings: Mapping[str, Any]) -> str:
    """A network in a few signs: blocks x width, patches, size of images; differs where costs do."""
    size, patch = settings["image_size"], settings["patch_size"]
    return f"{settings['depth']} x {settings['dim']}, patches of {patch} at {size} px"


def with_steps(config: Config, steps: int) -> Config:
    """`config` of a training of so many steps, validated `VALIDATIONS` times."""
    epoch_steps = math.ceil(steps / VALIDATIONS)
    training = dataclasses.replace(
        config.training,
        time=None,
        steps=steps,
        epoch_steps=epoch_steps,
        epochs=math.ceil(steps / epoch_steps),
    )
    return dataclasses.replace(config, training=training)


class CostMeter:
    """Measures what the trainings of trials cost, once for each network.

    Args:
        completed: The plan's settings with what the data and the memory say of them.
        splits: The images.
        accelerator: The devices.
        most: Seconds of one measurement.
    """

    def __init__(
        self, completed: Config, splits: Splits, accelerator: Accelerator, most: float
    ) -> None:
        self.completed = completed
        self.splits = splits
        self.accelerator = accelerator
        self.most = most
        self.measured: dict[str, tuple[int, Costs]] = {}

    def __call__(self, trial: Mapping[str, Any]) -> tuple[Config, Costs]:
        """The settings of a trial from `make_trials`, and the costs of its trainings."""
        config = make_config(trial["settings"])
        model = dataclasses.replace(config.model, num_classes=self.completed.model.num_classes)
        data = dataclasses.replace(config.data, accumulate=self.completed.data.accumulate)
        config = dataclasses.replace(config, model=model, data=data)
        name, batch = network_key(trial["settings"]), config.data.batch_size
        if name not in self.measured:
            if not self.measured:  # what it imports and compiles
                costs_of(config, self.splits, self.accelerator, 0.0)
            costs = costs_of(config, self.splits, self.accelerator, self.most)
            self.measured[name] = batch, costs
        other, costs = self.measured[name]
        share = batch / other
        return config, dataclasses.replace(
            costs,
            small_step=costs.small_step * share,
            full_step=costs.full_step * share,
            ending=max(costs.ending - REPORT - costs.validation, 0.0),  # there is no report
        )


def rung_sizes(trials: int) -> list[int]:
    """Trials of each rung."""
    sizes = [trials]
    while sizes[-1] > LAST:
        sizes.append(max(sizes[-1] // FACTOR, 2))
    return sizes


def seconds_of_first_rung(trials: int, room: float) -> float:
    """Seconds of a trial of the first rung, where the whole search has `room` seconds."""
    parts: int = sum(size * FACTOR**at for at, size in enumerate(rung_sizes(trials)))
    return room / parts


def count_trials(
    most: int,
    plan: tuple[Config, Costs],
    *,
    images: int,
    start: float,
    room: float,
    asked: int | None,
) -> int:
    """How many trials there are: as many as were asked for, or as are worth their time.

    Args:
        most: That could be drawn.
        plan: The plan's settings and what its trainings cost.
        images: Training images.
        start: Seconds that a training takes before its network is built.
        room: Seconds of the whole search.
        asked: Number that somebody asked for.

    Raises:
        ConfigError: There are not so many different ones.
    """
    config, costs = plan
    if most < (asked or LAST):
        raise ConfigError(
            f"the settings that are given leave only {most} different trials, the plan among them: "
            "leave some of them out, ask for fewer --trials, or use vit train"
        )
    if asked:
        return asked
    result_rank = images / config.data.batch_size * costs.full_step
    result_rank += BEGINNINGS * (start + overhead(costs))
    return next(
        (n for n in NUMBERS if n <= most and seconds_of_first_rung(n, room) >= result_rank), LAST
    )


def overhead(costs: Costs) -> float:
    """Seconds of a training beside its steps."""
    return costs.start + VALIDATIONS * (costs.validation + costs.saving) + costs.ending


def make_rungs(
    costs: Sequence[tuple[Config, Costs]],
    *,
    start: float,
    room: float,
    seconds: float,
    asked: bool,
) -> list[dict[str, Any]]:
    """The rungs: trials, seconds of each, and the optimiser steps of every trial in these seconds.

    Args:
        costs: Settings and costs of all trials, the plan first.
        start: Seconds that a training takes before its network is built.
        room: Seconds of the whole search.
        seconds: Of the whole tuning.
        asked: Whether somebody asked for so many trials.

    Raises:
        ConfigError: There is too little time.
    """
    number = len(costs)
    least = start + max(
        cost.of(with_steps(one, LEAST_STEPS), 2, LEAST_STEPS) for one, cost in costs
    )
    if not asked:
        least = max(least, BEGINNINGS / 2 * (start + overhead(costs[0][1])))
    first = seconds_of_first_rung(number, room)
    if first < least:
        enough = (
            SEARCH_SHARE * seconds - room + least / seconds_of_first_rung(number, 1.0)
        ) / SEARCH_SHARE
        other = "fewer --trials" if asked else "vit train, which makes one training of it"
        raise ConfigError(
            f"time={seconds:g}s: half of it searches, in which {number} trials have "
            f"{max(first, 0):.1f} s each and need {least:.1f} s: use --time "
            f"{math.ceil(1.2 * enough)}s or more, or {other}"
        )
    rungs = []
    for at, size in enumerate(rung_sizes(number)):
        each = first * FACTOR**at
        steps = [steps_in(each - start, one, cost) for one, cost in costs]
        rungs.append({"trials": size, "seconds": round(each, 2), "steps": steps})
    return rungs


def steps_in(seconds: float, config: Config, costs: Costs) -> int:
    """Optimiser steps of a training that takes so many seconds."""

    def end(steps: int) -> float:
        sized = with_steps(config, steps)
        return costs.of(sized, sized.training.epoch_steps or 1, steps)

    return max(count_that_fit(seconds, end), LEAST_STEPS)


def search(
    record: dict[str, Any],
    folder: Path,
    seconds: float,
    accelerator: Accelerator,
) -> None:
    """Train what is left of the trials, rung after rung; `record` gets their results."""
    tell = notifier(accelerator)
    notes = Notes(tell)
    given = [name for name in record["settings"] if name != "time"]
    for rung, facts in enumerate(record["rungs"], 1):
        for place, trial in enumerate(entrants(record, rung), 1):
            if find_result(record, rung, trial) is not None or record.get("stopped"):
                continue
            if (
                rung + place > 2
                and seconds_spent(record) + facts["seconds"] > MOST_SEARCH * seconds
            ):
                record["stopped"] = (
                    f"the search ended in rung {rung}, before trial {trial}: trials took longer "
                    "than was measured"
                )
                save(accelerator, folder, record)
                tell(f"note: {record['stopped']}")
                continue
            began = time.monotonic()
            result = run_trial(record, rung, trial, folder, given, notes, accelerator)
            result["seconds"] = round(max_over_processes(accelerator, time.monotonic() - began), 2)
            record["results"].append(result)
            save(accelerator, folder, record)
            tell(trial_line(record, rung, place, result))
            where = trial_folder(folder, trial, rung)
            on_main(accelerator, partial(drop_weights, where))


def run_trial(
    record: Mapping[str, Any],
    rung: int,
    trial: int,
    folder: Path,
    given: Sequence[str],
    notes: "Notes",
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Train one trial of a rung, or go on with it; what tune.json has of it, but its seconds.

    Raises:
        VitError: The plan itself cannot be trained, or something that is no fault of the settings.
    """
    steps = record["rungs"][rung - 1]["steps"][trial]
    config = with_steps(make_config(record["trials"][trial]["settings"]), steps)
    result: dict[str, Any] = {"rung": rung, "trial": trial, "steps": steps}
    where = trial_folder(folder, trial, rung)
    begun = on_main(accelerator, lambda: (where / "config.yaml").is_file())
    try:
        with redirect_lines(notes):
            training = train(
                config,
                where,
                resume=begun,
                given=[*given, "steps", "epoch_steps"],
                resumed_by=(COMMAND, folder),
                report=False,
            )
    except (Interrupted, BadImage):
        raise
    except VitError as error:
        alone = accelerator.num_processes > 1 and not error.on_all_processes
        if trial == 0 or alone:
            raise
        return {**result, "error": printable(error)}
    events = on_main(accelerator, lambda: read_events(where))
    epochs = [event for event in events if event["event"] == "epoch"]
    name = measure_of(epochs[-1])
    return {
        **result,
        "epoch": training.epoch,
        "measure": name,
        "score": training.scores[name],
        "loss": training.scores["loss"],
        "scores": training.scores,
        "epochs": [event[f"val_{name}"] for event in epochs],
    }


class Notes:
    """Lines of trials that the user sees: each note once, whatever its numbers.

    Args:
        tell: What writes a line.
    """

    def __init__(self, tell: Any) -> None:
        self.tell = tell
        self.seen: set[str] = set()

    def __call__(self, line: str) -> None:
        key = re.sub(r"[\d.,]+", "", line)
        if line.startswith("note:") and "no run in" not in line and key not in self.seen:
            self.seen.add(key)
            write_line(line)


def measure_of(event: Mapping[str, Any]) -> str:
    """Name of the score by which epochs and trials are compared."""
    return str(event.get("chosen_by", "val_top1")).removeprefix("val_")


def trial_folder(folder: Path, trial: int, rung: int) -> Path:
    """The run folder of a trial in a rung."""
    return folder / TRIALS / f"{trial:02d}-rung{rung}"


def drop_weights(folder: Path) -> None:
    """Delete what is large in a trial that has been measured; its settings and metrics stay."""
    with explain_write_errors(folder):
        for name in (CHECKPOINTS, BEST):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (WEIGHTS, "config.json"):
            (folder / name).unlink(missing_ok=True)


def find_result(record: Mapping[str, Any], rung: int, trial: int) -> dict[str, Any] | None:
    """The result of a trial in a rung, if it has one."""
    own = (one for one in record["results"] if (one["rung"], one["trial"]) == (rung, trial))
    return next(own, None)


def result_rank(result: Mapping[str, Any]) -> tuple[float, float]:
    """What a better trial has more of; one that failed has least."""
    if "error" in result:
        return -math.inf, -math.inf
    return result["score"], -result["scores"]["loss"]


def ranked(record: Mapping[str, Any], rung: int) -> list[dict[str, Any]]:
    """Results of a rung, the best first, of equal ones the earlier trial."""
    results = [one for one in record["results"] if one["rung"] == rung]
    return sorted(sorted(results, key=lambda one: one["trial"]), key=result_rank, reverse=True)


def entrants(record: Mapping[str, Any], rung: int) -> list[int]:
    """Trials of a rung: all in the first, then the best of the one before, the plan among them."""
    if rung == 1:
        return [one["trial"] for one in record["trials"]]
    size = record["rungs"][rung - 1]["trials"]
    best = [one["trial"] for one in ranked(record, rung - 1) if "error" not in one][:size]
    if 0 not in best:
        best[-1] = 0
    return sorted(best)


def leaders(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Results of the last rung that is complete, the best first; else of the first rung."""
    for rung in range(len(record["rungs"]), 0, -1):
        results = ranked(record, rung)
        if results and len(results) == len(entrants(record, rung)):
            return results
    return ranked(record, 1)


def seconds_spent(record: Mapping[str, Any]) -> float:
    """Seconds that the tuning took so far."""
    return float(record["seconds"]) + math.fsum(one["seconds"] for one in record["results"])


def train_best(
    config: Config, folder: Path, given: Sequence[str], *, resume: bool
) -> TrainingResult:
    """Train the best settings in FOLDER/best, or go on with it."""
    where = folder / BEST_RUN
    begun = resume and (where / "config.yaml").is_file()
    return train(config, where, resume=begun, given=given, resumed_by=(COMMAND, folder))


def write_search_settings(folder: Path, record: Mapping[str, Any], config: Config) -> None:
    """Write what is known before the best settings are trained: the recipe and the page."""
    path = folder / RECIPE_FILE
    atomic_write(path, lambda beside: write_settings(beside, config, RECIPE))
    write_report(folder, record)


def save(accelerator: Accelerator, folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write tune.json, from one process for all; the record as that process has it."""

    def write() -> dict[str, Any]:
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        write_text(folder / TUNE_FILE, text)
        plain: dict[str, Any] = json.loads(text)
        return plain

    return on_main(accelerator, write)


def write_report(folder: Path, record: Mapping[str, Any]) -> None:
    """Write FOLDER/tune.html."""
    best = leaders(record)[0]
    plan = find_result(record, best["rung"], 0)
    write_text(folder / PAGE_FILE, tune_page(record, leaderboard(record), plan, folder))


def leaderboard(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each trial's result in the last rung that it reached, the best first."""
    first = leaders(record)
    rungs = [first[0]["rung"], *range(len(record["rungs"]), 0, -1)]
    rows = [one for rung in rungs for one in ranked(record, rung)]
    return [*{one["trial"]: one for one in reversed(rows)}.values()][::-1]


def result_lines(record: Mapping[str, Any], result: TrainingResult, folder: Path) -> Iterator[str]:
    """What the tuning came to."""
    best = leaders(record)[0]
    yield from table_lines(record, leaderboard(record))
    if "stopped" in record:
        yield f"note: {record['stopped']}"
    yield verdict(record, best, find_result(record, best["rung"], 0))
    score = percent(result.scores[best["measure"]])
    yield (
        f"trained for {record['time']}: validation {measure_name(best)} {score}, "
        f"run folder {quoted(folder / BEST_RUN)}"
    )


def opening(record: Mapping[str, Any]) -> str:
    """What is about to be tried."""
    rungs = [
        f"{one['trials']} of {format_duration(one['seconds'])} each" for one in record["rungs"]
    ]
    return f"search: {len(record['trials'])} trials, in rungs of {', then '.join(rungs)}"


def trial_line(record: Mapping[str, Any], rung: int, place: int, result: Mapping[str, Any]) -> str:
    """What a trial came to."""
    count = record["rungs"][rung - 1]["trials"]
    words = changes_in_words(record["trials"][result["trial"]])
    if "error" in result:
        said = f"failed: {result['error']}"
    else:
        said = f"val {measure_name(result)} {percent(result['score'])}"
    return (
        f"rung {rung}, {place}/{count}: trial {result['trial']}  {said}  in "
        f"{result['seconds']:.0f} s  {words}"
    )
