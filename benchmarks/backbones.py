"""Images for the weights of configs/weights, and those weights in half the bytes.

    python -m benchmarks.backbones textures FOLDER                    4,000 drawn textures, 96 px
    python -m benchmarks.backbones cifar10 FOLDER --images CIFAR10
    python -m benchmarks.backbones store RUN FOLDER                   of a run, in float16

`cifar10` makes links to the first 4,000 images of each class, as `every`, and of five classes, as
`five`; the last 1,000 of each class are left for benchmarks/backbone_selection.py.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from vit.weights.safetensors_io import read_tensors, write_tensors
from vit.weights.saved_model import CONFIG_DIGEST, CONFIG_FILE, WEIGHTS_FILE

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]

TEXTURES_SIDE, OF_EACH_KIND = 96, 500
FIVE = ("airplane", "bird", "deer", "frog", "ship")
"""Classes of CIFAR-10 that weights are trained with; the five others are a target."""
FIRST = 4000


def turned(rng: np.random.Generator, side: int, period: tuple[float, float]) -> tuple[Floats, ...]:
    """Coordinates of the pixels along two axes at right angles, in periods, a little bent."""
    y, x = np.mgrid[:side, :side].astype(float)
    angle, length = rng.uniform(0, math.pi), rng.uniform(*period)
    bend = rng.uniform(0, 0.12) * length * spectrum(rng, side, 3.0)
    first = (x * math.cos(angle) + y * math.sin(angle) + bend) / length
    second = (y * math.cos(angle) - x * math.sin(angle) + bend) / length
    return first + rng.uniform(), second + rng.uniform()


def spectrum(rng: np.random.Generator, side: int, power: float) -> Floats:
    """Noise whose amplitude falls as frequency ** (-power / 2), of mean 0 and deviation 1."""
    f = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side))
    f[0, 0] = np.inf
    noise = np.fft.ifft2(np.fft.fft2(rng.normal(size=(side, side))) * f ** (-power / 2)).real
    return np.asarray((noise - noise.mean()) / noise.std())


def stripes(rng: np.random.Generator, side: int) -> Floats:
    along, _ = turned(rng, side, (5, 24))
    return np.asarray(np.tanh(rng.uniform(0.5, 6) * np.sin(2 * math.pi * along)))


def checks(rng: np.random.Generator, side: int) -> Floats:
    first, second = turned(rng, side, (8, 30))
    product = np.sin(2 * math.pi * first) * np.sin(2 * math.pi * second)
    return np.asarray(np.tanh(rng.uniform(2, 8) * product))


def dots(rng: np.random.Generator, side: int) -> Floats:
    first, second = turned(rng, side, (7, 24))
    distance = np.hypot(first % 1 - 0.5, second % 1 - 0.5)
    return np.asarray(np.tanh((rng.uniform(0.2, 0.4) - distance) * rng.uniform(8, 30)))


def bricks(rng: np.random.Generator, side: int) -> Floats:
    first, second = turned(rng, side, (8, 22))
    row = np.floor(second)
    across = (first / rng.uniform(1.5, 3) + 0.5 * (row % 2)) % 1
    joint = np.minimum(np.minimum(second % 1, 1 - second % 1), 2 * np.minimum(across, 1 - across))
    return np.asarray(np.tanh((joint - rng.uniform(0.06, 0.16)) * 20))


def weave(rng: np.random.Generator, side: int) -> Floats:
    first, second = turned(rng, side, (8, 24))
    over = (np.floor(first) + np.floor(second)) % 2
    return np.asarray(np.where(over > 0, np.sin(math.pi * (first % 1)), np.sin(math.pi * second)))


def cells(rng: np.random.Generator, side: int) -> Floats:
    points = rng.uniform(-10, side + 10, (int(rng.integers(12, 120)), 2))
    y, x = np.mgrid[:side, :side]
    distances = np.hypot(x[..., None] - points[:, 0], y[..., None] - points[:, 1])
    near = np.partition(distances, 1, axis=-1)[..., :2]
    return np.asarray(np.tanh((near[..., 1] - near[..., 0]) / rng.uniform(2, 6)) * 2 - 1)


def clouds(rng: np.random.Generator, side: int) -> Floats:
    return spectrum(rng, side, rng.uniform(1.5, 3.5))


def wood(rng: np.random.Generator, side: int) -> Floats:
    along, across = turned(rng, side, (20, 60))
    rings = along + 0.15 * spectrum(rng, side, 3.0) + 0.1 * np.sin(across)
    return np.asarray(2 * (rng.uniform(2, 5) * rings % 1) - 1)


TEXTURES: dict[str, Draw] = {
    "bricks": bricks, "cells": cells, "checks": checks, "clouds": clouds,
    "dots": dots, "stripes": stripes, "weave": weave, "wood": wood,
}  # fmt: skip


def texture(rng: np.random.Generator, kind: str, side: int) -> Image.Image:
    """A texture of two colours, with uneven light, blur and noise."""
    height = (
        TEXTURES[kind](rng, side)[..., None]
        + rng.uniform(0, 0.4) * spectrum(rng, side, 1)[..., None]
    )
    low, high = rng.uniform(20, 235, (2, 3))
    light = 1 + rng.uniform(0, 0.2) * spectrum(rng, side, 4.0)[..., None]
    values = (low + (high - low) * (height.clip(-1.5, 1.5) + 1) / 2) * light
    values += rng.normal(0, rng.uniform(0, 10), values.shape)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).filter(
        ImageFilter.GaussianBlur(rng.uniform(0, 0.8))
    )


def write_textures(out: Path) -> None:
    for number, kind in enumerate(TEXTURES):
        (out / kind).mkdir(parents=True, exist_ok=True)
        for at in range(OF_EACH_KIND):
            rng = np.random.default_rng((number, at))
            texture(rng, kind, TEXTURES_SIDE).save(out / kind / f"{at:04}.png")


def link_cifar10(out: Path, images: Path) -> None:
    for folder in sorted(path for path in images.iterdir() if path.is_dir()):
        for path in sorted(folder.iterdir())[:FIRST]:
            for name in ("every", "five") if folder.name in FIVE else ("every",):
                link = out / name / folder.name / path.name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.resolve())


def store(run: Path, out: Path) -> None:
    """Write config.json and model.safetensors of `run`, with floating-point numbers in float16 and
    without its calibration, which has files of its own."""
    out.mkdir(parents=True, exist_ok=True)
    tensors, notes = read_tensors(run / WEIGHTS_FILE)
    halves = {name: one.half() if one.is_floating_point() else one for name, one in tensors.items()}
    content = json.loads((run / CONFIG_FILE).read_bytes())
    for name in ("calibration", "calibration_error"):
        content["vit"].pop(name, None)
    text = json.dumps(content, indent=2) + "\n"
    notes[CONFIG_DIGEST] = hashlib.sha256(text.encode()).hexdigest()
    write_tensors(out / WEIGHTS_FILE, halves, notes)
    (out / CONFIG_FILE).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("textures", "cifar10", "store"))
    parser.add_argument("paths", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--images", type=Path, help="the training images of CIFAR-10, by class")
    args = parser.parse_args()
    if args.what == "textures":
        write_textures(args.paths[0])
    elif args.what == "cifar10":
        link_cifar10(args.paths[0], args.images)
    else:
        store(args.paths[0], args.paths[1])


if __name__ == "__main__":
    main()
