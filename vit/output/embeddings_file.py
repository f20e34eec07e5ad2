"""Image embeddings as .npy or .parquet, one row per image in the order of the list.

Rows are appended as float32; .npy is these rows after a header. A .parquet is converted from them
at the end, because a parquet file cannot be appended to after a kill.
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
from vit.output.resumable_output import write_error

LIBRARY = "pip install 'vit-toolkit[parquet]'"
SUFFIXES = (".npy", ".parquet")
GROUP_BYTES = 16_000_000

Vector = npt.NDArray[np.float32]


def check_embeddings(path: str) -> None:
    """Check the suffix, and that pyarrow is installed for .parquet.

    Raises:
        VitError: The suffix is unknown, or pyarrow is missing.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"embeddings={printable(path)}: name it .npy or .parquet")
    if suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise VitError(f"embeddings={printable(path)}: pyarrow is not installed: {LIBRARY}")


def npy_header(path: Path, count: int, dim: int) -> bytes:
    """Header of a .npy of shape (count, dim); empty for .parquet."""
    if path.suffix.lower() != ".npy":
        return b""
    text = io.BytesIO()
    shape = {"descr": "<f4", "fortran_order": False, "shape": (count, dim)}
    np.lib.format.write_array_header_1_0(text, shape)
    return text.getvalue()


def encode_rows(vectors: Iterable[npt.ArrayLike | None], dim: int) -> bytes:
    """Encode vectors as float32; missing ones as NaN.

    Raises:
        WeightsError: A vector has another width.
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
    """Convert rows to columns image, embedding (null for failures) and error.

    Args:
        source: float32 rows of all `images`.
        out: Replaced atomically.
        dim: Width of a row.
        images: Paths; bytes that are not UTF-8 become backslash escapes.
        failures: (index of the image, reason), in order.

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
        raise write_error(out, error) from None
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _groups(
    count: int, size: int, failures: Iterable[tuple[int, str]]
) -> Iterator[tuple[int, list[str | None]]]:
    """Yield the first index and the errors of each row group."""
    waiting = iter(failures)
    following = next(waiting, None)
    for first in range(0, count, size):
        errors: list[str | None] = [None] * min(size, count - first)
        while following is not None and following[0] < first + len(errors):
            errors[following[0] - first] = printable(following[1])
            following = next(waiting, None)
        yield first, errors
