"""Reads the metadata and the external data locations of an ONNX file, without onnx.

A minimal protobuf reader by the field numbers of onnx.proto: locations of external data are checked
before a library follows them. Weights are skipped, not read.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from vit.errors import WeightsError
from vit.paths import did_you_mean
from vit.text import printable

PathLike = str | os.PathLike[str]
Result = TypeVar("Result")

# message -> its fields that may contain a tensor, and their message types
NESTED_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
METADATA, EXTERNAL = 14, 13
KEY, VALUE = 1, 2
VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5


def read_metadata(path: PathLike) -> dict[str, str]:
    def parse(data: mmap.mmap) -> dict[str, str]:
        entries = _parse_fields(data, 0, len(data))
        return dict(_parse_entry(data, *span) for number, *span in entries if number == METADATA)

    return _read(path, parse)


def check_external_data(path: PathLike) -> None:
    """Refuse external data anywhere but in the file PATH.data."""
    name = os.fspath(path)
    own = f"{os.path.basename(name)}.data"
    for location in sorted(_read(path, lambda data: set(_external_locations(data)))):
        if location != own:
            raise WeightsError(
                f"{path} has weights in {location}, and only "
                f"{own} beside it is read; export it again"
            )
        if not os.path.isfile(os.path.join(os.path.dirname(name), own)):
            raise WeightsError(
                f"{name}.data is missing, where the weights of {path} are; copy both files"
            )


def _read(path: PathLike, parse: Callable[[mmap.mmap], Result]) -> Result:
    name = printable(path)
    if not os.path.isfile(path):
        hint = did_you_mean(path) or "; give the .onnx of vit export"
        raise WeightsError(f"{name} is missing, or not a file{hint}")
    try:
        if not os.path.getsize(path):
            raise ValueError("it is empty")
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return parse(data)
    except (OSError, ValueError, IndexError) as error:
        reason = printable(error)
        raise WeightsError(f"{name} is no usable ONNX file ({reason}); export it again") from None


def _external_locations(data: mmap.mmap) -> Iterator[str]:
    """Yield the external data locations of all tensors in the model."""
    stack = [("model", 0, len(data))]
    while stack:
        kind, *span = stack.pop()
        for number, start, end in _parse_fields(data, *span):
            nested = NESTED_FIELDS[kind].get(number)
            if nested is not None:
                stack.append((nested, start, end))
            elif kind == "tensor" and number == EXTERNAL:
                key, value = _parse_entry(data, start, end)
                if key == "location":
                    yield value


def _parse_entry(data: mmap.mmap, start: int, end: int) -> tuple[str, str]:
    fields = {number: data[a:b] for number, a, b in _parse_fields(data, start, end)}
    # surrogateescape keeps invalid UTF-8 distinct from any valid name
    key, value = (
        fields.get(number, b"").decode("utf-8", "surrogateescape") for number in (KEY, VALUE)
    )
    return key, value


def _parse_fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of each length-delimited field of a message."""
    while start < end:
        tag, start = _parse_varint(data, start)
        kind = tag & 7
        if kind == VARINT:
            _, start = _parse_varint(data, start)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            start += 8 if kind == EIGHT_BYTES else 4
        elif kind == LENGTH:
            length, start = _parse_varint(data, start)
            if start + length > end:
                break
            yield tag >> 3, start, start + length
            start += length
        else:
            break
    if start != end:
        raise ValueError("damaged or cut short")


def _parse_varint(data: mmap.mmap, offset: int) -> tuple[int, int]:
    """Return an integer of up to 64 bits, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
    raise ValueError("damaged")
