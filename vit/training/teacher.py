"""The teacher of a distillation: its answers for the training images, computed once.

    teacher: run, weights, exported file -> classes matched by name with those of the data
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from vit.config import Config
from vit.config.inference_config import InferenceConfig
from vit.data.dataset_types import NO_LABEL, Sample, Splits
from vit.data.image_io import read_image
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, DataError, RunError, WeightsError
from vit.exported.engine import exported_engine, exported_files, open_exported
from vit.paths import sha256_of_files
from vit.precision import autocast
from vit.tasks.task import calibrated_activation
from vit.text import Notify, join_names, percent, plural, printable
from vit.training.checkpoint.run_folder import TEACHER_ANSWERS, TEACHER_FILE, train_on
from vit.training.distributed.collectives import broadcast_tensor, on_main
from vit.training.distributed.devices import arithmetic, inference_precision
from vit.training.finetune.feature_extraction import CPU_BATCH_SIZE, Extractor, extract
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
    columns = match_classes(teacher, splits.classes)
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
        f"teacher: {printable(settings.teacher)} answers {plural(images, 'training image')}{views} "
        f"once, before the first step ({settings.distillation_type}, alpha "
        f"{settings.distillation_alpha:g}{tau})"
    ]


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A trained classifier.

    Args:
        name: As the user gave it.
        key: Digest of everything that its answers depend on, besides image and arithmetic.
        prepare: One image, uint8 (3, height, width).
        probabilities: Of prepared images, as of `vit predict`, (images, outputs) float64.
    """

    name: str
    classes: tuple[str, ...]
    multilabel: bool
    preprocessing: Preprocessing
    key: str
    prepare: Callable[[str], Tensor]
    probabilities: Callable[[Sequence[Tensor]], Tensor]


def network_teacher(
    name: str, loaded: LoadedRun, accelerator: Accelerator, precision: str
) -> Teacher:
    """A teacher in torch."""
    about = {
        "config": asdict(loaded.config),
        "calibration": None if loaded.calibration is None else loaded.calibration.to_dict(),
        "task": loaded.task_name,
    }
    key = digest(
        loaded.model.state_dict(), {"about": json.dumps(about, sort_keys=True, default=str)}
    )
    device, preprocessing = accelerator.device, loaded.preprocessing
    chosen = inference_precision(precision, device)
    network, activation = loaded.model.to(device).eval(), calibrated_activation(loaded)

    def prepare(path: str) -> Tensor:
        return preprocessing(read_image(path, intensity_range=preprocessing.intensity_range))

    @torch.inference_mode()
    def probabilities(images: Sequence[Tensor]) -> Tensor:
        inputs = preprocessing.normalise(torch.stack([*images]).to(device))
        with autocast(chosen, device):
            logits: Tensor = network(inputs)
        found: Tensor = activation(logits.float().cpu().double())
        return found

    return Teacher(
        name=name,
        classes=loaded.classes,
        multilabel=loaded.thresholds is not None,
        preprocessing=preprocessing,
        key=key,
        prepare=prepare,
        probabilities=probabilities,
    )


def exported_teacher(name: str, engine: str) -> Teacher:
    """A teacher in a file of `vit export`, whose graph prepares images of any size itself."""
    network = open_exported(name, engine, InferenceConfig(batch_size=CPU_BATCH_SIZE))
    if network.n_best or not network.shares:
        raise no_classifier(name, "its outputs are no probabilities of classes")

    def prepare(path: str) -> Tensor:
        image = read_image(path, intensity_range=network.preprocessing.intensity_range)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(image.height, image.width, 3).permute(2, 0, 1)

    def probabilities(images: Sequence[Tensor]) -> Tensor:
        arrays = [image.permute(1, 2, 0).contiguous().numpy() for image in images]
        rows = torch.empty(len(arrays), len(network.classes), dtype=torch.float64)
        for group in network.groups(arrays):
            found = network.run([arrays[index] for index in group])["probabilities"]
            rows[group] = torch.as_tensor(found)
        if not rows.isfinite().all():
            raise RunError(f"teacher {name}: the network overflowed")
        return rows

    return Teacher(
        name=name,
        classes=network.classes,
        multilabel=network.thresholds is not None,
        preprocessing=network.preprocessing,
        key=sha256_of_files(exported_files(name)),
        prepare=prepare,
        probabilities=probabilities,
    )


def open_teacher(config: Config, accelerator: Accelerator, notify: Notify) -> Teacher:
    """Open the teacher of a run."""
    name = config.distillation.teacher
    assert name is not None, "called for a run with a teacher"
    if engine := exported_engine(name):
        teacher = exported_teacher(name, engine)
    else:
        # one process downloads, the others find the files
        on_main(accelerator, lambda: locate_weights(name))
        loaded = load_model(name, notify=notify, headless=True)
        if loaded.tokenizer is not None:
            raise no_classifier(name, "it writes captions")
        if not loaded.classes:
            raise no_classifier(name, "it has no classes")
        if loaded.task_name not in ("classify", "multilabel"):
            raise no_classifier(name, f"its task is {printable(loaded.task_name)}")
        teacher = network_teacher(name, loaded, accelerator, config.run.precision)
    if teacher.multilabel != config.training.multilabel:
        gives = "any number of classes" if teacher.multilabel else "one class"
        raise ConfigError(
            f"teacher={name}: it gives an image {gives}, and the data are for "
            f"task={config.training.task}: give a teacher of the same task"
        )
    return teacher


def no_classifier(name: str, why: str) -> ConfigError:
    """The error of a teacher that has no probabilities of classes."""
    return ConfigError(
        f"teacher={name}: {why}, and a teacher is a classifier: give the run of one, "
        "weights with a head, or a classifier's file of vit export"
    )


def match_classes(teacher: Teacher, classes: Sequence[str]) -> list[int]:
    """The output of the teacher for each of `classes`; it may have more."""
    outputs = {name: column for column, name in enumerate(teacher.classes)}
    if missing := [name for name in classes if name not in outputs]:
        raise ConfigError(
            f"teacher={teacher.name}: it lacks "
            f"{plural(len(missing), 'class', 'classes')} of the data ({join_names(missing)}; it "
            f"knows {join_names(teacher.classes, 3)}): classes are matched by name, so rename the "
            "data's, or give a teacher that was trained on them"
        )
    return [outputs[name] for name in classes]


def compute_answers(
    teacher: Teacher,
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
    mirrored = config.augment.hflip > 0

    def scores(inputs: Sequence[Tensor]) -> Tensor:
        chosen = teacher.probabilities(inputs)[:, torch.tensor(columns)]
        if teacher.multilabel:
            return chosen.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY).logit()
        return chosen.clamp(min=MIN_PROBABILITY).log()

    def vectors(inputs: Sequence[Tensor]) -> Tensor:
        views = [inputs, [image.flip(-1) for image in inputs]] if mirrored else [inputs]
        return torch.stack([scores(view) for view in views]).mean(dim=0).float()

    identity = {
        "teacher": teacher.key,
        "preprocessing": teacher.preprocessing.to_dict(),
        "outputs": [*columns],
        "mirrored": mirrored,
        "arithmetic": arithmetic(config.run.precision, accelerator.device),
        "version": VERSION,
    }
    found = extract(
        samples,
        Extractor("teacher's answers", identity, teacher.prepare, vectors),
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
    if answers is None or answers.ndim != 2 or answers.dtype != torch.float16:
        raise RunError(f"{path} holds no answers of a teacher; delete it, and it answers again")
    if tuple(answers.shape) != shape:
        rows, classes = answers.shape
        raise DataError(
            f"the data set changed since this run began: {path} is for "
            f"{plural(rows, 'training image')} of {classes} classes, and there are {shape[0]} of "
            f"{shape[1]}: restore it to resume, or {train_on(path.parent)}"
        )
    return answers.float()
