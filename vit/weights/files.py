"""Tensors from a file that anybody may have written: safetensors, torch pickles, numpy archives.

The content decides which it is, not the name. No code in a file is run, memory is bounded by the
size of the file, and every value is finite. A file that is not as it should be is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.errors import WeightsError, printable
from vit.weights.arrays import is_numpy, read_arrays
from vit.weights.contents import NO_CODE, WANTED, content_of, open_file, read_json
from vit.weights.formats.names import some
from vit.weights.pickles import MOST_ENTRIES, SPARE, SWELL, read_checkpoint
from vit.weights.tensorfile import read_any_tensors

__all__ = ["StateFile", "read_arrays", "read_state", "shard_map"]

KEYS = ("state_dict_ema", "model_ema", "state_dict", "model", "module")
"""Where a training's checkpoint keeps its weights; the first one there is taken, as in timm."""
WRAPPERS = ("_orig_mod.", "module.")  # of torch.compile and DistributedDataParallel
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True)
class StateFile:
    """What a file of weights holds.

    Args:
        tensors: Floating point numbers by name: float32, finite, contiguous, on the CPU.
        integers: Whole numbers and booleans by name, as they are.
        key: Which entry of a checkpoint they were; None where the file has nothing else.
        notes: Lines for the user: what else the file holds.
    """

    tensors: dict[str, Tensor]
    integers: dict[str, Tensor]
    key: str | None = None
    notes: tuple[str, ...] = ()


def read_state(path: Path) -> StateFile:
    """Read a safetensors file, a file of torch.save, or the index of several of them.

    Raises:
        WeightsError: The file is missing, damaged, of another kind, could run code, or holds
            something else than finite numbers.
    """
    found = _read_shards(path) if content_of(path) == "index" else _read_one(path)
    return _unwrapped(found)


def _read_one(path: Path) -> StateFile:
    content = content_of(path)
    if content == "safetensors":
        _check_header(path)
        try:
            tensors, _ = read_any_tensors(path)
        except WeightsError as error:
            raise WeightsError(f"{error}; fetch it again") from None
        return _sorted_out(tensors, path)
    if content == "zip" and is_numpy(path):
        raise WeightsError(f"{printable(path)} holds numpy arrays and no torch tensors")
    return _read_pickle(path, zipped=content == "zip")


def _check_header(path: Path) -> None:
    """Refuse what safetensors would spend minutes on, or would read only half of."""
    with open_file(path) as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    if header.count(b"data_offsets") > MOST_ENTRIES:
        raise WeightsError(f"{printable(path)} has more than {MOST_ENTRIES:,} tensors")
    try:
        json.loads(header, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{printable(path)} is damaged: its header is no JSON ({printable(error)[:160]}); "
            "fetch it again"
        ) from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _read_pickle(path: Path, *, zipped: bool) -> StateFile:
    checkpoint = read_checkpoint(path, zipped=zipped)
    if isinstance(checkpoint, Tensor) or not isinstance(checkpoint, Mapping):
        raise WeightsError(
            f"{printable(path)} holds one {type(checkpoint).__name__} and no named tensors; "
            "give the file of a state_dict"
        )
    key = next((key for key in KEYS if _has_tensors(checkpoint.get(key))), None)
    notes: tuple[str, ...] = ()
    if key is not None:
        others = [str(name) for name in checkpoint if name != key]
        beside = f"; beside it are {some(others)}" if others else ""
        notes = (f"{printable(path.name)}: took {key}{beside}",)
    state = checkpoint if key is None else checkpoint[key]
    if not _has_tensors(state):
        entries = f"; it has {some(map(str, state))}" if state else ""
        raise WeightsError(f"{printable(path)} holds no tensors by name{entries}")
    _check_extent(state, path)
    return _sorted_out(state, path, key, notes)


def _has_tensors(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _check_extent(state: Mapping[Any, object], path: Path) -> None:
    """A tensor's strides may repeat a few bytes for ever: count what copies would need."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise WeightsError(
                f"{printable(path)} holds sparse, quantised or empty tensors; {NO_CODE} with "
                "plain ones"
            )
    needed, size = sum(tensor.nbytes for tensor in tensors), path.stat().st_size
    if needed > SWELL * size + SPARE:
        raise WeightsError(
            f"{printable(path)} declares tensors of {needed:,} bytes in a file of {size:,}: it is "
            "no honest file of weights"
        )


def _sorted_out(
    state: Mapping[Any, Any], path: Path, key: str | None = None, notes: tuple[str, ...] = ()
) -> StateFile:
    tensors: dict[str, Tensor] = {}
    integers: dict[str, Tensor] = {}
    others = []
    for name, value in state.items():
        if not isinstance(name, str):
            raise WeightsError(f"{printable(path)} names a tensor {printable(name)[:80]}, not text")
        if not isinstance(value, Tensor):
            others.append(name)
        elif value.dtype in FLOATS:
            tensors[name] = _finite(value.detach().float().contiguous(), name, path)
        elif value.dtype in WHOLE:
            integers[name] = value.contiguous()
        else:
            kind = str(value.dtype).removeprefix("torch.")
            raise WeightsError(
                f"{printable(path)}: {printable(name)} is of type {kind}; give weights in float32, "
                "float16 or bfloat16"
            )
    if not tensors:
        raise WeightsError(f"{printable(path)} holds no weights: no floating point numbers in it")
    if others:
        notes = (*notes, f"{printable(path.name)}: left out what is no tensor: {some(others)}")
    return StateFile(tensors, integers, key, notes)


def _finite(tensor: Tensor, name: str, path: Path) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise WeightsError(
            f"{printable(path)}: {printable(name)} has values that are not finite; its training "
            "broke down, or the file is damaged"
        )
    return tensor


def _unwrapped(file: StateFile) -> StateFile:
    """Without the prefixes that all weights have from being wrapped for training."""
    tensors, integers = file.tensors, file.integers
    while prefix := next((p for p in WRAPPERS if all(n.startswith(p) for n in tensors)), ""):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        integers = {name.removeprefix(prefix): tensor for name, tensor in integers.items()}
    return replace(file, tensors=tensors, integers=integers)


def _read_shards(index: Path) -> StateFile:
    """The files that a `*.index.json` of transformers lists; they lie beside it."""
    names: dict[str, list[str]] = {}
    for name, file in shard_map(index).items():
        names.setdefault(file, []).append(name)
    tensors: dict[str, Tensor] = {}
    integers: dict[str, Tensor] = {}
    notes: tuple[str, ...] = ()
    for file, listed in sorted(names.items()):
        shard = _read_one(index.with_name(file))
        found = shard.tensors.keys() | shard.integers.keys()
        if odd := found.symmetric_difference(listed):
            raise WeightsError(
                f"{printable(index)} and {printable(file)} disagree about {some(sorted(odd))}; "
                "fetch both from one place"
            )
        tensors |= shard.tensors
        integers |= shard.integers
        notes += shard.notes
    return StateFile(tensors, integers, None, notes)


def shard_map(index: Path) -> dict[str, str]:
    """Which file beside `index` has which tensor.

    Raises:
        WeightsError: It is no index, or names a file elsewhere.
    """
    content = read_json(index)
    files = content.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise WeightsError(f"{printable(index)} is JSON, but no index of weights; {WANTED}")
    for file in files.values():
        if not isinstance(file, str) or not _is_beside(file):
            raise WeightsError(
                f"{printable(index)} names {printable(file)[:80]!r}, which is no file beside it"
            )
    return {name: str(file) for name, file in files.items()}


def _is_beside(file: str) -> bool:
    """Whether `file` is a plain name; an index in an index could read itself for ever."""
    plain = Path(file).name == file and not any(mark in file for mark in "/\\:\0")
    return plain and file[:1] not in ("", ".") and not file.endswith(".json")
