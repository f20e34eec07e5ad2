"""Local and remote files through fsspec (s3://...): image lists, images, and result files."""

import csv
import io
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from vit.atomic_files import open_atomic
from vit.errors import DataError, RunError, VitError
from vit.output.output_file import resolve_link
from vit.output.prediction_results import FORMATS, Layout, Prediction, byte_order_mark
from vit.text import printable

if TYPE_CHECKING:
    import pyarrow as pa

COLUMN = "image"
LISTS = (".parquet", ".jsonl", ".csv")
ROW_GROUP = 1 << 14  # rows of a parquet file that are in memory together


def is_url(name: str) -> bool:
    """Whether fsspec, and not the operating system, opens `name`."""
    return "://" in name


def read_list(path: str) -> list[str]:
    """Names of images: the column `image` of a .parquet, .jsonl or .csv file, in its order."""
    name, ending = printable(path), os.path.splitext(path)[1].lower()
    if ending not in LISTS:
        raise DataError(f"{name}: a list of images is called {', '.join(LISTS)}")
    try:
        with _opened(path, "rb") as file:
            rows = _columns(file, ending)
    except ImportError as error:
        raise missing(error) from None
    except (OSError, ValueError) as error:  # of pyarrow and json too
        raise DataError(f"{name} is no readable list: {printable(error)}") from None
    if not rows:
        raise DataError(f"{name} is an empty list; give one image a row")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, str) or not row:
            raise DataError(f"{name}, row {number}: there is no text in the column {COLUMN!r}")
    return [str(row) for row in rows]


def _columns(file: IO[bytes], ending: str) -> list[object]:
    """The column of each row; None where a row has none."""
    if ending == ".parquet":
        import pyarrow.parquet as pq

        found = pq.ParquetFile(file)
        if COLUMN not in found.schema_arrow.names:
            return [None]
        column: list[object] = found.read([COLUMN])[COLUMN].to_pylist()
        return column
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        if ending == ".csv":
            return [row.get(COLUMN) for row in csv.DictReader(text)]
        records = [json.loads(line) for line in text if line.strip()]
    return [record.get(COLUMN) if isinstance(record, dict) else None for record in records]


@contextmanager
def _opened(path: str, mode: str) -> Iterator[Any]:
    if not is_url(path):
        with open(path, mode) as file:
            yield file
        return
    import fsspec

    with fsspec.open(path, mode) as file:
        yield file


def missing(error: ImportError) -> VitError:
    """The error for a missing library."""
    return VitError(f"{error.name} is not installed: pip install 'vit-toolkit[ray]'")


def check_out(out: str, style: str, *, overwrite: bool) -> None:
    """Check, before any work is done, that a URL can be written and the libraries are installed.

    Files on this disk are checked by `vit.output.output_file.check_output`.
    """
    try:
        if style == "parquet":
            import pyarrow.parquet  # noqa: F401
        if is_url(out):
            import fsspec

            system, path = fsspec.core.url_to_fs(out)
            if system.exists(path) and not overwrite:
                raise RunError(f"{printable(out)} exists; choose another name, or add --overwrite")
    except ImportError as error:
        raise missing(error) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{printable(out)} cannot be written: {printable(error)}") from None


def write_rows(out: str, style: str, layout: Layout, rows: Iterable[Prediction]) -> None:
    """Write all `rows`, one after the other, to a file that appears when it is complete.

    Args:
        rows: In the order of the file.
    """
    if not is_url(out):
        with open_atomic(resolve_link(out)) as file:
            _write(file, style, layout, rows)
        return
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(out)
        with system.transaction, system.open(path, "wb") as file:
            _write(file, style, layout, rows)
    except (OSError, ValueError) as error:
        if isinstance(error, VitError):
            raise
        raise RunError(f"{printable(out)} could not be written: {printable(error)}") from None


def _write(file: IO[bytes], style: str, layout: Layout, rows: Iterable[Prediction]) -> None:
    if style != "parquet":
        header, line = FORMATS[style](layout)
        mark = byte_order_mark(layout) if style == "csv" else ""
        file.write((mark + header).encode())
        for row in rows:
            file.write(line(row).encode("utf-8", "backslashreplace"))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(layout)
    rows = iter(rows)
    with pq.ParquetWriter(file, schema) as writer:
        while some := list(itertools.islice(rows, ROW_GROUP)):
            cells = [_cells(row, layout) for row in some]
            writer.write_table(pa.Table.from_pylist(cells, schema=schema))


def _schema(layout: Layout) -> "pa.Schema":
    """The columns of CSV, with their types."""
    import pyarrow as pa

    texts = [(f"label_{place}", f"score_{place}") for place in range(1, layout.top_k + 1)]
    pairs = [*texts, *layout.caption_columns]
    columns = [pa.field(COLUMN, pa.string(), nullable=False)]
    for text, score in pairs:
        columns += [pa.field(text, pa.string()), pa.field(score, pa.float64())]
    return pa.schema([*columns, pa.field("error", pa.string())])


def _cells(row: Prediction, layout: Layout) -> dict[str, Any]:
    """One row of a parquet file; bytes of a name that are not UTF-8 are written as escapes."""
    cells: dict[str, Any] = {COLUMN: _utf8(row.image)}
    for place, (label, score) in enumerate(row.predictions, 1):
        cells |= {f"label_{place}": _utf8(label), f"score_{place}": score}
    for (text, score_name), caption in zip(layout.caption_columns, row.captions, strict=False):
        cells |= {text: _utf8(caption.text), score_name: caption.score}
    return cells if row.error is None else cells | {"error": _utf8(row.error)}


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


@contextmanager
def fetched(images: Sequence[str]) -> Iterator[tuple[list[str], dict[int, str]]]:
    """Local paths of `images`, and errors by index; downloads are deleted after the `with`."""
    with tempfile.TemporaryDirectory(prefix="vit-") as folder:
        paths, errors = [*images], {}
        for number, image in enumerate(images):
            if is_url(image):
                paths[number] = os.path.join(folder, str(number))
                reason = _fetch(image, paths[number])
                if reason is not None:
                    errors[number] = reason
        yield paths, errors


def _fetch(url: str, path: str) -> str | None:
    """Download `url` to `path`; return the reason if that fails."""
    try:
        import fsspec

        system, inside = fsspec.core.url_to_fs(url)
        system.get_file(inside, path)
    except FileNotFoundError:
        return "no such file"
    except (OSError, ValueError, ImportError) as error:
        return f"cannot be fetched: {printable(error)}"
    return None
