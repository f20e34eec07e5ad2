"""How fast `vit check` is, and what it finds of planted copies.

    python benchmarks/checking.py DATA [--plant 500] [--seed 0]
    python benchmarks/checking.py DATA --bursts [--seed 0]

Time is that of the whole work without a cache and without a network. Copies are planted beside all
images of DATA, each of another one; found is the share that is named together with its original.
False pairs are among what is named in DATA as it is: look at them, some are true.

`--bursts` makes two to five images of every third one, crops, shifts, compressed copies and frames
of a pan, beside the others as they are: pairs of one scene are those in one component, as
`--group auto` finds them.
"""

import argparse
import io
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from itertools import combinations

import numpy as np
from PIL import Image, ImageEnhance

from vit.data.checks.dataset_check import check_dataset
from vit.data.checks.duplicates import MAX_MOVED, find_near_duplicates
from vit.data.checks.image_stats import downscaled, encode_thumbnail
from vit.data.image_io import read_image
from vit.data.sources.open_dataset import list_images
from vit.data.sources.train_val_split import connected

Draw = random.Random


def resized(image: Image.Image, draw: Draw) -> Image.Image:
    factor = draw.uniform(0.5, 2)
    size = max(round(image.width * factor), 8), max(round(image.height * factor), 8)
    return image.resize(size, Image.Resampling.BICUBIC)


def compressed(image: Image.Image, draw: Draw) -> Image.Image:
    content = io.BytesIO()
    image.save(content, "JPEG", quality=draw.randint(40, 90))
    return Image.open(content).convert("RGB")


def cut(image: Image.Image, sides: list[float]) -> Image.Image:
    width, height = image.size
    left, top, right, bottom = sides
    return image.crop(
        (
            round(left * width),
            round(top * height),
            round((1 - right) * width),
            round((1 - bottom) * height),
        )
    )


def brighter(image: Image.Image, draw: Draw, most: float = 0.2) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(draw.uniform(1 - most, 1 + most))


def all_of_it(image: Image.Image, draw: Draw) -> Image.Image:
    less = cut(image, [draw.uniform(0, 0.1) for _ in range(4)])
    return compressed(brighter(resized(less, draw), draw, 0.15), draw)


KINDS: dict[str, Callable[[Image.Image, Draw], Image.Image]] = {
    "0.5 to 2 times the size": resized,
    "JPEG quality 40 to 90": compressed,
    "cut 5 % off each side": lambda image, _: cut(image, [0.05] * 4),
    "cut 0 to 10 % off each side": lambda image, draw: cut(
        image, [draw.uniform(0, 0.1) for _ in range(4)]
    ),
    "cut 5 % off one side each way": lambda image, draw: cut(
        image, [draw.choice((0, 0.05)), draw.choice((0, 0.05)), 0.05, 0]
    ),
    "cut 10 % off each side": lambda image, _: cut(image, [0.1] * 4),
    "brightness 0.8 to 1.2": brighter,
    "cut, size, brightness and JPEG": all_of_it,
}


def frame(image: Image.Image, left: float, top: float, share: float) -> Image.Image:
    """A part of `share` of the sides; `left` and `top` are shares of what it leaves out."""
    rest = 1 - share
    return cut(image, [rest * left, rest * top, rest * (1 - left), rest * (1 - top)])


BURSTS: dict[str, Callable[[Image.Image, Draw, int], Image.Image]] = {
    "crops of 88 to 100 % of the sides": lambda image, draw, _: frame(
        image, draw.random(), draw.random(), draw.uniform(0.88, 1)
    ),
    "shifts of up to 8 % of the sides": lambda image, draw, _: frame(
        image, draw.random(), draw.random(), 0.92
    ),
    "JPEG quality 40 to 90": lambda image, _draw, _number: image,
    "frames of a pan, each 2.5 % further": lambda image, _, number: frame(
        image, number / 8, 0.5, 0.8
    ),
}


def measure_bursts(paths: list[str], draw: Draw) -> None:
    """Print the recall of the pairs of each kind of burst, and the precision of all."""
    order = draw.sample(paths, len(paths))
    scenes, thumbnails, sides = [], [], []
    for number, path in enumerate(order):
        image, kinds = read_image(path), [*BURSTS]
        kind = kinds[number // 3 % len(kinds)] if number % 3 == 0 else ""
        for at in range(draw.randint(2, 5) if kind else 1):
            shown = compressed(BURSTS[kind](image, draw, at), draw) if kind else image
            scenes.append((number, kind))
            thumbnails.append(encode_thumbnail(np.asarray(downscaled(shown), dtype=np.int16)))
            sides.append(min(shown.size))
    began = time.perf_counter()
    pairs = find_near_duplicates(thumbnails, sides, max_overhang=MAX_MOVED)
    seconds = time.perf_counter() - began
    found = [
        pair for group in connected(p[:2] for p in pairs) for pair in combinations(sorted(group), 2)
    ]
    right = Counter(scenes[a][1] for a, b in found if scenes[a] == scenes[b])
    sizes = Counter(scenes)
    every = Counter[str]()
    for (_, kind), size in sizes.items():
        every[kind] += size * (size - 1) // 2
    print(
        f"{len(scenes):,} images, compared in {seconds:.1f} s\n\n"
        "| kind | pairs | found |\n|---|---|---|"
    )
    for kind in BURSTS:
        print(f"| {kind} | {every[kind]:,} | {right[kind] / every[kind]:.4f} |")
    print(f"| all | {every.total():,} | {right.total() / every.total():.4f} |")
    print(f"precision of {len(found):,} pairs: {right.total() / len(found):.4f}")


def planted(paths: list[str], number: int, draw: Draw) -> list[tuple[int, str, Image.Image]]:
    """Place of the original, kind and image of so many copies a kind, each of another image."""
    kinds = list(KINDS)
    chosen = draw.sample(range(len(paths)), min(number * len(kinds), len(paths)))
    made = []
    for n, at in enumerate(chosen):
        kind = kinds[n % len(kinds)]
        made.append((at, kind, KINDS[kind](read_image(paths[at]), draw)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--plant", type=int, default=500)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bursts", action="store_true")
    args = parser.parse_args()
    if args.bursts:
        measure_bursts(list_images([args.data]), Draw(args.seed))
        return
    began = time.perf_counter()
    report = check_dataset(args.data, workers=args.workers, cache=False)
    seconds, cpu = time.perf_counter() - began, used()
    found = report.kinds()
    print(f"{len(report.stats):,} images in {seconds:.1f} s, {cpu:.1f} s of cores; {found}")
    paths = [*report.stats]
    copies = planted(paths, args.plant, Draw(args.seed))
    shown = [stats.thumbnail for stats in report.stats.values()]
    shown += [encode_thumbnail(np.asarray(downscaled(copy), dtype=np.int16)) for *_, copy in copies]
    sides = [min(stats.width, stats.height) for stats in report.stats.values()]
    sides += [min(copy.size) for *_, copy in copies]
    pairs = {pair[:2] for pair in find_near_duplicates(shown, sides, workers=args.workers)}
    print("| change | copies | found |\n|---|---|---|")
    for kind in KINDS:
        hits = [
            (at, len(paths) + n) in pairs
            for n, (at, other, _) in enumerate(copies)
            if other == kind
        ]
        print(f"| {kind} | {len(hits):,} | {sum(hits) / len(hits):.3f} |", flush=True)


def used() -> float:
    """Seconds of cores that this process and the ended ones below it took."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in both)


if __name__ == "__main__":
    main()
