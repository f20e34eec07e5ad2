"""Measures a saved model on images with classes or captions, through the predictor of users.

So the top-1 of `vit evaluate` is exactly the one counted from `vit predict` on the same files, and
the captions that it scores are those that `vit predict` writes.

Measures a network whose images may have several classes, through the predictor of users.
Measures a captioner on images with captions: what it writes, and how it likes what is true.

    loss           mean cross-entropy of a word of the images' first captions
    loss_shuffled  the same captions, each against another image

A decoder that does not look at the images has two losses that are equal. Both, and the scores of
the captions, are those of the validation after a training's epoch.
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
from vit.data.captions.caption_dataset import open_captioned
from vit.data.captions.caption_ids import CaptionIds
from vit.data.captions.caption_lists import find_lists
from vit.data.dataset_types import NO_LABEL, Sample
from vit.data.multilabel_targets import MultiHot, has_multilabel, labels_of
from vit.data.sources.dataset_spec import DatasetSpec, resolve_folder
from vit.data.sources.image_list import is_list
from vit.data.sources.open_dataset import open_eval_split
from vit.errors import ConfigError, DataError, RunError, printable
from vit.evaluation.caption_metrics import caption_scores
from vit.evaluation.classification_metrics import Outcomes, summarise
from vit.evaluation.multilabel_metrics import summarise_multilabel
from vit.generation.caption_likelihood import is_blind
from vit.generation.generation_config import Search
from vit.inference.caption_generator import CaptionGenerator
from vit.inference.model_runner import Views
from vit.inference.predictor import ImageOutput, PathLike, Predictor
from vit.output.prediction_results import unended_note
from vit.precision import autocast
from vit.text import plural
from vit.weights.saved_model import LoadedRun


def check_label_kind(thresholds: object, samples: tuple[Sample, ...], where: str) -> None:
    """Refuse images with several classes for a network that gives each one class.

    Images with one class are fine for a network that names several.

    Args:
        thresholds: Of the network; None where an image has one class.
        samples: The images.
        where: The data.

    Raises:
        ConfigError: It is so.
    """
    if thresholds is None and has_multilabel(samples):
        raise ConfigError(
            f"{printable(where)}: images have several classes, or none, and this network gives "
            "each one; train it with --task multilabel, or give data with one class an image"
        )


def measure_multilabel(
    predictor: Predictor, samples: tuple[Sample, ...], progress: Callable[[int, int], object]
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Scores of the readable images, none where there are none, and {"image", "error"} of others.

    All probabilities are held: 8 bytes an image and class.
    """
    assert predictor.thresholds is not None, "an image may have several classes"
    rows, kept, done = [], [], 0
    failed: list[dict[str, str]] = []
    for answers in predictor.batches([sample.path for sample in samples]):
        for answer, sample in zip(answers, samples[done : done + len(answers)], strict=True):
            if answer.probabilities is not None:
                rows.append(answer.probabilities)
                kept.append(labels_of(sample))
            if answer.error is not None:
                failed.append({"image": answer.image, "error": answer.error})
        done += len(answers)
        progress(done, len(samples))
    if not rows:
        return {}, failed
    targets = MultiHot(kept, len(predictor.classes))[torch.arange(len(kept))]
    scores = summarise_multilabel(
        torch.stack(rows), targets, predictor.classes, predictor.thresholds
    )
    return scores, failed


EXAMPLES = 5


class Told:
    """What was said of the images so far.

    Args:
        speaker: Of the captioner.
        samples: The images, each with a caption that the decoder has places for.
        ids: Their captions as tokens.
    """

    def __init__(
        self, caption_generator: CaptionGenerator, samples: Sequence[Sample], ids: CaptionIds
    ) -> None:
        self.caption_generator, self.samples, self.ids = caption_generator, samples, ids
        self.sums = {"loss": 0.0, "loss_shuffled": 0.0}
        self.words = dict.fromkeys(self.sums, 0)
        self.places: list[int] = []
        self.texts: list[str] = []
        self.unended = 0
        self.outcomes: list[Outcomes] = []

    def add(self, answers: Sequence[ImageOutput], first: int) -> None:
        """Count one batch, whose first image is sample `first`."""
        told = [(first + place, a) for place, a in enumerate(answers) if a.captions]
        memories = [answer.memory for _, answer in told if answer.memory is not None]
        places = [place for place, _ in told]
        away = len(self.samples) // 2  # as in training: each caption against one other image
        for name, shift in (("loss", 0), ("loss_shuffled", away)):
            chosen = [((place + shift) % len(self.samples), 0) for place in places]
            loss, words = self.caption_generator.loss(memories, self.ids.padded(chosen))
            self.sums[name] += loss
            self.words[name] += words
        self.places += places
        self.texts += [answer.captions[0].text for _, answer in told]
        self.unended += sum(not answer.captions[0].ended for _, answer in told)
        self._classes([(self.samples[place].label, answer) for place, answer in told])

    def _classes(self, told: Sequence[tuple[int, ImageOutput]]) -> None:
        rows = [
            (label, answer.probabilities)
            for label, answer in told
            if label != NO_LABEL and answer.probabilities is not None
        ]
        if rows:
            labels = torch.tensor([label for label, _ in rows])
            self.outcomes.append(Outcomes.of(torch.stack([row for _, row in rows]), labels))

    def scores(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """All numbers, of at least one image, and some examples."""
        references = [self.samples[place].captions for place in self.places]
        found: dict[str, Any] = {"count": len(self.texts)}
        if self.outcomes:
            found |= summarise(Outcomes.cat(self.outcomes), classes)
            found["class_loss"] = found.pop("loss")
        found |= {name: total / self.words[name] for name, total in self.sums.items()}
        found |= caption_scores(self.texts, references)
        return {**found, "count": len(self.texts), "examples": self._examples()}

    def _examples(self) -> list[dict[str, str]]:
        """Some images from all over the set, with what was said and the first reference."""
        shown = min(EXAMPLES, len(self.texts))
        return [
            {
                "image": self.samples[self.places[number]].path,
                "caption": self.texts[number],
                "reference": self.samples[self.places[number]].captions[0],
            }
            for number in (index * len(self.texts) // shown for index in range(shown))
        ]


@torch.inference_mode()
def measure_captions(
    predictor: Predictor,
    caption_generator: CaptionGenerator,
    samples: Sequence[Sample],
    *,
    notify: Callable[[str], object],
    progress: Callable[[int, int], object],
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Scores of the readable images, empty without any, and {"image", "error"} of the others.

    Args:
        predictor: Of a captioner.
        speaker: Its own.
        samples: Images with captions.
        say: Receives what a user should know of the numbers.
        progress: Receives the images done, and of how many, after each batch.

    Raises:
        DataError: No caption is short enough for the decoder, or one cannot be tokenised.
    """
    kept, ids = short_enough(caption_generator, samples, notify)
    told = Told(caption_generator, kept, ids)
    failed: list[dict[str, str]] = []
    done = 0
    for answers in predictor.batches(sample.path for sample in kept):
        with autocast(predictor.precision, predictor.device):
            told.add(answers, done)
        failed += [{"image": a.image, "error": a.error} for a in answers if a.error is not None]
        done += len(answers)
        progress(done, len(kept))
    if not told.texts:
        return {}, failed
    scores = told.scores(predictor.classes)
    for note in score_notes(scores, told.unended):
        notify(note)
    return scores, failed


def short_enough(
    caption_generator: CaptionGenerator, samples: Sequence[Sample], notify: Callable[[str], object]
) -> tuple[tuple[Sample, ...], CaptionIds]:
    """The samples with a caption that the decoder has places for, and those captions as tokens.

    Raises:
        DataError: There are none, or a caption cannot be tokenised.
    """
    most = caption_generator.decoder.most_tokens
    ids = CaptionIds([sample.captions for sample in samples], caption_generator.tokenizer, most)
    kept = tuple(sample for place, sample in enumerate(samples) if ids.count(place))
    if not kept:
        raise DataError(f"no caption has at most {most} tokens, the places of this decoder")
    if ids.too_long:
        said = f"left {plural(ids.too_long, 'caption')} of more than {most} tokens out of the loss"
        lost = len(samples) - len(kept)
        notify(f"{said}, and {plural(lost, 'image')} with no other" if lost else said)
        ids = CaptionIds([sample.captions for sample in kept], caption_generator.tokenizer, most)
    return kept, ids


def score_notes(scores: dict[str, Any], unended: int) -> list[str]:
    """What a user should know of the numbers."""
    notes = []
    right, wrong = scores["loss"], scores["loss_shuffled"]
    if scores["count"] > 1 and is_blind(right, wrong):
        notes.append(
            f"warning: the decoder hardly looks at the images: its loss is {right:.3f}, and "
            f"{wrong:.3f} with other images"
        )
    if unended:
        notes.append(unended_note(unended, scores["count"]))
    return notes


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
    """Scores of `model` on one split of `data`, as plain values that JSON takes; see `measured`.

    Classes are matched by name. Where training held images out of `data`, those alone are used.

    Args:
        model: A run folder or any other source of weights with a head, or one that is loaded.
        data: A folder or list of labelled images or captions, a built-in set, or an Asked.
        split, images: As for Asked, which has them as well; `val` is the first validation part.
        device, batch_size and so on, up to compile: As for Predictor.
        say, progress: Receive notes; and the images done and of how many, after each batch.

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
    asked = (
        data if isinstance(data, DatasetSpec) else DatasetSpec(os.fspath(data), images, split=split)
    )
    samples = find_samples(predictor, model, asked, notify)
    return measured(predictor, samples, notify, progress, where=asked.data)


def find_samples(
    predictor: Predictor,
    model: PathLike | LoadedRun,
    asked: DatasetSpec,
    notify: Callable[[str], object],
) -> tuple[Sample, ...]:
    """The images that the network of `predictor` is measured on."""
    if predictor.caption_generator is not None:
        return load_captioned_samples(model, asked, predictor.classes, notify)
    return load_labeled_samples(
        model, asked, predictor.classes, notify, thresholds=predictor.thresholds
    )


def measured(
    predictor: Predictor,
    samples: tuple[Sample, ...],
    notify: Callable[[str], object],
    progress: Callable[[int, int], object],
    *,
    where: str,
) -> dict[str, Any]:
    """Scores of the images that can be read.

    Returns:
        What `summarise` or `summarise_multilabel` says, and `failed`: the images that cannot be
        read, which it leaves out. Of a captioner `count`, `loss` and `loss_shuffled` (of a word of
        the captions), what `caption_scores` says, `examples` and `failed`; and with classes what
        `summarise` says, where its loss is `class_loss`.

    Raises:
        DataError: No image can be read, or no caption suits the decoder.
    """
    if predictor.thresholds is not None:
        scores, failed = measure_multilabel(predictor, samples, progress)
    elif predictor.caption_generator is None:
        parts, failed = measure(predictor, samples, progress)
        scores = summarise(Outcomes.cat(parts), predictor.classes) if parts else {}
    else:
        scores, failed = measure_captions(
            predictor, predictor.caption_generator, samples, notify=notify, progress=progress
        )
    if not scores:
        raise DataError(f"{printable(where)}: {no_readable_images(failed)}")
    return {**scores, "failed": failed}


def load_captioned_samples(
    model: PathLike | LoadedRun,
    asked: DatasetSpec,
    classes: tuple[str, ...],
    notify: Callable[[str], object],
) -> tuple[Sample, ...]:
    """The images that a captioner is measured on; `notify` receives notes about them.

    Raises:
        ConfigError: A setting is one of lists of classes.
    """
    for name in ("image_column", "label_column", "allow_outside"):
        if value := getattr(asked, name):
            raise ConfigError(f"{name}={value!r}: not for lists of captions; leave it out")
    data, images = asked.data, asked.images
    held_out: list[str] = []
    if not isinstance(model, LoadedRun) and (run_folder_of(model) / SPLIT_FILE).is_file():
        root = find_lists(data).root if images is None else Path(images)
        held_out = held_out_images(run_folder_of(model), data, root)
    samples, notes = open_captioned(
        data, split=asked.split or "val", images=images, held_out=held_out, classes=classes
    )
    for note in notes:
        notify(note)
    return samples


def load_labeled_samples(
    model: PathLike | LoadedRun,
    asked: DatasetSpec,
    classes: tuple[str, ...],
    notify: Callable[[str], object],
    *,
    thresholds: tuple[float, ...] | None = None,
) -> tuple[Sample, ...]:
    """The images that a classifier is measured on; `notify` receives notes about them.

    `thresholds` are those of its classes, where an image may have several.

    Raises:
        ConfigError: The images have several classes, and the network gives each one.
    """

    def held_out(root: Path, there: Collection[str]) -> list[str]:
        ours = None if isinstance(model, LoadedRun) else run_folder_of(model)
        return [] if ours is None else held_out_images(ours, asked.data, root, there)

    full = with_training_settings(
        asked, None if isinstance(model, LoadedRun) else run_folder_of(model)
    )
    full = dataclasses.replace(full, multilabel=None if thresholds is None else True)
    samples, notes = open_eval_split(
        full, split=asked.split or "val", classes=classes, held_out=held_out
    )
    for note in notes:
        notify(note)
    check_label_kind(thresholds, samples, asked.data)
    return samples


def with_training_settings(asked: DatasetSpec, run: Path | None) -> DatasetSpec:
    """`asked` with what the training of the run folder `run` said of its data, where left out.

    Which folder the images are in, and that they may lie outside of it, is true of its own list.
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


def no_readable_images(failed: list[dict[str, str]]) -> str:
    """Why there are no numbers: every image is among the `failed`."""
    image, error = printable(failed[0]["image"]), printable(failed[0]["error"])
    return f"none of {len(failed)} images can be measured; the first is {image}: {error}"


def run_folder_of(model: PathLike) -> Path:
    """The run folder, also where its file of weights was named."""
    path = Path(model)
    return path.parent if path.is_file() else path


def measure(
    predictor: Predictor, samples: tuple[Sample, ...], progress: Callable[[int, int], object]
) -> tuple[list[Outcomes], list[dict[str, str]]]:
    """Outcomes of the readable images, batch by batch, and {"image", "error"} of the others."""
    parts: list[Outcomes] = []
    failed: list[dict[str, str]] = []
    done = 0
    for answers in predictor.batches([sample.path for sample in samples]):
        parts += outcomes(answers, samples[done : done + len(answers)])
        failed += [{"image": a.image, "error": a.error} for a in answers if a.error is not None]
        done += len(answers)
        progress(done, len(samples))
    return parts, failed


def outcomes(answers: list[ImageOutput], samples: tuple[Sample, ...]) -> list[Outcomes]:
    """Outcomes of the readable images of one batch: one item, or none where there are none."""
    rows, labels = [], []
    for answer, sample in zip(answers, samples, strict=True):
        if answer.probabilities is not None:
            rows.append(answer.probabilities)
            labels.append(sample.label)
    return [Outcomes.of(torch.stack(rows), torch.tensor(labels))] if rows else []


def held_out_images(
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
    root = resolve_folder(data)[0] if root is None else root
    known = set(there)
    if root.resolve() == origin or all(n in known or (root / n).is_file() for n in names):
        return names
    # the same files may be named from another folder, such as that of a list
    elsewhere = (relative(str(origin / name), root.resolve()) for name in names)
    return [name for name in elsewhere if not name.startswith("../")]
