"""Errors for inputs that are no dataset: spreadsheets, archives, single images, globs."""

import mmap
import os
import re
from collections.abc import Sequence

from vit.data.sources.file_walk import IMAGE_SUFFIXES, UNSUPPORTED_SUFFIXES
from vit.errors import DataError
from vit.paths import did_you_mean, is_run_folder, names_in
from vit.text import printable

SAVE = "not a list: save it as CSV ({}) and give that file"
FILES = "save its images as files in class folders, or as files with a list (.csv) of their classes"
KINDS = {
    ".xls .xlsm .xlsb": "an Excel workbook, "
    + SAVE.format("File > Save As > CSV UTF-8 (Comma delimited) (*.csv)"),
    ".ods .fods": "a LibreOffice spreadsheet, " + SAVE.format("File > Save As > Text CSV (.csv)"),
    ".numbers": "a Numbers spreadsheet, " + SAVE.format("File > Export To > CSV..."),
    ".gsheet": "a link to a Google sheet, "
    + SAVE.format("File > Download > Comma-separated values (.csv)"),
    ".zip .rar .7z .tgz .gz .bz2 .xz .zst .txz .tbz .tbz2": "an archive: unpack it first, and give "
    "the folder or the list",
    ".parquet .pq": "a Parquet table: if it has images, give it as hf:PATH (pip install "
    "'vit-toolkit[datasets]'); if it has names of files, save it as CSV",
    ".arrow .feather": "an Arrow table: if it has images, give the folder that the library "
    "datasets has saved as hf:FOLDER; if it has names of files, save it as CSV",
    ".tfrecord .tfrecords": f"a file of TensorFlow records: {FILES}",
    ".h5 .hdf5 .npz .npy .mat .mdb .lmdb": f"a file of arrays or a database: {FILES}",
    ".pkl .pickle .pt .pth": f"a Python pickle, which may run code: {FILES}",
}
"""Suffixes of files that are no data here -> kind of file, and the way to use it."""
STORES = (".parquet", ".tfrecord", ".mdb")
"""Suffixes of files whose folder is one dataset."""
PART = re.compile(r"-\d+-of-\d+$")
"""Behind the suffix of a file that is a part of several."""
EXPECTED = "DATA is one folder, with a folder for each class, or one list (.csv, .jsonl, .xlsx)"
WILDCARDS = re.compile(r"[*?]")


def refuse_mistaken(data: str) -> None:
    """Refuse files of other kinds, such as spreadsheets and archives; and run folders."""
    names = names_in(data)
    stored = [name for name in names if _suffix(name) in STORES]
    if stored and any(os.path.isdir(os.path.join(data, name)) for name in names):
        stored = []  # class folders, beside such a file
    if os.path.isfile(data) or _is_numbers_package(data) or stored:
        suffix = _suffix(stored[0] if stored else data)
        for suffixes, kind in KINDS.items():
            if suffix in suffixes.split():
                raise DataError(f"{printable(data)} {'has' if stored else 'is'} {kind}")
    if is_run_folder(data):
        raise DataError(
            f"{printable(data)} is a run folder, a trained network: give a folder or list of images"
        )


def _suffix(name: str) -> str:
    return os.path.splitext(PART.sub("", name))[1].lower()


def json_file_kind(path: str) -> str:
    """What a JSON file without captions is, and the way to use it; empty of other files."""
    if not (path.lower().endswith(".json") and os.path.isfile(path) and os.access(path, os.R_OK)):
        return ""
    if has_json_key(path, "category_id"):
        return (
            "COCO's annotations with categories, not a list: write one (.csv) with file_name of "
            "images, and as label the name in categories of the image's annotations (several with "
            "| between them)"
        )
    if has_json_key(path, "choices"):
        return "an export of Label Studio: export it there as CSV, and add --label-column choice"
    return (
        'not a list: write one object, such as {"image": "1.jpg", "label": "cat"}, in each line '
        "of a .jsonl (jq -c '.[]' does so with an array)"
    )


def has_json_key(path: str, key: str) -> bool:
    """Whether a JSON file has a key anywhere, without parsing it."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(f'"{key}"'.encode()) >= 0


def refuse_single_images(data: str) -> None:
    """Refuse a single image or a glob of images, where one folder or list is expected."""
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
