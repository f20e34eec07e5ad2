"""Loading of training images: ours, timm's, torchvision's, and plain decoding.

Each loader reads the same files, cuts a random crop of 8 to 100 % of the area, resizes it, mirrors
half of them, and gives batches of bytes. Processes are started and the first batches brought before
the clock runs. Of timm's only the part that loads is timed, before its prefetcher normalises.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from benchmarks.timing import Comparison, Run
from vit.config import AugmentConfig
from vit.data.dataloader import TrainingLoader, ignore_worker_warnings
from vit.data.dataset import ConstantTransform
from vit.data.dataset_types import Sample
from vit.data.image_cache import ImageCache, cache_side, open_cache
from vit.data.preprocessing import Preprocessing
from vit.data.sampler import MicroBatchSampler
from vit.data.sources.open_dataset import list_images
from vit.data.transforms import TrainingTransform

BATCH, SIDE, AHEAD, MOST = 50, 224, 4, 4000


def paced(batches_of: Callable[[int], Iterator[object]], count: int) -> Run:
    """Time one pass after its first batches, as if it had brought `count` images."""
    epoch = iter(range(10**6))

    def run() -> float:
        with ignore_worker_warnings():
            batches = batches_of(next(epoch))
            list(islice(batches, AHEAD))
            began = time.perf_counter()
            rest = sum(1 for _ in batches)
            spent = time.perf_counter() - began
        return spent * count / (rest * BATCH)

    return run


def ours(
    paths: list[str], workers: int, *, fast: bool = True, cache: ImageCache | None = None
) -> Run:
    transform = TrainingTransform(
        AugmentConfig(), Preprocessing(image_size=(SIDE, SIDE)), fast_crop=fast
    )
    schedule = MicroBatchSampler(count=len(paths), seed=0, batch_size=BATCH)
    samples = [Sample(path, 0) for path in paths]
    loader = TrainingLoader(
        samples, ConstantTransform(transform), schedule, epochs=10**6, workers=workers, cache=cache
    )

    def one_pass(number: int) -> Iterator[object]:
        yield from loader.epoch(number)
        loader.close()

    return paced(one_pass, len(paths))


def from_timm(folder: Path, workers: int, count: int) -> Run:
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", root=str(folder)), input_size=(3, SIDE, SIDE), batch_size=BATCH,
        is_training=True, use_prefetcher=True, interpolation="bicubic", num_workers=workers,
        persistent_workers=False, device=torch.device("cpu"),
    )  # fmt: skip
    return paced(lambda _: iter(loader.loader), count)


def from_torchvision(folder: Path, workers: int, count: int) -> Run:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import InterpolationMode, v2

    steps = [v2.RandomResizedCrop(SIDE, interpolation=InterpolationMode.BICUBIC)]
    steps += [v2.RandomHorizontalFlip(), v2.PILToTensor()]
    return from_torch(ImageFolder(folder, v2.Compose(steps)), workers, count)


class Decoded(torch.utils.data.Dataset[int]):
    """Nothing but libjpeg-turbo: a loader that decodes whole images cannot be faster."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        from vit.data.image_io import read_pixels

        return len(read_pixels(self.paths[index], lambda *size: size))


def from_torch(dataset: torch.utils.data.Dataset[int], workers: int, count: int) -> Run:
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, shuffle=True, num_workers=workers, drop_last=True
    )
    return paced(lambda _: iter(loader), count)


def loading(options: argparse.Namespace) -> Iterator[Comparison]:
    """Whole loaders with `--workers` processes each."""
    if options.images is None:
        raise SystemExit("loading: give a folder of photographs with --images")
    found = list_images([str(options.images.resolve())])
    paths = (found * (MOST // len(found) + 1))[:MOST] if len(found) < MOST else found[:MOST]
    count = len(paths) // BATCH * BATCH
    folder = options.folder / "images"
    (folder / "all").mkdir(parents=True)
    for number, path in enumerate(paths):
        (folder / "all" / f"{number:06d}{Path(path).suffix}").symlink_to(path)
    workers = options.workers
    cache = open_cache(
        paths[:count], side=cache_side(SIDE, 0.08), kind="disk", folder=options.folder, notify=print
    )
    yield Comparison(
        title=f"Loading, {count:,} images, {workers} processes",
        ways={
            "timm, create_loader": partial(from_timm, folder, workers, count),
            "torchvision, ImageFolder and v2": partial(from_torchvision, folder, workers, count),
            "vit": partial(ours, paths[:count], workers),
            "vit, decode: exact": partial(ours, paths[:count], workers, fast=False),
            "vit, cached": partial(ours, paths[:count], workers, cache=cache),
            "decoding alone": lambda: from_torch(Decoded(paths[:count]), workers, count),
        },
        count=count,
        warm_ups=1,
    )
