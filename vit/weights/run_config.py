"""The texts of a run folder: config.json, of which the key "vit" is ours, and tokenizer.json."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vit.data.captioning.tokenizer import Tokenizer
from vit.errors import RunError, WeightsError, printable
from vit.nearby import did_you_mean
from vit.weights.tensorfile import read_tensors, write_tensors, write_text

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_DIGEST = "config_sha256"
VERSION = 1
MOST_BYTES = 50_000_000
USUAL = 0.5
"""Threshold of a class while nobody has chosen one."""


def read_config(folder: Path) -> bytes:
    """config.json of a run folder, as it is.

    Raises:
        RunError: There is none.
        WeightsError: It is no such file.
    """
    path = folder / CONFIG_FILE
    try:
        if not path.is_file():
            there = "has no config.json" if folder.is_dir() else "is not a folder"
            hint = "" if folder.exists() else did_you_mean(folder)
            remedy = hint or "; give the run folder of a training"
            raise RunError(f"{printable(folder)} {there}{remedy}")
        if path.stat().st_size > MOST_BYTES:
            raise WeightsError(f"{printable(path)} is larger than {MOST_BYTES:,} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        raise RunError(f"{printable(path)} cannot be read: {printable(error)}") from None


def own_part(content: Any) -> dict[str, Any]:
    """What config.json says to us; timm reads the rest.

    Raises:
        WeightsError: It was not written by this version.
    """
    own = content.get("vit") if isinstance(content, dict) else None
    if not isinstance(own, dict):
        raise WeightsError(f"{CONFIG_FILE} has no key 'vit': it was not written by vit")
    if own.get("version") != VERSION:
        raise WeightsError(
            f"{CONFIG_FILE} has version {own.get('version')!r}, this vit reads {VERSION}; "
            "install the vit that wrote it"
        )
    if own.keys() - {"decoder", "thresholds"} != {"version", "config", "preprocessing", "classes"}:
        raise WeightsError(f"{CONFIG_FILE} has the keys {sorted(own)} under 'vit'")
    return own


def set_thresholds(folder: str | os.PathLike[str], thresholds: Sequence[float]) -> None:
    """Write the thresholds of a run whose pictures may have several classes into its config.json.

    A kill at any moment leaves a whole run, with these thresholds or those from before: the weights
    know the digests of both.

    Raises:
        RunError, WeightsError: The run cannot be read or written.
    """
    where = Path(folder)
    raw = read_config(where)
    content = json.loads(raw)
    texts = []
    for values in ([USUAL] * len(thresholds), list(thresholds)):
        own_part(content)["thresholds"] = values
        texts.append(json.dumps(content, indent=2, allow_nan=False) + "\n")
    tensors, notes = read_tensors(where / WEIGHTS_FILE)
    known = dict.fromkeys([*(sha256(text.encode()) for text in texts), sha256(raw)])
    write_tensors(where / WEIGHTS_FILE, tensors, {**notes, CONFIG_DIGEST: " ".join(known)})
    write_text(where / CONFIG_FILE, texts[1])


def read_tokenizer(folder: Path, digest: str | None = None) -> Tokenizer:
    """The tokenizer of a run.

    Args:
        folder: The run folder.
        digest: What the weights say of the file.

    Raises:
        WeightsError: It is missing, damaged, or not the one of the weights.
    """
    path = folder / TOKENIZER_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise WeightsError(f"{printable(path)} cannot be read: {printable(error)}") from None
    if digest is not None and digest != sha256(text.encode()):
        raise WeightsError(
            f"{printable(path)} is damaged, edited, or of another run than {WEIGHTS_FILE}; restore "
            "both from one copy"
        )
    return Tokenizer.from_json(text)


def sha256(content: bytes) -> str:
    """The digest as files have it."""
    return hashlib.sha256(content).hexdigest()
