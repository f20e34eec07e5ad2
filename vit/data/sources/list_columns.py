"""Which columns of a list of images and classes are read, and what a cell of classes says.

Names of images in lists that somebody else wrote: inside a folder, or refused.
"""

import os
import posixpath
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vit.config.parser import nearest
from vit.data.captions.caption_files import IMAGE_COLUMNS, find_columns
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.file_walk import FolderWalker
from vit.data.sources.input_hints import is_image
from vit.data.sources.table_reader import Table, json_kind, wrong
from vit.errors import DataError, printable
from vit.text import join_names, plural

DRIVE = re.compile("[A-Za-z]:/")


def tidy_name(
    written: str,
    path: str,
    line: int,
    *,
    absolute: bool,
    outside: bool = False,
    remedy: str = "give the folder that holds the images as images",
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
        raise wrong(path, f"{name} is a web address; download the images first", line)
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
        raise wrong(path, f"{name} is a folder; expected an image", line)
    return tidy


def check_text(text: str, path: str, line: int) -> None:
    """Refuse half of a character, which no file name and no word has."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise wrong(path, f"half a character (a lone surrogate) in {text[:40]!a}", line)


def common_folders(base: str, names: Iterable[str]) -> list[str]:
    """The deepest folder that holds all of the images, unless one has an absolute name."""
    folders = {os.path.dirname(name) for name in names}
    if any(os.path.isabs(folder) for folder in folders):
        return []
    common = os.path.commonpath(folders) if "" not in folders else ""
    return [os.path.join(base, common) if common else base]


def unlisted_notes(named: Collection[str], folders: Iterable[str], root: str) -> list[str]:
    """How many images lie in `folders` beside those that are `named` by a list."""
    walk = FolderWalker(root)
    extra = []
    for folder in dict.fromkeys(folders):
        if os.path.isdir(folder):
            found = walk.images(folder)
            extra += [p for p in found if p not in named and os.path.normpath(p) not in named]
    if not extra:
        return []
    names = join_names([walk.relative_name(path) for path in extra], 3)
    return [f"left out {plural(len(extra), 'image')} that no line of a list names: {names}"]


CLASS_COLUMNS = (
    *("label", "labels", "class", "classes", "class_name", "category", "categories"),
    *("target", "targets", "tag", "tags"),
)
"""Names of the column of classes, the first one there is."""
SPLIT_COLUMN = "split"
SEPARATORS = "|;"
"""Between the classes of one cell of a table: the first of these that is in it."""


@dataclass(frozen=True)
class LabelColumns:
    """Names of the columns that are read; empty where there is none."""

    image: str
    label: str
    split: str
    group: str
    unused: tuple[str, ...]


def usual(names: Sequence[str], expected: Sequence[str]) -> str:
    """The first of `expected` that is in `names`, as it is written there."""
    plain = {name.strip().lower(): name for name in reversed(names)}
    return next((plain[name] for name in expected if name in plain), "")


def choose_columns(
    names: Sequence[str], path: str, line: int, asked: DatasetSpec, *, labels: bool = True
) -> LabelColumns:
    """The columns of the list `path` whose header, or first record, is at `line`.

    Args:
        names: Those of the header, or of the record.
        path: The list.
        line: Of the header.
        asked: What the user said of columns.
        labels: Whether a column of classes is needed.

    Raises:
        DataError: There are none of images or of classes, or not the ones that were asked for.
    """
    has = join_names([printable(name.strip()) for name in names], 8) or "none"

    def named(setting: str, wanted: str) -> str:
        found = usual(names, (wanted,)) or usual(names, (wanted.strip().lower(),))
        if not found:
            hint = nearest(wanted, [name.strip() for name in names])
            raise wrong(path, f"{setting}={wanted}: no such column among {has}{hint}", line)
        return found

    image = named("image_column", asked.image_column) if asked.image_column else ""
    image = image or usual(names, IMAGE_COLUMNS)
    label = named("label_column", asked.label_column) if asked.label_column else ""
    label = label or usual([name for name in names if name != image], CLASS_COLUMNS)
    if not image:
        expected = ", ".join(IMAGE_COLUMNS[:3])
        advice = f"expected {expected} in the first line, or say which with --image-column"
        raise wrong(path, f"no column of images among {has}; {advice}", line)
    if label == image:
        both = f"label_column={label.strip()}: the column of images too; choose another of"
        raise wrong(path, f"{both} {has}", line)
    if labels and not label:
        expected = ", ".join(CLASS_COLUMNS[:3])
        advice = f"expected {expected}, or say which with --label-column"
        if find_columns(names).captions:
            advice += "; for captions, --task caption"
        raise wrong(path, f"no column of classes among {has}; {advice}", line)
    group = usual(names, (asked.group.strip().lower(),)) if asked.group else ""
    split = usual(names, (SPLIT_COLUMN,))
    used = {image, label, split, group}
    others = [name.strip() or "one without a name" for name in names if name not in used]
    unused = tuple(dict.fromkeys(others))
    return LabelColumns(image, label, split, group, unused)


def check_header(table: Table, path: str, asked: DatasetSpec) -> None:
    """Refuse a table whose first line is an image already: its columns have no names.

    It is not read as it is: which column is the class, the split or the group would be a guess.

    Raises:
        DataError: It is so.
    """
    names = [name.strip() for name in table.names]
    if usual(names, ((asked.image_column or "").strip().lower(),)):
        return
    at = next((place for place, name in enumerate(names) if is_image(name)), None)
    if at is None:
        return
    labels = iter(("label", *(f"column{number}" for number in range(3, len(names) + 1))))
    line = table.delimiter.join(
        "image" if place == at else next(labels) for place in range(len(names))
    )
    raise wrong(
        path,
        f"looks like data ({join_names(names, 3)}), not like names of columns; add a line at the "
        f"top that names them: {line}",
        table.line,
    )


def comma_notes(path: str, labels: Iterable[Sequence[str]]) -> list[str]:
    """What to write where cells of classes have commas, as lists of tags have them.

    Args:
        path: The table.
        labels: The classes that each line names.
    """
    commas = [name for names in labels for name in names if "," in name.strip(",")]
    if len(commas) < 2:
        return []
    parts = [part.strip() for part in commas[0].split(",") if part.strip()]
    return [
        f"{printable(path)}: {len(commas):,} labels have a comma, and each is one class, such as "
        f"{printable(commas[0])!r}; if these are several labels write {printable('|'.join(parts))} "
        "(or a list in JSON lines)"
    ]


def check_record(
    names: Sequence[str],
    columns: LabelColumns,
    asked: DatasetSpec,
    path: str,
    line: int,
    *,
    labels: bool,
) -> None:
    """Refuse a record of JSON that says under another key what `columns` of the first one say.

    Args:
        names: Its keys.
        columns: Those of the first record.
        path: The list.
        line: Of the record.
        asked: What the user said of columns.
        labels: Whether classes are read.

    Raises:
        DataError: A key of it would be ignored.
    """
    others = [name for name in names if name != columns.image]
    classes = (asked.label_column.strip().lower(),) if asked.label_column else CLASS_COLUMNS
    wanted: list[tuple[str, Sequence[str]]] = [(columns.split, (SPLIT_COLUMN,))]
    if asked.group:
        wanted.append((columns.group, (asked.group.strip().lower(),)))
    if labels:
        wanted.append((columns.label, classes))
    for column, expected in wanted:
        if column not in names and (found := usual(others, expected)):
            there = f"the first one has {column!r}" if column else "the first one does not"
            advice = "give every record the same keys"
            raise wrong(path, f"this record has {found!r}, {there}; {advice}", line)


def cell_group(value: Any, path: str, line: int) -> str:
    """The group that a cell of a table, or a value of JSON, names; empty where it names none.

    Raises:
        DataError: It is no name or number.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column with gaps is written so by pandas
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise wrong(path, f"the group is {json_kind(value)}; expected a name or a number", line)
    return "" if value is None else str(value).strip()


def cell_labels(value: Any, path: str, line: int) -> tuple[str, ...]:
    """The classes that a cell of a table, or a value of JSON, names: none, one or several.

    A cell `a|b` or `a;b` names two. In JSON a list does, and a text is one class as it stands.

    Raises:
        DataError: It is no name, number or list of them.
    """
    if isinstance(value, list):
        return tuple(dict.fromkeys(_label(item, path, line) for item in value))
    return (name,) if (name := _label(value, path, line, may_lack=True)) else ()


def split_cell(cell: str) -> list[str] | str:
    """A cell of a table as a value of JSON would be: a list where it has a separator."""
    separator = next((mark for mark in SEPARATORS if mark in cell), None)
    if separator is None:
        return cell
    return [part.strip() for part in cell.split(separator) if part.strip()]


def _label(value: Any, path: str, line: int, *, may_lack: bool = False) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column with gaps is written so by pandas
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        expected = "a name or a number" + (", or a list of them" if may_lack else "")
        raise wrong(path, f"the label is {json_kind(value)}; expected {expected}", line)
    name = "" if value is None else str(value).strip()
    if "\0" in name:
        raise wrong(path, "a label with a NUL character", line)
    if not name and not may_lack:
        raise wrong(path, "an empty label in a list of them; leave it out", line)
    return name


def no_label(path: str, line: int) -> DataError:
    """The error for an image without a class, where each has one."""
    advice = "give it one, or remove the line; a set of several labels an image may have none"
    return wrong(path, f"no label; {advice} (--task multilabel)", line)
