"""split.json of a run folder: the images that its training held out for validation."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from vit.errors import RunError
from vit.text import printable

SPLIT_FILE = "split.json"


class HeldOutSplit(NamedTuple):
    """The images that a training held out for validation."""

    root: Path
    """Folder that the names are relative to."""
    val: list[str]


def read_split(run: Path) -> HeldOutSplit | None:
    """Read split.json of a run; None if its data had a validation split, or there is no such run.

    Raises:
        RunError: The file is damaged.
    """
    path = run / SPLIT_FILE
    if not path.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return HeldOutSplit(Path(record["root"]), [os.fspath(name) for name in record["val"]])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{printable(path)} is damaged ({printable(error)}); restore it") from None
