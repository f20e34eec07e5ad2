"""What is often given as data and is none: spreadsheets, archives, single images, patterns."""

import os
import re
from collections.abc import Sequence

from vit.data.sources.file_walk import FOREIGN, SUFFIXES
from vit.errors import DataError, printable
from vit.paths import did_you_mean

EXCEL = "an Excel workbook", "File > Save As > CSV UTF-8 (Comma delimited) (*.csv)"
CALC = "a LibreOffice spreadsheet", "File > Save As > Text CSV (.csv)"
SHEETS = "a link to a Google sheet", "File > Download > Comma-separated values (.csv)"
SPREADSHEETS = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".xlsb"), EXCEL),
    **dict.fromkeys((".ods", ".fods"), CALC),
    ".numbers": ("a Numbers spreadsheet", "File > Export To > CSV..."),
    ".gsheet": SHEETS,
}
"""Ending -> what it is, and the menu that saves it as CSV."""
ARCHIVES = (".zip", ".rar", ".7z", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".txz", ".tbz", ".tbz2")
WANTED = "DATA is one folder, with a folder for each class, or one list (.csv, .jsonl)"
WILD = re.compile(r"[*?]")


def refuse_mistaken(data: str) -> None:
    """Refuse a file that is a spreadsheet or an archive, and say what to give instead.

    Raises:
        DataError: It is one.
    """
    name, ending = printable(data), os.path.splitext(data)[1].lower()
    if ending in SPREADSHEETS and (os.path.isfile(data) or _is_package(data)):
        kind, menu = SPREADSHEETS[ending]
        raise DataError(f"{name} is {kind}, not a list: save it as CSV ({menu}) and give that file")
    if ending in ARCHIVES and os.path.isfile(data):
        raise DataError(f"{name} is an archive: unpack it first, and give the folder or the list")


def refuse_images(data: str) -> None:
    """Refuse a single image, or a pattern of them, where one folder or list is wanted.

    Raises:
        DataError: It is one.
    """
    if is_image(data) and os.path.isfile(data):
        raise DataError(f"{WANTED}, not a single image: {printable(data)}")
    if WILD.search(data) and not os.path.lexists(data):
        raise DataError(f"{WANTED}, not a pattern: {printable(data)}")


def surplus(data: str, more: Sequence[str]) -> str:
    """What is wrong with words after DATA, mostly a pattern that a shell has written out."""
    first = printable(data)
    if data.lower().endswith(".tar") and more[0].lower().endswith(".tar"):
        return f"DATA is one word, and {first} is only the first shard: put the pattern in quotes"
    if is_image(data):
        return f"{WANTED}, not single images: {first} and {len(more):,} more"
    return f"{printable(more[0])} is one too many: DATA is {first} already"


def no_match(pattern: str) -> str:
    """Why a pattern of files to predict has none, and what to give instead."""
    folder = folder_of(pattern)
    name = printable(pattern)
    if not os.path.isdir(folder):
        return f"{name}: matches no file, there is no folder {printable(folder)}" + (
            did_you_mean(folder) or "; correct the pattern"
        )
    return (
        f"{name}: matches no file; correct the pattern, or give {printable(folder)} for all in it"
    )


def folder_of(pattern: str) -> str:
    """The folder before the first wildcard of a pattern."""
    return os.path.dirname(re.split(r"[*?\[]", pattern, maxsplit=1)[0]) or os.curdir


def is_image(name: str) -> bool:
    """Whether a name ends as those of images do."""
    return os.path.splitext(name)[1].lower() in SUFFIXES | FOREIGN


def _is_package(data: str) -> bool:
    """Whether a folder is a document of Numbers, which may be kept as one."""
    return any(os.path.exists(os.path.join(data, name)) for name in ("Index.zip", "Index"))
