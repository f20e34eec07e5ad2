"""JSON of untrusted files, of a limited size."""

import errno
import json
import stat
from pathlib import Path
from typing import Any, BinaryIO

from vit.errors import WeightsError

MAX_JSON_BYTES = 50_000_000


def open_file(path: Path) -> BinaryIO:
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
