"""Is the exported file the model that was evaluated? Three ways to the same answers, compared.

by hand      the saved preprocessing and the network in torch, picture by picture
predictor    what `vit predict RUN` says, in float32
file         what the exported file says, without torch
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from vit.errors import DataError, RunError, VitError, WeightsError, printable
from vit.export.answering import Answers, Runner, Said, by_file, by_hand, by_predictor
from vit.export.causes import causes, metadata_differences
from vit.export.pictures import pictures_for
from vit.export.verdict import HAND, LIMITS, PREDICTOR, Compared, Limits, Verification
from vit.nearby import did_you_mean
from vit.runtime.opening import EXPORTED, runner_like
from vit.weights.loading import load_model
from vit.weights.sources import locate

PathLike = str | os.PathLike[str]


def verify(
    run: PathLike | None,
    exported: PathLike | None = None,
    images: Sequence[str] | None = None,
    *,
    engine: str | None = None,
    batch_size: int | None = None,
    say: Callable[[str], object] = lambda _note: None,
) -> Verification:
    """Compare what a run, the predictor and an exported file say of the same pictures.

    Args:
        run: A run folder, or of a classifier any other source of weights with a head; the one in
            the metadata of `exported` when left out.
        exported: X.onnx or X.xml; the run alone is compared with the predictor when left out.
        images: Paths; when left out up to 50 validation pictures of the run's data, or drawn ones
            where there are none.
        engine: What computes the file: onnx or openvino; by its suffix when left out.
        batch_size: Of the runner.
        say: Receives which pictures were taken.

    Raises:
        VitError: The run, the file or the engine cannot be used.
        DataError: No picture has an answer of every way.
    """
    runner = None if exported is None else opened(exported, engine, batch_size)
    source = source_of(exported, runner) if run is None else run
    loaded = load_model(source, say=say)
    with pictures_for(Path(source), loaded, images, say) as paths:
        ways = {HAND: by_hand(loaded, paths), PREDICTOR: by_predictor(loaded, paths)}
        if runner is None:
            return verdict(paths, ways, None, [])
        file = os.path.basename(os.fspath(exported or ""))
        ways[file] = by_file(runner, paths, loaded.classes)
        precision = precision_of(runner)
        found = metadata_differences(loaded, runner)
        agrees = compare(file, paths, ways[HAND], ways[file], LIMITS[precision]).agrees
        if not agrees and {*runner.classes} == {*loaded.classes}:  # by other names nothing compares
            found += causes(loaded, runner, paths, ways[HAND], ways[file])
        return verdict(paths, ways, precision, found)


def opened(exported: PathLike, engine: str | None, batch_size: int | None) -> Runner:
    """The runner of an exported file.

    Raises:
        VitError: It cannot be opened.
    """
    suffix = Path(exported).suffix.lower()
    engine = engine or EXPORTED.get(suffix)
    if engine is None and not os.path.exists(exported):
        remedy = did_you_mean(exported) or "; give X.onnx or X.xml, or a run folder"
        raise WeightsError(f"{printable(exported)} is not there{remedy}")
    if engine is None:
        raise WeightsError(
            f"{printable(exported)} is no exported file: give X.onnx or X.xml, or a run folder"
        )
    return runner_like(exported, engine=engine, batch_size=batch_size)


def source_of(exported: PathLike | None, runner: Runner | None) -> str:
    """The run folder, or other source of weights, that an exported file names.

    Raises:
        RunError: It names none, or one that is not here.
    """
    if exported is None or runner is None:
        raise RunError("neither a run nor an exported file: give one of them")
    source = runner.metadata.get("source_run")
    if source is None:
        raise RunError(f"{printable(exported)} names no run; give it with --run RUN")
    try:
        locate(source)
    except VitError:
        raise RunError(
            f"{printable(exported)} was exported from {printable(source)}, which is not here; give "
            "the run with --run RUN"
        ) from None
    return source


def precision_of(runner: Runner) -> str:
    """What the file says that it computes in; a captioner is always of float32.

    Raises:
        WeightsError: It computes in what this version does not know.
    """
    precision = runner.metadata.get("precision", "fp32")
    if precision not in LIMITS:
        raise WeightsError(
            f"precision={printable(precision)!r} in the metadata: expected {', '.join(LIMITS)}; "
            "export it again"
        )
    return precision


def verdict(
    images: Sequence[str], ways: dict[str, Answers], precision: str | None, found: list[str]
) -> Verification:
    """All ways compared with the first; that of a file has the limits of its `precision`."""
    usual = LIMITS["fp32"]
    limits = LIMITS[precision or "fp32"]
    compared = tuple(
        compare(name, images, ways[HAND], said, usual if name in (HAND, PREDICTOR) else limits)
        for name, said in ways.items()
    )
    if not compared[1].agrees:
        found = [*found, "the predictor differs from its own parts: please report it"]
    failures = failures_of(images, ways)
    return Verification(
        images=len(images) - len({failure["image"] for failure in failures}),
        paths=compared,
        failures=failures,
        causes=tuple(found),
        precision=precision,
    )


def compare(
    name: str, images: Sequence[str], hand: Answers, said: Answers, limits: Limits
) -> Compared:
    """How far `said` is from what was computed by `hand`, on the pictures that both answered.

    Raises:
        DataError: There is none.
    """
    rows = [
        (one.agreement(other), one.difference(other), path)
        for path, one, other in zip(images, hand, said, strict=True)
        if isinstance(one, Said) and isinstance(other, Said)
    ]
    if not rows:
        error = hand[0] if isinstance(hand[0], str) else said[0]
        raise DataError(
            f"none of {len(images)} pictures can be compared; the first, {printable(images[0])}: "
            f"{printable(error)}"
        )
    same, apart, paths = zip(*rows, strict=True)
    most = max(apart)
    worst = paths[apart.index(most)] if most > 0 else None
    return Compared(name, len(rows), sum(same) / len(rows), most, worst, limits)


def failures_of(images: Sequence[str], ways: dict[str, Answers]) -> tuple[dict[str, str], ...]:
    """Pictures without an answer, and which way says so; once where all say the same."""
    failures = []
    for place, image in enumerate(images):
        errors = {name: said[place] for name, said in ways.items() if isinstance(said[place], str)}
        if len(errors) == len(ways) and len(set(errors.values())) == 1:
            errors = {"all": next(iter(errors.values()))}
        failures += [
            {"image": image, "path": name, "error": str(error)} for name, error in errors.items()
        ]
    return tuple(failures)
