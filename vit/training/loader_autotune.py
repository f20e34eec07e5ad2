"""How the training images come to the device in time: a cache, processes, and what is said."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm

from vit.config import Config, DataConfig
from vit.data.dataloader import default_workers
from vit.data.dataset import ImageDataset
from vit.data.dataset_types import Sample, Splits
from vit.data.image_cache import ImageCache, cache_side, open_cache
from vit.data.image_io import read_bytes
from vit.data.sampler import SampleKey
from vit.errors import BadImage, ConfigError
from vit.precision import autocast
from vit.training.devices import inference_precision
from vit.training.fsdp import is_sharded
from vit.training.lr_schedule import image_side
from vit.training.training_loaders import TransformFor
from vit.training.training_loop import TrainingState
from vit.training.training_progress import teller

PROBED = 32
"""Images that are enough to see how they are read."""
PROBE_SECONDS = 1.0
MOST_TIMES = 4
"""Loader processes of a core at most, however long files take to come."""
LITTLE = 0.05
"""Share of the network's time for an image below which loading it needs no process."""
AMPLE = 2
"""Times the pace of the network on a CPU at which loading can never be what a step waits for."""
MUCH = 0.15
"""Share of an epoch spent waiting for data above which there is advice."""
LEAST_SECONDS = 2.0
MOST_SHARED = 2
"""Caches in memory that trainings one after the other share: each has a part of what is free."""

# the caches in memory that the next training of this process may use, the newest last; None where
# each training forgets its own
_shared: list[ImageCache] | None = None


@contextlib.contextmanager
def shared_caches() -> Iterator[None]:
    """Inside, trainings one after the other share their caches in memory, of the same side."""
    global _shared
    _shared = []
    try:
        yield
    finally:
        for cache in _shared:
            cache.unlink()
        _shared = None


def share_or_forget(cache: ImageCache) -> None:
    """Keep a cache in memory for the next training, or delete its name."""
    if _shared is None:
        cache.unlink()
        return
    _shared[:] = [*(other for other in _shared if other.file != cache.file), cache]
    while len(_shared) > MOST_SHARED:
        _shared.pop(0).unlink()


def with_cache(
    config: Config, splits: Splits, accelerator: Accelerator, notify: Callable[[str], None]
) -> Splits:
    """`splits` with its training images in a cache, where the settings ask for one.

    All processes of a machine share it: one builds it, and the others wait.

    Raises:
        DataError: There is no room for it, or it cannot be written.
        ConfigError: Nothing would be read from it.
    """
    data = config.data
    if data.cache == "none":
        return splits
    if config.finetune.method == "probe":
        raise ConfigError(f"cache={data.cache}: method=probe reads each image once; leave it out")
    paths = [sample.path for sample in splits.train]
    visible = accelerator.is_local_main_process
    with tqdm(
        desc="cache", total=len(paths), unit="img", disable=None if visible else True, leave=False
    ) as bar:
        cache = open_cache(
            paths,
            side=cache_side(config.model.image_size, config.augment.min_crop),
            kind=data.cache,
            folder=None if data.cache_folder is None else Path(data.cache_folder).expanduser(),
            threads=max(data.workers or default_workers(1), 1),
            notify=notify,
            advance=bar.update,
        )
    accelerator.wait_for_everyone()
    if data.cache == "ram":
        share_or_forget(cache)
    return dataclasses.replace(splits, cache=cache)


def measured_workers(run: TrainingState, samples: Sequence[Sample]) -> int | None:
    """Loader processes of this device, from how long some images take; None where chosen.

    None at all on a CPU where the network takes so much longer that loading in between costs less
    than processes do. Else one a core of its share, and more where they wait for files to come, but
    no more than make images twice as fast as a CPU learns from them.
    Validation reads no cache, so what counts is the image as its file has it.
    """
    if run.config.data.workers is not None or run.config.finetune.method == "probe":
        return None
    share = default_workers(run.processes)
    fetch, rest = time_reading(run, samples)
    network = time_network(run) if fetch + rest else 0.0
    if fetch + rest < LITTLE * network:
        teller(run.accelerator)(
            f"loading: {1000 * (fetch + rest):.1f} ms an image, {(fetch + rest) / network:.1%} of "
            "what the network takes: in this process (-j chooses loader processes)"
        )
        return 0
    workers = share if not rest else min(math.ceil(share * (1 + fetch / rest)), MOST_TIMES * share)
    if network:
        workers = min(max(math.ceil(AMPLE * (fetch + rest) / network), 1), workers)
    if run.cache is not None:
        return min(workers, share)
    if fetch + rest:
        teller(run.accelerator)(
            f"loading: {1000 * (fetch + rest):.1f} ms an image, {fetch / (fetch + rest):.0%} of "
            f"it for its file to come: {workers} loader processes a device (-j chooses others)"
        )
    return workers


def time_reading(run: TrainingState, samples: Sequence[Sample]) -> tuple[float, float]:
    """Seconds that a training image takes: its file to come, and all that follows."""
    transform = TransformFor(run.config, run.preprocessing)
    some = samples[:: max(len(samples) // PROBED, 1)][:PROBED]
    dataset = ImageDataset(some, transform, seed=0)
    fetch, rest, done, began = 0.0, 0.0, 0, time.perf_counter()
    for index, sample in enumerate(some):
        start = time.perf_counter()
        if start - began > PROBE_SECONDS:
            break
        try:
            read_bytes(sample.path)
        except BadImage:  # the run itself will meet it, and say so
            continue
        middle = time.perf_counter()
        dataset[SampleKey(0, index, 0)]
        if index:  # the first one also imports what it needs
            fetch, rest, done = (
                fetch + middle - start,
                rest + time.perf_counter() - middle,
                done + 1,
            )
    return fetch / max(done, 1), rest / max(done, 1)


@torch.no_grad()
def time_network(run: TrainingState) -> float:
    """About the seconds that the network takes to learn from an image of the first epoch.

    Three times the forward pass, measured with two blank images. Only on a CPU and of whole
    networks: a GPU waits while this process loads. 0 elsewhere.
    """
    accelerator = run.accelerator
    if accelerator.device.type != "cpu" or is_sharded(accelerator) or run.tokenizer is not None:
        return 0.0
    side = image_side(run.config, 0, run.config.training.epochs)
    dtype = next(run.network.parameters()).dtype
    images = torch.zeros(2, run.config.model.channels, side, side, dtype=dtype)
    precision = inference_precision(run.config.run.precision, accelerator.device)
    was = run.network.training
    run.network.eval()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        with autocast(precision, accelerator.device):
            run.network(images)
        seconds.append(time.perf_counter() - began)
        if sum(seconds) > PROBE_SECONDS:
            break
    run.network.train(was)
    return 3 * min(seconds) / len(images)


def waiting(event: Mapping[str, Any], data: DataConfig) -> str | None:
    """What to do about an epoch that spent much of its time waiting for data, or None."""
    share, seconds = event["data_wait"], event["seconds"]
    if share <= MUCH or share * seconds < LEAST_SECONDS:
        return None
    ways = {
        "none": "--cache ram or --cache disk keeps images decoded; more loader processes (-j) "
        "help where cores are idle, and smaller files on a nearer disk where they are not",
        "disk": "--cache ram is nearer; more loader processes (-j) help where cores are idle",
        "ram": "more loader processes (-j) help where cores are idle, or fewer augmentations",
    }
    return f"note: {share:.0%} of the epoch was spent waiting for images: {ways[data.cache]}"
