"""Diagnosis of an exported file whose outputs differ from those of its run.

Suspects are tested: the run is evaluated with another mean, crop, ... until it agrees with the
file. If none does, images that need no resizing, or have one colour, isolate the part that differs.
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
from vit.errors import printable
from vit.export.reference_outputs import Answers, ModelOutputs, Runner, by_file, by_reference_code
from vit.export.sample_images import scene
from vit.weights.saved_model import LoadedRun

MOST = 8
"""Images on which suspects are tried, those of the largest difference."""
EXPLAINED = 0.05
"""Share of the difference that may be left where its cause is found."""
COLOURS = ("black", "white", "gray", "red", "lime", "blue")
STATISTICS = {
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "the usual": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "no": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
SHARES = (1.0, 0.95, 0.9, 0.875, 0.85, 0.8)


def metadata_differences(run: LoadedRun, runner: Runner) -> list[str]:
    """What the file says of itself and the run does not, one sentence each."""
    found = []
    ours, theirs = run.preprocessing.to_dict(), runner.preprocessing.to_dict()
    for name, value in ours.items():
        if theirs[name] != value:
            found.append(f"its metadata say {name} {_plain(theirs[name])}, the run {_plain(value)}")
    found += _thresholds(run.thresholds, getattr(runner, "thresholds", None))
    if runner.classes != run.classes:
        found.append(_classes(run.classes, runner.classes))
    return found


def _plain(value: Any) -> str:
    listed = isinstance(value, list | tuple)
    return ", ".join(f"{number:g}" for number in value) if listed else printable(value)


def _thresholds(ours: tuple[float, ...] | None, theirs: tuple[float, ...] | None) -> Iterator[str]:
    if (ours is None) != (theirs is None):
        own, other = ("one class" if of is None else "several classes" for of in (ours, theirs))
        yield f"its metadata say {other} an image, the run {own}"
    elif ours != theirs:
        yield "its metadata say other thresholds of the classes than the run"


def _classes(ours: Sequence[str], theirs: Sequence[str]) -> str:
    if len(ours) != len(theirs):
        return f"its metadata name other classes: {len(theirs)} of them, the run {len(ours)}"
    how = "the classes in another order" if sorted(ours) == sorted(theirs) else "other classes"
    place = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1)
    return (
        f"its metadata name {how}: number {place} is "
        f"{printable(theirs[place])}, in the run {printable(ours[place])}"
    )


def diagnose(
    run: LoadedRun, runner: Runner, images: Sequence[str], hand: Answers, file: Answers
) -> list[str]:
    """Likely causes of a difference, one sentence each.

    Args:
        run: The run.
        runner: Of the file.
        images: Paths.
        hand: What the run says of them.
        file: What the file says of them.
    """
    worst = [path for _, path in sorted(_apart(images, hand, file), reverse=True)[:MOST]]
    known = dict(zip(images, file, strict=True))
    told = [known[path] for path in worst]
    before = largest_difference(by_reference_code(run, worst), told)
    left = []
    for suspect in suspects(run.preprocessing, runner.preprocessing):
        supposed = replace(run, preprocessing=suspect.preprocessing)
        said = by_reference_code(supposed, worst, reversed_channels=suspect.reversed_channels)
        left.append((largest_difference(said, told), suspect.text))
    least, text = min(left, key=itemgetter(0))
    if least <= EXPLAINED * before:
        return [f"it answers as with {text}"]
    return [_permuted(hand, file) or _part(run, runner, before)]


def _apart(images: Sequence[str], hand: Answers, file: Answers) -> Iterator[tuple[float, str]]:
    for path, one, other in zip(images, hand, file, strict=True):
        if isinstance(one, ModelOutputs) and isinstance(other, ModelOutputs):
            yield one.difference(other), path


def largest_difference(first: Answers, second: Answers) -> float:
    """The largest difference; without end where only one has an answer."""
    found = 0.0
    for one, other in zip(first, second, strict=True):
        if isinstance(one, ModelOutputs) and isinstance(other, ModelOutputs):
            found = max(found, one.difference(other))
        elif isinstance(one, ModelOutputs) or isinstance(other, ModelOutputs):
            return float("inf")
    return found


@dataclass(frozen=True)
class Suspect:
    """What a file may do instead of the run's preprocessing."""

    text: str
    preprocessing: Preprocessing
    reversed_channels: bool = False


def suspects(own: Preprocessing, said: Preprocessing) -> Iterator[Suspect]:
    """Preprocessings that are not the run's `own`; first what the file has `said`."""
    if said != own:
        yield Suspect("the preprocessing in its metadata, which is not the run's", said)
    for name, (mean, std) in STATISTICS.items():
        if (mean, std) != (own.mean, own.std):
            text = f"{name} mean and deviation ({_plain(mean)}; {_plain(std)}), where the run has "
            text += f"{_plain(own.mean)}; {_plain(own.std)}"
            yield Suspect(text, replace(own, mean=mean, std=std))
    for share in SHARES:
        if share != own.crop_share:
            text = f"crop_share {share:g}, where the run has {own.crop_share:g}"
            yield Suspect(text, replace(own, crop_share=share))
    for resize in get_args(Resize):
        if resize != own.resize:
            yield Suspect(f"resize {resize}", replace(own, resize=resize))
    for other in get_args(Interpolation):
        if other != own.interpolation:
            yield Suspect(f"interpolation {other}", replace(own, interpolation=other))
    yield Suspect("red and blue exchanged", own, reversed_channels=True)


def _permuted(hand: Answers, file: Answers) -> str | None:
    """Whether the file gives the run's probabilities in another order."""
    pairs = [
        (one.probabilities, other.probabilities)
        for one, other in zip(hand, file, strict=True)
        if isinstance(one, ModelOutputs) and isinstance(other, ModelOutputs)
    ]
    ours, theirs = (np.stack(rows, axis=1) for rows in zip(*pairs, strict=True))
    if not len(ours):
        return None
    limit = EXPLAINED * float(np.abs(ours - theirs).max())
    order: list[int] = []
    for row in ours:  # one at a time: a square of thousands of classes is too much
        apart = np.abs(theirs - row).max(axis=1)
        order.append(int(apart.argmin()))
        if apart[order[-1]] > limit:
            return None
    if len(set(order)) < len(order):
        return None
    moved = sum(place != number for number, place in enumerate(order))
    return f"its outputs are in another order: {moved} of {len(order)} classes changed places"


def _part(run: LoadedRun, runner: Runner, before: float) -> str:
    """Which part differs, told by images that leave others out."""
    height, width = (int(side / run.preprocessing.crop_share) for side in _size(run))
    with tempfile.TemporaryDirectory(prefix="vit-verify-") as folder:
        plain, exact = [], [str(Path(folder) / "exact.png")]
        Image.fromarray(scene(width, height, 0)).save(exact[0])
        for colour in COLOURS:
            plain.append(str(Path(folder) / f"{colour}.png"))
            Image.new("RGB", (width, height), colour).save(plain[-1])
        apart = [
            largest_difference(by_reference_code(run, paths), by_file(runner, paths, run.classes))
            for paths in (plain, exact)
        ]
    if max(apart) <= EXPLAINED * before:
        return (
            f"images that already have {width} x {height} pixels get the same answers: it "
            "resizes otherwise, or cuts another part out of larger ones"
        )
    if apart[0] <= EXPLAINED * before:
        return (
            "images of a single colour get the same answers, and others do not: it resizes or "
            "cuts otherwise, or turns images"
        )
    return (
        "images of a single colour, which no resizing changes, get other answers too: its "
        "weights or its normalisation are not the run's; export it again if the run was trained on"
    )


def _size(run: LoadedRun) -> tuple[int, int]:
    return run.preprocessing.image_size
