"""JSON of untrusted files, of a limited size, and dataclasses from what this package wrote."""

import errno
import json
import math
import stat
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from vit.errors import ConfigError, WeightsError
from vit.text import printable

T = TypeVar("T")
MAX_JSON_BYTES = 50_000_000


def from_plain(kind: type[T], values: Any, name: str, *, optional: Collection[str] = ()) -> T:
    """The dataclass `kind` from what `dataclasses.asdict` gave and JSON kept.

    Args:
        name: That of the values, for errors.
        optional: Fields that may be missing, and then have their default.
    """
    kinds = typing.get_type_hints(kind)
    needed = kinds.keys() - {*optional}
    if not isinstance(values, dict) or not needed <= values.keys() <= kinds.keys():
        names = values.keys() if isinstance(values, dict) else [values]
        given = printable(", ".join(map(str, names)) or "nothing")
        raise ConfigError(f"{name} must have exactly {', '.join(sorted(needed))}, and has {given}")
    return kind(**{key: plain_value(kinds[key], values[key], f"{name}.{key}") for key in values})


def plain_value(kind: Any, value: Any, name: str) -> Any:
    """Check `value` against the annotation `kind`: lists become tuples, whole numbers floats."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else plain_value(options[0], value, name)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = options[:1] * len(value) if options[-1] is Ellipsis else options
        if len(kinds) == len(value):
            pairs = zip(kinds, value, strict=True)
            return tuple(plain_value(each, part, name) for each, part in pairs)
    if origin is Mapping and isinstance(value, dict):
        return {key: plain_value(options[1], part, name) for key, part in value.items()}
    if kind is float:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif type(value) is kind or (origin is Literal and value in options):
        return value
    choice = f": choose one of {', '.join(options)}" if origin is Literal else " is of another type"
    raise ConfigError(f"{name}={value!r}{choice}")


def open_file(path: Path) -> BinaryIO:
    """Open the regular file `path` for reading."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise OSError(errno.EINVAL, "it is no regular file")
        return path.open("rb")
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"{path} cannot be read: {reason}") from None


def read_bytes(path: Path) -> bytes:
    """Read a file of JSON, which is not as large as one of weights."""
    with open_file(path) as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise WeightsError(f"{path} is larger than {MAX_JSON_BYTES:,} bytes")
    return raw


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    raw = read_bytes(path)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path} is no JSON: {str(error)[:160]}; if it was downloaded, it is "
            "incomplete: fetch it again"
        ) from None
    if not isinstance(content, dict):
        raise WeightsError(f"{path} is no JSON object")
    return content
