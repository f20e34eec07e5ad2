"""Errors for inputs that are no dataset: spreadsheets, archives, single images, globs."""

import os
import re
from collections.abc import Sequence

from vit.data.sources.file_walk import IMAGE_SUFFIXES, UNSUPPORTED_SUFFIXES, is_run_folder
from vit.errors import DataError
from vit.paths import did_you_mean
from vit.text import printable

EXCEL = "an Excel workbook", "File > Save As > CSV UTF-8 (Comma delimited) (*.csv)"
CALC = "a LibreOffice spreadsheet", "File > Save As > Text CSV (.csv)"
SHEETS = "a link to a Google sheet", "File > Download > Comma-separated values (.csv)"
SPREADSHEETS = {
    **dict.fromkeys((".xls", ".xlsm", ".xlsb"), EXCEL),
    **dict.fromkeys((".ods", ".fods"), CALC),
    ".numbers": ("a Numbers spreadsheet", "File > Export To > CSV..."),
    ".gsheet": SHEETS,
}
"""Suffix -> kind of file, and the menu that exports it as CSV."""
ARCHIVES = (".zip", ".rar", ".7z", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".txz", ".tbz", ".tbz2")
EXPECTED = "DATA is one folder, with a folder for each class, or one list (.csv, .jsonl, .xlsx)"
WILDCARDS = re.compile(r"[*?]")


def refuse_mistaken(data: str) -> None:
    """Refuse spreadsheets, archives and run folders.

    Raises:
        DataError: `data` is one; the message gives the remedy.
    """
    name, suffix = printable(data), os.path.splitext(data)[1].lower()
    if suffix in SPREADSHEETS and (os.path.isfile(data) or _is_numbers_package(data)):
        kind, menu = SPREADSHEETS[suffix]
        raise DataError(f"{name} is {kind}, not a list: save it as CSV ({menu}) and give that file")
    if suffix in ARCHIVES and os.path.isfile(data):
        raise DataError(f"{name} is an archive: unpack it first, and give the folder or the list")
    if is_run_folder(data):
        raise DataError(
            f"{name} is a run folder, a trained network: give a folder or list of images"
        )


def refuse_single_images(data: str) -> None:
    """Refuse a single image or a glob of images, where one folder or list is expected.

    Raises:
        DataError: `data` is one.
    """
    if is_image(data) and os.path.isfile(data):
        raise DataError(f"{EXPECTED}, not a single image: {printable(data)}")
    if WILDCARDS.search(data) and not os.path.lexists(data):
        raise DataError(f"{EXPECTED}, not a pattern: {printable(data)}")


def extra_arguments_message(data: str, extra: Sequence[str], before: str) -> str:
    """The error for arguments after DATA: an expanded glob, or a name with spaces.

    `before` is the word before the first extra one.
    """
    first = printable(data)
    for end in range(len(extra), 0, -1):
        if os.path.lexists(name := " ".join([before, *extra[:end]])):
            return f'a name with spaces needs quotes: "{printable(name)}"'
    if data.lower().endswith(".tar") and extra[0].lower().endswith(".tar"):
        return f"DATA is one argument, and {first} is only the first shard: quote the pattern"
    if is_image(data):
        return f"{EXPECTED}, not single images: {first} and {len(extra):,} more"
    return f"{printable(extra[0])} is one argument too many: DATA is {first} already"


def no_match_message(pattern: str) -> str:
    """The error for a glob that matches no file."""
    folder = os.path.dirname(re.split(r"[*?\[]", pattern, maxsplit=1)[0]) or os.curdir
    name = printable(pattern)
    if not os.path.isdir(folder):
        return f"{name}: matches no file, there is no folder {printable(folder)}" + (
            did_you_mean(folder) or "; correct the pattern"
        )
    return (
        f"{name}: matches no file; correct the pattern, or give {printable(folder)} for all in it"
    )


def is_image(name: str) -> bool:
    """Whether a name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES | UNSUPPORTED_SUFFIXES


def _is_numbers_package(data: str) -> bool:
    """Whether a folder is a document of Numbers, which may save one as a folder."""
    return any(os.path.exists(os.path.join(data, name)) for name in ("Index.zip", "Index"))
