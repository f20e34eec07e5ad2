"""Text formatting: safe names, plurals, lists of names, sizes, durations, numbers, tables."""

import difflib
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Callable, Container, Iterable, Sequence

Notify = Callable[[str], object]
"""Called with one line for the user."""
Progress = Callable[[int, int], object]
"""Called with what is done, and the total."""
JOINERS = "\u200c\u200d"
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are the full-width forms of the first."""
FORMULA_INSIDE = re.compile('([,;\t]"?)(?=[=+\\-@\uff1d\uff0b\uff0d\uff20])')
"""Where a formula begins if a spreadsheet takes another character for the separator."""
FORMULA_GUARD = re.compile("(^|[,;\t]\"?)'(?=[=+\\-@\uff1d\uff0b\uff0d\uff20])")
"""An apostrophe of `csv_text`."""
BOM = "\ufeff"
"""Before a CSV file that is not ASCII, which Excel reads as the machine's old code page without."""


def ignore(*_: object) -> None:
    """The callback of a caller who wants no notes, or no progress."""


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """`1 image`, `2,000 images`; `plural_noun` where an `s` does not make the plural."""
    return f"{count:,} {noun if count == 1 else plural_noun or noun + 's'}"


def is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogates: bytes of a file name that are not UTF-8."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def join_names(names: Iterable[object], limit: int = 5) -> str:
    """The first `limit` names, printable, and the number of the others: `a, b and 3 more`."""
    names = list(names)
    rest = len(names) - limit
    return ", ".join(map(printable, names[:limit])) + (f" and {rest:,} more" if rest > 0 else "")


def nearest_names(
    word: str, names: Iterable[str], limit: int = 3, cutoff: float = 0.6
) -> list[str]:
    """The names that are most like `word`, in any case of letters: one, or equally similar ones."""
    known: dict[str, str] = {}
    for name in names:
        known.setdefault(name.casefold(), name)
    near = difflib.get_close_matches(word.casefold(), known, n=limit, cutoff=cutoff)
    # arguments in the order of get_close_matches: the measure is not symmetric
    scores = [difflib.SequenceMatcher(None, name, word.casefold()).ratio() for name in near]
    best = scores.count(scores[0]) if scores else 0
    return sorted(known[name] for name in near[:best])


def nearest(word: str, names: Iterable[str]) -> str:
    """`; did you mean X?` for the most similar of `names`, or "" if none is."""
    near = nearest_names(word, names)
    return f"; did you mean {' or '.join(map(printable, near))}?" if near else ""


def percent(fraction: float | None, digits: int = 2) -> str:
    """A fraction in [0, 1] as `12.34%`; an undefined one is `-`."""
    return "-" if fraction is None else f"{fraction:.{digits}%}"


def format_bytes(size: float) -> str:
    """A size of memory in binary units: `3.0 MiB`, `1.25 GiB`."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def format_megabytes(size: float) -> str:
    """A size of a file in decimal megabytes, as download pages give it: `12.3 MB`."""
    return f"{size / 1e6:,.1f} MB"


def format_count(count: float, spec: str = ".3g") -> str:
    """A large number with a unit prefix: `21.7 M`; `spec` formats its digits."""
    for power, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= power:
            return f"{count / power:{spec}} {prefix}"
    return str(count)


def format_parameters(number: int) -> str:
    """A number of parameters in the notation of training's log: `3,850`, `0.30 M`, `21.7 M`."""
    if number < 100_000:
        return f"{number:,}"
    return f"{number / 1e6:.2f} M" if number < 1e6 else f"{number / 1e6:.1f} M"


def format_duration(seconds: float) -> str:
    """`45 s`, `12 min` or `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def format_clock(seconds: float) -> str:
    """`0:07`, `12:30` or `1:02:03`."""
    total = round(seconds)
    hours, minutes = total // 3600, total % 3600 // 60
    if hours:
        return f"{hours}:{minutes:02}:{total % 60:02}"
    return f"{minutes}:{total % 60:02}"


def printable(name: object) -> str:
    """`name` as one line that is safe to print on a terminal.

    Control characters, escape sequences, invisible and direction marks (Unicode category C), line
    separators and undecodable bytes become backslash escapes. Everything else is kept, including
    the zero-width joiners of some scripts and emoji.
    """
    text = os.fsdecode(name) if isinstance(name, bytes | os.PathLike) else str(name)
    # str.isprintable refuses all of these, and more, such as joiners and unusual spaces
    return text if text.isprintable() else "".join(map(_escape, text))


def quoted(path: object) -> str:
    """`path` quoted for a shell, for commands that users copy."""
    return shlex.quote(printable(path))


def align_columns(rows: Sequence[Sequence[str]], *, left: Container[int]) -> list[str]:
    """Lines of a table; the columns `left`, by index, are aligned left, all others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            f"{cell:{'<' if index in left else '>'}{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def csv_mark(texts: Iterable[str]) -> str:
    """BOM where a CSV file has one of `texts` that is not ASCII, else ""."""
    return "" if all(map(str.isascii, texts)) else BOM


def csv_text(text: str) -> str:
    """`text` as a cell that a spreadsheet does not run: control characters as escapes, and an
    apostrophe before what would begin a formula (OWASP, "CSV Injection"), also behind a comma or
    semicolon: which of them separates cells, the spreadsheet decides by its country."""
    safe = FORMULA_INSIDE.sub(r"\1'", printable(text))
    return ("'" if text.startswith(FORMULA_STARTS) else "") + safe


def without_formula_guards(cell: str) -> str:
    """A cell without the apostrophes of `csv_text`."""
    return FORMULA_GUARD.sub(r"\1", cell)


def _escape(character: str) -> str:
    safe = unicodedata.category(character)[0] != "C" and character not in "\u2028\u2029"
    if safe or character in JOINERS:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
