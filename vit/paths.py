"""What a path that is not there may have been meant as, by the names that are where it leads."""

import difflib
import itertools
import os
from pathlib import Path

from vit.errors import printable

MOST_NAMES = 4096
"""Of a folder that are looked at: one with a million must not delay an error."""
LONGEST = 255
LIKE = 0.6
"""How much alike names are, as difflib has it, from which on one is offered."""


def did_you_mean(path: str | os.PathLike[str]) -> str:
    """`; did you mean X?` for a path that is not there, or nothing where no name is like it.

    Only the folder that it names is looked into, or the nearest one above that is there; capitals
    do not count. Names that are equally near are all offered, up to three.
    """
    folder, name = os.path.split(os.path.normpath(os.fspath(path)))
    rest = ""
    while folder and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        rest = os.path.join(name, rest) if rest else name
        folder, name = os.path.split(folder)
    if os.path.lexists(os.path.join(folder, name)):  # a broken link, or a place inside of a file
        return ""
    plain: dict[str, str] = {}
    for one in names_in(folder or os.curdir):
        plain.setdefault(one.casefold(), one)
    word = name[:LONGEST].casefold()
    near = difflib.get_close_matches(word, plain, n=3, cutoff=LIKE)
    best = [_like(word, one) for one in near]
    offered = []
    for one, like in zip(near, best, strict=True):
        found = os.path.join(folder, plain[one])
        whole = os.path.join(found, rest)
        if like == best[0]:
            offered.append(printable(whole if rest and os.path.exists(whole) else found))
    return f"; did you mean {' or '.join(sorted(offered))}?" if offered else ""


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Sorted names in a folder that are not hidden, of the first ones where there are very many."""
    try:
        with os.scandir(folder) as entries:
            some_of_them = itertools.islice(entries, MOST_NAMES)
            return sorted(entry.name for entry in some_of_them if entry.name[0] != ".")
    except OSError:
        return []


def user_cache() -> Path:
    """The folder of files that this package can make again: `~/.cache/vit-toolkit`.

    `XDG_CACHE_HOME` replaces `~/.cache` where it is an absolute path.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "vit-toolkit"


def _like(word: str, other: str) -> float:
    # in the order of difflib.get_close_matches: the measure is not symmetric
    return difflib.SequenceMatcher(None, other, word).ratio()
