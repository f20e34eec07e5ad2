"""Reads captions in JSON: an object a line, or a file of COCO's."""

from collections.abc import Iterator
from typing import Any

from vit.data.captioning.columns import EXPECTED, Columns, Row, choose_columns
from vit.data.sources.tables import json_kind, json_records, parse_json
from vit.data.sources.text_files import whole_text, wrong
from vit.errors import printable


def json_rows(path: str, notes: list[str]) -> Iterator[Row]:
    """The rows of a file with an object a line; the first one's columns are told in `notes`.

    Raises:
        DataError: A line is no such object.
    """
    known: dict[tuple[str, ...], Columns] = {}
    for line, record in json_records(path):
        keys = tuple(record)
        if keys not in known:
            known[keys] = choose_columns(keys, path, line, [] if known else notes)
        yield _row_of_record(record, keys, known[keys], path, line)


def _row_of_record(
    record: dict[str, Any], keys: tuple[str, ...], columns: Columns, path: str, line: int
) -> Row:
    name = record[keys[columns.image]]
    if not isinstance(name, str):
        raise wrong(path, f"{keys[columns.image]} is {json_kind(name)}; expected a file name", line)
    captions: list[str] = []
    for at in columns.captions:
        value = record[keys[at]]
        for caption in value if isinstance(value, list) else [value]:
            if not isinstance(caption, str | None):
                where = f"{keys[at]} {'holds' if isinstance(value, list) else 'is'}"
                raise wrong(
                    path, f"{where} {json_kind(caption)}; expected a text or a list of texts", line
                )
            captions.append(caption or "")
    label = record[keys[columns.label]] if columns.label is not None else ""
    if isinstance(label, bool) or not isinstance(label, str | int | None):
        raise wrong(path, f"the label is {json_kind(label)}; expected a name or a number", line)
    return Row(line, name, captions, "" if label is None else str(label).strip())


def coco_rows(path: str) -> Iterator[Row]:
    """The pictures of a file of COCO's captions, each with all of its captions.

    Raises:
        DataError: It is no such file.
    """
    data = parse_json(whole_text(path), path)
    if not isinstance(data, dict):
        raise wrong(path, f"{json_kind(data)}; {EXPECTED}")
    for part in ("images", "annotations"):
        if not isinstance(data.get(part), list):
            has = ", ".join(printable(key) for key in [*data][:5]) or "nothing"
            raise wrong(path, f"has {has}, but no list of {part}, so it is not COCO; {EXPECTED}")
    names: dict[int | str, str] = {}
    for at, image in enumerate(data["images"]):
        number, name = _two(image, "id", "file_name", f"images[{at}]", path)
        if names.setdefault(number, name) != name:
            raise wrong(path, f"images[{at}] has the id {number!a} of another picture")
    captions: dict[int | str, list[str]] = {number: [] for number in names}
    for at, annotation in enumerate(data["annotations"]):
        number, caption = _two(annotation, "image_id", "caption", f"annotations[{at}]", path)
        if number not in captions:
            raise wrong(path, f"annotations[{at}] has image_id {number!a}, which is no image's id")
        captions[number].append(caption)
    for number, name in names.items():
        yield Row(0, name, captions[number], "")


def _two(record: object, key: str, text: str, where: str, path: str) -> tuple[int | str, str]:
    """The number and the text of one entry."""
    if not isinstance(record, dict):
        raise wrong(path, f"{where} is {json_kind(record)}; expected an object")
    for name, kinds in ((key, (int, str)), (text, (str,))):
        value = record.get(name)
        if name not in record:
            hint = "; expected captions, not boxes or outlines" if name == "caption" else ""
            raise wrong(path, f"{where} has no {name}{hint}")
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise wrong(path, f"{where}: {name} is {json_kind(value)}")
    return record[key], record[text]
