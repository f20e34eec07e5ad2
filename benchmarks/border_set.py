"""What is at the ends of long images: accuracy of --resize crop, squash, pad and native.

    python benchmarks/border_set.py OUT [--seeds 3] [--epochs 12]

Images of 96 x 288 or 288 x 96 pixels of coloured noise; a disc at one of the far ends, which the
centre crop cuts off, is red or blue: the class. All trainings have equal settings but `resize`.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import vit

CLASSES = ("blue", "red")
SHORT, LONG, RADIUS = 96, 288, 14
WAYS = ("crop", "native", "pad", "squash")
SETTINGS = {"image_size": 64, "patch_size": 8, "stem": "conv", "dim": 32, "depth": 2}
SETTINGS |= {"num_heads": 2, "pooling": "mean", "class_token": False, "position": "sinusoidal_2d"}
SETTINGS |= {"optimizer": "muon", "lr": 1.3e-3, "fallback_lr": 2.8e-3, "warmup_epochs": 1}
SETTINGS |= {"batch_size": 32, "min_crop": 0.7, "ema": 0, "report": "fast", "precision": "fp32"}


def draw(path: Path, seed: int) -> None:
    """Write one image; its class is that of the parity of `seed`."""
    random = np.random.default_rng(seed)
    coarse = random.integers(40, 216, (SHORT // 8, LONG // 8, 3), dtype=np.uint8)
    noise = Image.fromarray(coarse).resize((LONG, SHORT), Image.Resampling.BICUBIC)
    pixels = np.asarray(noise) + random.normal(0, 20, (SHORT, LONG, 3))
    end = random.integers(RADIUS, LONG // 6)  # the crop begins at a third
    x, y = (end, LONG - end)[random.integers(2)], random.integers(RADIUS, SHORT - RADIUS)
    rows, cols = np.mgrid[:SHORT, :LONG]
    inside = (rows - y) ** 2 + (cols - x) ** 2 < RADIUS**2
    pixels[inside] = (220, 40, 40) if seed % 2 else (40, 40, 220)
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    upright = image.transpose(Image.Transpose.ROTATE_90) if random.integers(2) else image
    upright.save(path)


def make_data(root: Path) -> Path:
    """A folder of 400 images for training and as many for validation."""
    for split, first, count in (("train", 0, 400), ("val", 10_000, 400)):
        for seed in range(first, first + count):
            place = root / split / CLASSES[seed % 2]
            place.mkdir(parents=True, exist_ok=True)
            draw(place / f"{seed}.png", seed)
    return root


def main() -> None:
    """Print a row for each way and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    data = make_data(args.out / "data")
    print("| resize | " + " | ".join(f"seed {seed}" for seed in range(args.seeds)) + " |")
    print("|---|" + "---|" * args.seeds)
    for resize in WAYS:
        scores = []
        for seed in range(args.seeds):
            run = args.out / f"{resize}-{seed}"
            chosen = {**SETTINGS, "resize": resize, "seed": seed, "epochs": args.epochs}
            vit.train(str(data), run, overwrite=True, **chosen)
            scores.append(vit.evaluate(run, data, precision="fp32")["top1"])
        cells = " | ".join(f"{100 * one:.1f}" for one in scores)
        print(f"| {resize} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
