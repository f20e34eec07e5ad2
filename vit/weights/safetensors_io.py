"""Tensors on disk, so that damage is noticed: safetensors with a SHA-256 of all they hold.

A file is written beside its place, flushed to the disk, then renamed: at every moment there is
either the old file or the whole new one. Nothing is pickled.
"""

import contextlib
import errno
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

from vit.errors import RunError, WeightsError, printable

DIGEST = "sha256"
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write `tensors` and `metadata` to the safetensors file `path`, with their digest.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    notes = {**metadata, DIGEST: digest(on_cpu, metadata)}
    needed = sum(tensor.nbytes for tensor in on_cpu.values())
    atomic_write(path, lambda beside: _write_in_order(beside, on_cpu, notes), needed)


def _write_in_order(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """safetensors' file with its metadata sorted: its own order changes from run to run."""
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
    """Tensors and metadata of a file made by `write_tensors`.

    Raises:
        WeightsError: The file is missing, cut, or any bit of it has changed.
    """
    tensors, metadata = read_any_tensors(path)
    if metadata.pop(DIGEST, None) is None:
        raise WeightsError(f"{printable(path)} has no {DIGEST}: it was not written by vit")
    return tensors, metadata


def read_any_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file, whoever wrote it; a digest in it is checked.

    Raises:
        WeightsError: The file is missing, cut, or does not match its digest.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            # cloned: they would be views into the file, which could then not be deleted
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
    """SHA-256 over names, types, shapes and bytes of `tensors`, and over `metadata`."""
    total = hashlib.sha256()
    for key, text in sorted(metadata.items()):
        total.update(f"{len(key)} {key} {len(text)} {text}\n".encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{len(name)} {name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a small text file as safely as the tensors.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    atomic_write(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def atomic_write(path: Path, write: Callable[[Path], object], needed: int = 0) -> None:
    """Call `write` on a temporary name, flush it to the disk, and rename it to `path`."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_write_errors(path, needed):
        try:
            write(beside)
            with contextlib.suppress(PermissionError):  # some network disks know no modes
                beside.chmod(0o666 & ~_umask())  # some writers keep others from reading
            _flush(beside)
            beside.replace(path)
            _flush(path.parent)
        finally:
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def explain_write_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn a failed write inside the `with` into one line that names `path` and the cause.

    Args:
        path: What is written.
        needed: Its size in bytes, where that is known before.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in FULL or "os error 28" in str(error)
        reason = getattr(error, "strerror", None) or error
        if full:
            left = f"{shutil.disk_usage(path.parent).free / 1e6:,.1f} MB"
            wanted = f" ({left} are left, and it needs {needed / 1e6:,.1f})" if needed else ""
            reason = f"the disk is full{wanted}: free some space"
        raise RunError(f"{printable(path)} could not be written: {reason}") from None


def _umask() -> int:
    mask = os.umask(0o077)  # there is no way to read it without setting it
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle for a folder to flush
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
