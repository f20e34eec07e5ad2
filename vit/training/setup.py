"""Builds network, optimiser, schedule and task from completed settings, before step 0."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from vit.config import Config
from vit.data.captions.tokenizer import Tokenizer
from vit.data.dataset_types import Sample, Splits
from vit.data.image_archives import relative
from vit.data.preprocessing import Preprocessing
from vit.data.random_seed import random_seed
from vit.model.vision_transformer import VisionTransformer
from vit.stop_signals import Interruption
from vit.tasks.task import get_task
from vit.text import Notify, format_parameters, plural
from vit.training.activation_checkpointing import recompute_blocks
from vit.training.compilation import compile_network
from vit.training.distributed.devices import arithmetic
from vit.training.distributed.fsdp import is_sharded, require_shardable
from vit.training.ema import ExponentialMovingAverage
from vit.training.finetune.finetune_settings import apply_finetune_method
from vit.training.lr_schedule import learning_rate
from vit.training.optimizers import make_optimizer
from vit.training.sync_batch_norm import sync_batch_norm
from vit.training.training_context import TrainingContext
from vit.weights.adapt_weights import adapt_weights
from vit.weights.formats.pretrained import Pretrained

# settings of a decoder that its weights do not depend on
WITHOUT_WEIGHTS: dict[str, Any] = {
    "decoder_dropout": 0.0,
    "decoder_drop_path": 0.0,
    "caption_dropout": 0.0,
    "tokenizer": "bpe",
}


def make_network(
    config: Config,
    source: Pretrained | None = None,
    classes: Sequence[str] | None = None,
    notify: Notify = lambda _: None,
    tokenizer: Tokenizer | None = None,
) -> VisionTransformer:
    """Build the network on the CPU, load pretrained weights, and add or freeze parts by method."""
    torch.manual_seed(random_seed(config.training.seed, "weights"))
    network = get_task(config.training.task).build_network(config)
    if source is not None:
        target = config.model
        if source.config.tile_pooling is None:  # the pooling of tiles is new
            target = dataclasses.replace(target, tile_pooling=None)
        state, report = adapt_weights(
            source, target, classes=classes or None, channel_names=config.data.channel_names
        )
        for line in report.lines():
            notify(line)
        words = decoder_weights(source, config, tokenizer, notify)
        network.load_state_dict({**network.state_dict(), **state, **words})
    learns = apply_finetune_method(network, config)
    if learns is not None:
        notify(learns)
    return network


def decoder_weights(
    source: Pretrained, config: Config, tokenizer: Tokenizer | None, notify: Notify
) -> dict[str, Tensor]:
    """Weights of the source's decoder, if its settings and vocabulary are the same."""
    if source.decoder is None or not config.training.captions:
        return {}
    sizes = dataclasses.replace(source.decoder.config, **WITHOUT_WEIGHTS)
    assert tokenizer is not None, "captions have a tokenizer"
    alike = source.decoder.tokenizer.to_json() == tokenizer.to_json()
    if not alike or sizes != dataclasses.replace(config.decoder, **WITHOUT_WEIGHTS):
        notify("note: decoder reinitialised: its settings or vocabulary differ from the weights'")
        return {}
    notify("decoder initialised from the pretrained weights")
    return {f"decoder.{name}": tensor for name, tensor in source.decoder.state.items()}


def make_training(
    config: Config,
    accelerator: Accelerator,
    total_steps: int,
    network: VisionTransformer | None = None,
    splits: Splits | None = None,
    *,
    epoch_steps: float | None = None,
    failed: dict[str, str] | None = None,
    interruption: Interruption | None = None,
    workers_for: Callable[[TrainingContext, Sequence[Sample]], int | None] | None = None,
) -> TrainingContext:
    """Build network, optimiser, moving average and schedule on their devices."""
    training, real = config.training, epoch_steps is not None  # else it measures later steps
    epoch_steps = total_steps / training.epochs if epoch_steps is None else epoch_steps
    frozen_steps = (training.freeze_epochs or 0) * round(epoch_steps) if real else 0
    if 0 < total_steps <= frozen_steps:
        training.refuse(
            "freeze_epochs", f"leaves none of the {total_steps:,} steps to the backbone"
        )
    require_shardable(accelerator, config)
    network = make_network(config) if network is None else network
    network.to(accelerator.device)
    if config.run.precision == "fp64":
        network.double()
    if config.run.checkpoint_activations:
        recompute_blocks(network)
    if config.run.compile:
        compile_network(network, config)
    precision = accelerator.mixed_precision
    optimizer = make_optimizer(network, training, depth=config.model.depth, precision=precision)
    sync_batch_norm(network, accelerator.num_processes)
    # the network is on its device already, where accelerate would look for sharded parameters with
    # half a second of imports
    placement = [False, None]
    model, prepared = accelerator.prepare(network, optimizer, device_placement=placement)
    # of the parameters as they are now: sharding has replaced them
    average = ExponentialMovingAverage(network, training.ema) if training.ema else None
    state = TrainingContext(
        config=config,
        accelerator=accelerator,
        network=network,
        model=model,
        optimizer=prepared,
        average=average,
        preprocessing=Preprocessing.from_config(
            config.data, config.model.image_size, config.model.patch_size
        ),
        lr_at=learning_rate(training, epoch_steps=epoch_steps, total=total_steps),
        task=get_task(training.task).with_data(config, splits),
        tokenizer=None if splits is None else splits.tokenizer,
        cache=None if splits is None else splits.cache,
        failed={} if failed is None else failed,
        interruption=interruption or Interruption(),
        frozen_steps=frozen_steps,
    )
    if workers_for is not None and splits is not None:
        state.workers = workers_for(state, splits.train)
    return state


def fingerprint(splits: Splits) -> dict[str, Any]:
    """SHA-256 of paths, labels and numbers of all images, and the number of images."""
    lines = [str(splits.classes)]
    for sample in (*splits.train, *splits.val):
        labels = sample.labels if splits.multilabel else [sample.label]
        names = [relative(sample.path, splits.root), ",".join(map(str, labels))]
        names += [repr(sample.weight)] if sample.weight != 1 else []
        lines.append("\t".join([*names, *sample.captions, *map(repr, sample.numbers)]))
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    return {"sha256": digest, "train": len(splits.train), "val": len(splits.val)}


def steps_line(config: Config, splits: Splits, total_steps: int) -> str:
    """Number of steps and epochs, and the passes over the images if `epoch_steps` is set."""
    if config.finetune.method == "probe":
        return "a linear probe, which makes no steps"
    epochs = f"{plural(total_steps, 'step')} in {plural(config.training.epochs, 'epoch')}"
    if config.training.epoch_steps is None:
        return epochs
    passes = total_steps * config.data.batch_size / len(splits.train)
    each = plural(config.training.epoch_steps, "step")
    return f"{epochs} of {each}, {passes:.1f} passes over the images"


def preflight(run: TrainingContext, splits: Splits, total_steps: int) -> list[str]:
    """Log lines about data, network, devices and schedule of the run."""
    accelerator, config = run.accelerator, run.config
    size = format_parameters(sum(parameter.numel() for parameter in run.network.parameters()))
    kind = accelerator.device.type
    precision = arithmetic(config.run.precision, accelerator.device)
    sharded = " in pieces (FSDP)" if is_sharded(accelerator) else ""
    repeated = ", deterministic" if config.run.deterministic else ""
    micro = config.data.micro_batches
    batch = f"batch {config.data.batch_size}" + (f" in {micro} micro-batches" if micro > 1 else "")
    return [
        *run.task.summary(config, splits),
        f"{size} parameters{sharded}, {config.model.image_size} px, "
        f"{accelerator.num_processes} x {kind}, {precision}{repeated}, {batch}, "
        f"{steps_line(config, splits, total_steps)}",
        *run.task.notes(config, splits),
        *schedule_warnings(config),
    ]


def schedule_warnings(config: Config) -> list[str]:
    """Log lines about durations that are longer than the run."""
    training = config.training
    effects = {
        "growth_epochs": "images never reach image_size",
        "cooldown_epochs": "the learning rate never reaches lr",
    }
    return [
        f"warning: {name}={epochs:g} is more than epochs={training.epochs}: {effect}"
        for name, effect in effects.items()
        if (epochs := getattr(training, name)) is not None and epochs > training.epochs
    ]
