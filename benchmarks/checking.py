"""How fast `vit check` is, and what it finds of planted copies.

    python benchmarks/checking.py DATA [--plant 500]

Time is that of the whole work without a cache and without a network. Copies are planted one kind at
a time beside all pictures of DATA; recall is the share of them that is named together
with its original. False pairs are what is named in DATA as it is: look at them, some are true.
"""

import argparse
import io
import random
import time
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance

from vit.data.decoding import read_image
from vit.data.inspection.alike import near_pairs
from vit.data.inspection.facts import looks, shrunk
from vit.data.inspection.inspecting import inspect

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
    "cut 10 % off each side": lambda image, _: cut(image, [0.1] * 4),
    "brightness 0.8 to 1.2": brighter,
    "cut, size, brightness and JPEG": all_of_it,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--plant", type=int, default=500)
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    began = time.perf_counter()
    report = inspect(args.data, workers=args.workers, cache=False)
    seconds = time.perf_counter() - began
    print(f"{len(report.facts):,} pictures in {seconds:.1f} s; {report.kinds()}")
    paths, draw = [*report.facts], Draw(0)
    chosen = draw.sample(range(len(paths)), min(args.plant, len(paths)))
    shown = [facts.look for facts in report.facts.values()]
    sides = [min(facts.width, facts.height) for facts in report.facts.values()]
    for kind, change in KINDS.items():
        copies = [change(read_image(paths[at]), draw) for at in chosen]
        planted = [looks(np.asarray(shrunk(copy), dtype=np.int16)) for copy in copies]
        found = {
            pair[:2] for pair in near_pairs(shown + planted, sides + [min(c.size) for c in copies])
        }
        recall = sum((at, len(paths) + n) in found for n, at in enumerate(chosen)) / len(chosen)
        print(f"{kind:<32} {recall:.3f}", flush=True)


if __name__ == "__main__":
    main()
