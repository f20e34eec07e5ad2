"""What is wrong with single lines of a list, or with single shards: `vit check` tells all of it."""

from typing import NamedTuple

from vit.errors import DataError

HARMLESS = ("repeated_line", "lone_label")
"""Kinds over which training does not stop."""


class Fault(NamedTuple):
    """A line, a shard or a member that is left out where all faults are wanted."""

    kind: str
    """As in vit.data.checks.problems."""
    error: DataError
    """Where it is and what is wrong: the line with which training stops."""
    images: tuple[str, ...] = ()
    """The image or shard, where it is known."""


Faults = list[Fault] | None
"""Receives what is wrong; a reader that is given None raises the first error instead."""


def leave(faults: Faults, kind: str, error: DataError, *images: str) -> None:
    """Go on without something that is wrong, if all faults are wanted.

    Raises:
        DataError: They are not.
    """
    if faults is None:
        raise error
    faults.append(Fault(kind, error, images))


def nothing_left(faults: list[Fault]) -> DataError:
    """The error where all is left out: the first fault, and how many others there are."""
    first, *others = [fault for fault in faults if fault.kind not in HARMLESS] or faults
    more = f" (and {len(others):,} more such faults: nothing else can be read)" if others else ""
    return DataError(f"{first.error}{more}")
