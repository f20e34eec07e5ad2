"""Safetensors files with a SHA-256 of their content. Nothing is pickled."""

import errno
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vit.atomic_files import atomic_file
from vit.errors import WeightsError

DIGEST = "sha256"
SAFETENSORS_FULL = ("os error 28", "code: 28")  # its versions word it differently


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write `tensors` and `metadata` to a safetensors file, with their digest."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    notes = {**metadata, DIGEST: digest(on_cpu, metadata)}
    with atomic_file(path, sum(tensor.nbytes for tensor in on_cpu.values())) as temporary:
        try:
            save_file(on_cpu, temporary, notes)
        except SafetensorError as error:
            full = any(code in str(error) for code in SAFETENSORS_FULL)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from None
        _sort_metadata(temporary)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a file, because safetensors' own order varies between processes."""
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
        raise WeightsError(f"{path} has no {DIGEST}: it was not written by vit")
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
        raise WeightsError(f"{path} is missing") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} is damaged: {error}") from None
    content = {name: text for name, text in metadata.items() if name != DIGEST}
    if DIGEST in metadata and digest(tensors, content) != metadata[DIGEST]:
        raise WeightsError(f"{path} is damaged: its content does not match its {DIGEST}")
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
