"""A trained run as ONNX files, which give the same answers without torch.

A classifier becomes one file, NAME.onnx (classifier.py). A captioner becomes two: NAME.onnx sees,
NAME.decoder.onnx writes (captioner.py). Each is compared with torch before anything is written.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.errors import ConfigError, RunError, printable
from vit.export import captioner, classifier
from vit.export.accuracy import Accuracy, compare
from vit.export.calibration import Pictures, calibration_pictures, validation_samples
from vit.export.graph import MOST_BYTES, as_onnx, check_equal, check_size, libraries, traced, write
from vit.export.halves import halved
from vit.export.options import MAX_DROP, OPSET, Options
from vit.export.quantisation import quantised
from vit.export.staging import data_beside, publish, staged
from vit.runtime.session import Session
from vit.weights.folder import LoadedRun
from vit.weights.loading import load_model, tell

PathLike = str | os.PathLike[str]
Say = Callable[[str], object]

SUFFIX = ".onnx"
DECODER = ".decoder"
TOLERANCES = {"fp32": 1e-4, "fp16": 0.02, "int8": float("inf")}
"""Largest difference to torch on noise; int8 is judged by what it says of pictures."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        files: Their paths and their sizes in bytes.
        difference: Largest difference to torch on noise, as a share of the largest value.
        accuracy: Of the file and of the run, where there were pictures for that.
    """

    files: tuple[tuple[Path, int], ...]
    difference: float
    accuracy: Accuracy | None = None


def export_onnx(
    run: PathLike,
    out: PathLike,
    *,
    overwrite: bool = False,
    say: Say | None = tell,
    **options: Any,
) -> Exported:
    """Write a run as ONNX: a classifier as one file, a captioner as two.

    Args:
        run: Its folder, or of a classifier any other source of weights with a head.
        out: NAME.onnx; the decoder of a captioner becomes NAME.decoder.onnx beside it.
        overwrite: Replace files that exist.
        say: Told what was assumed of weights and found about data; None to hear nothing.
        options: The fields of `vit.export.options.Options`; a captioner takes none.

    Raises:
        ConfigError: The run has what cannot be exported, or an option is impossible.
        RunError: The run or the place to write cannot be used.
        VitError: A library is missing, a graph does not compute what torch does, or the file
            loses more than `max_drop`.
    """
    asked, path = Options(**options), Path(out)
    check_place(path, overwrite=overwrite)
    loaded = load_model(run, say=say)
    if loaded.tokenizer is None:
        with classifier_file(loaded, run, path, asked, say=say, overwrite=overwrite) as made:
            checked, difference, accuracy = made
            return Exported(publish(checked, path), difference, accuracy)
    asked.check_unused("a captioner is exported in fp32 with its usual outputs", "precision")
    if asked.precision != "fp32":
        raise ConfigError(
            f"precision={asked.precision!r}: a captioner is exported in fp32; leave it out"
        )
    return _captioner(loaded, printable(run), path, overwrite=overwrite)


@contextmanager
def classifier_file(
    run: LoadedRun,
    source: PathLike,
    path: Path,
    asked: Options,
    *,
    say: Say | None,
    overwrite: bool = True,
) -> Iterator[tuple[Path, float, Accuracy | None]]:
    """A checked file that is still without its name, its difference to torch, and its accuracy.

    Args:
        run: The network.
        source: Where it comes from.
        path: What the file is to be called.
        asked: How it is made.
        say: Told notes on the data.
        overwrite: Whether weights that lie beside `path` may be replaced.

    Raises:
        VitError: As `export_onnx`.
    """
    hear = say or (lambda _line: None)
    part = classifier.part_of(run, tokens=asked.tokens)
    external = asked.external_data or sum(x.nbytes for x in run.model.parameters()) > MOST_BYTES
    if external and data_beside(path).exists() and not overwrite:
        name = printable(data_beside(path))
        raise RunError(f"{name} exists; choose another name, or add --overwrite")
    samples = validation_samples(
        source, asked.measured_on, run.classes, hear, thresholds=run.thresholds
    )
    pictures = calibration_pictures(asked, run.classes, samples)
    proto = made(part, run, source, asked, pictures)
    with staged(path, proto, external=external) as checked:
        session = Session(checked)
        tolerance = TOLERANCES[asked.precision]
        difference = classifier.check_pictures(part, session, run.preprocessing, tolerance)
        accuracy = compare(run, session, samples) if samples else None
        if accuracy is not None:
            hear(accuracy.line())
            drop = MAX_DROP if asked.max_drop is None else asked.max_drop
            accuracy.check(drop, str(path))
        yield checked, difference, accuracy


def made(part: Any, run: LoadedRun, source: PathLike, asked: Options, pictures: Pictures) -> Any:
    """The whole graph in the precision that was asked for, as an onnx.ModelProto."""
    opset = asked.opset or OPSET
    proto = traced(part, opset)
    if asked.precision == "fp16":
        proto = halved(proto)
    classifier.with_pixels(proto, run.preprocessing)
    metadata = classifier.metadata_of(
        run, printable(source), precision=asked.precision, opset=opset
    )
    onnx = libraries()
    if asked.precision == "int8":
        check_size(part)
        onnx.checker.check_model(proto, full_check=True)
        content = quantised(proto.SerializeToString(), pictures, dynamic=asked.dynamic)
        proto = onnx.load_from_string(content)
        metadata["opset"] = str(next(x.version for x in proto.opset_import if not x.domain))
        metadata["calibration"] = json.dumps(
            {"dynamic": True}
            if asked.dynamic
            else {"dynamic": False, "data": printable(asked.calibration), "samples": len(pictures)},
            ensure_ascii=False,
        )
    onnx.helper.set_model_props(proto, dict(sorted(metadata.items())))
    return proto


def _captioner(run: LoadedRun, source: str, path: Path, *, overwrite: bool) -> Exported:
    paths = {"encoder": path, "decoder": decoder_beside(path)}
    check_place(paths["decoder"], overwrite=overwrite)
    parts, metadata = captioner.parts_of(run), captioner.metadata_of(run, source)
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


def check_place(path: Path, *, overwrite: bool, suffix: str = SUFFIX) -> None:
    """Refuse, before any work is done, a file that could not be written at the end.

    Raises:
        RunError: It has another suffix, exists and `overwrite` is off, or its folder is missing.
    """
    name = printable(path)
    if path.suffix != suffix:
        raise RunError(
            f"{name}: name it {suffix}, such as {printable(path.stem or 'model')}{suffix}"
        )
    if path.exists() and not path.is_file():
        raise RunError(f"{name} is no ordinary file; give another name")
    if path.exists() and not overwrite:
        raise RunError(f"{name} exists; choose another name, or add --overwrite")
    if not path.parent.is_dir():
        raise RunError(f"{name}: there is no folder {printable(path.parent)}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise RunError(f"{name}: the folder {printable(path.parent)} cannot be written")
