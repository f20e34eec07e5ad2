"""Columns of lists and tables: which hold images, captions, classes, splits, groups; their cells.

Lists come from anywhere, so every cell is checked: a file name stays inside the folder of the
images, and text is valid Unicode.
"""

import os
import posixpath
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from vit.data.dataset_types import ImageRecord
from vit.data.sources.dataset_spec import SPLIT_NAMES, DatasetSpec
from vit.data.sources.file_walk import IMAGE_SUFFIXES, UNSUPPORTED_SUFFIXES
from vit.data.sources.image_name_lookup import is_plain
from vit.data.sources.table_reader import Table, json_kind, wrong
from vit.errors import DataError
from vit.text import is_unicode, join_names, nearest, plural, printable

IMAGE_COLUMNS = (
    *("file_name", "filename", "image", "image_name", "image_path", "image_file"),
    *("path", "filepath", "file_path", "file", "img"),
)
"""Names of the image column; the first that a list has is read."""
CLASS_COLUMNS = (
    *("label", "labels", "class", "classes", "class_name", "category", "categories"),
    *("target", "targets", "tag", "tags"),
)
"""Names of the class column of a list of classes; the first that it has is read."""
CAPTIONED_CLASS_COLUMNS = ("label", "class")
"""Names of the class column of a list of captions, where `tags` and the like mean other things."""
CAPTION_COLUMNS = ("caption", "text", "sentence", "comment", "description")
"""Names of caption columns: all of the first kind that a list has, maybe with an s or a number."""
SPLIT_COLUMN = "split"
SEPARATORS = "|;"
"""Between the classes of one cell of a table: the first of these that is in it."""
INSIDE = "say which folder holds the images with --images, or take it with --allow-outside"
DRIVE = re.compile("[A-Za-z]:/")
ESCAPE = re.compile(r"\\([tnr]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
"""Of `printable`, at the beginning of a name."""
WHOLE_NUMBER = re.compile(r"\d+\.0")
LIST_IN_CELL = re.compile(r"\[\s*(?:['\"]|\d+[\s,]+\d).*\]", re.DOTALL)
"""A list as pandas writes it, `['cat', 'dog']`, or NumPy, `['cat' 'dog']`."""
EMPTY_LIST = re.compile(r"\s*\[\s*\]\s*")


SPREADSHEET_ERRORS = frozenset(
    ("#N/A", "#REF!", "#VALUE!", "#NAME?", "#DIV/0!", "#NULL!", "#NUM!", "#SPILL!", "#CALC!")
)
"""What Excel and others show in cells of formulas without a result."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are read, as the list has them, or empty."""

    image: str
    captions: tuple[str, ...]
    label: str
    split: str
    group: str
    unused: tuple[str, ...]
    more: tuple[str, ...] = ()
    """Those of `DatasetSpec.columns`, in its order."""
    numbers: tuple[str, ...] = ()
    """Those of `DatasetSpec.numbers`."""


def caption_columns(names: Sequence[str]) -> tuple[str, ...]:
    for kind in CAPTION_COLUMNS:
        pattern = re.compile(rf"{kind}s?[ _-]?\d*")
        if found := tuple(name for name in names if pattern.fullmatch(name.strip().lower())):
            return found
    return ()


def match_name(names: Sequence[str], expected: Sequence[str]) -> str:
    """The first of `expected` in `names`, as written there; ignores case and outer white space."""
    plain = {name.strip().lower(): name for name in reversed(names)}
    return next((plain[name] for name in expected if name in plain), "")


def find_column(names: Sequence[str], column: str) -> str:
    """The name of a column that the user gave, as in `names`: in the same case, else in any."""
    exact = next((name for name in names if name.strip() == column.strip()), "")
    return exact or match_name(names, (column.strip().lower(),))


class Role(NamedTuple):
    """What a column is for."""

    kind: str
    setting: str
    usual: Sequence[str]
    """Its names in lower case; the first that there is is read."""


IMAGES = Role("images", "image_column", IMAGE_COLUMNS)
CLASSES = Role("classes", "label_column", CLASS_COLUMNS)
CAPTIONS = Role("captions", "caption_column", CAPTION_COLUMNS)


def pick_column(
    role: Role,
    names: Sequence[str],
    spec: DatasetSpec,
    path: str,
    line: int,
    *,
    free: Sequence[str] | None = None,
    more: str = "",
) -> str:
    """The column that `spec` gives, or with a usual name; one of `free`, if not any of `names`."""
    given = getattr(spec, role.setting)
    free = names if free is None else free
    found = find_column(free, given) if given else match_name(free, role.usual)
    if found:
        return found
    if given:
        raise no_column(role.setting, given, free, path, line)
    has = join_names([name.strip() for name in names], 8) or "none"
    flag = f"--{role.setting.replace('_', '-')}"
    advice = f"expected {', '.join(role.usual[:3])}, or say which with {flag}{more}"
    raise wrong(path, f"no column of {role.kind} among {has}; {advice}", line)


def no_column(setting: str, given: str, names: Sequence[str], path: str, line: int) -> DataError:
    """The error for a column that the user names and a list does not have."""
    plain = [name.strip() for name in names]
    has, hint = join_names(plain, 8) or "none", nearest(given, plain)
    return wrong(path, f"{setting}={given}: no such column among {has}{hint}", line)


def choose_columns(names: Sequence[str], path: str, line: int, spec: DatasetSpec) -> Columns:
    image = pick_column(IMAGES, names, spec, path, line)
    others = [name for name in names if name != image]
    captions: tuple[str, ...] = ()
    if spec.captions:
        captions = () if spec.caption_column else caption_columns(others)
        captions = captions or (pick_column(CAPTIONS, names, spec, path, line, free=others),)
    label = ""
    if spec.label_column or (spec.labels and not spec.captions):
        more = "; for captions, --task caption" if caption_columns(names) else ""
        label = pick_column(CLASSES, names, spec, path, line, free=others, more=more)
    elif spec.captions:
        label = match_name(others, CAPTIONED_CLASS_COLUMNS)
    elif not spec.numbers:
        label = match_name(others, CLASS_COLUMNS)
    numbers = tuple(find_column(others, target) for target in spec.numbers)
    for target, found in zip(spec.numbers, numbers, strict=True):
        if not found:
            raise no_column("target", target, others, path, line)
    group = find_column(names, spec.group) if spec.group else ""
    split = match_name(names, (SPLIT_COLUMN,))
    more_columns = tuple(find_column(names, column) for column in spec.columns)
    for column, found in zip(spec.columns, more_columns, strict=True):
        if column == spec.weight_column and not found:
            raise no_column("weight_column", column, others, path, line)
    used = {image, *captions, label, split, group, *more_columns, *numbers}
    unused = [name.strip() or "one without a name" for name in names if name not in used]
    unused = [*dict.fromkeys(unused)]
    return Columns(image, captions, label, split, group, (*unused,), more_columns, numbers)


def unused_notes(columns: Columns, path: str, spec: DatasetSpec) -> list[str]:
    if not columns.unused or not (spec.labels or spec.captions or spec.numbers):
        return []
    unused = join_names(columns.unused)
    read = f"classes from {printable(columns.label)}"
    numbers = "targets" if spec.texts else "numbers"
    for kind, names in (("captions", columns.captions), (numbers, columns.numbers)):
        read = f"{kind} from {join_names([name.strip() for name in names])}" if names else read
    return [f"{printable(path)}: {read}; not used: {unused}"]


def check_header(table: Table, path: str, spec: DatasetSpec) -> None:
    """Refuse a table without a header, whose first line is an image already.

    Which column is the class, the split or the group would be a guess.
    """
    names = [name.strip() for name in table.names]
    if match_name(names, ((spec.image_column or "").strip().lower(),)):
        return
    suffixes = {os.path.splitext(name)[1].lower() for name in names}
    if suffixes & (IMAGE_SUFFIXES | UNSUPPORTED_SUFFIXES):
        second = "caption" if spec.captions else "label"
        raise wrong(
            path,
            f"looks like data ({join_names(names, 3)}), not like names of columns; add a line at "
            f"the top that names them, such as image{table.delimiter}{second}",
            table.line,
        )


def check_record(
    names: Sequence[str], columns: Columns, spec: DatasetSpec, path: str, line: int
) -> None:
    """Refuse a JSON record without a key that is read, or with one that the first record lacks."""
    for column, usual in ((columns.split, SPLIT_COLUMN), (columns.group, spec.group or "")):
        found = find_column(names, usual) if usual else ""
        if found and found != column:
            text = f"this record has {found!r}, the first one does not"
            raise wrong(path, f"{text}; give every record the same keys", line)
    label = columns.label if spec.labels and not spec.captions else ""
    for column in (columns.group, label, *columns.numbers):
        if column and column not in names:
            none = '[] for none of the classes, "" for no label yet, null for no group or number'
            raise wrong(path, f"no {column!r} in this record; write {none}", line)


def written_name(written: str, path: str, line: int, *, outside: bool) -> str:
    """A file name of a list: tidy if it has one spelling only, else as it is written."""
    name = written.strip()
    if not name:
        raise wrong(path, "no file name; give one, or delete the line", line)
    if name.startswith("file://"):
        name = written = unquote(urlsplit(name).path, errors="surrogateescape")
    elif "://" in name:
        raise wrong(path, f"{name} is a web address; download the images first", line)
    try:
        if b"\0" in os.fsencode(name):
            raise wrong(path, "a file name with a NUL character", line)
    except UnicodeEncodeError:
        check_unicode(name, path, line)
    if not is_plain(written):
        return written
    check_inside(tidy := posixpath.normpath(name), path, line, outside=outside)
    return tidy


def tidy_path(written: str, path: str, line: int) -> str:
    """The name of a missing file with forward slashes, as Windows may have written it."""
    name = written.strip()
    if os.path.isabs(name) or ESCAPE.match(name):
        return os.path.normpath(name)
    tidy = posixpath.normpath(name.replace("\\", "/"))
    if DRIVE.match(tidy) or tidy.startswith("/"):
        raise wrong(path, f"{name} is a place on another computer; expected a file here", line)
    return tidy


def check_inside(name: str, path: str, line: int, *, outside: bool) -> None:
    """Refuse a relative name that is no file, or leads out of the folder unless it may."""
    if (name == ".." or name.startswith("../")) and not outside:
        raise wrong(path, f"{name} leads out of the folder; {INSIDE}", line)
    if name == ".":
        raise wrong(path, f"{name} is a folder; expected an image", line)


def check_unicode(text: str, path: str, line: int) -> None:
    """Refuse lone surrogates, which neither file names nor text can have."""
    if not is_unicode(text):
        raise wrong(path, f"half a character (a lone surrogate) in {text[:40]!a}", line)


def cell_captions(value: Any, column: str, path: str, line: int, *, is_table: bool) -> list[str]:
    """The captions in a cell of a table, or in a value of JSON; some may be empty.

    A caption is in normalised Unicode (NFC), with single spaces and none at its ends.
    """
    if is_table and value.startswith(('["', "['")) and value.rstrip().endswith("]"):
        advice = "give each caption its own column or row, or use JSON lines"
        raise wrong(path, f"a list in a cell: {value[:40]!r}; {advice}", line)
    captions = []
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str | None):
            where = f"{column} {'holds' if isinstance(value, list) else 'is'}"
            expected = "expected a text or a list of texts"
            raise wrong(path, f"{where} {json_kind(text)}; {expected}", line)
        captions.append(_clean_caption(text or "", path, line))
    return captions


def drop_uncaptioned(
    splits: Mapping[str, Sequence[ImageRecord]], notes: list[str]
) -> dict[str, list[ImageRecord]]:
    """The images with each of their captions once; those without a caption are left out."""
    kept: dict[str, list[ImageRecord]] = {}
    empty, repeats = 0, 0
    uncaptioned: list[str] = []
    for split, records in splits.items():
        kept[split] = []
        for record in records:
            captions = [caption for caption in record.captions if caption]
            unique = tuple(dict.fromkeys(captions))
            empty += len(record.captions) - len(captions)
            repeats += len(captions) - len(unique)
            if unique:
                kept[split].append(record._replace(captions=unique))
            else:
                uncaptioned.append(record.path)
    names = join_names(sorted(uncaptioned))
    if empty or repeats:
        notes.append(f"left out {plural(empty + repeats, 'caption')}, empty or repeated")
    if uncaptioned:
        notes.append(f"left out {plural(len(uncaptioned), 'image')} without a caption: {names}")
    if not all(kept.values()):
        raise DataError(f"{names}: no image has a caption")
    return kept


def _clean_caption(text: str, path: str, line: int) -> str:
    if not text.isascii():
        check_unicode(text, path, line)
        text = unicodedata.normalize("NFC", text)
    if "\0" in text:
        raise wrong(path, "a caption with a NUL character", line)
    return " ".join(text.split())


def cell_split(value: object, path: str, line: int) -> str:
    """The split that a cell of a table, or a value of JSON, names."""
    name = str("" if value is None else value).strip().lower()
    if name not in SPLIT_NAMES:
        hint = nearest(name, SPLIT_NAMES)
        expected = ", ".join(SPLIT_NAMES)
        found = f"{name!r}" if name else "nothing"
        raise wrong(path, f"{SPLIT_COLUMN} is {found}; expected {expected}{hint}", line)
    return name


def cell_group(value: Any, path: str, line: int) -> str:
    """The group that a cell of a table, or a value of JSON, names; empty if it is empty."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column with gaps is written so by pandas
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise wrong(path, f"the group is {json_kind(value)}; expected a name or a number", line)
    text = "" if value is None else str(value).strip()
    # the same group has no .0 in a CSV file whose column has no gaps
    return text.removesuffix(".0") if WHOLE_NUMBER.fullmatch(text) else text


def cell_labels(
    value: Any, path: str, line: int, *, is_table: bool = False
) -> tuple[str, ...] | None:
    """The classes that a cell of a table, or a value of JSON, names; None if nothing is written.

    A cell `a|b` or `a;b` names two, and `[]` or a separator none of the classes. In JSON a list
    does, and a text is one class as it stands.
    """
    if is_table and LIST_IN_CELL.fullmatch(value.strip()):
        raise wrong(path, f"a list in a cell: {value[:40]!r}; write cat|dog, or JSON lines", line)
    if is_table and EMPTY_LIST.fullmatch(value):
        value = []
    elif is_table and (separator := next((mark for mark in SEPARATORS if mark in value), None)):
        value = [part.strip() for part in value.split(separator) if part.strip()]
    if isinstance(value, list):
        return tuple(dict.fromkeys(_class_name(item, path, line) for item in value))
    return (name,) if (name := _class_name(value, path, line, may_lack=True)) else None


def _class_name(value: Any, path: str, line: int, *, may_lack: bool = False) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column with gaps is written so by pandas
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        kind = f"{value}, a fraction" if isinstance(value, float) else json_kind(value)
        expected = "a name or a whole number" + (", or a list of them" if may_lack else "")
        raise wrong(path, f"the label is {kind}; expected {expected}", line)
    name = "" if value is None else str(value).strip()
    if "\0" in name:
        raise wrong(path, "a label with a NUL character", line)
    if name in SPREADSHEET_ERRORS:
        raise wrong(
            path,
            f"the label is {name}, an error of a spreadsheet, such as of a formula that finds "
            "nothing; write the label",
            line,
        )
    if not name and not may_lack:
        raise wrong(path, "an empty label in a list of them; leave it out", line)
    return name


def no_label(path: str, line: int) -> DataError:
    """The error for an image without a class where each image needs one."""
    advice = (
        "give it one, or remove the line; vit train IMAGES --labels LIST skips empty cells, and "
        "where an image may have several labels (--task multilabel) it may have none"
    )
    return wrong(path, f"no label; {advice}", line)


def comma_notes(path: str, labels: Iterable[Sequence[str]]) -> list[str]:
    """How to write cells of several classes where they have commas, as lists of tags have them."""
    commas = [name for names in labels for name in names if "," in name.strip(",")]
    if len(commas) < 2:
        return []
    parts = [part.strip() for part in commas[0].split(",") if part.strip()]
    return [
        f"{printable(path)}: {len(commas):,} labels have a comma, and each is one class, such as "
        f"{printable(commas[0])!r}; if these are several labels write {printable('|'.join(parts))} "
        "(or a list in JSON lines)"
    ]
