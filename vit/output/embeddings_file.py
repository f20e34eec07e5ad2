"""Image embeddings as .npy or .parquet, one row per image in the order of the list."""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from vit.atomic_files import open_atomic
from vit.errors import ConfigError, VitError, WeightsError
from vit.text import printable

if TYPE_CHECKING:
    import numpy.typing as npt

    from vit.output.resumable_output import Block

LIBRARY = "pip install 'vit-toolkit[parquet]'"
SUFFIXES = (".npy", ".parquet")
GROUP_BYTES = 16_000_000


def check_embeddings(path: str) -> None:
    """Check the suffix, and that pyarrow is installed for .parquet."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"embeddings={printable(path)}: name it .npy or .parquet")
    if suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise VitError(f"embeddings={printable(path)}: pyarrow is not installed: {LIBRARY}")


def encode_vectors(vectors: "Iterable[npt.ArrayLike | None]", dim: int) -> bytes:
    """Encode vectors as float32; missing ones as NaN."""
    import numpy as np

    pieces = []
    for vector in vectors:
        row = np.full(dim, np.nan) if vector is None else np.asarray(vector)
        if row.shape != (dim,):
            raise WeightsError(f"an embedding has the shape {row.shape}, and not ({dim},)")
        pieces.append(row.astype("<f4").tobytes())
    return b"".join(pieces)


def write_embeddings(
    path: Path, blocks: "Iterable[Block]", images: Sequence[str], dim: int
) -> None:
    """Write the vectors of all blocks to a .npy of shape (images, dim), or to a .parquet."""
    with open_atomic(path) as file:
        if path.suffix.lower() == ".parquet":
            _write_parquet(file, blocks, images, dim)
            return
        import numpy as np

        shape = {"descr": "<f4", "fortran_order": False, "shape": (len(images), dim)}
        np.lib.format.write_array_header_1_0(file, shape)
        file.writelines(block.vectors for block in blocks)


def _write_parquet(
    file: IO[bytes], blocks: "Iterable[Block]", images: Sequence[str], dim: int
) -> None:
    """Columns image (bytes that are not UTF-8 as escapes), embedding (null for failures), error."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    vectors = pa.list_(pa.float32())  # of a fixed size, pyarrow could not read back a null
    names = {"image": pa.string(), "embedding": vectors, "error": pa.string()}
    with pq.ParquetWriter(file, pa.schema(names)) as writer:
        for group in _groups(blocks, max(1, GROUP_BYTES // (4 * dim))):
            first = group[0].first
            rows = np.frombuffer(b"".join(block.vectors for block in group), "<f4").reshape(-1, dim)
            errors: list[str | None] = [None] * len(rows)
            for block in group:
                for index, reason in block.errors:
                    errors[block.first - first + index] = printable(reason)
            valid = np.array([error is None for error in errors])
            ends = np.append(0, np.cumsum(valid * dim)).astype(np.int32)
            column = pa.ListArray.from_arrays(ends, rows[valid].ravel(), mask=pa.array(~valid))
            paths = images[first : first + len(rows)]
            text = [path.encode("utf-8", "backslashreplace").decode() for path in paths]
            writer.write_batch(
                pa.record_batch(
                    [pa.array(text), column, pa.array(errors, pa.string())], names=[*names]
                )
            )


def _groups(blocks: "Iterable[Block]", images: int) -> "Iterator[list[Block]]":
    """Lists of blocks with at least so many images together; the last one may have fewer."""
    group: list[Block] = []
    for block in blocks:
        group.append(block)
        if block.first + block.images - group[0].first >= images:
            yield group
            group = []
    if group:
        yield group
