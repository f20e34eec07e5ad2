"""Names of pictures in lists that somebody else wrote: inside a folder, or refused."""

import os
import posixpath
import re
from collections.abc import Collection, Iterable

from vit.data.sources.folders import Walk, count, some
from vit.data.sources.text_files import wrong

DRIVE = re.compile("[A-Za-z]:/")


def tidy_name(
    written: str,
    path: str,
    line: int,
    *,
    absolute: bool,
    outside: bool = False,
    remedy: str = "give the folder that holds the pictures as images",
) -> str:
    """A file name with forward slashes and without detours.

    Args:
        written: The name as a list has it.
        path: The list.
        line: Its line there.
        absolute: Whether the name may be absolute.
        outside: Whether a relative name may lead out of the folder.
        remedy: What to do about one that does.

    Raises:
        DataError: It is empty, a web address, or leads out of the folder.
    """
    name = written.strip()
    if not name:
        raise wrong(path, "no file name", line)
    check_text(name, path, line)
    if "\0" in name:
        raise wrong(path, "a file name with a NUL character", line)
    if "://" in name:
        raise wrong(path, f"{name} is a web address; download the pictures first", line)
    if os.path.isabs(name):
        if absolute:
            return os.path.normpath(name)
        raise wrong(path, f"{name} is absolute; expected a name inside images", line)
    tidy = posixpath.normpath(name.replace("\\", "/"))
    if DRIVE.match(tidy) or tidy.startswith("/"):
        raise wrong(path, f"{name} is a place on another computer; expected a file here", line)
    if (tidy == ".." or tidy.startswith("../")) and not outside:
        raise wrong(path, f"{name} leads out of the folder; {remedy}", line)
    if tidy == ".":
        raise wrong(path, f"{name} is a folder; expected a picture", line)
    return tidy


def check_text(text: str, path: str, line: int) -> None:
    """Refuse half of a character, which no file name and no word has."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise wrong(path, f"half a character (a lone surrogate) in {text[:40]!a}", line)


def common_folders(base: str, names: Iterable[str]) -> list[str]:
    """The deepest folder that holds all of the pictures, unless one has an absolute name."""
    folders = {os.path.dirname(name) for name in names}
    if any(os.path.isabs(folder) for folder in folders):
        return []
    common = os.path.commonpath(folders) if "" not in folders else ""
    return [os.path.join(base, common) if common else base]


def unlisted_notes(named: Collection[str], folders: Iterable[str], root: str) -> list[str]:
    """How many pictures lie in `folders` beside those that are `named` by a list."""
    walk = Walk(root)
    extra = []
    for folder in dict.fromkeys(folders):
        if os.path.isdir(folder):
            found = walk.pictures(folder)
            extra += [p for p in found if p not in named and os.path.normpath(p) not in named]
    if not extra:
        return []
    names = some([walk.name(path) for path in extra], 3)
    return [f"left out {count(len(extra), 'picture')} that no line of a list names: {names}"]
