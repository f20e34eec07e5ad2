"""Scenes and sources of a dataset (`--group auto`) in its split, and in the record of a run.

Images of one scene are in one split, and count as one. The run folder records all in groups.csv, so
that a resumed run has the same split.
"""

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vit.atomic_files import write_bytes
from vit.data.dataset_types import ImageGroups, ImageRecord, ImagesByClass
from vit.data.image_archives import relative
from vit.errors import RunError
from vit.paths import GROUPS_FILE
from vit.text import plural


class FoundGroups(NamedTuple):
    """What belongs together among the images of a dataset, by their paths."""

    scenes: Sequence[Sequence[str]]
    sources: Mapping[str, str] = MappingProxyType({})
    """As of `find_sources`."""
    backgrounds: Mapping[str, Any] = MappingProxyType({})
    """As of `background`."""
    new: Mapping[str, str] | None = None
    """As of `new_images`, of a run that has recorded it."""


GroupFinder = Callable[[Sequence[ImageRecord], Path], FoundGroups | None]
"""From the images of a dataset and its root to its groups; None if it would take too long."""
MAX_SHARE = 0.5
"""Largest share of the images of a class that one scene may be: else they cannot be divided."""
COLUMNS = ("image", "group", "source", "new_source")
"""Of groups.csv."""
HOW = "nearly the same image, or one camera within 10 seconds"


@dataclass(frozen=True)
class Scenes:
    """Sets of images of one scene each."""

    kept: Sequence[Sequence[str]] = ()
    """Those that stay together, by the paths of their images."""
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, found: FoundGroups | None, records: Iterable[ImageRecord]) -> "Scenes":
        """The scenes `found` among `records`, but for those that are most of a class."""
        if found is None:
            note = "scenes and sources of images were not looked for: it takes more than 10 % of"
            return cls(notes=[f"{note} --time; --group none or more time"])
        labels = {record.path: record.labels for record in records}
        total = Counter(label for names in labels.values() for label in names)

        def is_small(scene: Sequence[str]) -> bool:
            own = Counter(label for path in scene for label in labels[path])
            return all(number <= MAX_SHARE * total[label] for label, number in own.items())

        kept = [scene for scene in found.scenes if is_small(scene)]
        notes = []
        if kept:
            images = plural(sum(map(len, kept)), "image")
            notes.append(
                f"{images} in {plural(len(kept), 'scene')} ({HOW}): each scene stays in one split "
                "and counts as one image; --group none takes images one by one"
            )
        if left := len(found.scenes) - len(kept):
            notes.append(
                f"{plural(left, 'scene')} with more than half of the images of a class: not kept "
                "together; add images of others, or --group COLUMN|REGEX says what belongs together"
            )
        return cls(kept, notes)

    def leak_notes(self, train: ImagesByClass, val: ImagesByClass) -> list[str]:
        """A note about validation images of the data whose scene was trained on."""
        trained = {path for paths in train.values() for path in paths}
        validated = {path for paths in val.values() for path in paths}
        seen = {
            path
            for scene in self.kept
            if not trained.isdisjoint(scene)
            for path in validated.intersection(scene)
        }
        if not seen:
            return []
        return [
            f"{len(seen):,} of {plural(len(validated), 'validation image')} show a scene of the "
            f"training images ({HOW}), and score too well for new ones: move each scene to one "
            "side, or give the training images alone and we hold some out"
        ]


def write_groups(run: Path, groups: ImageGroups) -> None:
    """Record groups by the names of images, which need not be UTF-8, in a run folder."""
    lines = StringIO()
    table = csv.writer(lines, lineterminator="\n", quoting=csv.QUOTE_ALL)
    columns = (groups.scenes, groups.sources, groups.new)
    names = {name for column in columns for name in column}
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    table.writerows([COLUMNS, *sorted(rows, key=lambda row: (row[2], row[1], row[0]))])
    write_bytes(run / GROUPS_FILE, lines.getvalue().encode("utf-8", "surrogateescape"))


def read_groups(run: Path) -> ImageGroups:
    """The groups that a run folder has recorded; empty without, or without a column."""
    path = run / GROUPS_FILE
    if not path.is_file():
        return ImageGroups()
    try:
        with path.open(encoding="utf-8", newline="", errors="surrogateescape") as file:
            rows = [*csv.DictReader(file, strict=True)]
            return ImageGroups(
                *(
                    {row["image"]: row[name] for row in rows if row.get(name)}
                    for name in COLUMNS[1:]
                )
            )
    except (OSError, KeyError, csv.Error) as error:
        raise RunError(f"{path} is damaged ({error}); restore it") from None


def recorded_groups(run: Path) -> GroupFinder:
    """Finds the groups that `run` has recorded."""
    groups = read_groups(run)

    def find(records: Sequence[ImageRecord], root: Path) -> FoundGroups:
        names = {record.path: relative(record.path, root) for record in records}
        scenes = defaultdict[str, list[str]](list)
        for path, name in names.items():
            if name in groups.scenes:
                scenes[groups.scenes[name]].append(path)
        sources, new = (
            {path: table[name] for path, name in names.items() if name in table}
            for table in (groups.sources, groups.new)
        )
        return FoundGroups([one for one in scenes.values() if len(one) > 1], sources, new=new)

    return find
