"""Files of torch.save, opened so that nothing in them can run or swell.

A pickle is a program. Before torch reads it (with weights_only), every name that it asks for is
compared with a list of harmless ones; sizes are compared with the size of the file.
"""

import argparse
import io
import pickle
import pickletools
import re
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from vit.errors import WeightsError, printable
from vit.weights.contents import NO_CODE, open_file

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PICKLES = 5  # magic number, protocol, sizes of types, the object, keys of its storages
SWELL = 4
SPARE = 16_000_000
"""A file may declare SWELL times its size and SPARE bytes more: real ones are never above 2."""
MOST_ENTRIES = 50_000
MOST_STEPS = 5_000_000
"""Of a pickle's program; the checkpoint of a large network has a tenth of them."""

# What a name in a pickle may be. torch allows more: bytearray and encode could ask for all memory.
HARMLESS = re.compile(
    r"collections (OrderedDict|Counter)"
    r"|argparse Namespace"
    r"|(builtins|__builtin__) (set|complex)"
    r"|torch (\w+Storage|Size|device|Tensor|b?float\d+\w*|u?int\d+|bool|half|double|long)"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch\._tensor _rebuild_from_type_v2"
    r"|torch\.nn\.parameter Parameter"
    r"|torch\.storage (Untyped|Typed)Storage"
)
NAMING = ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4")
"""Other ways to name an object; torch.save has never used them."""


def read_checkpoint(path: Path, *, zipped: bool) -> Any:
    """What torch.save wrote to `path`, on the CPU.

    Args:
        path: The file.
        zipped: Whether it is a zip archive, as torch writes since 1.6.

    Raises:
        WeightsError: It is damaged, asks for anything but tensors and plain values, or declares
            far more than it holds.
    """
    try:
        if zipped:
            with zipfile.ZipFile(path) as archive:
                _check_program(io.BytesIO(archive.read(_pickle_in(archive, path))), path)
        else:
            with open_file(path) as file:
                _check_legacy(file, path)
        with (
            open_file(path) as file,  # not by its name, which torch would believe
            warnings.catch_warnings(),
            torch.serialization.safe_globals([argparse.Namespace]),
        ):
            warnings.simplefilter("ignore")  # of torch, about its own old formats
            return torch.load(file, map_location="cpu", weights_only=True)
    except WeightsError:
        raise
    except pickle.UnpicklingError:
        raise WeightsError(f"{printable(path)} cannot be read safely; {NO_CODE}") from None
    except Exception as error:  # torch raises a dozen kinds on damaged files
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise WeightsError(
                f"{printable(path)} asks for more memory than there is; use a larger machine, or "
                f"{NO_CODE}"
            ) from None
        reason = printable((str(error) or type(error).__name__).splitlines()[0])[:160]
        raise WeightsError(
            f"{printable(path)} is cut or damaged ({reason}); fetch it again"
        ) from None


def check_archive(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse an archive that would grow far beyond its size.

    Raises:
        WeightsError: It would, or it has too many entries.
    """
    size, declared = path.stat().st_size, sum(entry.file_size for entry in archive.infolist())
    if declared > SWELL * size + SPARE:
        raise WeightsError(
            f"{printable(path)} declares {declared:,} bytes in a file of {size:,}: it is no honest "
            "file of weights"
        )
    if len(archive.infolist()) > MOST_ENTRIES:
        raise WeightsError(f"{printable(path)} has more than {MOST_ENTRIES:,} entries")


def _pickle_in(archive: zipfile.ZipFile, path: Path) -> str:
    check_archive(archive, path)
    names = archive.namelist()
    if any(name.endswith("/constants.pkl") for name in names):
        raise WeightsError(
            f"{printable(path)} is a TorchScript program; {NO_CODE} of its state_dict"
        )
    found = [name for name in names if re.fullmatch(r"[^/]+/data\.pkl", name)]
    if len(found) != 1:
        raise WeightsError(
            f"{printable(path)} is a zip archive, but none of torch.save; unpack it, or {NO_CODE}"
        )
    return found[0]


def _check_legacy(file: IO[bytes], path: Path) -> None:
    magic = _check_program(file, path)
    if magic != LEGACY_MAGIC:
        raise WeightsError(f"{printable(path)} is a Python pickle, but not of torch; {NO_CODE}")
    for _ in range(LEGACY_PICKLES - 1):
        _check_program(file, path)


def _check_program(file: IO[bytes], path: Path) -> object:
    """Read one pickle without running it; returns the last number in it."""
    foreign: dict[str, None] = {}
    number: object = None
    for step, (code, value, _) in enumerate(pickletools.genops(file)):
        if step == MOST_STEPS:
            raise WeightsError(f"{printable(path)} is a program too long for weights; {NO_CODE}")
        if code.name == "GLOBAL" and not HARMLESS.fullmatch(str(value)):
            foreign[str(value).replace(" ", ".")] = None
        elif code.name in NAMING:
            foreign[f"an object named by {code.name}"] = None
        elif isinstance(value, int):
            number = value
    if foreign:
        names = ", ".join(printable(name)[:80] for name in list(foreign)[:3])
        more = " and others" if len(foreign) > 3 else ""
        raise WeightsError(
            f"{printable(path)} holds Python objects ({names}{more}), which could run code; "
            f"{NO_CODE}, or for one that torch.save made of a state_dict"
        )
    return number
