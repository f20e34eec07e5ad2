"""Class-incremental learning: the classes that a network keeps and gains, and their recall.

    recall of some classes = images of these classes that are predicted right / all of their images

`before` is the recall of the network whose weights the training began with, which has fewer
classes to choose from; so some loss is expected where old and new classes look alike.

Source: van de Ven et al., "Three types of incremental learning", Nature Machine Intelligence 4,
2022, https://doi.org/10.1038/s42256-022-00568-3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vit.evaluation.classification_metrics import Outcomes
from vit.text import plural, printable

MAX_TABLE = 20
"""Classes that a table names, those that lost most first."""
WIDEST_NAME = 40


@dataclass(frozen=True)
class ClassChange:
    """The classes of a network and of the data that it is trained on further.

    Args:
        kept: Classes of both, in the order of the data.
    """

    kept: tuple[str, ...]
    added: tuple[str, ...]
    lost: tuple[str, ...]

    @staticmethod
    def between(network: Sequence[str] | None, data: Sequence[str]) -> "ClassChange":
        """Compare names; a network without known names has no class of the data."""
        known, present = set(network or ()), set(data)
        return ClassChange(
            kept=tuple(name for name in data if name in known),
            added=tuple(name for name in data if name not in known),
            lost=tuple(name for name in network or () if name not in present),
        )


@dataclass(frozen=True)
class RecallRow:
    """Recall of one class or of some classes.

    Args:
        before: Recall of the old network in [0, 1]; None for new classes.
    """

    name: str
    images: int
    before: float | None
    now: float
    summary: bool = False

    @property
    def gain(self) -> float | None:
        """Recall now less that before, None for new classes."""
        return None if self.before is None else self.now - self.before


def compare_recall(
    change: ClassChange, outcomes: Outcomes, classes: Sequence[str], before: Mapping[str, int]
) -> list[RecallRow]:
    """Recall of the old, the new and all classes, then of each class with images."""
    index = {name: place for place, name in enumerate(classes)}
    kept = set(change.kept)
    right = [0] * len(classes)
    images = [0] * len(classes)
    for label, rank in zip(outcomes.labels.tolist(), outcomes.ranks.tolist(), strict=True):
        images[label] += 1
        right[label] += rank == 0

    def row(names: Sequence[str], title: str, *, summary: bool = False) -> RecallRow | None:
        places = [index[name] for name in names]
        count = sum(images[place] for place in places)
        if not count:
            return None
        old = None
        if kept.issuperset(names):
            old = sum(before.get(name, 0) for name in names) / count
        return RecallRow(title, count, old, sum(right[at] for at in places) / count, summary)

    groups = [
        row(change.kept, plural(len(change.kept), "old class", "old classes"), summary=True),
        row(change.added, plural(len(change.added), "new class", "new classes"), summary=True),
        row(classes, "all classes", summary=True),
    ]
    each = [one for name in classes if (one := row([name], name)) is not None]
    each.sort(key=lambda one: (one.gain is None, one.gain or 0.0))
    return [one for one in groups if one is not None] + each


def recall_lines(rows: Sequence[RecallRow]) -> list[str]:
    """`rows` as a table for a terminal."""
    each = [row for row in rows if not row.summary]
    shown = [row for row in rows if row.summary] + each[:MAX_TABLE]
    names = [("" if row.summary else "  ") + printable(row.name) for row in shown]
    width = min(max(len("recall"), *map(len, names)), WIDEST_NAME)
    lines = [f"{'recall':<{width}}  images  before     now"]
    for row, name in zip(shown, names, strict=True):
        before = "-" if row.before is None else f"{row.before:.1%}"
        lines.append(f"{name:<{width}}  {row.images:>6,}  {before:>6}  {row.now:>6.1%}")
    if hidden := len(rows) - len(shown):
        lines.append(f"and {plural(hidden, 'other class', 'other classes')}")
    return lines
