"""Tunes data loading: the image cache, and the number of loader processes by measurement."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from accelerate import Accelerator
from tqdm import tqdm

from vit.config import Config
from vit.data.dataloader import default_workers
from vit.data.dataset import ImageDataset
from vit.data.dataset_types import Sample, Splits
from vit.data.device_cache import DeviceCache, check_device_memory, free_device_memory
from vit.data.image_cache import SHARED_MEMORY, Kind, cache_side, open_cache
from vit.data.image_io import read_bytes
from vit.data.preprocessing import spec_from_config
from vit.data.sampler import SampleKey
from vit.errors import BadImage, ConfigError
from vit.precision import autocast
from vit.text import Notify, plural
from vit.timing import time_calls, timed
from vit.training.distributed.collectives import min_over_processes
from vit.training.distributed.devices import inference_precision
from vit.training.distributed.fsdp import is_sharded
from vit.training.logging.training_progress import notifier
from vit.training.lr_schedule import image_side
from vit.training.training_context import TrainingContext
from vit.training.training_loaders import TransformFor

TIMED_IMAGES = 32
MAX_TIMING_SECONDS = 1.0
MAX_WORKERS_PER_CORE = 4
"""Loader processes per core at most, however slow the disk is."""
NEGLIGIBLE_SHARE = 0.05
"""Loading time relative to the network's below which no loader process is started."""
SUFFICIENT_RATIO = 2
"""Loading rate relative to the network's rate on a CPU that is always sufficient."""


def with_cache(config: Config, splits: Splits, accelerator: Accelerator, notify: Notify) -> Splits:
    """Add a cache of the training images to `splits`, if the setting `cache` is not none.

    All processes of a machine share it: one builds it, and the others wait.
    """
    data = config.data
    if data.cache == "none":
        return splits
    if config.finetune.method == "probe":
        raise ConfigError(f"cache={data.cache}: method=probe reads each image once; leave it out")
    on_device, device = data.cache == "device", accelerator.device
    if on_device and device.type != "cuda":
        notify(
            f"note: cache=device on a {device.type} augments images in this process, which is slow "
            "for photographs; a new run with --cache ram has loader processes for it"
        )
    kind: Kind = "disk" if data.cache == "disk" or data.cache_folder else "ram"
    if on_device and not SHARED_MEMORY.is_dir():
        kind = "disk"
    paths = [sample.path for sample in splits.train]
    visible = accelerator.is_local_main_process
    with tqdm(
        desc="cache", total=len(paths), unit="img", disable=None if visible else True, leave=False
    ) as bar:
        cache = open_cache(
            paths,
            side=cache_side(config.model.image_size, config.augment.min_crop),
            kind=kind,
            folder=None if data.cache_folder is None else Path(data.cache_folder).expanduser(),
            intensity_range=data.intensity_range,
            channels=spec_from_config(data),
            threads=max(data.workers or default_workers(1), 1),
            notify=notify,
            advance=bar.update,
        )
    accelerator.wait_for_everyone()
    if kind == "ram":
        cache.unlink()  # the processes of this training have it open
    if on_device:
        if (free := free_device_memory(device)) is not None:  # all processes raise, or none
            check_device_memory(cache, min_over_processes(accelerator, free))
        return dataclasses.replace(splits, cache=DeviceCache(cache, device))
    return dataclasses.replace(splits, cache=cache)


def choose_workers(run: TrainingContext, samples: Sequence[Sample]) -> int | None:
    """Choose the number of loader processes per device by timing some images; None if it is given
    or for a linear probe.

    0 on a CPU where loading is negligible beside the network. Else one per core of this process,
    and more if they wait for the disk, but no more than load images twice as fast as a CPU trains
    on them. Validation does not use the cache, so files are timed.
    """
    if run.config.data.workers is not None or run.config.finetune.method == "probe":
        return None
    share = default_workers(run.processes)
    fetch, decode = time_loading(run, samples)
    network = time_network(run) if fetch + decode else 0.0
    if fetch + decode < NEGLIGIBLE_SHARE * network:
        notifier(run.accelerator)(
            f"loading: {1000 * (fetch + decode):.1f} ms an image, "
            f"{(fetch + decode) / network:.1%} of "
            "what the network takes: in this process (-j chooses loader processes)"
        )
        return 0
    workers = (
        share
        if not decode
        else min(math.ceil(share * (1 + fetch / decode)), MAX_WORKERS_PER_CORE * share)
    )
    if network:
        workers = min(max(math.ceil(SUFFICIENT_RATIO * (fetch + decode) / network), 1), workers)
    if run.cache is not None:
        return min(workers, share)
    if fetch + decode:
        notifier(run.accelerator)(
            f"loading: {1000 * (fetch + decode):.1f} ms an image, "
            f"{fetch / (fetch + decode):.0%} of it to read its file: "
            f"{plural(workers, 'loader process', 'loader processes')} a device (-j chooses others)"
        )
    return workers


def time_loading(run: TrainingContext, samples: Sequence[Sample]) -> tuple[float, float]:
    """Seconds per training image: reading its file, and decoding and augmenting it."""
    transform = TransformFor(run.config, run.preprocessing)
    some = samples[:: max(len(samples) // TIMED_IMAGES, 1)][:TIMED_IMAGES]
    dataset = ImageDataset(some, transform, seed=0)
    reading, decoding = list[float](), list[float]()
    for index, sample in enumerate(some):
        if sum(reading) + sum(decoding) > MAX_TIMING_SECONDS:
            break
        with contextlib.suppress(BadImage):  # reported when training reads it
            reading.append(timed(partial(read_bytes, sample.path))[0])
            decoding.append(timed(partial(dataset.__getitem__, SampleKey(0, index, 0)))[0])
    # the first one includes imports
    return fmean(reading[1:] or [0.0]), fmean(decoding[1:] or [0.0])


@torch.no_grad()
def time_network(run: TrainingContext) -> float:
    """Approximate seconds per image of a training step in the first epoch, on a CPU.

    Three times the forward pass of two blank images. 0 on other devices, under FSDP, for
    captioning, and where the first pass would compile the network.
    """
    accelerator = run.accelerator
    if accelerator.device.type != "cpu" or is_sharded(accelerator) or run.tokenizer is not None:
        return 0.0
    if run.config.run.compile:
        return 0.0
    side = image_side(run.config, 0, run.config.training.epochs)
    dtype = next(run.network.parameters()).dtype
    images = torch.zeros(2, run.config.model.channels, side, side, dtype=dtype)
    precision = inference_precision(run.config.run.precision, accelerator.device)
    was = run.network.training
    run.network.eval()
    with autocast(precision, accelerator.device):
        seconds = time_calls(partial(run.network, images), repeats=3, seconds=MAX_TIMING_SECONDS)
    run.network.train(was)
    return 3 * min(seconds) / len(images)
