"""The teacher of a distillation: its answers for the training images, computed once.

    teacher: run or weights -> classes matched by name with those of the data
    image, and its mirror image where training mirrors -> the teacher's own preprocessing
    -> probabilities p, calibrated where the teacher has a calibration
    -> log p, or log p - log(1 - p) of several classes an image -> mean of the two images
    -> Splits.teacher_answers, (images, classes) float16 -> vit/tasks/distillation.py

Images without a label in `--labels` get the teacher's best class as theirs (Chen et al., "Big
Self-Supervised Models are Strong Semi-Supervised Learners", section 3, arXiv:2006.10029).

The answers are cached by the content of an image (feature_extraction.py), so that a second student
of the same teacher computes none. The run folder stores them, so that a resumed run needs no
teacher.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from vit.config import Config
from vit.data.dataset_types import NO_LABEL, Sample, Splits
from vit.errors import ConfigError, DataError, RunError, WeightsError
from vit.precision import autocast
from vit.tasks.task import calibrated_activation
from vit.text import Notify, join_names, percent, plural
from vit.training.checkpoint.run_folder import TEACHER_ANSWERS, TEACHER_FILE, train_on
from vit.training.distributed.collectives import broadcast_tensor, on_main
from vit.training.distributed.devices import arithmetic, inference_precision
from vit.training.finetune.feature_extraction import Extractor, extract
from vit.weights.load_model import load_model
from vit.weights.resolve_source import locate_weights
from vit.weights.safetensors_io import digest, read_tensors
from vit.weights.saved_model import LoadedRun

MIN_PROBABILITY = 1e-7
"""Smaller probabilities, and those nearer to 1, count as this: float32 cannot tell them apart."""
VERSION = 1
"""Part of the cache's identity; another one invalidates all answers."""


def with_teacher(
    config: Config,
    splits: Splits,
    accelerator: Accelerator,
    notify: Notify,
    resumed: Path | None = None,
) -> Splits:
    """Add the answers of the teacher to `splits`, if there is a teacher."""
    if config.distillation.teacher is None:
        return splits
    stored = None if resumed is None else resumed / TEACHER_FILE
    if stored is not None and on_main(accelerator, stored.is_file):
        shape = (len(splits.train), config.model.num_classes)
        answers = broadcast_tensor(accelerator, lambda: read_answers(stored, shape))
        return with_answers(splits, answers)
    teacher = open_teacher(config, accelerator, notify)
    columns = match_classes(teacher, config.distillation.teacher, splits.classes)
    for line in teacher_lines(config, len(splits.train)):
        notify(line)
    answers = compute_answers(teacher, columns, config, splits.train, accelerator, notify)
    if not config.training.multilabel:
        labels = torch.tensor([sample.label for sample in splits.train])
        agreed = (answers.argmax(dim=1) == labels)[labels != NO_LABEL].double().mean()
        labelled = "these images" if not splits.unlabelled else "those with a label"
        notify(
            f"the teacher's best class is the label of {percent(float(agreed), 1)} of {labelled}"
        )
    return with_answers(splits, answers)


def with_answers(splits: Splits, answers: Tensor) -> Splits:
    """`splits` with the teacher's `answers`, (images, classes), and labels for all images.

    An image without a label gets the best class, or of a multi-label teacher all classes that are
    more probable than not.
    """

    def label(sample: Sample, scores: Tensor) -> Sample:
        if sample.path not in splits.unlabelled:
            return sample
        if splits.multilabel:
            return dataclasses.replace(sample, labels=tuple((scores > 0).nonzero()[:, 0].tolist()))
        return dataclasses.replace(sample, label=int(scores.argmax()))

    rounded = answers.half()  # as they are stored
    train = splits.train
    if splits.unlabelled:
        train = tuple(label(*pair) for pair in zip(train, rounded.float(), strict=True))
    return dataclasses.replace(splits, train=train, teacher_answers=rounded)


def teacher_lines(config: Config, images: int) -> list[str]:
    """A log line about the teacher and its pass over the training images, if there is one."""
    settings = config.distillation
    if settings.teacher is None:
        return []
    views = " and their mirror images" if config.augment.hflip else ""
    tau = f", tau {settings.distillation_tau:g}" if settings.distillation_type == "soft" else ""
    return [
        f"teacher: {settings.teacher} answers {plural(images, 'training image')}{views} "
        f"once, before the first step ({settings.distillation_type}, alpha "
        f"{settings.distillation_alpha:g}{tau})"
    ]


def open_teacher(config: Config, accelerator: Accelerator, notify: Notify) -> LoadedRun:
    name = config.distillation.teacher
    assert name is not None, "called for a run with a teacher"
    # one process downloads, the others find the files
    on_main(accelerator, lambda: locate_weights(name))
    teacher = load_model(name, notify=notify, headless=True)
    why = ""
    if teacher.tokenizer is not None:
        why = "it writes captions"
    elif not teacher.classes:
        why = "it has no classes"
    elif teacher.task_name not in ("classify", "multilabel"):
        why = f"its task is {teacher.task_name}"
    if why:
        raise ConfigError(
            f"teacher={name}: {why}, and a teacher is a classifier: give the run of one, or "
            "weights with a head"
        )
    if (teacher.thresholds is not None) != config.training.multilabel:
        gives = "one class" if teacher.thresholds is None else "any number of classes"
        raise ConfigError(
            f"teacher={name}: it gives an image {gives}, and the data are for "
            f"task={config.training.task}: give a teacher of the same task"
        )
    return teacher


def match_classes(teacher: LoadedRun, name: str, classes: Sequence[str]) -> list[int]:
    """The output of the teacher for each of `classes`; it may have more."""
    outputs = {each: column for column, each in enumerate(teacher.classes)}
    if missing := [each for each in classes if each not in outputs]:
        raise ConfigError(
            f"teacher={name}: it lacks {plural(len(missing), 'class', 'classes')} of the data "
            f"({join_names(missing)}; it knows {join_names(teacher.classes, 3)}): classes are "
            "matched by name, so rename the data's, or give a teacher that was trained on them"
        )
    return [outputs[each] for each in classes]


def teacher_digest(teacher: LoadedRun) -> str:
    """Digest of everything that its answers depend on, besides image and arithmetic."""
    about = {
        "config": asdict(teacher.config),
        "calibration": None if teacher.calibration is None else teacher.calibration.to_dict(),
        "task": teacher.task_name,
    }
    text = json.dumps(about, sort_keys=True, default=str)
    return digest(teacher.model.state_dict(), {"about": text})


def compute_answers(
    teacher: LoadedRun,
    columns: Sequence[int],
    config: Config,
    samples: Sequence[Sample],
    accelerator: Accelerator,
    notify: Notify,
) -> Tensor:
    """Log-probabilities of the data's classes, or log-odds of several classes an image.

    (images, classes) float32, from the cache or computed. Rows of images that cannot be read, with
    on_bad_image=skip, are 0; training skips them too.
    """
    device, preprocessing = accelerator.device, teacher.preprocessing
    mirrored, precision = config.augment.hflip > 0, config.run.precision
    network, activation = teacher.model.to(device).eval(), calibrated_activation(teacher)
    chosen = torch.tensor(columns)

    def prepare(path: str) -> Tensor:
        return preprocessing(preprocessing.read(path))

    @torch.inference_mode()
    def scores(images: Sequence[Tensor]) -> Tensor:
        with autocast(inference_precision(precision, device), device):
            if preprocessing.native:
                floats = [preprocessing.normalise(image.to(device)) for image in images]
                logits: Tensor = network.forward_packed(floats)
            else:
                logits = network(preprocessing.normalise(torch.stack([*images]).to(device)))
        probabilities: Tensor = activation(logits.float().cpu().double())[:, chosen]
        if config.training.multilabel:
            return probabilities.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY).logit()
        return probabilities.clamp(min=MIN_PROBABILITY).log()

    def vectors(inputs: Sequence[Tensor]) -> Tensor:
        views = [inputs, [image.flip(-1) for image in inputs]] if mirrored else [inputs]
        return torch.stack([scores(view) for view in views]).mean(dim=0).float()

    identity = {
        "teacher": teacher_digest(teacher),
        "preprocessing": preprocessing.to_dict(),
        "outputs": [*columns],
        "mirrored": mirrored,
        "arithmetic": arithmetic(precision, device),
        "version": VERSION,
    }
    found = extract(
        samples,
        Extractor("teacher's answers", identity, prepare, vectors),
        config,
        accelerator,
        notify,
    )
    assert found is not None, "nothing interrupts this pass but an exception"
    answers = torch.zeros(len(samples), len(columns))
    readable = [row for row, sample in enumerate(samples) if sample.path not in found.failed]
    answers[torch.tensor(readable)] = found.values
    return answers


def read_answers(path: Path, shape: tuple[int, int]) -> Tensor:
    """The answers that a run folder stores, (images, classes) float32."""
    try:
        answers = read_tensors(path)[0].get(TEACHER_ANSWERS)
    except WeightsError as error:
        raise RunError(f"{error}; delete it, and the teacher answers again") from None
    if answers is None or tuple(answers.shape) != shape:
        raise DataError(
            f"the data set changed since this run began: {path} does not have answers for "
            f"{plural(shape[0], 'training image')} of {shape[1]} classes: restore the data to "
            f"resume, or {train_on(path.parent)}"
        )
    return answers.float()
