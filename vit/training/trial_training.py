"""Dry runs: trainings, or steps of a network, that are discarded, to measure memory and time."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from torch.nn import functional as F

from vit.config import Config
from vit.config.decoder_config import DecoderConfig
from vit.config.model_config import ModelConfig
from vit.config.presets import preset
from vit.data.dataset_types import Splits
from vit.model.build import build_captioner, build_classifier
from vit.model.vision_transformer import VisionTransformer
from vit.precision import autocast
from vit.timing import time_calls
from vit.training.compilation import compiles_blocks
from vit.training.distributed.collectives import max_over_processes
from vit.training.distributed.devices import inference_precision
from vit.training.optimizers import make_optimizer
from vit.training.plan_rules import (
    TRAINING_FLOPS,
    CaptionStats,
    Network,
    TimedNetwork,
    decoder_depth,
    flops_with_captions,
    heads_for,
    network_settings,
    stem_reaches,
)
from vit.training.setup import make_training
from vit.training.training_context import TrainingContext

T = TypeVar("T")

# Epochs and steps that a dry run never reaches, so its schedule stays in the warm-up.
LONG = 10**6
STEPS = 10**12
# Share of the free memory that a trial may not use: changing image sizes fragment it, and libraries
# beside torch (NCCL, cuDNN) need some.
HEADROOM = 0.08


def dry_run(
    config: Config,
    accelerator: Accelerator,
    act: Callable[[TrainingContext], T],
    splits: Splits | None = None,
) -> T:
    """Call `act` with a training of `config`, then discard the training, which its result must not
    refer to.

    Random state, loss scale and the state of accelerate are restored. After an error, memory is
    free once the exception is released and `accelerator.free_memory` was called.
    """
    scaler = accelerator.scaler
    scale = None if scaler is None else scaler.state_dict()
    cuda = [accelerator.device] if accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cuda):
            return act(make_training(config, accelerator, STEPS, splits=splits))
    finally:
        if scaler is not None:
            scaler.load_state_dict(scale)
            scaler._per_optimizer_states.clear()  # left by a step that ran out of memory
        if config.run.compile and not compiles_blocks(config):
            torch.compiler.reset()  # else the real run compiles for sizes it never uses
        accelerator.free_memory()


def largest_that_fits(
    sizes: Sequence[int], trial: Callable[[int], float], accelerator: Accelerator
) -> tuple[int, float] | None:
    """The first of `sizes` that fits on every process, with the largest of the processes' numbers;
    None if none fits.

    `trial` returns a number for a size, such as the memory that it needs, or raises
    torch.OutOfMemoryError. It must not wait for other processes, which may have run out of memory
    earlier.
    """
    for size in sizes:
        needed = math.inf
        try:
            needed = trial(size)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
        # after the except block, whose traceback referred to the training
        accelerator.free_memory()
        most = max_over_processes(accelerator, needed)
        if most < math.inf:
            return size, most
    return None


@contextlib.contextmanager
def limit_gpu_memory(accelerator: Accelerator, headroom: float = HEADROOM) -> Iterator[float]:
    """Limit torch to the same number of bytes of the GPU on all processes, and yield that limit.

    Processes whose steps wait for each other then run out of memory together. Other devices have no
    limit. Memory that was used inside is free afterwards.
    """
    device = accelerator.device
    if device.type != "cuda":
        yield math.inf
        return
    if device.index is None:  # that of a single process
        device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_per_process_memory_fraction(device)
    free, total = torch.cuda.mem_get_info(device)
    mine = (1 - headroom) * (free + torch.cuda.memory_reserved(device))
    room = -max_over_processes(accelerator, -mine)
    torch.cuda.set_per_process_memory_fraction(min(room / total, before), device)
    try:
        yield room
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
    accelerator.free_memory()


# Images of a step on a CPU: more would be no faster. A GPU is timed with as many as are planned.
PROBE_BATCH = 64
PROBE_STEPS, PROBE_SECONDS = 5, 0.6
# Steps before those, which choose kernels and allocate memory.
WARM_STEPS = {"cuda": 3}
# Share of a GPU's free memory that a timed step may not use: training keeps more in it.
PLAN_HEADROOM = 0.3


Measure = Callable[..., TimedNetwork]
"""`measure_speed` with its settings and devices: of a network, captions, and perhaps a batch."""


def measure_speed(
    config: Config,
    accelerator: Accelerator,
    row: Network,
    captions: CaptionStats | None = None,
    batch: int = PROBE_BATCH,
) -> TimedNetwork:
    """Speed of training steps of `row`; of fewer images if they do not fit into a GPU."""

    def trial(size: int) -> float:
        return step_seconds(config, accelerator, row, captions, size)

    sizes = [batch >> n for n in range(batch.bit_length())]
    found = largest_that_fits(
        sizes if accelerator.device.type == "cuda" else [batch], trial, accelerator
    )
    cost = flops_with_captions(row, {}, captions)
    if found is None:
        return TimedNetwork(cost, 0.0, 0)
    fits, step = found
    flops = TRAINING_FLOPS * fits * cost * int(accelerator.num_processes) / step
    return TimedNetwork(cost, flops, fits if fits < batch else None)


def step_seconds(
    config: Config,
    accelerator: Accelerator,
    row: Network,
    captions: CaptionStats | None,
    batch: int,
) -> float:
    """Median seconds of a training step of `row`, without the other processes."""
    device = accelerator.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        network = probe_network(row, captions).to(device)
        images = torch.randn(batch, 3, row.side, row.side).to(device)
    training = dataclasses.replace(config.training, optimizer="muon", fallback_lr=None)
    precision = inference_precision(config.run.precision, device)
    optimizer = make_optimizer(network, training, depth=row.depth, precision=precision)
    labels = torch.arange(batch, device=device).remainder(PROBE_BATCH)
    if captions is not None:
        length = round(captions.tokens)
        labels = labels.remainder(captions.vocab_size)[:, None].expand(-1, length)

    def step() -> None:
        with autocast(precision, device):
            if captions is None:
                loss = F.cross_entropy(network(images).float(), labels)
            else:
                logits = network(images, labels).caption_logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        (loss + norm).item()  # waits for the device before the update, as training does
        optimizer.step()
        optimizer.zero_grad()
        torch.zeros(1, device=device).item()

    warmup = WARM_STEPS.get(device.type, 1)
    return median(time_calls(step, repeats=PROBE_STEPS, warmup=warmup, seconds=PROBE_SECONDS))


def probe_network(row: Network, captions: CaptionStats | None) -> VisionTransformer:
    """The network of `row` that is timed, with a decoder if there are `captions`."""
    settings: dict[str, Any] = {**network_settings(row), "num_heads": heads_for(row.dim)}
    if stem_reaches(row.patch, {}):
        settings["stem"] = "conv"
    else:
        settings = {n: v for n, v in settings.items() if not n.startswith("stem")}
    if captions is None:
        return build_classifier(ModelConfig(**{**preset("vit_tiny_patch16_224"), **settings}))
    decoder = DecoderConfig(
        decoder_depth=decoder_depth(captions),
        vocab_size=captions.vocab_size,
        caption_tokens=max(captions.longest, 3),
    )
    return build_captioner(ModelConfig(**settings, num_classes=0, pooling="none"), decoder)
