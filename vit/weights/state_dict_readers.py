"""Reads state dicts from untrusted files: safetensors, torch.save, .npz, sharded checkpoints.

The format is detected by content. No code in a file is run, memory is bounded by the size of the
file, and all values are finite; any other file raises WeightsError.

A pickle is a program: before torch reads it (with weights_only), every global it imports is checked
against an allow-list, and declared sizes against the size of the file.
"""

import argparse
import contextlib
import io
import math
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from vit.errors import WeightsError
from vit.json_reader import open_file, read_json
from vit.text import join_names
from vit.weights.formats.state_dict_names import WRAPPERS, wrapper_prefix
from vit.weights.safetensors_io import read_any_tensors

FileFormat = Literal["safetensors", "zip", "pickle", "index"]

HEADER_BYTES = 64
NO_CODE = "ask for a .safetensors file"


def detect_format(path: Path) -> FileFormat:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(HEADER_BYTES)
    if start[8:9] == b"{" and 8 + int.from_bytes(start[:8], "little") <= size:
        return "safetensors"
    if start.startswith(b"PK\x03\x04"):
        return "zip"
    if start.startswith(b"\x80"):
        return "pickle"
    if start.lstrip().startswith(b"{") and path.name.endswith(".json"):
        return "index"
    raise WeightsError(
        f"{path} is no .safetensors, .pth, .bin or .npz file of weights, or is cut; "
        "fetch it again (a few lines of text are what git-lfs or a login leave in its place)"
    )


LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PICKLES = 5  # magic number, protocol, type sizes, object, storage keys
MAX_EXPANSION = 4
EXPANSION_ALLOWANCE = 16_000_000
"""A file may declare MAX_EXPANSION times its size plus this; real files stay below 2 times."""
MAX_OPCODES = 5_000_000
"""Pickle opcodes; the checkpoint of a large network has a tenth of them."""
# Globals that a pickle may import. torch allows more: bytearray and encode could exhaust memory.
ALLOWED_GLOBALS = re.compile(
    r"collections (OrderedDict|Counter)"
    r"|argparse Namespace"
    r"|(builtins|__builtin__) (set|complex)"
    r"|torch (\w+Storage|Size|device|Tensor|b?float\d+\w*|u?int\d+|bool|half|double|long)"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch\._tensor _rebuild_from_type_v2"
    r"|torch\.nn\.parameter Parameter"
    r"|torch\.storage (Untyped|Typed)Storage"
)
GLOBAL_OPCODES = ("GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4")
"""Opcodes that import objects; torch.save has used only the first."""
CHECKPOINT_KEYS = (
    *("state_dict_ema", "model_ema", "state_dict", "model", "module"),
    *("model_state_dict", "teacher", "net", "encoder"),
)
"""Keys of the weights in a training checkpoint; the first present one is used, the first five in
timm's order. Others: PyTorch's tutorial, DINO, and I-JEPA, as in timm."""
NOT_FINITE = "has values that are not finite; its training broke down, or the file is damaged"
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGER_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True)
class StateFile:
    """Content of a weight file; `arch` is the network, if known.

    Args:
        tensors: Floating point tensors by name: float32, finite, contiguous, on the CPU.
    """

    tensors: dict[str, Tensor]
    integers: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    arch: str | None = None


def read_state(path: Path) -> StateFile:
    """Read a safetensors file, a file of torch.save, or the index of several of them; without the
    prefixes of training wrappers that all names share."""
    file = _read_shards(path) if detect_format(path) == "index" else _read_one(path)
    prefix = wrapper_prefix(file.tensors, WRAPPERS)
    tensors, integers = (
        {name.removeprefix(prefix): tensor for name, tensor in part.items()}
        for part in (file.tensors, file.integers)
    )
    return replace(file, tensors=tensors, integers=integers)


def _read_one(path: Path) -> StateFile:
    content = detect_format(path)
    if content == "safetensors":
        try:
            tensors, _ = read_any_tensors(path)
        except WeightsError as error:
            raise WeightsError(f"{error}; fetch it again") from None
        return _classify_entries(tensors, path)
    if content == "zip" and is_npz(path):
        raise WeightsError(f"{path} holds numpy arrays and no torch tensors")
    return _read_pickle(path, zipped=content == "zip")


def _read_pickle(path: Path, *, zipped: bool) -> StateFile:
    checkpoint = read_checkpoint(path, zipped=zipped)
    if not isinstance(checkpoint, Mapping):
        checkpoint = {}
    inside = [key for key, value in checkpoint.items() if _has_tensors(value)]
    known = [key for key in CHECKPOINT_KEYS if key in inside]
    if not known and len(inside) == 1 and not _has_tensors(checkpoint):
        known = inside
    state: Mapping[Any, Any] = checkpoint
    notes: tuple[str, ...] = ()
    if known:
        key, state = known[0], checkpoint[known[0]]
        rest = [str(name) for name in checkpoint if name != key]
        beside = f"; beside it are {join_names(rest, 3)}" if rest else ""
        notes = (f"{path.name}: took {key}{beside}",)
    if not _has_tensors(state):
        name = inside[0] if inside else "NAME"
        raise WeightsError(
            f"{path} holds no tensors by name; save its state dict alone: "
            f'torch.save(ckpt["{name}"], "weights.pth")'
        )
    _check_extent(state, path)
    found = _classify_entries(state, path, notes)
    arch = checkpoint.get("arch")
    return replace(found, arch=arch) if isinstance(arch, str) else found


def _has_tensors(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _check_extent(state: Mapping[Any, object], path: Path) -> None:
    """Check the memory of contiguous copies, because strides may repeat a few bytes."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_meta:
            raise WeightsError(f"{path} holds tensors without plain values; {NO_CODE}")
    _check_size(sum(tensor.nbytes for tensor in tensors), "tensors of ", path)


def _classify_entries(
    state: Mapping[Any, Any], path: Path, notes: tuple[str, ...] = ()
) -> StateFile:
    tensors: dict[str, Tensor] = {}
    integers: dict[str, Tensor] = {}
    others = []
    for name, value in state.items():
        if not isinstance(name, str):
            raise WeightsError(f"{path} names a tensor {str(name)[:80]}, not text")
        if not isinstance(value, Tensor):
            others.append(name)
        elif value.dtype in FLOAT_TYPES:
            tensors[name] = value.detach().float().contiguous()
            if not torch.isfinite(tensors[name]).all():
                raise WeightsError(f"{path}: {name} {NOT_FINITE}")
        elif value.dtype in INTEGER_TYPES:
            integers[name] = value.contiguous()
        else:
            kind = str(value.dtype).removeprefix("torch.")
            raise WeightsError(
                f"{path}: {name} is of type {kind}; give weights in float32, float16 or bfloat16"
            )
    if not tensors:
        raise WeightsError(f"{path} holds no weights: no floating point numbers in it")
    if others:
        notes = (
            *notes,
            f"{path.name}: left out what is no tensor: {join_names(others, 3)}",
        )
    return StateFile(tensors, integers, notes)


def _read_shards(index: Path) -> StateFile:
    """Read the shards listed in a `*.index.json` of transformers, in the same folder."""
    names: dict[str, set[str]] = {}
    for name, file in shard_map(index).items():
        names.setdefault(file, set()).add(name)
    found = StateFile({}, {})
    for file, listed in sorted(names.items()):
        path = index.with_name(file)
        shard = _read_one(path)
        if odd := listed ^ (shard.tensors.keys() | shard.integers.keys()):
            raise WeightsError(
                f"{index} and {file} disagree about "
                f"{join_names(sorted(odd), 3)}; fetch both from one place"
            )
        found = StateFile(
            found.tensors | shard.tensors,
            found.integers | shard.integers,
            notes=found.notes + shard.notes,
        )
    return found


def shard_map(index: Path) -> dict[str, str]:
    """Shard file of each tensor in `index`."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise WeightsError(f"{index} is JSON, but no index of weights")
    for file in files.values():
        # a plain name beside the index, and no other index, which could be recursive
        if not isinstance(file, str) or not re.fullmatch(r"[^./\\:\0][^/\\:\0]*(?<!\.json)", file):
            raise WeightsError(f"{index} names {str(file)[:80]!r}, which is no file beside it")
    return dict(files)


def read_checkpoint(path: Path, *, zipped: bool) -> Any:
    """Load a file of torch.save to the CPU; `zipped` is the format since torch 1.6."""
    with _explain_damage(path):
        if zipped:
            with zipfile.ZipFile(path) as archive:
                _check_pickle(io.BytesIO(archive.read(_pickle_in(archive, path))), path)
        else:
            with open_file(path) as file:
                if _check_pickle(file, path) != LEGACY_MAGIC:
                    raise WeightsError(f"{path} is a Python pickle, but not of torch; {NO_CODE}")
                for _ in range(LEGACY_PICKLES - 1):
                    _check_pickle(file, path)
        with (
            open_file(path) as file,  # an open file, because torch trusts the name
            warnings.catch_warnings(),
            torch.serialization.safe_globals([argparse.Namespace]),
        ):
            warnings.simplefilter("ignore")  # torch warns about its old formats
            try:
                return torch.load(file, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError:
                raise WeightsError(f"{path} cannot be read safely; {NO_CODE}") from None


@contextlib.contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Convert the errors of torch, zipfile, zlib and numpy on damaged files to WeightsError."""
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:160]
        raise WeightsError(f"{path} is cut or damaged ({reason}); fetch it again") from None


def _check_size(declared: int, what: str, path: Path) -> None:
    """Refuse a file that declares far more bytes than it has (zip bombs, repeating strides)."""
    size = path.stat().st_size
    if declared > MAX_EXPANSION * size + EXPANSION_ALLOWANCE:
        raise WeightsError(
            f"{path} declares {what}{declared:,} bytes in a file of {size:,}: it is no "
            "honest file of weights"
        )


def _check_archive(archive: zipfile.ZipFile, path: Path) -> None:
    _check_size(sum(entry.file_size for entry in archive.infolist()), "", path)


def _pickle_in(archive: zipfile.ZipFile, path: Path) -> str:
    _check_archive(archive, path)
    names = archive.namelist()
    found = [name for name in names if re.fullmatch(r"[^/]+/data\.pkl", name)]
    if len(found) != 1 or found[0].replace("data", "constants") in names:  # of TorchScript
        raise WeightsError(
            f"{path} is a zip archive, but none of the state_dict of a network; {NO_CODE}"
        )
    return found[0]


def _check_pickle(file: IO[bytes], path: Path) -> object:
    """Check the opcodes of one pickle without running it, and return its last integer."""
    number: object = None
    for step, (code, value, _) in enumerate(pickletools.genops(file)):
        if step == MAX_OPCODES:
            raise WeightsError(f"{path} is a program too long for weights; {NO_CODE}")
        known = code.name == "GLOBAL" and ALLOWED_GLOBALS.fullmatch(str(value))
        if code.name in GLOBAL_OPCODES and not known:
            name = str(value or code.name).replace(" ", ".")[:80]
            raise WeightsError(
                f"{path} holds Python objects ({name}), which could run code; "
                f"{NO_CODE}, or for one that torch.save made of a state_dict"
            )
        if isinstance(value, int):
            number = value
    return number


def is_npz(path: Path) -> bool:
    """Whether the zip archive `path` contains only numpy arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of a .npz file by name; floats are converted to float32."""
    with _explain_damage(path), zipfile.ZipFile(path) as archive:
        _check_archive(archive, path)
        return {
            entry.filename.removesuffix(".npy"): _read_array(archive, entry, path)
            for entry in archive.infolist()
        }


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> NDArray[Any]:
    where = f"{path}: {entry.filename}"
    with archive.open(entry) as file:
        first = npy.read_magic(file) == (1, 0)
        shape, _, kind = (npy.read_array_header_1_0 if first else npy.read_array_header_2_0)(file)
    if kind.hasobject:
        raise WeightsError(f"{where} holds Python objects, which could run code; {NO_CODE}")
    if math.prod(shape) * kind.itemsize > entry.file_size:
        raise ValueError(f"{entry.filename} is shorter than it says")
    with archive.open(entry) as file:
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    if kind.kind in "iub":
        return array
    if kind.kind == "V" and kind.itemsize == 2 and kind.fields is None:
        # bfloat16, which numpy does not know, is the upper half of a float32
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif kind.kind != "f":
        raise WeightsError(f"{where} holds {kind.name}, which are no weights; give float32")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise WeightsError(f"{where} {NOT_FINITE}")
    return array
