"""A file of a graph that is checked before it gets its name, with its weights beside it if needed.

NAME.onnx        the graph, with weights of less than 2 GB
NAME.onnx.data   the weights of larger ones, which the graph names
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vit.export.graph import libraries
from vit.weights.tensorfile import naming, write_safely

DATA = ".data"
SMALL = 1024  # bytes of tensors that stay in the graph


def data_beside(path: Path) -> Path:
    """Where the weights of the graph `path` are, if they are not in it."""
    return path.with_name(path.name + DATA)


@contextmanager
def staged(path: Path, proto: Any, *, external: bool) -> Iterator[Path]:
    """`proto` in a folder of its own beside `path`, under the same name, checked by onnx's checker.

    Args:
        path: Where it is to be.
        proto: An onnx.ModelProto.
        external: Whether its weights are a file of their own.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    onnx, size = libraries(), sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    with naming(path, size):
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with naming(path, size):
            onnx.save_model(
                proto,
                folder / path.name,
                save_as_external_data=external,
                location=path.name + DATA,
                size_threshold=SMALL,
            )
        onnx.checker.check_model(folder / path.name, full_check=True)
        yield folder / path.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(checked: Path, path: Path) -> tuple[tuple[Path, int], ...]:
    """Give a staged graph its name.

    A crash in between leaves no graph with the weights of another one.

    Returns:
        What was written, and its bytes.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    old, new = data_beside(path), data_beside(checked)
    written = []
    if old.exists() or new.exists():
        with naming(path):
            path.unlink(missing_ok=True)
    if new.exists():
        written.append((old, new.stat().st_size))
        write_safely(old, new.replace)
    elif old.exists():
        with naming(old):
            old.unlink()
    written.insert(0, (path, checked.stat().st_size))
    write_safely(path, checked.replace)
    return tuple(written)
