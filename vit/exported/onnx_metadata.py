"""What an ONNX file says of itself and which files it names, before anything opens it.

Read from its bytes as onnx.proto numbers its fields, so that neither onnx nor onnxruntime is needed
and names of other files are known before a library follows them. Weights are skipped, not read.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from vit.errors import WeightsError, printable
from vit.paths import did_you_mean

PathLike = str | os.PathLike[str]
Found = TypeVar("Found")

# message -> its fields in which a tensor may be, and what these are
INSIDE: dict[str, dict[int, str]] = {
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


def metadata_of(path: PathLike) -> dict[str, str]:
    """What the ONNX file `path` says of itself, by name.

    Raises:
        WeightsError: The file is missing, or no ONNX file.
    """

    def find(data: mmap.mmap) -> dict[str, str]:
        entries = _fields(data, 0, len(data))
        return dict(_entry(data, *span) for number, *span in entries if number == METADATA)

    return _read(path, find)


def check_external(path: PathLike) -> None:
    """Refuse weights in another file than the one that is called like `path` and ends in .data.

    Raises:
        WeightsError: Another file is named, the right one is missing, or `path` is no ONNX file.
    """
    name = os.fspath(path)
    own = f"{os.path.basename(name)}.data"
    for location in sorted(_read(path, lambda data: set(_locations(data)))):
        if location != own:
            raise WeightsError(
                f"{printable(path)} wants weights of {printable(location)}, and only "
                f"{printable(own)} beside it is read; export it again"
            )
        if not os.path.isfile(os.path.join(os.path.dirname(name), own)):
            raise WeightsError(
                f"{printable(name)}.data is missing, where the weights of {printable(path)} are; "
                "copy both files"
            )


def _read(path: PathLike, find: Callable[[mmap.mmap], Found]) -> Found:
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
            return find(data)
    except (OSError, ValueError, IndexError) as error:
        words = printable(error)
        raise WeightsError(f"{name} is no usable ONNX file ({words}); export it again") from None


def _locations(data: mmap.mmap) -> Iterator[str]:
    """Files that tensors anywhere in the model name."""
    todo = [("model", 0, len(data))]
    while todo:
        kind, *span = todo.pop()
        for number, start, end in _fields(data, *span):
            inside = INSIDE[kind].get(number)
            if inside is not None:
                todo.append((inside, start, end))
            elif kind == "tensor" and number == EXTERNAL:
                key, value = _entry(data, start, end)
                if key == "location":
                    yield value


def _entry(data: mmap.mmap, start: int, end: int) -> tuple[str, str]:
    """A StringStringEntryProto."""
    found = {number: data[a:b] for number, a, b in _fields(data, start, end)}
    # what is not UTF-8 stays different from everything that is
    key, value = (
        found.get(place, b"").decode("utf-8", "surrogateescape") for place in (KEY, VALUE)
    )
    return key, value


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field of the message that is text, bytes or a message.

    Raises:
        ValueError, IndexError: It is no message.
    """
    while start < end:
        tag, start = _varint(data, start)
        kind = tag & 7
        if kind == VARINT:
            _, start = _varint(data, start)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            start += 8 if kind == EIGHT_BYTES else 4
        elif kind == LENGTH:
            length, start = _varint(data, start)
            if start + length > end:
                break
            yield tag >> 3, start, start + length
            start += length
        else:
            break
    if start != end:
        raise ValueError("damaged or cut short")


def _varint(data: mmap.mmap, place: int) -> tuple[int, int]:
    """A number of up to 64 bits, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("damaged")
