"""metrics.jsonl and environment.jsonl of a run folder: one JSON object a line.

A process or machine that stops may leave a line cut, or zeros in its place. Damaged lines are left
out and named.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit.text import plural

METRICS_FILE = "metrics.jsonl"
LOWER_IS_BETTER = {"val_loss", "val_mae"}
"""Scores that rank epochs and runs the other way round."""
NUMBERS = {"epoch": ("epoch", "val_loss"), "soup": ("better",), "test": ("test_images",)}
"""Keys of the numbers that every event of a kind has."""
MIN_CIDER_IMAGES = 100
"""Captioned validation images from which on CIDEr ranks epochs: of fewer it is too noisy."""

Event = Mapping[str, Any]
"""A line of metrics.jsonl."""


class EventLog(NamedTuple):
    """What can be read of a file."""

    events: list[dict[str, Any]]
    damage: str = ""
    cut: bool = False
    """Whether it is the last line that lacks its end, as where a process was killed."""


def read_event_log(path: Path, *kinds: str, key: str = "event") -> EventLog:
    """The events of `kinds`, or all; each has `key`. Other lines are not parsed, which is quick."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return EventLog([])
    except OSError as error:
        return EventLog([], f"{path.name} cannot be read: {error.strerror}")
    starts = tuple(b'{"event": "%s"' % kind.encode() for kind in kinds)
    events, damaged = [], []
    for number, line in enumerate(lines, 1):
        whole = line.startswith(b'{"event": "') and line.endswith(b"}\n")
        if kinds and whole and not line.startswith(starts):
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        kind = row.get(key) if isinstance(row, dict) else None
        if not isinstance(kind, str) or not all(
            isinstance(row.get(name), int | float) for name in NUMBERS.get(kind, ())
        ):
            damaged.append(number)
        elif not kinds or kind in kinds:
            events.append(row)
    if not damaged:
        return EventLog(events)
    others = f" and {plural(len(damaged) - 1, 'other')}" if damaged[1:] else ""
    damage = f"line {damaged[0]:,} of {path.name}{others} cannot be read"
    return EventLog(events, damage, damaged == [len(lines)] and not lines[-1].endswith(b"\n"))


def ranking_metric(event: Event) -> str:
    """The score that ranks epochs, by the scores that an event has; see `Task.rank`."""
    if "chosen_by" in event:
        return str(event["chosen_by"])
    if "val_cider" in event:
        images = event.get("val_captioned", event.get("val_images", MIN_CIDER_IMAGES))
        few = images < MIN_CIDER_IMAGES  # older runs have the number of all validation images
        return "val_loss" if few or "val_top1" in event else "val_cider"
    known = ("val_top1", "val_mae", "val_score")
    return next((name for name in known if name in event), "val_loss")


def best_epoch(epochs: Sequence[Event]) -> Event | None:
    """The epoch that the run ranks first: the best score, then the least loss, then the first.

    Pretraining without labels keeps its last epoch.
    """

    def rank(event: Event) -> tuple[float, float]:
        if "val_rankme" in event:
            return float(event["epoch"]), 0.0
        metric, loss = ranking_metric(event), float(event["val_loss"])
        score = float(event[metric])
        return -score if metric in LOWER_IS_BETTER else score, -loss

    return max(epochs, key=rank, default=None)


def saved_event(events: Sequence[Event]) -> Event | None:
    """The event of the weights in model.safetensors: a soup that is better, or the best epoch."""
    soups = (one for one in events if one["event"] == "soup" and one["better"])
    return next(soups, None) or best_epoch([one for one in events if one["event"] == "epoch"])
