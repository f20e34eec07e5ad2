"""Safetensors files with a SHA-256 of their content, and atomic file writes.

A file is written to a temporary name in the same folder, flushed to disk and renamed, so that
either the old or the complete new file exists at any time. Nothing is pickled.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vit.errors import DISK_FULL, RunError, WeightsError
from vit.text import printable

DIGEST = "sha256"
SAFETENSORS_FULL = ("os error 28", "code: 28")  # its versions word it differently


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write `tensors` and `metadata` to a safetensors file, with their digest."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    notes = {**metadata, DIGEST: digest(on_cpu, metadata)}
    needed = sum(tensor.nbytes for tensor in on_cpu.values())
    atomic_write(path, lambda temporary: _write_in_order(temporary, on_cpu, notes), needed)


def _write_in_order(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Save with sorted metadata, because safetensors' own order varies between processes."""
    save_file(tensors, path, metadata)
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length, "sorting must not make the header longer"
        file.seek(8)
        file.write(text.ljust(length))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata of a file written by `write_tensors`."""
    tensors, metadata = read_any_tensors(path)
    if metadata.pop(DIGEST, None) is None:
        raise WeightsError(f"{printable(path)} has no {DIGEST}: it was not written by vit")
    return tensors, metadata


def read_any_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata of any safetensors file; its digest is checked if present."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            # cloned, because views into the mapped file would prevent its deletion
            names = file.keys()
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except FileNotFoundError:
        raise WeightsError(f"{printable(path)} is missing") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{printable(path)} is damaged: {printable(error)}") from None
    content = {name: text for name, text in metadata.items() if name != DIGEST}
    if DIGEST in metadata and digest(tensors, content) != metadata[DIGEST]:
        raise WeightsError(f"{printable(path)} is damaged: its content does not match its {DIGEST}")
    return tensors, metadata


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of `tensors`, and of `metadata`."""
    total = hashlib.sha256()
    for key, text in sorted(metadata.items()):
        total.update(f"{len(key)} {key} {len(text)} {text}\n".encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{len(name)} {name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    atomic_write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def atomic_write(path: Path, write: Callable[[Path], object], needed: int = 0) -> None:
    """Call `write` with a temporary path, flush the file to disk, and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_write_errors(path, needed):
        try:
            write(temporary)
            with contextlib.suppress(PermissionError):  # some network file systems have no modes
                temporary.chmod(0o666 & ~_umask())  # some writers create private files
            _fsync(temporary)
            temporary.replace(path)
            _fsync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def explain_write_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Convert write errors inside the `with` to a RunError with `path` and the cause.

    Args:
        needed: Its size in bytes; 0 if unknown.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in DISK_FULL or any(
            code in str(error) for code in SAFETENSORS_FULL
        )
        reason = getattr(error, "strerror", None) or error
        if full:
            left = f"{shutil.disk_usage(path.parent).free / 1e6:,.1f} MB"
            space = f" ({left} are left, and it needs {needed / 1e6:,.1f})" if needed else ""
            reason = f"the disk is full{space}: free some space"
        raise RunError(f"{printable(path)} could not be written: {reason}") from None


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask


def _fsync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
