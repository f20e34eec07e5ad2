"""Evaluates a saved model on labeled or captioned images, with a Predictor.

So the top-1 of `vit evaluate` is exactly the one counted from the output of `vit predict` on the
same files, and the captions that are scored are those that `vit predict` writes.

The loss of a captioner is measured twice, as in the validation of its training:

    loss           mean cross-entropy of a token of the images' first captions
    loss_shuffled  the same captions, each paired with another image

The two are equal for a decoder that ignores the images.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from vit.config.parser import make_config, read_settings
from vit.data.archives import relative
from vit.data.captions.caption_ids import CaptionIds
from vit.data.dataset_types import NO_LABEL, Sample
from vit.data.multilabel_targets import MultiHot, has_multilabel, labels_of
from vit.data.sources.dataset_spec import DatasetSpec, resolve_folder
from vit.data.sources.list_files import is_list
from vit.data.sources.open_dataset import open_eval_split
from vit.errors import ConfigError, DataError, RunError, printable
from vit.evaluation.caption_metrics import caption_scores
from vit.evaluation.classification_metrics import Outcomes, summarize
from vit.evaluation.multilabel_metrics import summarize_multilabel
from vit.generation.caption_likelihood import ignores_image
from vit.generation.generation_config import Search
from vit.inference.caption_generator import CaptionGenerator
from vit.inference.model_runner import Views
from vit.inference.predictor import ImageOutput, PathLike, Predictor
from vit.output.prediction_results import unended_note
from vit.precision import autocast
from vit.text import plural
from vit.weights.saved_model import LoadedRun

EXAMPLES = 5
SPLIT_FILE = "split.json"


def evaluate(
    model: PathLike | LoadedRun,
    data: str | DatasetSpec,
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
    notify: Callable[[str], object] = lambda _note: None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> dict[str, Any]:
    """Evaluate `model` on one split of `data`; the metrics are JSON values, see `measure`.

    Classes are matched by name. If the training held out images of `data`, only those are used.

    Args:
        model: A run folder or any other source of weights with a head, or one that is loaded.
        data: A folder or list of labelled images or captions, a built-in dataset, or a DatasetSpec.
        split, images: As in DatasetSpec, which replaces them; `val` is the first validation split.
        device, batch_size, ..., compile: As for Predictor.
        notify: Called with notes.
        progress: Called with the images done and their total after each batch.

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
        notify=notify,
    )
    spec = (
        data if isinstance(data, DatasetSpec) else DatasetSpec(os.fspath(data), images, split=split)
    )
    samples = load_samples(predictor, model, spec, notify)
    return measure(predictor, samples, notify, progress, where=spec.data)


def evaluate_held_out(run: PathLike) -> dict[str, Any]:
    """Evaluate a run folder on the validation images of its training; see `evaluate`."""
    config = make_config(read_settings(Path(run) / "config.yaml"), complete=True)
    spec = dataclasses.replace(DatasetSpec.from_config(config.data), split="val")
    device = config.run.device
    return evaluate(run, spec, device=None if device == "auto" else device)


def load_samples(
    predictor: Predictor,
    model: PathLike | LoadedRun,
    spec: DatasetSpec,
    notify: Callable[[str], object],
) -> tuple[Sample, ...]:
    """The images that `predictor` is evaluated on."""
    if predictor.caption_generator is not None:
        return load_captioned_samples(model, spec, predictor.classes, notify)
    return load_labeled_samples(
        model, spec, predictor.classes, notify, thresholds=predictor.thresholds
    )


def load_labeled_samples(
    model: PathLike | LoadedRun,
    spec: DatasetSpec,
    classes: tuple[str, ...],
    notify: Callable[[str], object],
    *,
    thresholds: tuple[float, ...] | None = None,
) -> tuple[Sample, ...]:
    """Open the labeled images of a split; `thresholds` are those of a multi-label model.

    Raises:
        ConfigError: The images are multi-label and the model is not.
    """
    full = dataclasses.replace(spec, multilabel=None if thresholds is None else True)
    samples = _load_split(model, full, classes, notify)
    check_label_kind(thresholds, samples, spec.data)
    return samples


def load_captioned_samples(
    model: PathLike | LoadedRun,
    spec: DatasetSpec,
    classes: tuple[str, ...],
    notify: Callable[[str], object],
) -> tuple[Sample, ...]:
    """Open the captioned images of a split.

    Raises:
        ConfigError: A class column is named, and the model has no classes.
    """
    if spec.label_column is not None and not classes:
        raise ConfigError(
            f"label_column={spec.label_column!r}: the model has no classes; leave it out"
        )
    full = dataclasses.replace(spec, multilabel=False, captions=True, labels=bool(classes))
    return _load_split(model, full, classes, notify)


def _load_split(
    model: PathLike | LoadedRun,
    spec: DatasetSpec,
    classes: tuple[str, ...],
    notify: Callable[[str], object],
) -> tuple[Sample, ...]:
    """The images of a split; if training held out images of the same data, only those."""
    run = None if isinstance(model, LoadedRun) else run_folder_of(model)

    def held_out(root: Path, known: Collection[str]) -> list[str]:
        return [] if run is None else held_out_images(run, spec.data, root, known)

    full = with_training_settings(spec, run)
    samples, notes = open_eval_split(
        full, split=full.split or "val", classes=classes, held_out=held_out
    )
    for note in notes:
        notify(note)
    return samples


def with_training_settings(spec: DatasetSpec, run: Path | None) -> DatasetSpec:
    """`spec` with the dataset settings of the training in run folder `run` where it has none.

    The image folder, and whether images may lie outside of it, are taken for the same list only.
    """
    path = None if run is None else run / "config.yaml"
    if path is None or not path.is_file():
        return spec
    data = make_config(read_settings(path), complete=True).data
    own = os.path.realpath(data.data) == os.path.realpath(spec.data)
    if not own and not is_list(spec.data):
        return spec
    return dataclasses.replace(
        spec,
        images=spec.images or (data.images if own else None),
        image_column=spec.image_column or data.image_column,
        label_column=spec.label_column or data.label_column,
        allow_outside=spec.allow_outside or (own and data.allow_outside),
    )


def held_out_images(
    run: Path, data: str, root: Path | None = None, known: Collection[str] = ()
) -> list[str]:
    """Names of the images that the training of `run` held out from `data` for validation.

    `data` is what it split if the folder is the same, or has all of the names (moved or copied).
    Else the names are made relative to `data`, where only the same files match.

    Args:
        run: The run folder.
        data: As for `evaluate`.
        root: Folder that the names are relative to; that of `data` by default.
        known: Names in it, besides its files.

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
    root = resolve_folder(data)[0] if root is None else root
    names_there = set(known)
    if root.resolve() == origin or all(n in names_there or (root / n).is_file() for n in names):
        return names
    # the same files may be named from another folder, such as that of a list
    elsewhere = (relative(str(origin / name), root.resolve()) for name in names)
    return [name for name in elsewhere if not name.startswith("../")]


def run_folder_of(model: PathLike) -> Path:
    """The run folder of a source, which may name its weights file."""
    path = Path(model)
    return path.parent if path.is_file() else path


def check_label_kind(thresholds: object, samples: tuple[Sample, ...], where: str) -> None:
    """Raise if the images are multi-label and the model is not; the converse is fine.

    Args:
        thresholds: Thresholds of a multi-label model; else None.
        samples: The images.
        where: The dataset, for the message.

    Raises:
        ConfigError: The labels do not suit the model.
    """
    if thresholds is None and has_multilabel(samples):
        raise ConfigError(
            f"{printable(where)}: images have several classes, or none, and this network gives "
            "each one; train it with --task multilabel, or give data with one class an image"
        )


def measure(
    predictor: Predictor,
    samples: tuple[Sample, ...],
    notify: Callable[[str], object],
    progress: Callable[[int, int], object],
    *,
    where: str,
) -> dict[str, Any]:
    """Metrics of the readable images.

    Returns:
        The metrics of `summarize` or `summarize_multilabel`, and `failed`, the unreadable images,
        which they leave out. Of a captioner `count`, `loss`, `loss_shuffled`, the metrics of
        `caption_scores`, `examples` and `failed`; with classes also those of `summarize`, whose
        loss becomes `class_loss`.

    Raises:
        DataError: No image can be read, or no caption fits into the decoder.
    """
    if predictor.thresholds is not None:
        scores, failed = measure_multilabel(predictor, samples, progress)
    elif predictor.caption_generator is None:
        parts, failed = measure_classes(predictor, samples, progress)
        scores = summarize(Outcomes.cat(parts), predictor.classes) if parts else {}
    else:
        scores, failed = measure_captions(
            predictor, predictor.caption_generator, samples, notify=notify, progress=progress
        )
    if not scores:
        raise DataError(f"{printable(where)}: {no_readable_images(failed)}")
    return {**scores, "failed": failed}


def measure_classes(
    predictor: Predictor, samples: tuple[Sample, ...], progress: Callable[[int, int], object]
) -> tuple[list[Outcomes], list[dict[str, str]]]:
    """Outcomes of the readable images, by batch, and the {"image", "error"} of the others."""
    parts: list[Outcomes] = []
    failed: list[dict[str, str]] = []
    done = 0
    for outputs in predictor.batches([sample.path for sample in samples]):
        parts += batch_outcomes(outputs, samples[done : done + len(outputs)])
        failed += failures(outputs)
        done += len(outputs)
        progress(done, len(samples))
    return parts, failed


def batch_outcomes(outputs: list[ImageOutput], samples: tuple[Sample, ...]) -> list[Outcomes]:
    """Outcomes of the readable images of a batch: a list of one item, empty if none is."""
    rows, labels = [], []
    for output, sample in zip(outputs, samples, strict=True):
        if output.probabilities is not None:
            rows.append(output.probabilities)
            labels.append(sample.label)
    return [Outcomes.of(torch.stack(rows), torch.tensor(labels))] if rows else []


def measure_multilabel(
    predictor: Predictor, samples: tuple[Sample, ...], progress: Callable[[int, int], object]
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Multi-label metrics of the readable images, empty if none is, and the errors of the others.

    Holds all probabilities in memory: 8 bytes an image and class.
    """
    assert predictor.thresholds is not None, "an image may have several classes"
    rows, kept, done = [], [], 0
    failed: list[dict[str, str]] = []
    for outputs in predictor.batches([sample.path for sample in samples]):
        for output, sample in zip(outputs, samples[done : done + len(outputs)], strict=True):
            if output.probabilities is not None:
                rows.append(output.probabilities)
                kept.append(labels_of(sample))
        failed += failures(outputs)
        done += len(outputs)
        progress(done, len(samples))
    if not rows:
        return {}, failed
    targets = MultiHot(kept, len(predictor.classes))[torch.arange(len(kept))]
    scores = summarize_multilabel(
        torch.stack(rows), targets, predictor.classes, predictor.thresholds
    )
    return scores, failed


@torch.inference_mode()
def measure_captions(
    predictor: Predictor,
    caption_generator: CaptionGenerator,
    samples: Sequence[Sample],
    *,
    notify: Callable[[str], object],
    progress: Callable[[int, int], object],
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Caption metrics of the readable images, empty if none is, and the errors of the others.

    Args:
        predictor: Predictor of a captioner.
        caption_generator: Caption generator of the predictor.
        samples: Images with captions.
        notify: Called with warnings about the numbers.
        progress: Called with the images done and their total after each batch.

    Raises:
        DataError: No caption fits into the decoder, or one cannot be tokenised.
    """
    kept, ids = drop_long_captions(caption_generator, samples, notify)
    accumulator = CaptionScores(caption_generator, kept, ids)
    failed: list[dict[str, str]] = []
    done = 0
    for outputs in predictor.batches(sample.path for sample in kept):
        with autocast(predictor.precision, predictor.device):
            accumulator.add(outputs, done)
        failed += failures(outputs)
        done += len(outputs)
        progress(done, len(kept))
    if not accumulator.texts:
        return {}, failed
    scores = accumulator.scores(predictor.classes)
    for note in score_notes(scores, accumulator.unended):
        notify(note)
    return scores, failed


def drop_long_captions(
    caption_generator: CaptionGenerator, samples: Sequence[Sample], notify: Callable[[str], object]
) -> tuple[tuple[Sample, ...], CaptionIds]:
    """Samples with a caption that fits into the decoder, and those captions as tokens.

    Raises:
        DataError: No caption fits, or a caption cannot be tokenised.
    """
    most = caption_generator.decoder.max_length
    ids = CaptionIds([sample.captions for sample in samples], caption_generator.tokenizer, most)
    kept = tuple(sample for place, sample in enumerate(samples) if ids.count(place))
    if not kept:
        raise DataError(f"no caption has at most {most} tokens, the length of this decoder")
    if ids.too_long:
        note = f"left {plural(ids.too_long, 'caption')} of more than {most} tokens out of the loss"
        lost = len(samples) - len(kept)
        notify(f"{note}, and {plural(lost, 'image')} with no other" if lost else note)
        ids = CaptionIds([sample.captions for sample in kept], caption_generator.tokenizer, most)
    return kept, ids


class CaptionScores:
    """Accumulates the captions, losses and classes of a captioner over batches.

    Args:
        caption_generator: Caption generator of the predictor.
        samples: Images, each with a caption that fits into the decoder.
        ids: Their captions as tokens.
    """

    def __init__(
        self, caption_generator: CaptionGenerator, samples: Sequence[Sample], ids: CaptionIds
    ) -> None:
        self.caption_generator, self.samples, self.ids = caption_generator, samples, ids
        self.sums = {"loss": 0.0, "loss_shuffled": 0.0}
        self.tokens = dict.fromkeys(self.sums, 0)
        self.indices: list[int] = []
        self.texts: list[str] = []
        self.unended = 0
        self.outcomes: list[Outcomes] = []

    def add(self, outputs: Sequence[ImageOutput], first: int) -> None:
        """Add one batch, whose first image is sample `first`."""
        pairs = [(first + n, output) for n, output in enumerate(outputs) if output.captions]
        memories = [output.memory for _, output in pairs if output.memory is not None]
        indices = [index for index, _ in pairs]
        half = len(self.samples) // 2  # as in training: each caption with one other image
        for name, shift in (("loss", 0), ("loss_shuffled", half)):
            chosen = [((index + shift) % len(self.samples), 0) for index in indices]
            loss, tokens = self.caption_generator.loss(memories, self.ids.padded(chosen))
            self.sums[name] += loss
            self.tokens[name] += tokens
        self.indices += indices
        self.texts += [output.captions[0].text for _, output in pairs]
        self.unended += sum(not output.captions[0].ended for _, output in pairs)
        self._add_classes([(self.samples[index].label, output) for index, output in pairs])

    def _add_classes(self, pairs: Sequence[tuple[int, ImageOutput]]) -> None:
        rows = [
            (label, output.probabilities)
            for label, output in pairs
            if label != NO_LABEL and output.probabilities is not None
        ]
        if rows:
            labels = torch.tensor([label for label, _ in rows])
            self.outcomes.append(Outcomes.of(torch.stack([row for _, row in rows]), labels))

    def scores(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """All metrics, with some examples; at least one image was added."""
        references = [self.samples[index].captions for index in self.indices]
        scores: dict[str, Any] = {"count": len(self.texts)}
        if self.outcomes:
            scores |= summarize(Outcomes.cat(self.outcomes), classes)
            scores["class_loss"] = scores.pop("loss")
        scores |= {name: total / self.tokens[name] for name, total in self.sums.items()}
        scores |= caption_scores(self.texts, references)
        return {**scores, "count": len(self.texts), "examples": self._examples()}

    def _examples(self) -> list[dict[str, str]]:
        """Images spread over the dataset, with the generated caption and the first reference."""
        shown = min(EXAMPLES, len(self.texts))
        return [
            {
                "image": self.samples[self.indices[number]].path,
                "caption": self.texts[number],
                "reference": self.samples[self.indices[number]].captions[0],
            }
            for number in (index * len(self.texts) // shown for index in range(shown))
        ]


def score_notes(scores: dict[str, Any], unended: int) -> list[str]:
    """Warnings about the metrics, for the user."""
    notes = []
    right, wrong = scores["loss"], scores["loss_shuffled"]
    if scores["count"] > 1 and ignores_image(right, wrong):
        notes.append(
            f"warning: the decoder hardly uses the images: its loss is {right:.3f}, and "
            f"{wrong:.3f} with other images"
        )
    if unended:
        notes.append(unended_note(unended, scores["count"]))
    return notes


def failures(outputs: Sequence[ImageOutput]) -> list[dict[str, str]]:
    """{"image", "error"} of each image without an output."""
    return [
        {"image": output.image, "error": output.error}
        for output in outputs
        if output.error is not None
    ]


def no_readable_images(failed: list[dict[str, str]]) -> str:
    """Error message where every image is among the `failed`."""
    image, error = printable(failed[0]["image"]), printable(failed[0]["error"])
    return f"none of {len(failed)} images can be measured; the first is {image}: {error}"
