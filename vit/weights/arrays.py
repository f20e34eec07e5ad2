"""numpy's archives (.npz), as JAX projects publish weights: numbers only, sizes checked first."""

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from vit.errors import WeightsError, printable
from vit.weights.contents import NO_CODE, content_of
from vit.weights.pickles import check_archive


def is_numpy(path: Path) -> bool:
    """Whether the zip archive `path` holds numpy arrays and nothing else."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Arrays of a .npz file by name: numbers with a fraction as float32, whole ones as they are.

    Raises:
        WeightsError: The file is missing, damaged, of another kind, or holds something else than
            finite numbers.
    """
    if content_of(path) != "zip":
        raise WeightsError(f"{printable(path)} is no .npz file")
    try:
        with zipfile.ZipFile(path) as archive:
            check_archive(archive, path)
            entries = {entry.filename: entry for entry in archive.infolist()}
            if len(entries) != len(archive.infolist()):
                raise WeightsError(f"{printable(path)} has two arrays of one name")
            return {
                name.removesuffix(".npy"): _read_array(archive, entry, path)
                for name, entry in entries.items()
            }
    except WeightsError:
        raise
    except Exception as error:  # of zipfile, zlib and numpy, a dozen kinds
        reason = printable((str(error) or type(error).__name__).splitlines()[0])[:160]
        raise WeightsError(
            f"{printable(path)} is cut or damaged ({reason}); fetch it again"
        ) from None


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> NDArray[Any]:
    where = f"{printable(path)}: {printable(entry.filename)}"
    with archive.open(entry) as file:
        first = npy.read_magic(file) == (1, 0)
        shape, _, kind = (npy.read_array_header_1_0 if first else npy.read_array_header_2_0)(file)
    if kind.hasobject:
        raise WeightsError(f"{where} holds Python objects, which could run code; {NO_CODE}")
    if math.prod(shape) * kind.itemsize > entry.file_size:
        raise ValueError(f"{printable(entry.filename)} is shorter than it says")
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
        raise WeightsError(
            f"{where} has values that are not finite; its training broke down, or the file is "
            "damaged"
        )
    return array
