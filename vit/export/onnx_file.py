"""A trained run as ONNX files, which give the same answers without torch.

A captioner becomes two: NAME.onnx sees, NAME.decoder.onnx writes. Each is compared with torch
before anything is written; see vit/export/captioner.py for what goes in and out.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from vit.errors import ConfigError, RunError, printable
from vit.export.captioner import metadata_of, parts_of
from vit.export.graph import as_onnx, check_equal, check_size, write
from vit.weights.folder import load_run

SUFFIX = ".onnx"
DECODER = ".decoder"
PRECISIONS = ("fp32",)


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        files: Paths of the graphs, and their sizes in bytes.
        difference: Largest difference to torch on random inputs, as a share of the largest value.
    """

    files: tuple[tuple[Path, int], ...]
    difference: float


def export_onnx(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    precision: str = "fp32",
    overwrite: bool = False,
) -> Exported:
    """Write a captioning run as two ONNX files.

    Args:
        run: Its folder.
        out: NAME.onnx; the decoder becomes NAME.decoder.onnx beside it.
        precision: fp32.
        overwrite: Replace files that exist.

    Raises:
        ConfigError: The run writes no captions, or has what cannot be exported.
        RunError: The run or the place to write cannot be used.
        VitError: A library is missing, or a graph does not compute what torch does.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
    path = Path(out)
    paths = {"encoder": path, "decoder": decoder_beside(path)}
    for place in paths.values():
        check_place(place, overwrite=overwrite)
    loaded = load_run(run)
    if loaded.tokenizer is None:
        raise ConfigError(
            f"{printable(run)} writes no captions, and only captioners can be exported so far; "
            "give a run of vit train --task caption"
        )
    parts, metadata = parts_of(loaded), metadata_of(loaded, printable(run))
    for part in parts:
        check_size(part)
    contents, difference = {}, 0.0
    for part in parts:
        content = as_onnx(part, metadata[part.name]).SerializeToString()
        difference = max(difference, check_equal(part, content))
        contents[part.name] = content
    for name, content in contents.items():
        write(paths[name], content)
    sizes = tuple((paths[name], len(content)) for name, content in contents.items())
    return Exported(sizes, difference)


def decoder_beside(path: Path) -> Path:
    """Where the decoder of the encoder `path` is."""
    return path.with_name(f"{path.stem}{DECODER}{path.suffix}")


def check_place(path: Path, *, overwrite: bool) -> None:
    """Refuse, before any work is done, a file that could not be written at the end.

    Raises:
        RunError: It has another suffix, exists and `overwrite` is off, or its folder is missing.
    """
    name = printable(path)
    if path.suffix != SUFFIX:
        raise RunError(
            f"{name}: name it {SUFFIX}, such as {printable(path.stem or 'model')}{SUFFIX}"
        )
    if path.exists() and not path.is_file():
        raise RunError(f"{name} is no ordinary file; give another name")
    if path.exists() and not overwrite:
        raise RunError(f"{name} exists; choose another name, or add --overwrite")
    if not path.parent.is_dir():
        raise RunError(f"{name}: there is no folder {printable(path.parent)}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise RunError(f"{name}: the folder {printable(path.parent)} cannot be written")
