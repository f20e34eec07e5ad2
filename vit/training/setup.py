"""From settings and pictures to everything a training carries, checked before step 0."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from vit.config import Config
from vit.data.checking import check_samples, without
from vit.data.preprocessing import Preprocessing
from vit.data.samples import Splits
from vit.data.schedule import fitting_batch_size
from vit.data.seeding import random_seed
from vit.data.sources import open_splits, relative
from vit.errors import BadImage, ConfigError
from vit.model.build import build_classifier
from vit.model.classifier import VisionTransformer
from vit.training.agreement import on_main
from vit.training.devices import arithmetic
from vit.training.ema import MovingAverage
from vit.training.finetuning import choose_what_learns
from vit.training.freezing import counted
from vit.training.loop import Training
from vit.training.optimization import make_optimizer
from vit.training.recomputation import recompute_blocks
from vit.training.schedule import CosineSchedule
from vit.training.sharding import is_sharded, require_shardable
from vit.weights.adapting import adapt
from vit.weights.pretrained import Pretrained

Say = Callable[[str], None]


def look_at_data(
    config: Config, given: Sequence[str], accelerator: Accelerator, say: Say
) -> tuple[Config, Splits, dict[str, str]]:
    """The settings of a run completed with what its pictures say, the pictures, and the bad ones.

    Raises:
        DataError: The data cannot be trained on.
        ConfigError: A setting does not fit the data.
        BadImage: A picture cannot be read, and `on_bad_image` is stop.
    """
    data = config.data
    splits = open_splits(data.data, val_share=data.val_share, seed=config.training.seed)
    config = complete(config, splits, given)
    bad = find_bad_images(splits, config, accelerator)
    splits = without(splits, bad)
    for note in splits.notes:
        say(f"note: {note}")
    config = fit_batch_size(config, len(splits.train), accelerator.num_processes, say)
    batch_size, images = config.data.batch_size, len(splits.train)
    probing = config.finetune.method == "probe"  # which sees all of them, once
    if not probing and (lost := images % batch_size / images) > 0.1:
        say(
            f"note: each epoch leaves out {lost:.0%} of the pictures, others every time, since "
            f"batch_size={batch_size} does not divide {images}; a smaller -b leaves out fewer"
        )
    return config, splits, {image.path: image.reason for image in bad}


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


def find_bad_images(splits: Splits, config: Config, accelerator: Accelerator) -> list[BadImage]:
    """Pictures whose headers cannot be read, looked at by one process for all.

    Raises:
        BadImage: There are some, and `on_bad_image` is stop.
    """
    bad = on_main(accelerator, lambda: check_samples([*splits.train, *splits.val]))
    if bad and config.data.on_bad_image == "stop":
        others = ", ".join(str(image) for image in bad[1:5])
        more = f" (and {len(bad) - 1} more: {others})" if others else ""
        raise BadImage(
            bad[0].path,
            f"{bad[0].reason}{more}; mend or delete, or leave such files out with "
            "--on-bad-image skip",
        )
    return bad


def fit_batch_size(config: Config, images: int, processes: int, say: Say) -> Config:
    """`config` with a batch that the training pictures fill.

    Raises:
        DataError: There are fewer pictures than micro-batches in a step.
        ConfigError: The batch does not split into whole pairs, and pairs are to be mixed.
    """
    data, parts = config.data, processes * config.data.micro_batches
    unit = 2 * parts if parts > 1 and config.augment.mixes else parts
    batch_size = fitting_batch_size(images, data.batch_size, unit)
    if batch_size % unit and not batch_size % parts:
        raise ConfigError(
            f"batch_size={batch_size} is {batch_size // parts} pictures in each of {parts} parts, "
            f"and MixUp and CutMix mix pairs: choose a multiple of {unit}"
        )
    if batch_size != data.batch_size:
        say(
            f"note: only {images} training pictures, fewer than batch_size={data.batch_size}: "
            f"going on with batch_size={batch_size}"
        )
    return dataclasses.replace(config, data=dataclasses.replace(data, batch_size=batch_size))


def make_network(
    config: Config,
    source: Pretrained | None = None,
    classes: Sequence[str] | None = None,
    say: Say = lambda _: None,
) -> VisionTransformer:
    """The network before its first step, on the CPU, with what the method adds and freezes.

    Args:
        config: Completed settings.
        source: Weights to start from; fresh ones where left out.
        classes: Names of the classes; rows of the source's head are kept where they are its own.
        say: Told what became of the source's tensors, and what learns.

    Raises:
        WeightsError: The source's weights do not fit.
        ConfigError: The method does not fit the network.
    """
    torch.manual_seed(random_seed(config.training.seed, "weights"))
    network = build_classifier(config.model)
    if source is not None:
        state, report = adapt(source, config.model, classes=classes)
        network.load_state_dict(state)
        for line in report.lines():
            say(line)
    check_forward(network, config)
    learns = choose_what_learns(network, config)
    if learns is not None:
        say(learns)
    return network


def make_training(
    config: Config,
    accelerator: Accelerator,
    total_steps: int,
    network: VisionTransformer | None = None,
) -> Training:
    """Network, optimiser, average and schedule, on their devices.

    Args:
        config: Completed settings.
        accelerator: The devices.
        total_steps: Optimiser steps of the whole training.
        network: From `make_network`; a fresh one where left out.
    """
    training = config.training
    require_shardable(accelerator, config)
    network = make_network(config) if network is None else network
    network.to(accelerator.device)
    if config.run.precision == "fp64":
        network.double()
    if config.run.checkpoint_activations:
        recompute_blocks(network)
    if config.run.compile:
        expect_graphs(2 * len(config.model.drawn_patch_sizes) + 4)
        network.compile()
    optimizer = make_optimizer(network, training, depth=config.model.depth)
    model, prepared = accelerator.prepare(network, optimizer)
    # of the parameters as they are now: sharding has replaced them
    average = MovingAverage(network, training.ema) if training.ema else None
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
        preprocessing=Preprocessing.of(config.data, config.model.image_size),
        lr_at=schedule,
    )


def expect_graphs(count: int) -> None:
    """Let torch compile one network `count` times: each patch size is a graph of its own.

    Beyond its limit of 8 torch runs the rest as it is, slower and with warnings.
    """
    import torch._dynamo.config as dynamo

    name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    setattr(dynamo, name, max(getattr(dynamo, name), count))


@torch.no_grad()
def check_forward(network: torch.nn.Module, config: Config) -> None:
    """Run one blank picture, so that a network that cannot work is known before step 0."""
    side = config.model.image_size
    network.eval()
    logits = network(torch.zeros(1, config.model.channels, side, side))
    assert logits.shape == (1, config.model.num_classes), f"logits are {tuple(logits.shape)}"


def fingerprint(splits: Splits) -> dict[str, Any]:
    """Which pictures there are and their labels, as a digest, and how many."""
    lines = [str(splits.classes)]
    for samples in (splits.train, splits.val):
        lines += [f"{relative(s.path, splits.root)}\t{s.label}" for s in samples]
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    return {"sha256": digest, "train": len(splits.train), "val": len(splits.val)}


def preflight(run: Training, splits: Splits, total_steps: int) -> list[str]:
    """What will be trained, on what, how."""
    accelerator, config = run.accelerator, run.config
    size = counted(sum(parameter.numel() for parameter in run.network.parameters()))
    kind = accelerator.device.type
    precision = arithmetic(config.run.precision, accelerator.device)
    sharded = " in pieces (FSDP)" if is_sharded(accelerator) else ""
    repeated = ", deterministic" if config.run.deterministic else ""
    micro = config.data.micro_batches
    batch = f"batch {config.data.batch_size}" + (f" in {micro} micro-batches" if micro > 1 else "")
    return [
        f"{len(splits.train):,} training and {len(splits.val):,} validation pictures, "
        f"{len(splits.classes)} classes",
        f"{size} parameters{sharded}, {config.model.image_size} px, "
        f"{accelerator.num_processes} x {kind}, {precision}{repeated}, {batch}, "
        f"{total_steps:,} steps in {config.training.epochs} epochs",
    ]
