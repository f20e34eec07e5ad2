"""Diagnosis of an exported file whose outputs differ from those of its run.

The run is evaluated with other preprocessing (mean, crop, ...) until it agrees with the file. If it
never does, images that need no resizing, or have one colour, isolate the part that differs.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
from PIL import Image

from vit.data.preprocessing import Interpolation, Preprocessing, Resize
from vit.export.reference_outputs import ModelOutputs, Outputs, Runner, by_file, by_reference_code
from vit.export.sample_images import scene
from vit.text import printable
from vit.weights.saved_model import LoadedRun

MAX_IMAGES = 8
"""Number of images that are evaluated, those of the largest difference."""
EXPLAINED = 0.05
"""Share of the difference that may remain if the cause is found."""
COLOURS = ("black", "white", "gray", "red", "lime", "blue")
STATISTICS = {
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "the usual": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "no": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
SHARES = (1.0, 0.95, 0.9, 0.875, 0.85, 0.8)


def metadata_differences(run: LoadedRun, runner: Runner) -> list[str]:
    """Differences between the metadata of the file and the run, one sentence each."""
    found = []
    ours, theirs = run.preprocessing.to_dict(), runner.preprocessing.to_dict()
    for name in {**ours, **theirs}:
        value, other = ours.get(name), theirs.get(name)
        if other != value:
            found.append(f"its metadata say {name} {_text(other)}, the run {_text(value)}")
    found += _threshold_differences(run.thresholds, getattr(runner, "thresholds", None))
    own_calibration, other = run.calibration, getattr(runner, "calibration", None)
    if other is not None and other != own_calibration:
        own = "none"
        if own_calibration is not None:
            own = f"one with temperature {own_calibration.temperature:g}"
        found.append(
            f"its metadata have a calibration with temperature {other.temperature:g}, the run "
            f"{own}: export it again"
        )
    if runner.classes != run.classes:
        found.append(_class_difference(run.classes, runner.classes))
    return found


def _text(value: Any) -> str:
    listed = isinstance(value, list | tuple)
    return ", ".join(f"{number:g}" for number in value) if listed else printable(value)


def _threshold_differences(
    ours: tuple[float, ...] | None, theirs: tuple[float, ...] | None
) -> Iterator[str]:
    if (ours is None) != (theirs is None):
        own, other = ("one class" if of is None else "several classes" for of in (ours, theirs))
        yield f"its metadata say {other} an image, the run {own}"
    elif ours != theirs:
        yield "its metadata say other thresholds of the classes than the run"


def _class_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    if len(ours) != len(theirs):
        return f"its metadata name other classes: {len(theirs)} of them, the run {len(ours)}"
    how = "the classes in another order" if sorted(ours) == sorted(theirs) else "other classes"
    index = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1)
    return (
        f"its metadata name {how}: number {index} is "
        f"{printable(theirs[index])}, in the run {printable(ours[index])}"
    )


def diagnose(
    run: LoadedRun, runner: Runner, images: Sequence[str], reference: Outputs, file: Outputs
) -> list[str]:
    """Likely causes of a difference, one sentence each."""
    differences = sorted(
        (
            (one.difference(other), path)
            for path, one, other in zip(images, reference, file, strict=True)
            if isinstance(one, ModelOutputs) and isinstance(other, ModelOutputs)
        ),
        reverse=True,
    )
    worst = [path for _, path in differences[:MAX_IMAGES]]
    by_path = dict(zip(images, file, strict=True))
    expected = [by_path[path] for path in worst]
    before = largest_difference(by_reference_code(run, worst), expected)
    remaining = []
    for change in preprocessing_changes(run.preprocessing, runner.preprocessing):
        changed = replace(run, preprocessing=change.preprocessing)
        found = by_reference_code(changed, worst, reversed_channels=change.reversed_channels)
        remaining.append((largest_difference(found, expected), change.text))
    least, text = min(remaining, key=itemgetter(0))
    if least <= EXPLAINED * before:
        return [f"it answers as with {text}"]
    return [permutation_cause(reference, file) or _differing_part(run, runner, before)]


def largest_difference(first: Outputs, second: Outputs) -> float:
    """The largest difference; infinite if only one of both has outputs."""
    found = 0.0
    for one, other in zip(first, second, strict=True):
        if isinstance(one, ModelOutputs) and isinstance(other, ModelOutputs):
            found = max(found, one.difference(other))
        elif isinstance(one, ModelOutputs) or isinstance(other, ModelOutputs):
            return float("inf")
    return found


@dataclass(frozen=True)
class PreprocessingChange:
    """Preprocessing that a file may have instead of the run's."""

    text: str
    preprocessing: Preprocessing
    reversed_channels: bool = False


def preprocessing_changes(
    own: Preprocessing, declared: Preprocessing
) -> Iterator[PreprocessingChange]:
    """Common changes of the run's `own` preprocessing; first the one that the file declares."""
    if declared != own:
        text = "the preprocessing in its metadata, which is not the run's"
        yield PreprocessingChange(text, declared)
    for name, (mean, std) in STATISTICS.items():
        if (mean, std) != (own.mean, own.std):
            text = f"{name} mean and deviation ({_text(mean)}; {_text(std)}), where the run has "
            text += f"{_text(own.mean)}; {_text(own.std)}"
            yield PreprocessingChange(text, replace(own, mean=mean, std=std))
    for share in SHARES:
        if share != own.crop_share:
            text = f"crop_share {share:g}, where the run has {own.crop_share:g}"
            yield PreprocessingChange(text, replace(own, crop_share=share))
    for resize in get_args(Resize):
        if resize != own.resize:
            yield PreprocessingChange(f"resize {resize}", replace(own, resize=resize))
    for other in get_args(Interpolation):
        if other != own.interpolation:
            yield PreprocessingChange(f"interpolation {other}", replace(own, interpolation=other))
    yield PreprocessingChange("red and blue exchanged", own, reversed_channels=True)


def permutation_cause(reference: Outputs, file: Outputs) -> str | None:
    """The cause if the file has the run's probabilities in another order; else None."""
    pairs = [
        (one.probabilities, other.probabilities)
        for one, other in zip(reference, file, strict=True)
        if isinstance(one, ModelOutputs) and isinstance(other, ModelOutputs)
    ]
    ours, theirs = (np.stack(rows, axis=1) for rows in zip(*pairs, strict=True))
    if not len(ours):
        return None
    limit = EXPLAINED * float(np.abs(ours - theirs).max())
    order: list[int] = []
    for row in ours:  # one at a time: a square of thousands of classes is too much
        differences = np.abs(theirs - row).max(axis=1)
        order.append(int(differences.argmin()))
        if differences[order[-1]] > limit:
            return None
    if len(set(order)) < len(order):
        return None
    moved = sum(index != number for number, index in enumerate(order))
    return f"its outputs are in another order: {moved} of {len(order)} classes changed places"


def _differing_part(run: LoadedRun, runner: Runner, before: float) -> str:
    """The part that differs, isolated by images that bypass the others."""
    size, share = run.preprocessing.image_size, run.preprocessing.crop_share
    height, width = (int(side / share) for side in size)
    with tempfile.TemporaryDirectory(prefix="vit-verify-") as folder:
        plain, exact = [], [str(Path(folder) / "exact.png")]
        Image.fromarray(scene(width, height, 0)).save(exact[0])
        for colour in COLOURS:
            plain.append(str(Path(folder) / f"{colour}.png"))
            Image.new("RGB", (width, height), colour).save(plain[-1])
        plain_difference, exact_difference = (
            largest_difference(by_reference_code(run, paths), by_file(runner, paths, run.classes))
            for paths in (plain, exact)
        )
    if max(plain_difference, exact_difference) <= EXPLAINED * before:
        return (
            f"images that already have {width} x {height} pixels get the same answers: it "
            "resizes otherwise, or cuts another part out of larger ones"
        )
    if plain_difference <= EXPLAINED * before:
        return (
            "images of a single colour get the same answers, and others do not: it resizes or "
            "cuts otherwise, or turns images"
        )
    return (
        "images of a single colour, which no resizing changes, get other answers too: its "
        "weights or its normalisation are not the run's; export it again if the run was trained on"
    )
