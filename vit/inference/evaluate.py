"""Measures a saved model on pictures with classes or captions, through the predictor of users.

So the top-1 of `vit evaluate` is exactly the one counted from `vit predict` on the same files, and
the captions that it scores are those that `vit predict` writes.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from vit.data.captioning.captions import open_captioned
from vit.data.captioning.lists import find_lists
from vit.data.samples import Sample
from vit.data.sources.label_lists import is_list
from vit.data.sources.opening import Asked, open_labelled, relative, resolve
from vit.errors import ConfigError, DataError, RunError, printable
from vit.evaluation.metrics import Outcomes, summarise
from vit.generation.search import Search
from vit.inference.evaluate_captions import measure_captions
from vit.inference.evaluate_several import check_kind, measure_several
from vit.inference.network import Views
from vit.inference.predictor import Answer, PathLike, Predictor
from vit.settings import make_config, read_settings
from vit.weights.folder import LoadedRun

SPLIT_FILE = "split.json"


def evaluate(
    model: PathLike | LoadedRun,
    data: str | Asked,
    *,
    split: str = "val",
    images: str | None = None,
    device: str | None = None,
    batch_size: int | None = None,
    precision: str = "auto",
    workers: int | None = None,
    merge_tokens: int | None = None,
    patch_size: int | None = None,
    keep_aspect: bool = False,
    search: Search | None = None,
    tta: Views | None = None,
    compile: bool = False,  # noqa: A002
    say: Callable[[str], object] = lambda _note: None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> dict[str, Any]:
    """Scores of `model` on one split of `data`, as plain values that JSON takes; see `measured`.

    Classes are matched by name. Where training held pictures out of `data`, those alone are used.

    Args:
        model: A run folder or any other source of weights with a head, or one that is loaded.
        data: A folder or list of labelled pictures or captions, a built-in set, or an Asked.
        split, images: As for Asked, which has them as well; `val` is the first validation part.
        device, batch_size and so on, up to compile: As for Predictor.
        say, progress: Receive notes; and the pictures done and of how many, after each batch.

    Raises:
        VitError: The model, the data or a setting cannot be used.
    """
    predictor = Predictor(
        model,
        device=device,
        batch_size=batch_size,
        precision=precision,
        workers=workers,
        merge_tokens=merge_tokens,
        patch_size=patch_size,
        keep_aspect=keep_aspect,
        search=search,
        tta=tta,
        compile=compile,
        say=say,
    )
    asked = data if isinstance(data, Asked) else Asked(os.fspath(data), images, split=split)
    samples = find_samples(predictor, model, asked, say)
    return measured(predictor, samples, say, progress, where=asked.data)


def find_samples(
    predictor: Predictor,
    model: PathLike | LoadedRun,
    asked: Asked,
    say: Callable[[str], object],
) -> tuple[Sample, ...]:
    """The pictures that the network of `predictor` is measured on."""
    if predictor.speaker is not None:
        return captioned(model, asked, predictor.classes, say)
    return labelled(model, asked, predictor.classes, say, thresholds=predictor.thresholds)


def measured(
    predictor: Predictor,
    samples: tuple[Sample, ...],
    say: Callable[[str], object],
    progress: Callable[[int, int], object],
    *,
    where: str,
) -> dict[str, Any]:
    """Scores of the pictures that can be read.

    Returns:
        What `summarise` or `summarise_several` says, and `failed`: the pictures that cannot be
        read, which it leaves out. Of a captioner `count`, `loss` and `loss_shuffled` (of a word of
        the captions), what `caption_scores` says, `examples` and `failed`; and with classes what
        `summarise` says, where its loss is `class_loss`.

    Raises:
        DataError: No picture can be read, or no caption suits the decoder.
    """
    if predictor.thresholds is not None:
        scores, failed = measure_several(predictor, samples, progress)
    elif predictor.speaker is None:
        parts, failed = measure(predictor, samples, progress)
        scores = summarise(Outcomes.cat(parts), predictor.classes) if parts else {}
    else:
        scores, failed = measure_captions(
            predictor, predictor.speaker, samples, say=say, progress=progress
        )
    if not scores:
        raise DataError(f"{printable(where)}: {none_measured(failed)}")
    return {**scores, "failed": failed}


def captioned(
    model: PathLike | LoadedRun,
    asked: Asked,
    classes: tuple[str, ...],
    say: Callable[[str], object],
) -> tuple[Sample, ...]:
    """The pictures that a captioner is measured on; `say` receives notes about them.

    Raises:
        ConfigError: A setting is one of lists of classes.
    """
    for name in ("image_column", "label_column", "allow_outside"):
        if value := getattr(asked, name):
            raise ConfigError(f"{name}={value!r}: not for lists of captions; leave it out")
    data, images = asked.data, asked.images
    held_out: list[str] = []
    if not isinstance(model, LoadedRun) and (folder_of(model) / SPLIT_FILE).is_file():
        root = find_lists(data).root if images is None else Path(images)
        held_out = held_out_pictures(folder_of(model), data, root)
    samples, notes = open_captioned(
        data, split=asked.split or "val", images=images, held_out=held_out, classes=classes
    )
    for note in notes:
        say(note)
    return samples


def labelled(
    model: PathLike | LoadedRun,
    asked: Asked,
    classes: tuple[str, ...],
    say: Callable[[str], object],
    *,
    thresholds: tuple[float, ...] | None = None,
) -> tuple[Sample, ...]:
    """The pictures that a classifier is measured on; `say` receives notes about them.

    `thresholds` are those of its classes, where a picture may have several.

    Raises:
        ConfigError: The pictures have several classes, and the network gives each one.
    """

    def held_out(root: Path, there: Collection[str]) -> list[str]:
        ours = None if isinstance(model, LoadedRun) else folder_of(model)
        return [] if ours is None else held_out_pictures(ours, asked.data, root, there)

    full = as_trained(asked, None if isinstance(model, LoadedRun) else folder_of(model))
    full = dataclasses.replace(full, several=None if thresholds is None else True)
    samples, notes = open_labelled(
        full, split=asked.split or "val", classes=classes, held_out=held_out
    )
    for note in notes:
        say(note)
    check_kind(thresholds, samples, asked.data)
    return samples


def as_trained(asked: Asked, run: Path | None) -> Asked:
    """`asked` with what the training of the run folder `run` said of its data, where left out.

    Which folder the pictures are in, and that they may lie outside of it, is true of its own list.
    """
    path = None if run is None else run / "config.yaml"
    if path is None or not path.is_file():
        return asked
    data = make_config(read_settings(path), complete=True).data
    own = os.path.realpath(data.data) == os.path.realpath(asked.data)
    if not own and not is_list(asked.data):
        return asked
    return dataclasses.replace(
        asked,
        images=asked.images or (data.images if own else None),
        image_column=asked.image_column or data.image_column,
        label_column=asked.label_column or data.label_column,
        allow_outside=asked.allow_outside or (own and data.allow_outside),
    )


def none_measured(failed: list[dict[str, str]]) -> str:
    """Why there are no numbers: every picture is among the `failed`."""
    image, error = printable(failed[0]["image"]), printable(failed[0]["error"])
    return f"none of {len(failed)} pictures can be measured; the first is {image}: {error}"


def folder_of(model: PathLike) -> Path:
    """The run folder, also where its file of weights was named."""
    path = Path(model)
    return path.parent if path.is_file() else path


def measure(
    predictor: Predictor, samples: tuple[Sample, ...], progress: Callable[[int, int], object]
) -> tuple[list[Outcomes], list[dict[str, str]]]:
    """Outcomes of the readable pictures, batch by batch, and {"image", "error"} of the others."""
    parts: list[Outcomes] = []
    failed: list[dict[str, str]] = []
    done = 0
    for answers in predictor.batches([sample.path for sample in samples]):
        parts += outcomes(answers, samples[done : done + len(answers)])
        failed += [{"image": a.image, "error": a.error} for a in answers if a.error is not None]
        done += len(answers)
        progress(done, len(samples))
    return parts, failed


def outcomes(answers: list[Answer], samples: tuple[Sample, ...]) -> list[Outcomes]:
    """Outcomes of the readable pictures of one batch: one item, or none where there are none."""
    rows, labels = [], []
    for answer, sample in zip(answers, samples, strict=True):
        if answer.probabilities is not None:
            rows.append(answer.probabilities)
            labels.append(sample.label)
    return [Outcomes.of(torch.stack(rows), torch.tensor(labels))] if rows else []


def held_out_pictures(
    run: Path, data: str, root: Path | None = None, there: Collection[str] = ()
) -> list[str]:
    """Names that the training of `run` held out for validation, if `data` is what it split.

    It is where the folder is the same, or where it has every one of the names: moved or copied.
    Else they are named from where `data` is, and nobody finds them there but by their own files.

    Args:
        run: The run folder.
        data: As for `evaluate`.
        root: The folder that the names are relative to; that of `data` when left out.
        there: The names that are in it; those of files in any case.

    Raises:
        RunError: split.json of the run is damaged.
    """
    path = run / SPLIT_FILE
    if not path.is_file():
        return []
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        names, origin = [os.fspath(name) for name in record["val"]], Path(record["root"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{printable(path)} is damaged ({printable(error)}); restore it") from None
    root = resolve(data)[0] if root is None else root
    known = set(there)
    if root.resolve() == origin or all(n in known or (root / n).is_file() for n in names):
        return names
    # the same files may be named from another folder, such as that of a list
    elsewhere = (relative(str(origin / name), root.resolve()) for name in names)
    return [name for name in elsewhere if not name.startswith("../")]
