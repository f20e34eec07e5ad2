"""Cross-validation: one training a fold, each in a run folder of its own, and a summary.

The interval is Student's t over the folds, widened as by Nadeau and Bengio (Machine Learning 52,
2003): folds share most of their training images, so their results vary less than those of
independent trainings would. Its half width is t s sqrt(1/k + 1/(k - 1)), with the standard
deviation s over k folds; 1/(k - 1) is the ratio of validation to training images.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from vit.config import Config
from vit.config.finetune_config import AUTO_WEIGHTS
from vit.config.parser import default_run_folder, flatten, make_config
from vit.config.settings_file import FOLDS_FILE, read_fold_settings
from vit.errors import ConfigError, RunError, printable
from vit.training.checkpoint.run_folder import RESUMABLE_CHANGES, WEIGHTS
from vit.training.distributed.collectives import on_main
from vit.training.distributed.devices import make_accelerator
from vit.training.logging.training_progress import notifier
from vit.training.plan import with_chosen_weights
from vit.training.train import resolve_plan, train
from vit.weights.safetensors_io import explain_write_errors, write_text

LEVEL = 0.95
UNBOUNDED = ("loss", "loss_shuffled", "class_loss", "cider")
"""Scores that are no shares."""
HOW = "Student's t with the variance of Nadeau and Bengio (2003), since folds share images"

Measure = Callable[[Path], Mapping[str, Any]]
"""Scores of the run in a folder, on the images that it held out."""


def train_folds(
    config: Config | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    measure: Measure,
    resume: bool = False,
    overwrite: bool = False,
    given: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Train on all folds but one, for each of them, in OUT/fold-1, OUT/fold-2 and so on.

    Args:
        config: As for `train`; `folds` is the number of folds.
        out: Folder of the run folders; `runs/<name of the data>` where left out.
        measure: Gives top1, loss and others of a finished run; those that are numbers are kept.
        resume: Leave out the folds that are finished, and continue the one that is not.
        overwrite: Delete the runs that are there.
        given: As in `train`.

    Returns:
        What folds.json has: the scores of each fold, and their mean and interval.

    Raises:
        VitError: Something the caller can mend: see the message.
    """
    config, given, _ = resolve_plan(config, given)
    number = config.data.folds
    assert number is not None
    check_cross_validation(config)
    accelerator = make_accelerator(config.run)
    folder, tell = Path(out or default_run_folder(config.data.data)), notifier(accelerator)
    config, given = resolve_weights_once(config, given, accelerator, folder, resume=resume)
    flat = flatten(config)
    record = {"folds": number, "settings": {name: flat[name] for name in given}}
    settings: dict[str, Any] = {name: flat[name] for name in given if name not in RESUMABLE_CHANGES}
    look = partial(finished, folder, settings, resume=resume, overwrite=overwrite)
    done = on_main(accelerator, look)
    write(accelerator, folder, {**record, "scores": done})
    failed: dict[str, str] = {}
    for fold in range(1, number + 1):
        place = folder / f"fold-{fold}"
        if str(fold) in done:
            tell(f"fold {fold} of {number} is finished: {printable(place)}")
            continue
        tell(f"fold {fold} of {number}: {printable(place)}")
        part = dataclasses.replace(config, data=dataclasses.replace(config.data, fold=fold))
        result = train(part, place, resume=resume, overwrite=overwrite, given=[*given, "fold"])
        failed |= result.failed
        done[str(fold)] = on_main(accelerator, partial(measured, measure, place))
        write(accelerator, folder, {**record, "scores": done, **summary([*done.values()])})
    return {**record, "scores": done, **summary([*done.values()]), "failed": failed}


def resolve_weights_once(
    config: Config, given: Sequence[str], accelerator: Accelerator, folder: Path, *, resume: bool
) -> tuple[Config, Sequence[str]]:
    """Settings with the weights that `--weights auto` chose for all folds, now or before.

    Raises:
        VitError: There are none to be had, or the record of the folds is damaged.
    """
    if config.finetune.weights == AUTO_WEIGHTS and resume and (folder / FOLDS_FILE).is_file():
        settings = read_fold_settings(folder / FOLDS_FILE)
        return make_config(settings), [*settings]
    config, given, _ = with_chosen_weights(config, given, accelerator)
    return config, given


def check_cross_validation(config: Config) -> None:
    """Refuse settings that are not for all folds together.

    Raises:
        ConfigError: There are some.
    """
    if config.training.time is not None:
        raise ConfigError(
            f"time={config.training.time}: it would be that of each fold; give --epochs, or train "
            "them one by one with --fold 1, --fold 2 and so on"
        )


def finished(
    folder: Path, settings: Mapping[str, Any], *, resume: bool, overwrite: bool
) -> dict[str, dict[str, float]]:
    """The scores of the folds in `folder` that are finished, by their numbers.

    Raises:
        RunError: It is taken by something else, or its record is damaged.
        ConfigError: They were trained with other settings.
    """
    path = folder / FOLDS_FILE
    if (folder / WEIGHTS).exists():  # of a training without folds
        raise RunError(f"{printable(folder)} is a run folder itself: give another --out")
    if overwrite:
        with explain_write_errors(path):
            path.unlink(missing_ok=True)
    if not path.is_file():
        return {}
    if not resume:
        raise RunError(f"{printable(path)} exists: --resume continues it, --overwrite starts anew")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        before = {n: v for n, v in record["settings"].items() if n not in RESUMABLE_CHANGES}
        scores = dict(record["scores"])
        done = {str(fold): {n: float(v) for n, v in row.items()} for fold, row in scores.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{printable(path)} is damaged ({printable(error)}); delete it") from None
    names = sorted({*settings, *before})
    changed = [name for name in names if settings.get(name) != before.get(name)]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{name}={settings.get(name)!r} differs from {before.get(name)!r} in "
            f"{printable(path)}: all folds have the same settings; give another --out"
        )
    return {fold: row for fold, row in done.items() if (folder / f"fold-{fold}" / WEIGHTS).exists()}


def measured(measure: Measure, folder: Path) -> dict[str, float]:
    """The scores of the run in `folder` that are one number each."""
    scores = measure(folder)
    return {
        name: value
        for name, value in scores.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Mean and interval over folds of what all of them have, and how the interval is made."""
    if not rows:
        return {}
    names = [name for name in rows[0] if name != "count" and all(name in row for row in rows)]
    spread = {
        name: interval([row[name] for row in rows], share=name not in UNBOUNDED) for name in names
    }
    return {
        "mean": {name: statistics.fmean(row[name] for row in rows) for name in names},
        "interval": spread,
        "level": LEVEL,
        "method": HOW,
    }


def interval(values: Sequence[float], *, share: bool = False) -> list[float] | None:
    """Ends of the interval around the mean of a cross-validation; None of a single value.

    Args:
        values: Of each fold.
        share: Whether they lie between 0 and 1, so that the ends do as well.
    """
    count = len(values)
    if count < 2:
        return None
    middle = statistics.fmean(values)
    width = t_quantile((1 + LEVEL) / 2, count - 1) * statistics.stdev(values)
    width *= math.sqrt(1 / count + 1 / (count - 1))
    low, high = middle - width, middle + width
    return [max(low, 0.0), min(high, 1.0)] if share else [low, high]


def t_quantile(share: float, freedom: int) -> float:
    """Where Student's t distribution has this share (above a half) below it; by bisection."""
    low, high = 0.0, 1.0
    while t_share(high, freedom) < share:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def t_share(value: float, freedom: int) -> float:
    """Share of Student's t distribution below `value`, which is not negative.

    By the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(value / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for at in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (at - 1) / at
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return (1 + inside) / 2


def write(accelerator: Accelerator, folder: Path, record: Mapping[str, Any]) -> None:
    """Leave `record` in `folder`, from one process for all."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"

    def leave() -> None:
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FOLDS_FILE, text)

    on_main(accelerator, leave)
