"""From settings and pictures to everything a training carries, checked before step 0."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list

from vit.config import Config, TrainingConfig
from vit.data.checking import check_samples, without
from vit.data.preprocessing import Preprocessing
from vit.data.samples import Splits
from vit.data.schedule import fitting_batch_size
from vit.data.seeding import random_seed
from vit.data.sources import relative
from vit.errors import BadImage, ConfigError
from vit.model.build import build_classifier
from vit.model.precision import resolve_precision
from vit.training.ema import MovingAverage
from vit.training.loop import Training
from vit.training.optimization import make_optimizer
from vit.training.schedule import CosineSchedule

MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
Say = Callable[[str], None]


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """The devices of this process, in the arithmetic that they are good at.

    Raises:
        ConfigError: The device is unknown or absent, or cannot compute in that precision.
    """
    kind, _, index = config.device.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps"):
        raise ConfigError(f"device={config.device!r}: choose auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={config.device!r}: torch sees no CUDA device; use --device cpu")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={config.device!r}: torch sees no MPS device; use --device cpu")
    if index:
        if not index.isdecimal() or int(index) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ConfigError(f"device={config.device!r}: there are {count} CUDA devices")
        torch.cuda.set_device(int(index))
    device = PartialState(cpu=True if kind == "cpu" else None).device
    precision = resolve_precision(config.precision, device)
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError("precision='fp16': has no loss scaling on a CPU; use bf16 or fp32")
    return Accelerator(cpu=kind == "cpu", mixed_precision=MIXED[precision])


def complete(config: Config, splits: Splits, given: Sequence[str]) -> Config:
    """`config` with what the data says: the number of classes.

    Args:
        config: Settings as asked for.
        splits: The data.
        given: Names of the settings that somebody chose.

    Raises:
        ConfigError: num_classes was chosen, and the data has another number.
    """
    found = len(splits.classes)
    if "num_classes" in given and config.model.num_classes != found:
        raise ConfigError(
            f"num_classes={config.model.num_classes}: the data has {found} classes; "
            "leave it out and it is taken from the data"
        )
    if config.model.channels != 3:
        raise ConfigError(f"channels={config.model.channels}: pictures are read as RGB, use 3")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_classes=found))


def readable(splits: Splits, config: Config, accelerator: Accelerator) -> Splits:
    """`splits` without the pictures whose headers cannot be read, looked at by one process.

    Raises:
        BadImage: There are some, and `on_bad_image` is stop.
        DataError: A class has no readable training picture left.
    """
    found: list[list[BadImage]] = [[]]
    if accelerator.is_main_process:
        found[0] = check_samples([*splits.train, *splits.val])
    broadcast_object_list(found)
    bad = found[0]
    if bad and config.data.on_bad_image == "stop":
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise BadImage(
            bad[0].path,
            f"{bad[0].reason}{more}: mend or delete it, or leave such files out with "
            "--on-bad-image skip",
        )
    return without(splits, bad)


def preprocessing_of(config: Config) -> Preprocessing:
    """How pictures of this run are prepared for evaluation, prediction and export."""
    side, data = config.model.image_size, config.data
    return Preprocessing(
        image_size=(side, side),
        resize=data.resize,
        crop_share=data.crop_share,
        interpolation=data.interpolation,
        mean=data.mean,
        std=data.std,
    )


def fit_batch_size(config: Config, images: int, processes: int, say: Say) -> Config:
    """`config` with a batch that the training pictures fill.

    Raises:
        DataError: There are fewer pictures than micro-batches in a step.
    """
    data = config.data
    batch_size = fitting_batch_size(images, data.batch_size, processes * data.accumulate)
    if batch_size != data.batch_size:
        say(
            f"note: only {images} training pictures, fewer than batch_size={data.batch_size}: "
            f"going on with batch_size={batch_size}"
        )
    return dataclasses.replace(config, data=dataclasses.replace(data, batch_size=batch_size))


def make_training(config: Config, accelerator: Accelerator, total_steps: int) -> Training:
    """Network, optimiser, average and schedule, on their devices."""
    training = config.training
    torch.manual_seed(random_seed(training.seed, "weights"))
    network = build_classifier(config.model)
    check_forward(network, config)
    network.to(accelerator.device)
    optimizer = make_optimizer(network, training, depth=config.model.depth)
    average = MovingAverage(network, training.ema) if training.ema else None
    if training.compile:
        network.compile()
    model, prepared = accelerator.prepare(network, optimizer)
    warmup_steps = round(training.warmup * total_steps / training.epochs)
    schedule = CosineSchedule(
        peak=training.lr, least=training.min_lr, warmup_steps=warmup_steps, total_steps=total_steps
    )
    return Training(
        config=config,
        accelerator=accelerator,
        network=network,
        model=model,
        optimizer=prepared,
        average=average,
        preprocessing=preprocessing_of(config),
        lr_at=schedule,
    )


@torch.no_grad()
def check_forward(network: torch.nn.Module, config: Config) -> None:
    """Run one blank picture, so that a network that cannot work is known before step 0."""
    side = config.model.image_size
    network.eval()
    logits = network(torch.zeros(1, config.model.channels, side, side))
    assert logits.shape == (1, config.model.num_classes), f"logits are {tuple(logits.shape)}"


def fingerprint(splits: Splits) -> str:
    """A digest of which pictures there are and their labels, to notice a changed data set."""
    lines = [str(splits.classes)]
    for samples in (splits.train, splits.val):
        lines += [f"{relative(s.path, splits.root)}\t{s.label}" for s in samples]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
