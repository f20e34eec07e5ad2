"""Are several questions of an image learned in one run as well as in a run each, and how fast?

    python benchmarks/attributes.py FOLDER [--epochs 12] [--seed 0]

Each image has one thing on a noisy ground: its shape is one of four, its colour one of five and its
size one of three. One run of `--target shape,colour,size` and a run of each alone get the same
network, augmentation, epochs and images; their best epochs answer the same 600 other images.
"""

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SIDE, TRAIN, VAL, TEST = 64, 1500, 600, 600
SHAPES: dict[str, list[tuple[float, float]] | None] = {
    "disc": None,
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1.2), (1.2, 0.9), (-1.2, 0.9)],
    "cross": [
        *((-0.35, -1.2), (0.35, -1.2), (0.35, -0.35), (1.2, -0.35), (1.2, 0.35), (0.35, 0.35)),
        *((0.35, 1.2), (-0.35, 1.2), (-0.35, 0.35), (-1.2, 0.35), (-1.2, -0.35), (-0.35, -0.35)),
    ],
}
COLOURS = {
    "red": (200, 50, 50),
    "green": (50, 170, 60),
    "blue": (60, 70, 200),
    "yellow": (210, 190, 50),
    "violet": (150, 60, 170),
}
SIZES = {"small": (9, 11), "middle": (14, 16), "large": (20, 23)}
QUESTIONS = ("shape", "colour", "size")
SETTINGS: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "stem": "conv",
    "dim": 64,
    "depth": 3,
    "num_heads": 2,
    "hidden_dim": 128,
    "batch_size": 32,
    "lr": 2e-3,
    "warmup_epochs": 1,
    "smoothing": 0.0,
    "random_crop": "simple",
    "hflip": 0.0,
    "cache": "ram",
    "workers": 0,
    "device": "cpu",
    **dict.fromkeys(("mixup", "cutmix", "erase", "color_jitter"), 0.0),
}
"""Of all runs alike."""


def draw(random: np.random.Generator) -> tuple[Image.Image, list[str]]:
    """An image with its shape, colour and size."""
    shape, colour, size = (str(random.choice([*one])) for one in (SHAPES, COLOURS, SIZES))
    radius = random.uniform(*SIZES[size])
    x, y = random.uniform(1.2 * radius, SIDE - 1.2 * radius, 2)
    tone = np.clip(random.normal(COLOURS[colour], 15), 0, 255).astype(int).tolist()
    image = Image.new("RGB", (SIDE, SIDE), (*random.integers(70, 190, 3).tolist(),))
    corners = SHAPES[shape]
    if corners is None:
        box = (x - radius, y - radius, x + radius, y + radius)
        ImageDraw.Draw(image).ellipse(box, fill=(*tone,))
    else:
        angle = random.uniform(-0.3, 0.3)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        points = np.array([x, y]) + radius * np.array(corners) @ turn
        ImageDraw.Draw(image).polygon([(*point,) for point in points.tolist()], fill=(*tone,))
    pixels = np.asarray(image, np.float32) + random.normal(0, 12, (SIDE, SIDE, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), [shape, colour, size]


def make(folder: Path, seed: int) -> None:
    """Write the images with list.csv, of training and validation, and test.csv."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    splits = ["train"] * TRAIN + ["val"] * VAL + ["test"] * TEST
    rows = []
    for number, split in enumerate(splits):
        image, answers = draw(random)
        image.save(folder / f"{number}.png")
        rows.append([f"{number}.png", split, *answers])
    for name, some in (("list.csv", rows[: TRAIN + VAL]), ("test.csv", rows[TRAIN + VAL :])):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([["image", "split", *QUESTIONS], *some])


def run(folder: Path, targets: tuple[str, ...], epochs: int, seed: int) -> dict[str, Any]:
    """Train on the columns `targets`; seconds, those of the processor, and the accuracy of each on
    the test images."""
    import vit

    out, start = folder / f"run-{'-'.join(targets)}", (time.monotonic(), time.process_time())
    vit.train(folder / "list.csv", out, target=targets, epochs=epochs, seed=seed, **SETTINGS)
    spent = time.monotonic() - start[0], time.process_time() - start[1]
    scores = vit.evaluate(out, folder / "test.csv", split="test", device="cpu")
    questions = scores.get("questions", {targets[0]: scores})
    return {"spent": spent, **{name: questions[name]["top1"] for name in targets}}


def measure(folder: Path, epochs: int, seed: int) -> None:
    """Print the accuracies of one run and of a run each, and the share of their time."""
    make(folder, seed)
    alone = {name: run(folder, (name,), epochs, seed) for name in QUESTIONS}
    together = run(folder, QUESTIONS, epochs, seed)
    each = [sum(times) for times in zip(*(one["spent"] for one in alone.values()), strict=True)]
    shares = [one / total for one, total in zip(together["spent"], each, strict=True)]
    row = {
        "seed": seed,
        "alone": {name: alone[name][name] for name in QUESTIONS},
        "together": {name: together[name] for name in QUESTIONS},
        "seconds alone": [one["spent"][0] for one in alone.values()],
        "seconds together": together["spent"][0],
        "share of the time": shares[0],
        "share of the processor's time": shares[1],
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    measure(given.folder, given.epochs, given.seed)
