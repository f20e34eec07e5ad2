"""Detects the format of a weight file by its magic bytes; the file name is not trusted."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, Literal

from vit.errors import WeightsError
from vit.text import printable

FileFormat = Literal["safetensors", "zip", "pickle", "index"]

HEADER_BYTES = 1024
"""Bytes read for detection."""

# offset, magic bytes, description
FOREIGN_FORMATS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG", "an image (PNG)"),
    (0, b"\xff\xd8\xff", "an image (JPEG)"),
    (0, b"GIF8", "an image (GIF)"),
    (8, b"WEBP", "an image (WebP)"),
    (0, b"II*\0", "an image (TIFF)"),
    (0, b"MM\0*", "an image (TIFF)"),
    (0, b"%PDF", "a PDF"),
    (0, b"\x89HDF", "an HDF5 file, as Keras writes it"),
    (0, b"GGUF", "a GGUF file, as language models use it"),
    (4, b"TFL3", "a TensorFlow Lite file"),
    (0, b"\x93NUMPY", "a single numpy array"),
    (0, b"\x1f\x8b", "a gzip archive"),
    (0, b"\x28\xb5\x2f\xfd", "a zstandard archive"),
    (257, b"ustar", "a tar archive, or a file of the oldest torch, which could run code"),
)
MAX_JSON_BYTES = 50_000_000
WANTED = "give a .safetensors, .pth, .bin or .npz file"
NO_CODE = "ask for a .safetensors file"
ONNX = (
    "an ONNX file, which has been exported for prediction already; "
    "give the weights it was exported from"
)


def detect_format(path: Path) -> FileFormat:
    """Detect the format of the file `path`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(HEADER_BYTES)
    if not start:
        raise WeightsError(f"{printable(path)} is empty; fetch it again")
    header_length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and 8 + header_length <= size:
        return "safetensors"
    if start.startswith(b"PK\x03\x04"):
        return "zip"
    if start[0] == 0x80 and len(start) > 1 and start[1] <= 5:
        return "pickle"
    if start.lstrip()[:1] == b"{" and path.name.endswith(".json"):
        return "index"
    if path.suffix == ".safetensors" and not describe_foreign_format(start):
        raise WeightsError(f"{printable(path)} is cut or damaged: it has no header; fetch it again")
    shape = describe_foreign_format(start) or f"nothing known here ({size:,} bytes)"
    remedy = "" if ";" in shape else f"; {WANTED}"
    raise WeightsError(f"{printable(path)} looks like {shape}{remedy}")


def open_file(path: Path) -> BinaryIO:
    """Open the regular file `path` for reading."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise WeightsError(f"{printable(path)} is a folder; give a file in it")
        if not stat.S_ISREG(mode):  # opening a pipe would block
            raise WeightsError(f"{printable(path)} is no regular file; {WANTED}")
        return path.open("rb")
    except FileNotFoundError:
        raise WeightsError(f"{printable(path)} is missing") from None
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"{printable(path)} cannot be read: {printable(reason)}") from None


def describe_foreign_format(start: bytes) -> str:
    """Describe a file that starts with `start`, with a remedy; empty if unknown."""
    if start.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer and not the file itself; run `git lfs pull` where it came from"
    for offset, magic, meaning in FOREIGN_FORMATS:
        if start[offset:].startswith(magic):
            return meaning
    if start[:1] == b"\x08" and start[1:2] <= b"\x20" and start[2:3] in b"\x12\x1a\x22\x28\x32\x3a":
        return ONNX
    if re.match(rb"[(\]}]?[dlc][a-z_]*p?\d*\n", start):
        return f"a Python pickle, which could run code; {NO_CODE}"
    try:
        # the last character may be truncated
        text = start.decode() if len(start) < HEADER_BYTES else start[:-4].decode()
    except UnicodeDecodeError:
        return ""
    words = text.lstrip("\ufeff \t\r\n").lower()
    if words.startswith(("<!doctype html", "<html", "<head", "<?xml")):
        return "a web page, perhaps of an error or a login; fetch the file itself"
    if not all(letter.isprintable() or letter in "\t\r\n" for letter in text):
        return ""
    return "JSON text" if words.startswith("{") else "text"


def read_bytes(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes."""
    with open_file(path) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise WeightsError(f"{printable(path)} is larger than {most:,} bytes")
    return raw


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    raw = read_bytes(path, MAX_JSON_BYTES)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{printable(path)} is no JSON: {printable(error)[:160]}; if it was downloaded, it is "
            "incomplete: fetch it again"
        ) from None
    if not isinstance(content, dict):
        raise WeightsError(f"{printable(path)} is no JSON object")
    return content
