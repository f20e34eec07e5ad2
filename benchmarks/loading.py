"""How many photographs a second loaders bring: ours, timm's, torchvision's, and plain decoding.

    python benchmarks/loading.py PICTURES [--size 224] [--workers 2] [--rounds 7] [--quality]

Each loader reads the same files, cuts a random crop of 8 to 100 % of the area and of 3/4 to 4/3 of
the aspect, resizes it, flips half of them, and gives batches of bytes. They take turns, so that a
busy machine disturbs all alike; a ratio is the median over rounds of ours to timm's in that round.
timm's loader is what `create_loader` gives with its prefetcher, of which only the part that loads
is timed: bytes, before they are moved and normalised. Processes are started and the first batches
brought before the clock runs. Seconds of a core, which suffer less from others on the machine,
count all processes of a loader with their start.

    --quality   instead: PSNR of our crops, of JPEGs decoded whole and at reduced size and of a
                cache, to those that Pillow makes of whole images
"""

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simplejpeg
import torch

from vit.config import AugmentConfig
from vit.data.dataloader import TrainingLoader, ignore_worker_warnings
from vit.data.dataset import ConstantTransform
from vit.data.dataset_types import Sample
from vit.data.image_cache import ImageCache, cache_side, open_cache
from vit.data.image_io import read_image, read_pixels
from vit.data.preprocessing import RESAMPLING, Preprocessing
from vit.data.sampler import MicroBatchSampler
from vit.data.transforms import FastCrop, TrainingTransform, random_crop_box

BATCH = 50
AHEAD = 4
"""Batches that are brought before the clock runs."""
Loader = Callable[[int], Iterator[object]]


def ours(
    paths: list[str],
    args: argparse.Namespace,
    *,
    quick: bool = True,
    cache: ImageCache | None = None,
) -> Loader:
    """Our loader of training images."""
    samples = [Sample(path, 0) for path in paths]
    size = Preprocessing(image_size=(args.size,) * 2, interpolation=args.interpolation)
    transform = TrainingTransform(AugmentConfig(), size, fast_crop=quick)
    schedule = MicroBatchSampler(count=len(samples), seed=0, batch_size=BATCH)
    loader = TrainingLoader(
        samples,
        ConstantTransform(transform),
        schedule,
        epochs=10**6,
        workers=args.workers,
        cache=cache,
    )

    def one_pass(number: int) -> Iterator[object]:
        yield from loader.epoch(number)
        loader.close()

    return one_pass


def timms(folder: Path, args: argparse.Namespace) -> Loader:
    """timm's loader; what its prefetcher is fed with."""
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", root=str(folder)),
        input_size=(3, args.size, args.size),
        batch_size=BATCH,
        is_training=True,
        use_prefetcher=True,
        interpolation=args.interpolation,
        num_workers=args.workers,
        persistent_workers=False,
        device=torch.device("cpu"),
    )
    return lambda _number: iter(loader.loader)


def torchvisions(folder: Path, args: argparse.Namespace) -> Loader:
    """torchvision's ImageFolder and transforms, on Pillow's images."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import InterpolationMode, v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(args.size, interpolation=InterpolationMode(args.interpolation)),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
        ]
    )
    return from_torch(ImageFolder(folder, transform), args)


def decoding_alone(paths: list[str], args: argparse.Namespace) -> Loader:
    """Nothing but libjpeg-turbo: a loader that decodes whole images cannot be faster."""

    class Decoded(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> int:
            return len(simplejpeg.decode_jpeg(Path(paths[index]).read_bytes()))

    return from_torch(Decoded(), args)


def from_torch(dataset: torch.utils.data.Dataset, args: argparse.Namespace) -> Loader:
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, shuffle=True, num_workers=args.workers, drop_last=True
    )
    return lambda _number: iter(loader)


class Pace(NamedTuple):
    """How a loader did in one pass."""

    rate: float
    """Images a second, after the first batches."""
    core: float
    """Images a second of a core: all processes, with their start."""


def pace(loader: Loader, number: int, count: int) -> Pace:
    before = os.times()
    batches = loader(number)
    list(islice(batches, AHEAD))
    began = time.perf_counter()
    rest = sum(1 for _ in batches)
    rate = rest * BATCH / (time.perf_counter() - began)
    assert rest == count // BATCH - AHEAD, f"{rest} batches"
    del batches  # ends the processes, whose time is counted then
    gc.collect()
    spent = sum(os.times()[:4]) - sum(before[:4])
    return Pace(rate, count / spent)


def psnr(pixels: torch.Tensor, other: np.ndarray) -> float:
    one = pixels.permute(1, 2, 0).numpy()
    error = np.mean((one.astype(np.float64) - other) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-3)))


def quality(paths: list[str], args: argparse.Namespace, cache: ImageCache) -> None:
    """Print how near quick crops and crops from a cache are to those of Pillow, of equal boxes."""
    size, found = (args.size, args.size), {"whole": [], "reduced": [], "cache": []}
    for index, path in enumerate(paths):
        image = read_image(path)
        torch.manual_seed(index)
        box = tuple(map(round, random_crop_box(*image.size, AugmentConfig().min_crop, 4 / 3)))
        want = np.asarray(image.resize(size, RESAMPLING[args.interpolation], box=box))
        pixels = []

        def from_file(least, path=path, pixels=pixels):
            pixels.append(read_pixels(path, least))
            return pixels[-1]

        crop = FastCrop(size, args.interpolation, lambda _width, _height, box=box: box)
        value = psnr(crop(from_file), want)
        found["reduced" if pixels[0].shape[1] < image.width else "whole"].append(value)
        kept = cache.pixels(index)
        assert kept is not None
        scale = kept.shape[1] / image.width
        own = tuple(edge * scale for edge in box)
        crop = FastCrop(size, args.interpolation, lambda _width, _height, own=own: own)
        found["cache"].append(psnr(crop(lambda _least, kept=kept: kept), want))
    for name, values in found.items():
        if values:
            tenth, median = sorted(values)[len(values) // 10], statistics.median(values)
            print(
                f"{name:8s} {len(values):5d}: PSNR median {median:.1f} dB, 10 % below {tenth:.1f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--interpolation", default="bicubic", choices=["bicubic", "bilinear"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--most", type=int, default=1000, help="images")
    parser.add_argument("--repeat", type=int, default=4, help="how often a pass has each of them")
    parser.add_argument("--side", type=int, help="of the cache")
    parser.add_argument("--quality", action="store_true")
    args = parser.parse_args()
    random.seed(0)
    paths = sorted(str(path.resolve()) for path in args.images.rglob("*.jp*g"))[: args.most]
    if not args.quality:
        paths *= args.repeat  # long passes, so that starting processes weighs little
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "images"
        (folder / "all").mkdir(parents=True)
        for number, path in enumerate(paths):
            (folder / "all" / f"{number:06d}.jpg").symlink_to(path)
        cache = open_cache(
            paths,
            side=args.side or cache_side(args.size, 0.08),
            kind="disk",
            folder=Path(temporary),
            notify=print,
        )
        if args.quality:
            quality(paths, args, cache)
            return
        loaders = {
            "timm": timms(folder, args),
            "torchvision": torchvisions(folder, args),
            "ours": ours(paths, args),
            "ours, exact": ours(paths, args, quick=False),
            "ours, cached": ours(paths, args, cache=cache),
            "decoding alone": decoding_alone(paths, args),
        }
        compare(loaders, len(paths), args.rounds)


def compare(loaders: dict[str, Loader], count: int, rounds: int) -> None:
    """Print the pace of each, and beside timm's in the same round."""
    paces: dict[str, list[Pace]] = {name: [] for name in loaders}
    with ignore_worker_warnings():
        for number in range(rounds):
            for name, loader in loaders.items():
                paces[name].append(pace(loader, number, count))
    load = "/".join(f"{mean:.1f}" for mean in os.getloadavg())
    print(f"{count} images, {rounds} rounds, torch {torch.__version__}, load {load}")
    for name, found in paces.items():
        print(f"{name:15s}", end="")
        for field in Pace._fields:
            own, timms = ([getattr(one, field) for one in each] for each in (found, paces["timm"]))
            ratios = [one / other for one, other in zip(own, timms, strict=True)]
            middle = f"{statistics.median(own):6.0f} = {statistics.median(ratios):5.2f} x timm"
            print(f"  {field} {middle} ({min(ratios):.2f} to {max(ratios):.2f})", end="")
        print()


if __name__ == "__main__":
    main()
