"""Scenes of a dataset (`--group auto`): images of one scene are in one split, and count as one.

The run folder records them in groups.csv, so that a resumed run has the same split.
"""

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from vit.atomic_files import write_bytes
from vit.data.dataset_types import ImageRecord, ImagesByClass
from vit.data.image_archives import relative
from vit.errors import RunError
from vit.paths import GROUPS_FILE
from vit.text import plural

SceneFinder = Callable[[Sequence[str], Path], "list[list[str]] | None"]
"""From the images of a dataset and its root to its scenes; None if it would take too long."""
MAX_SHARE = 0.5
"""Largest share of the images of a class that one scene may be: else they cannot be divided."""
HOW = "nearly the same image, or one camera within 10 seconds"


@dataclass(frozen=True)
class Scenes:
    """Sets of images of one scene each."""

    kept: Sequence[Sequence[str]] = ()
    """Those that stay together, by the paths of their images."""
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, found: Sequence[Sequence[str]] | None, records: Iterable[ImageRecord]) -> "Scenes":
        """The scenes `found` among `records`, but for those that are most of a class."""
        if found is None:
            note = "images of one scene were not looked for: it takes more than 10 % of --time"
            return cls(notes=[f"{note}; --group none or more time"])
        labels = {record.path: record.labels for record in records}
        total = Counter(label for names in labels.values() for label in names)

        def is_small(scene: Sequence[str]) -> bool:
            own = Counter(label for path in scene for label in labels[path])
            return all(number <= MAX_SHARE * total[label] for label, number in own.items())

        kept = [scene for scene in found if is_small(scene)]
        notes = []
        if kept:
            images = plural(sum(map(len, kept)), "image")
            notes.append(
                f"{images} in {plural(len(kept), 'scene')} ({HOW}): each scene stays in one split "
                "and counts as one image; --group none takes images one by one"
            )
        if left := len(found) - len(kept):
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


def write_scenes(run: Path, scenes: Mapping[str, str]) -> None:
    """Record the group of each image by its name, which need not be UTF-8, in a run folder."""
    lines = StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerows([("image", "group"), *sorted(scenes.items(), key=lambda row: row[::-1])])
    write_bytes(run / GROUPS_FILE, lines.getvalue().encode("utf-8", "surrogateescape"))


def read_scenes(run: Path) -> dict[str, str]:
    """The group of each image by its name, as recorded in a run folder; empty without."""
    path = run / GROUPS_FILE
    if not path.is_file():
        return {}
    try:
        with path.open(encoding="utf-8", newline="", errors="surrogateescape") as file:
            return {row["image"]: row["group"] for row in csv.DictReader(file, strict=True)}
    except (OSError, KeyError, csv.Error) as error:
        raise RunError(f"{path} is damaged ({error}); restore it") from None


def recorded_scenes(run: Path) -> SceneFinder:
    """Finds the scenes that `run` has recorded."""
    scenes = read_scenes(run)

    def find(paths: Sequence[str], root: Path) -> list[list[str]]:
        found = defaultdict[str, list[str]](list)
        for path in paths:
            if (name := scenes.get(relative(path, root))) is not None:
                found[name].append(path)
        return [scene for scene in found.values() if len(scene) > 1]

    return find
