"""What a list says of each picture, line by line, and what it may not say twice."""

from dataclasses import dataclass, field
from typing import NamedTuple

from vit.data.sources.faults import Fault, Faults, leave
from vit.data.sources.label_columns import LabelColumns, no_label
from vit.data.sources.text_files import wrong
from vit.errors import DataError, printable


class Entry(NamedTuple):
    """What a list says of a picture."""

    line: int
    labels: tuple[str, ...]
    split: str
    group: str


@dataclass
class ReadList:
    """One list, read."""

    path: str
    entries: dict[str, Entry] = field(default_factory=dict)
    """By name of the picture, relative to the folder of the pictures or absolute."""
    columns: LabelColumns | None = None
    several: int = 0
    """The first line with several classes, 0 where there is none."""
    empty: int = 0
    """The first line without a class."""
    merging: tuple[str, Entry, Entry] | None = None
    """The first picture that has another class in another line, and both lines."""
    twice: int = 0
    """Lines that say again what is known."""
    faults: Faults = None
    """Lines that are wrong, with names of pictures as in `entries`; None: the first is raised."""
    merged: list[tuple[str, Entry, Entry]] = field(default_factory=list)
    """As `merging`, all of them, if all faults are wanted."""

    def add(self, name: str, entry: Entry) -> None:
        """Take a line; a picture may be named again where that is no contradiction."""
        known = self.entries.setdefault(name, entry)
        if known is entry:
            return
        for what in ("split", "group"):
            one, other = getattr(known, what), getattr(entry, what)
            if one != other:
                both = f"{printable(one) or 'none'} (line {known.line}) and {printable(other)}"
                raise wrong(self.path, f"{name} is in two {what}s, {both}", entry.line)
        if {*known.labels} == {*entry.labels}:
            self._repeat(name, known, entry)
            return
        labels = tuple(dict.fromkeys((*known.labels, *entry.labels)))
        self.merging = self.merging or (name, known, entry)
        if self.faults is not None:
            self.merged.append((name, known, entry))
        self.entries[name] = known._replace(labels=labels)

    def _repeat(self, name: str, known: Entry, entry: Entry) -> None:
        self.twice += 1
        if self.faults is not None:
            again = wrong(self.path, f"{name} again, as in line {known.line}", entry.line)
            self.faults.append(Fault("repeated_line", again, (name,)))

    def check_single(self) -> None:
        """Refuse what a picture of exactly one class cannot have.

        Raises:
            DataError: A picture has several classes, or none.
        """
        if self.several:
            raise self._several(self.several)
        if self.merging is not None:
            raise self._two(*self.merging)
        if self.empty:
            raise no_label(self.path, self.empty)

    def leave_unfit(self) -> None:
        """Leave out all that `check_single` refuses; of two labels the first stays.

        Raises:
            DataError: Not all faults are wanted.
        """
        first: dict[str, Entry] = {}
        for name, merged, entry in self.merged:
            known = first.setdefault(name, merged)
            if name in self.entries:
                self.entries[name] = known
            if {*known.labels} == {*entry.labels}:
                self._repeat(name, known, entry)
            else:
                leave(self.faults, "contradiction", self._two(name, known, entry), name)
        for name, entry in [*self.entries.items()]:
            if not entry.labels:
                leave(self.faults, "no_label", no_label(self.path, entry.line), name)
            elif len(entry.labels) > 1:
                leave(self.faults, "several_labels", self._several(entry.line), name)
            if len(entry.labels) != 1:
                del self.entries[name]

    def _several(self, line: int) -> DataError:
        advice = "--task multilabel learns several; a name that has a | or ; needs JSON lines"
        return wrong(self.path, f"several labels; {advice}", line)

    def _two(self, name: str, known: Entry, entry: Entry) -> DataError:
        both = " and ".join(printable("|".join(e.labels) or "none") for e in (known, entry))
        return wrong(
            self.path,
            f"{name} has two labels, {both}, the first in line {known.line}; correct one, or "
            "learn several with --task multilabel",
            entry.line,
        )
