"""Vectors of images in a file, a row an image in the order of the list: .npy or .parquet.

Rows are written as they are made, as plain float32; a .npy is that with a head, a .parquet is made
from it at the end, because nobody can go on writing one after a kill.
"""

import importlib.util
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vit.errors import ConfigError, VitError, WeightsError, printable
from vit.output.resumable_output import not_written

LIBRARY = "pip install 'vit-toolkit[parquet]'"
SUFFIXES = (".npy", ".parquet")
GROUP_BYTES = 16_000_000

Vector = npt.NDArray[np.float32]


def check_embeddings(path: str) -> None:
    """Refuse a name that says no format, and one whose library is missing.

    Raises:
        VitError: It is so.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"embeddings={printable(path)}: name it .npy or .parquet")
    if suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise VitError(f"embeddings={printable(path)}: pyarrow is not installed: {LIBRARY}")


def head(path: Path, count: int, dim: int) -> bytes:
    """What the file begins with before its rows: `count` vectors of `dim` numbers."""
    if path.suffix.lower() != ".npy":
        return b""
    text = io.BytesIO()
    shape = {"descr": "<f4", "fortran_order": False, "shape": (count, dim)}
    np.lib.format.write_array_header_1_0(text, shape)
    return text.getvalue()


def rows(vectors: Iterable[npt.ArrayLike | None], dim: int) -> bytes:
    """Vectors as bytes; NaN in place of one that is missing.

    Raises:
        WeightsError: One has another width.
    """
    pieces = []
    for vector in vectors:
        row = np.full(dim, np.nan) if vector is None else np.asarray(vector)
        if row.shape != (dim,):
            raise WeightsError(f"an embedding has the shape {row.shape}, and not ({dim},)")
        pieces.append(row.astype("<f4").tobytes())
    return b"".join(pieces)


def write_parquet(
    source: Path,
    out: Path,
    dim: int,
    images: Sequence[str],
    failures: Iterable[tuple[int, str]],
) -> None:
    """Columns image, embedding (null where there is none) and error, from the rows in `source`.

    Args:
        source: float32 rows, of all `images`.
        out: Replaced when it is whole.
        dim: Numbers in a row.
        images: Paths; bytes that are not UTF-8 become backslash escapes.
        failures: (number of the image, reason), in order.

    Raises:
        RunError: The disk is full.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    vectors = pa.list_(pa.float32())  # of a fixed size, pyarrow could not read back a null
    names = {"image": pa.string(), "embedding": vectors, "error": pa.string()}
    size = max(1, GROUP_BYTES // (4 * dim))
    beside = out.with_name(f".{out.name}.tmp")
    try:
        with open(source, "rb") as file, pq.ParquetWriter(beside, pa.schema(names)) as writer:
            for first, errors in _groups(len(images), size, failures):
                some = images[first : first + size]
                flat = np.fromfile(file, dtype="<f4", count=len(some) * dim)
                there = np.array([error is None for error in errors])
                ends = np.append(0, np.cumsum(there * dim)).astype(np.int32)
                values = flat.reshape(-1, dim)[there].ravel()
                column = pa.ListArray.from_arrays(ends, values, mask=pa.array(~there))
                words = [name.encode("utf-8", "backslashreplace").decode() for name in some]
                writer.write_batch(
                    pa.record_batch(
                        [pa.array(words), column, pa.array(errors, pa.string())], names=[*names]
                    )
                )
        os.replace(beside, out)
    except OSError as error:
        raise not_written(out, error) from None
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _groups(
    count: int, size: int, failures: Iterable[tuple[int, str]]
) -> Iterator[tuple[int, list[str | None]]]:
    """First number and errors of each group of rows."""
    waiting = iter(failures)
    following = next(waiting, None)
    for first in range(0, count, size):
        errors: list[str | None] = [None] * min(size, count - first)
        while following is not None and following[0] < first + len(errors):
            errors[following[0] - first] = printable(following[1])
            following = next(waiting, None)
        yield first, errors
