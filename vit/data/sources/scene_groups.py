"""Scenes and sources of a dataset (`--group auto`) in its split, and in files.

Images of one scene are in one split, and count as one. The run folder records all in groups.csv, so
that a resumed run has the same split; `vit check --write-groups` writes such a file to edit, and
`--group FILE.csv` reads it.
"""

import csv
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vit.atomic_files import write_bytes
from vit.data.dataset_types import ImageGroups, ImageRecord
from vit.data.image_archives import relative
from vit.errors import DataError, RunError
from vit.paths import GROUPS_FILE
from vit.text import plural


class FoundGroups(NamedTuple):
    """What belongs together among the images of a dataset, by their paths."""

    scenes: Sequence[Sequence[str]] = ()
    sources: Mapping[str, str] = MappingProxyType({})
    """As of `find_sources`."""
    backgrounds: Mapping[str, Any] = MappingProxyType({})
    """As of `background`."""
    new: Mapping[str, str] | None = None
    """As of `new_images`, of a run that has recorded it."""
    how: str = "nearly the same image, or one camera within 10 seconds"
    notes: Sequence[str] = ()
    given: bool = False
    """Whether a user named the scenes, which are any groups then, and stay together."""

    def __str__(self) -> str:
        """A line with the numbers of scenes and sources; empty without any."""
        parts = []
        if self.scenes:
            images = plural(sum(map(len, self.scenes)), "image")
            parts.append(f"{images} of {plural(len(self.scenes), 'scene')} ({self.how})")
        if self.sources:
            kind = next(iter(self.sources.values())).partition(": ")[0]
            parts.append(f"{plural(len({*self.sources.values()}), 'source')} (by {kind})")
        return "; ".join(parts)

    def named(self, path: str) -> "FoundGroups":
        """The same, as a user named them in the file at `path`."""
        return self._replace(given=True, how=f"as in {path}")

    def to_dict(self) -> dict[str, Any]:
        """For the JSON of `vit check`: paths of each scene, images of each source."""
        return {"scenes": self.scenes, "sources": dict(Counter(self.sources.values()))}

    def divisible(self, records: Iterable[ImageRecord]) -> "FoundGroups":
        """Without scenes that are most of a class of `records`; `notes` say what is left."""
        labels = {record.path: record.labels for record in records}
        total = Counter(label for names in labels.values() for label in names)

        def is_small(scene: Sequence[str]) -> bool:
            own = Counter(label for path in scene for label in labels[path])
            return all(number <= MAX_SHARE * total[label] for label, number in own.items())

        kept = [scene for scene in self.scenes if self.given or is_small(scene)]
        notes, what = [*self.notes], "group" if self.given else "scene"
        if kept:
            images = plural(sum(map(len, kept)), "image")
            notes.append(
                f"{images} in {plural(len(kept), what)} ({self.how}): each {what} stays in one "
                "split and counts as one image; --group none takes images one by one"
            )
        if left := len(self.scenes) - len(kept):
            notes.append(
                f"{plural(left, 'scene')} with more than half of the images of a class: not kept "
                "together; add images of others, or --group COLUMN|REGEX says what belongs together"
            )
        return self._replace(scenes=kept, notes=notes)

    def leak_notes(self, train: Iterable[str], val: Iterable[str]) -> list[str]:
        """A note about validation images of the data whose scene was trained on, by their paths."""
        trained, validated = {*train}, {*val}
        seen = {
            path
            for scene in self.scenes
            if not trained.isdisjoint(scene)
            for path in validated.intersection(scene)
        }
        if not seen:
            return []
        return [
            f"{len(seen):,} of {plural(len(validated), 'validation image')} show a scene of the "
            f"training images ({self.how}), and score too well for new ones: move each scene to "
            "one side, or give the training images alone and we hold some out"
        ]


GroupFinder = Callable[[Sequence[ImageRecord], Path], FoundGroups]
"""From the images of a dataset and its root to its groups."""
NOT_SEARCHED = FoundGroups(
    notes=[
        "scenes and sources of images were not looked for: it takes more than 10 % of --time; "
        "--group none or more time"
    ]
)
MAX_SHARE = 0.5
"""Largest share of the images of a class that one scene may be: else they cannot be divided."""
COLUMNS = ("image", "group", "source", "new_source")
"""Of groups.csv."""


def groups_table(groups: ImageGroups, images: Iterable[str] = ()) -> bytes:
    """Groups as a CSV file, by the names of images, which need not be UTF-8; with all `images`."""
    lines = StringIO()
    table = csv.writer(lines, lineterminator="\n", quoting=csv.QUOTE_ALL)
    columns = (groups.scenes, groups.sources, *((groups.new,) if groups.new else ()))
    names = {*images, *itertools.chain(*columns)}
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    table.writerows(
        [COLUMNS[: 1 + len(columns)], *sorted(rows, key=lambda row: (row[2], row[1], row[0]))]
    )
    return lines.getvalue().encode("utf-8", "surrogateescape")


def write_groups(run: Path, groups: ImageGroups) -> None:
    """Record groups in a run folder."""
    write_bytes(run / GROUPS_FILE, groups_table(groups))


def read_groups(run: Path) -> ImageGroups:
    """The groups that a run folder has recorded; empty without, or without a column."""
    path = run / GROUPS_FILE
    try:
        return read_groups_table(path)[0] if path.is_file() else ImageGroups()
    except DataError as error:
        raise RunError(f"{path} is damaged ({error}); restore it") from None


def read_groups_table(path: Path) -> tuple[ImageGroups, set[str]]:
    """The groups of a CSV file with a column image, and any others of COLUMNS; and its images."""
    rows: dict[str, dict[str, str]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
            for row in csv.DictReader(file, strict=True):
                if rows.setdefault(row["image"], row) is not row:
                    raise DataError(f"{row['image']} is in two lines; leave one out")
    except OSError as error:
        raise DataError(error.strerror or str(error)) from None
    except KeyError:
        raise DataError(f"it has no column image; columns: {', '.join(COLUMNS[:3])}") from None
    except csv.Error as error:
        raise DataError(str(error)) from None
    scenes, sources, new = (
        {image: row[name] for image, row in rows.items() if row.get(name)} for name in COLUMNS[1:]
    )
    return ImageGroups(scenes, sources, new), {*rows}


def given_groups(path: str) -> GroupFinder:
    """Finds the groups of a CSV file; which sources are new, the split decides."""
    try:
        found, listed = read_groups_table(Path(path))
    except DataError as error:
        raise DataError(f"group={path}: {error}") from None
    sources = found.sources.items()
    named = {image: one if ": " in one else f"source: {one}" for image, one in sources}
    groups = ImageGroups(found.scenes, named)

    def find(records: Sequence[ImageRecord], root: Path) -> FoundGroups:
        names = {relative(record.path, root) for record in records}
        if not listed & names:
            first = f", such as {min(listed)}" if listed else ""
            raise DataError(
                f"group={path}: none of its {plural(len(listed), 'image')}{first} is in the data; "
                f"names are relative to {root}, such as {min(names)}"
            )
        unknown = len(listed - names)
        verb = "is" if unknown == 1 else "are"
        notes = [f"{plural(unknown, 'image')} of {path} {verb} not in the data"] if unknown else []
        found = match_groups(groups, records, root)
        return found._replace(new=None, notes=notes).named(path)

    return find


def recorded_groups(run: Path) -> GroupFinder:
    """Finds the groups that `run` has recorded."""
    return partial(match_groups, read_groups(run))


def match_groups(groups: ImageGroups, records: Sequence[ImageRecord], root: Path) -> FoundGroups:
    """`groups`, of names relative to `root`, by the paths of `records`."""
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
