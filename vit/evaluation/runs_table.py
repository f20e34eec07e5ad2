"""Many run folders as one table: `vit runs`.

    FOLDER -> run folders below it -> RunRecord each -> RunsTable -> lines, JSON, page

    config.yaml          settings, of which those that differ between the runs are shown
    summary.json         epochs, best score with its interval, time; from metrics.jsonl without it
    config.json          calibration error
    model.safetensors    shapes in its header: number of parameters
    .lock                whether a process trains there

Only this is read, and torch is not imported: 200 runs take well below a second.
"""

import contextlib
import csv
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from urllib.parse import quote

from vit.atomic_files import lock_file
from vit.config.collect_settings import FOLDS_FILE, SOUP_FOLDER
from vit.config.presets import PRESETS
from vit.config.setting_layers import all_settings, read_stored_settings, settings_with
from vit.config.settings import as_typed
from vit.errors import ConfigError, RunError
from vit.evaluation.exact_tests import wilson_interval
from vit.evaluation.metric_rows import metric_of
from vit.event_log import (
    LOWER_IS_BETTER,
    METRICS_FILE,
    Event,
    best_epoch,
    ranking_metric,
    read_event_log,
    saved_event,
)
from vit.paths import GROUPS_FILE, did_you_mean, is_run_folder, path_argument
from vit.text import align_columns, format_duration, format_parameters, nearest, percent, printable

SETTINGS = "config.yaml"
WEIGHTS = "model.safetensors"
SUMMARY_FILE = "summary.json"
OWN_FOLDERS = {"checkpoints", "best", "tracking"}
"""Folders inside a run folder, which are no runs."""
FINISHED, RUNNING, UNFINISHED, BROKEN = "finished", "running", "unfinished", "broken"
BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "table", "angles")
"""Last parts of the names of tensors that are no parameters."""
COMMON_FOLDERS = {"train", "training", "images", "data"}
"""Last parts of paths that need the one before."""
NEW_SOURCE = ("top1", "known_top1", "top1_interval", "images", "sources", "by")
"""What `vit.evaluation.new_sources` measures."""
MAX_HEADER_BYTES = 100_000_000


def rank_of(run: "RunRecord") -> tuple[str, str, float]:
    """Sort key of scores: those of one metric, and one unit, stand together, the best one first."""
    metric, score = run.metric or "", run.score or 0.0
    known = metric_of(metric)
    target = as_typed(run.setting("target")) if known.in_units else ""
    return known.title, target, score if metric in LOWER_IS_BETTER else -score


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One training, as its run folder describes it; `epochs` to `seconds` are of summary.json.

    Args:
        changed: Time of the last change of its metrics, in seconds since 1970.
        best_epoch: The epoch of the weights, from 1; None if they are an average of several.
        metric: The score that ranked the epochs, such as `val_top1`; None before the first.
        new_source: The accuracy on new sources, as of `NewSources.scores`; None if not measured.
        interval: Its 95 % interval where it is a share of independent images (Wilson), else None.
    """

    name: str
    folder: Path
    state: str
    reason: str
    changed: float
    settings: Mapping[str, Any]
    parameters: int | None = None
    epochs: int = 0
    best_epoch: int | None = None
    metric: str | None = None
    score: float | None = None
    interval: Sequence[float] | None = None
    new_source: Mapping[str, Any] | None = None
    calibration_error: float | None = None
    seconds: float | None = None
    has_report: bool = False

    def setting(self, name: str) -> Any:
        """A setting; of a run from before it existed its default, which is what the run did."""
        known = all_settings()
        return self.settings.get(name, known[name].default if name in known else None)

    @property
    def data(self) -> str | None:
        data = self.settings.get("data")
        return None if data is None else str(data)

    @property
    def network(self) -> str | None:
        """The preset, or the sizes of another network: blocks x width, patches, pixels."""
        if not self.settings:
            return None
        model = str(self.setting("model"))
        sizes = {name: self.setting(name) for name in PRESETS.get(model, {})}
        if sizes and sizes == PRESETS[model]:
            return model
        depth, dim, patch, image = map(self.setting, ("depth", "dim", "patch_size", "image_size"))
        return f"{depth} x {dim}, patch {patch}, {image} px"

    @property
    def score_text(self) -> str:
        """The score; its name stands beside all but top-1."""
        metric = metric_of(self.metric or "")
        value = metric.text(self.score, ".4g")
        return value if self.metric == "val_top1" else f"{metric.title} {value}"

    @property
    def lower_limit(self) -> float | None:
        """The lower end of the interval of the score."""
        return None if self.interval is None else self.interval[0]

    @property
    def progress(self) -> str:
        """Epochs that are over, of those that are planned."""
        return f"{self.epochs}/{self.setting('epochs')}" if self.settings else ""

    def to_dict(self, settings: Sequence[str]) -> dict[str, Any]:
        """Its entry in the JSON of `vit runs`, with these settings."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "state": self.state,
            **({"reason": self.reason} if self.reason else {}),
            "date": local_time(self.changed).isoformat(timespec="seconds"),
            "data": self.data,
            "network": self.network,
            "parameters": self.parameters,
            "epochs": self.epochs,
            "planned_epochs": self.setting("epochs") if self.settings else None,
            "best_epoch": self.best_epoch,
            "metric": None if self.metric is None else self.metric.removeprefix("val_"),
            "score": self.score,
            "interval": self.interval,
            "new_source": self.new_source,
            "calibration_error": self.calibration_error,
            "seconds": self.seconds,
            "report": str(self.folder / "report.html") if self.has_report else None,
            "settings": {name: self.setting(name) for name in settings} if self.settings else {},
        }


class Column(NamedTuple):
    """A column of the table."""

    title: str
    attribute: str
    text: Callable[[RunRecord], str] | None = None
    """What is shown of a run that has the value; the value itself by default."""
    number: bool = False
    key: Callable[[RunRecord], Any] | None = None
    """What rows are sorted by, the best or newest first; the value by default."""

    def value(self, run: RunRecord) -> Any:
        """The value of a run; None if it has none."""
        return getattr(run, self.attribute)

    def show(self, run: RunRecord) -> str:
        """The text of a run; "" if it has no value."""
        if self.value(run) is None:
            return ""
        return str(self.value(run)) if self.text is None else self.text(run)

    def sort_key(self, run: RunRecord) -> Any:
        """What the row of a run is sorted by; None last."""
        return self.value(run) if self.key is None or self.value(run) is None else self.key(run)


COLUMNS = {
    "name": Column("run", "name", key=lambda run: run.name.casefold()),
    "state": Column("state", "state"),
    "date": Column(
        "date",
        "changed",
        lambda run: f"{local_time(run.changed):%Y-%m-%d %H:%M}",
        number=True,
        key=lambda run: -run.changed,
    ),
    "data": Column("data", "data", lambda run: short_path(run.data)),
    "network": Column("network", "network"),
    "parameters": Column(
        "parameters", "parameters", lambda run: format_parameters(run.parameters or 0), number=True
    ),
    "epochs": Column("epochs", "epochs", lambda run: run.progress, number=True),
    "score": Column("score", "score", lambda run: run.score_text, number=True, key=rank_of),
    "interval": Column(
        "95 % interval",
        "lower_limit",
        lambda run: " to ".join(map(percent, run.interval or ())),
        number=True,
        key=lambda run: -(run.lower_limit or 0.0),
    ),
    "new_source": Column(
        "new sources",
        "new_source",
        lambda run: percent((run.new_source or {})["top1"]),
        number=True,
        key=lambda run: -(run.new_source or {})["top1"],
    ),
    "calibration_error": Column(
        "calibration error",
        "calibration_error",
        lambda run: f"{run.calibration_error:.4f}",
        number=True,
    ),
    "time": Column("time", "seconds", lambda run: format_duration(run.seconds or 0.0), number=True),
}
"""By the name that `--sort` takes."""


@dataclass(frozen=True)
class RunsTable:
    """The result of `runs`, sorted."""

    folder: Path
    runs: tuple[RunRecord, ...]

    @cached_property
    def differing(self) -> dict[str, str]:
        """Settings that differ between the runs, with the value that most of them have."""
        read = [run for run in self.runs if run.settings]
        known = sorted(
            all_settings(), key=settings_with(decided_by="time").__contains__
        )  # those that a time gave last
        hidden = {*settings_with(listed=False), *COLUMNS}
        found = {}
        for name in dict.fromkeys([*known, *(name for run in read for name in run.settings)]):
            values = Counter(setting_text(run.setting(name)) for run in read)
            if len(values) > 1 and name not in hidden:
                found[name] = values.most_common(1)[0][0]
        return found

    @property
    def columns(self) -> list[Column]:
        """The columns in which a run has something."""
        return [one for one in COLUMNS.values() if any(map(one.show, self.runs))]

    def setting_texts(self, run: RunRecord) -> dict[str, str]:
        """Its settings that differ between the runs; none if they cannot be read."""
        if not run.settings:
            return {}
        return {name: setting_text(run.setting(name)) for name in self.differing}

    def deviations(self, run: RunRecord) -> dict[str, str]:
        """Settings of `run` that differ from those of most runs."""
        texts = self.setting_texts(run).items()
        return {name: value for name, value in texts if value != self.differing[name]}

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit runs`."""
        names = list(self.differing)
        return {"differing": names, "runs": [run.to_dict(names) for run in self.runs]}

    def lines(self) -> list[str]:
        """The table for a terminal, one line a run, then why runs are broken."""
        columns = self.columns
        changes = [self.deviations(run) for run in self.runs]
        notes = [" ".join(f"{name}={value}" for name, value in each.items()) for each in changes]
        rows = [[*(one.title for one in columns), "differs from most in" if any(notes) else ""]]
        for run, note in zip(self.runs, notes, strict=True):
            rows.append([printable(text) for text in (*(one.show(run) for one in columns), note)])
        left = {index for index, column in enumerate(columns) if not column.number}
        lines = align_columns(rows, left={*left, len(columns)})
        broken = [run for run in self.runs if run.reason]
        return [*lines, *(f"{printable(run.name)}: {printable(run.reason)}" for run in broken)]

    def page(self, file: str | os.PathLike[str]) -> str:
        """The HTML page for `file`, from which the links to the reports are relative."""
        from vit.evaluation.html_page import render_page

        place = Path(file).resolve().parent
        rows = []
        for run in self.runs:
            cells = [
                (one.show(run), one.value(run) if one.number else None) for one in self.columns
            ]
            rare = self.deviations(run)
            settings = [(value, name in rare) for name, value in self.setting_texts(run).items()]
            report = run.folder.resolve() / "report.html"
            link = quote(os.fsencode(os.path.relpath(report, place).replace(os.sep, "/")))
            rows.append((run, link, cells, settings))
        return render_page(
            "runs_page.html.j2",
            heading=self.folder.resolve().name or self.folder,
            columns=self.columns,
            names=list(self.differing),
            rows=rows,
            states=Counter(run.state for run in self.runs),
        )


def runs(
    folder: str | os.PathLike[str] = "runs", *, sort: str = "score", reverse: bool = False
) -> RunsTable:
    """All runs below a folder, as a table: `vit runs`.

        table = vit.runs("runs")
        print(table.runs[0].name, table.runs[0].score, list(table.differing))

    Args:
        folder: Searched with all folders below it; links are not followed.
        sort: A column (name, state, date, data, network, parameters, epochs, score, interval,
            calibration_error, time) or a setting; the best, newest or smallest first, runs without
            a value last.
        reverse: The other way round; runs without a value stay last.

    Raises:
        VitError: There is no such folder or column, or no run below it.
    """
    root = Path(path_argument("folder", folder, "a folder with run folders"))
    key = sort_key(sort)
    if not root.is_dir():
        hint = did_you_mean(root)
        raise RunError(f"{root} is not a folder{hint}; give one with run folders")
    records = [read_run(path, root) for path in find_runs(root)]
    if not records:
        raise RunError(
            f"{root}: neither it nor a folder below it is a run folder, as vit train "
            "--out writes it"
        )
    records.sort(key=lambda run: run.name.casefold())
    having = sorted((run for run in records if key(run) is not None), key=key, reverse=reverse)
    return RunsTable(root, (*having, *(run for run in records if key(run) is None)))


def sort_key(name: str) -> Callable[[RunRecord], Any]:
    """The sort key of a column, or of a setting: numbers before words, None last."""
    word = name.replace("-", "_")
    if word in COLUMNS:
        return COLUMNS[word].sort_key
    if word not in all_settings():
        hint = nearest(word, [*COLUMNS, *all_settings()])
        raise ConfigError(
            f"sort={name}: no column or setting is called so{hint}; columns: {', '.join(COLUMNS)}"
        )

    def key(run: RunRecord) -> tuple[bool, float, str] | None:
        value = run.setting(word) if run.settings else None
        if value is None:
            return None
        number = isinstance(value, int | float)
        return not number, float(value) if number else 0.0, as_typed(value)

    return key


def find_runs(root: Path) -> Iterator[Path]:
    """Run folders: `root` and those below it; hidden folders and links are left out.

    The network of all folds of a cross-validation is left out: it has no scores.
    """
    for place, folders, files in os.walk(root):
        inside = {*folders, *files}
        is_run = METRICS_FILE in inside or is_run_folder(place)
        if is_run:
            yield Path(place)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and not (is_run and name in OWN_FOLDERS)
            and not (FOLDS_FILE in inside and name == SOUP_FOLDER)
        )


def read_run(folder: Path, root: Path) -> RunRecord:
    """Read a run folder; what cannot be read makes it broken, and raises nothing."""
    reasons: list[str] = []
    settings: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    parameters = error = None
    has_report, has_weights = ((folder / name).is_file() for name in ("report.html", WEIGHTS))
    try:
        settings = read_stored_settings(folder / SETTINGS)
    except ConfigError as problem:
        reasons.append(str(problem).replace(f"{printable(folder)}{os.sep}", ""))
    try:
        facts, damage = read_summary(folder, settings, ended=has_report)
        if damage:
            reasons.append(damage)
        elif not facts and (has_report or has_weights):
            reasons.append(f"{METRICS_FILE} has no epoch")
    except (ValueError, KeyError, TypeError):
        reasons.append(f"{SUMMARY_FILE} or {METRICS_FILE} is damaged")
    stopped_early = facts.pop("stopped_early", False)
    if has_weights:
        try:
            parameters = count_parameters(folder / WEIGHTS, settings)
            own = json.loads((folder / "config.json").read_bytes())["vit"]
            error = own.get("calibration_error")
            error = None if error is None else float(error)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
            reasons.append(f"{WEIGHTS} or config.json is damaged: {printable(problem)}")
    elif facts and (folder / "config.json").exists():  # a search drops both of its trials
        reasons.append(f"{WEIGHTS} is missing")
    over = stopped_early or facts.get("epochs", 0) >= float(settings.get("epochs", math.inf))
    state = BROKEN if reasons else FINISHED if over or has_report else UNFINISHED
    changed = 0.0
    for path in (folder, folder / SETTINGS, folder / METRICS_FILE):
        with contextlib.suppress(OSError):
            changed = path.stat().st_mtime
    relative = os.path.relpath(folder, root)
    return RunRecord(
        name=folder.resolve().name if relative == "." else relative,
        folder=folder,
        state=RUNNING if is_locked(folder / ".lock") else state,
        reason="; ".join(reasons),
        changed=changed,
        settings=settings,
        parameters=parameters,
        calibration_error=error,
        has_report=has_report,
        **facts,
    )


def read_summary(
    folder: Path, settings: Mapping[str, Any], *, ended: bool
) -> tuple[dict[str, Any], str]:
    """summary.json, and what is damaged; of an older run that of its metrics.jsonl."""
    with contextlib.suppress(OSError):
        facts: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_bytes())
        return facts, ""
    log = read_event_log(folder / METRICS_FILE, "epoch", "soup", "new_source")
    killed = log.cut and not ended  # the epoch of a cut line is trained again
    return summarize_run(log.events, settings, folder), "" if killed else log.damage


def summarize_run(
    events: Sequence[Event], settings: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """The content of summary.json: what the run in `folder` has reached so far; {} before its first
    epoch."""
    epochs = [event for event in events if event["event"] == "epoch"]
    chosen, best = saved_event(events), best_epoch(epochs)
    if chosen is None or best is None:
        return {}
    last, patience = epochs[-1], settings.get("patience")
    later = events[1 + max(place for place, one in enumerate(events) if one is last) :]
    measured = [event for event in later if event["event"] == "new_source"]
    new_source = {k: v for k, v in measured[-1].items() if k in NEW_SOURCE} if measured else None
    metric, images = ranking_metric(last), last.get("val_images")
    score = float(chosen[metric])
    interval = None
    grouped = settings.get("group") not in (None, "auto") or has_scenes(folder)
    if metric == "val_top1" and not grouped and images:
        interval = [*wilson_interval(round(score * images), images)]
    return {
        "epochs": int(last["epoch"]),
        "best_epoch": chosen.get("epoch"),
        "metric": metric,
        "score": score,
        "interval": interval,
        **({"new_source": new_source} if new_source else {}),
        "seconds": float(sum(event["seconds"] for event in epochs)),
        "stopped_early": bool(patience) and last["epoch"] - best["epoch"] >= patience,
    }


def has_scenes(folder: Path) -> bool:
    """Whether a run has recorded images of one scene."""
    try:
        with (folder / GROUPS_FILE).open(encoding="utf-8", errors="surrogateescape") as file:
            return any(row.get("group") for row in csv.DictReader(file))
    except (OSError, csv.Error):
        return False


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of a run folder."""
    try:
        with path.open("rb") as file:
            return not lock_file(file, shared=True, inherited=False)
    except OSError:  # no lock file, or a file system without locks
        return False


def count_parameters(path: Path, settings: Mapping[str, Any]) -> int:
    """Number of parameters in a safetensors file, by the shapes in its header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError("no safetensors header")
        tensors = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    if (
        8 + length + max(each["data_offsets"][1] for each in tensors.values())
        != path.stat().st_size
    ):
        raise ValueError("the weights are cut")
    fixed = {"pos_embed"} if str(settings.get("position")).startswith("sinusoidal") else set()
    return sum(
        math.prod(each["shape"])
        for name, each in tensors.items()
        if name not in fixed and name.rpartition(".")[2] not in BUFFERS
    )


def local_time(seconds: float) -> datetime:
    """A time since 1970 in the time zone of this machine."""
    return datetime.fromtimestamp(seconds).astimezone()


def short_path(path: str | None) -> str:
    """The last distinctive part of a path; names such as `hf:OWNER/NAME` stay whole."""
    if not path or ":" in path:
        return path or ""
    parts = PurePath(path).parts
    return "/".join(parts[-2:] if parts[-1] in COMMON_FOLDERS else parts[-1:]) or path


def setting_text(value: object) -> str:
    """A setting as it is shown and compared; floats with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else as_typed(value)
