"""Whether a command works alone, or as one of several processes that a launcher has started."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vit.inference.processes import Team

T = TypeVar("T")


class Alone:
    """One process, with the words of a Team."""

    rank, processes = 0, 1

    def device(self, asked: str | None) -> str | None:
        return asked

    def on_main(self, act: Callable[[], T]) -> T:
        return act()

    def together(self, act: Callable[[], T]) -> T:
        return act()

    def everyones(self, mine: T) -> list[T]:
        return [mine]


def processes_started() -> int:
    """How many processes a launcher has started."""
    word = os.environ.get("WORLD_SIZE", "1")
    return int(word) if word.isdecimal() else 1


def team_here() -> "Alone | Team":
    """Those that work together."""
    if processes_started() == 1:
        return Alone()
    from vit.inference.processes import Team

    return Team()
