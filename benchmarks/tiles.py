"""Is a mark of 40 pixels in images of 8,000 x 8,000 learned by tiles, and found by their map?

    python benchmarks/tiles.py FOLDER make          # slides: train/, val/, test/ with three classes
    python benchmarks/tiles.py FOLDER train         # by tiles with attention, and as whole images
    python benchmarks/tiles.py FOLDER measure       # accuracy and peaks of the maps on test/
    python benchmarks/tiles.py FOLDER memory        # prediction of images up to 32,000 pixels

A slide is bright glass with five pieces of tissue, each of random size, place and tone; in one of
them is the mark, a disc or a ring of one colour, or none. Nothing else differs between the classes;
without the third one a network may find discs alone.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import Image

CLASSES, STORED = ("disc", "ring", "none"), 256
COUNTS = {"data/train": 90, "data/val": 18, "test": 60}
NETWORK = {"image_size": 32, "patch_size": 8, "dim": 64, "depth": 2, "num_heads": 4}
TRAINING = {"optimizer": "muon", "lr": 3e-3, "batch_size": 4, "smoothing": 0.0, "vflip": 0.5}
HERE = {"device": "cpu", "precision": "fp32", "workers": 1, "report": "fast"}


def slide(side: int, seed: int, label: int, mark: int) -> tuple[Iterator[Any], tuple[int, int]]:
    """Tiles of a slide, row by row, and the (x, y) of its mark."""
    random = np.random.default_rng(seed)
    tone = random.uniform((190, 120, 170), (230, 160, 210))
    coarse = Image.fromarray(random.normal(0, 1, (128, 128)).astype(np.float32))
    texture = tone + 20 * np.asarray(coarse.resize((1024, 1024), 3))[..., None]
    texture = (texture + random.normal(0, 6, (1024, 1024, 1))).clip(0, 255).astype(np.uint8)
    radii = side * random.uniform(0.06, 0.1, 5)
    ratios = random.uniform(0.6, 1, 5)
    places = [random.uniform(radius, side - radius, 2) for radius in radii]
    piece, angle = random.integers(5), random.uniform(0, 2 * np.pi)
    away = 0.7 * radii[piece] * math.sqrt(random.uniform())
    mark_x = int(places[piece][0] + away * math.cos(angle))
    mark_y = int(places[piece][1] + away * math.sin(angle) * ratios[piece])
    mark_x, mark_y = (min(max(one, mark), side - mark) for one in (mark_x, mark_y))

    pieces = [*zip(places, radii, ratios, strict=True)]

    def tiles() -> Iterator[Any]:
        for top, left in product(range(0, side, STORED), repeat=2):
            tile = np.full((STORED, STORED, 3), 243, np.uint8)
            centre = np.array([left, top]) + STORED / 2
            near = [one for one in pieces if abs(one[0] - centre).max() < one[1] + STORED]
            if near:
                y, x = np.mgrid[top : top + STORED, left : left + STORED]
                inside = np.zeros((STORED, STORED), bool)
                for (cx, cy), radius, ratio in near:
                    inside |= (x - cx) ** 2 + ((y - cy) / ratio) ** 2 < radius**2
                row, col = random.integers(0, 1024 - STORED, 2)
                tile[inside] = texture[row : row + STORED, col : col + STORED][inside]
                apart = np.hypot(x - mark_x, y - mark_y)
                if CLASSES[label] != "none":
                    tile[(apart < mark / 2) & ((apart > mark / 4) | (label == 0))] = (70, 45, 120)
            yield tile

    return tiles(), (mark_x, mark_y)


def write_slide(path: Path, side: int, seed: int, label: int, mark: int) -> tuple[int, int]:
    """Write a tiled Deflate TIFF, unless it is there; returns the place of its mark."""
    tiles, place = slide(side, seed, label, mark)
    if path.is_file():
        return place
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(
        path,
        tiles,
        shape=(side, side, 3),
        dtype=np.uint8,
        photometric="rgb",
        tile=(STORED, STORED),
        compression="deflate",
        compressionargs={"level": 1},
        metadata=None,
    )
    return place


def make(folder: Path, side: int, mark: int) -> None:
    """All slides, and marks.json."""
    jobs = [
        (folder / split / CLASSES[n % 3] / f"{n:03}.tif", side, 1000 * part + n, n % 3, mark)
        for part, (split, count) in enumerate(COUNTS.items())
        for n in range(count)
    ]
    with ProcessPoolExecutor(2) as pool:
        marks = [*pool.map(write_slide, *zip(*jobs, strict=True))]
    names = [str(job[0].relative_to(folder)) for job in jobs]
    (folder / "marks.json").write_text(json.dumps(dict(zip(names, marks, strict=True))))


def train(folder: Path, epochs: int, kinds: str, tile: int) -> None:
    """A run by tiles, and one of whole images, which an ordinary training resizes."""
    import vit

    settings: dict[str, Any] = {
        **NETWORK,
        **TRAINING,
        **HERE,
        "epochs": epochs,
        "model": "vit_tiny_patch16_224",
    }
    settings |= {"class_token": False, "pooling": "mean"}
    if "tiles" in kinds:
        vit.train(str(folder / "data"), folder / "tiles", tiles=(tile,), **settings)
    if "whole" in kinds:
        vit.train(str(folder / "data"), folder / "whole", cache="ram", resize="squash", **settings)


def measure(folder: Path, mark: int) -> None:
    """Accuracy on test/, and how often the peak of the map is at the mark."""
    import vit
    from vit.inference.attribution import class_maps

    marks = json.loads((folder / "marks.json").read_text())
    for kind in ("tiles", "whole"):
        if (folder / kind / "model.safetensors").is_file():
            scores = vit.evaluate(folder / kind, folder / "test", device="cpu")
            print(
                kind,
                {
                    name: scores[name]
                    for name in ("count", "top1", "top1_interval")
                    if name in scores
                },
            )
    predictor = vit.Predictor(folder / "tiles", precision="fp32", device="cpu")
    names = [name for name in marks if name.startswith("test/") and "/none/" not in name]
    hits = 0
    for (output,) in predictor.batches([folder / name for name in names]):
        image = output.pixels
        (_, weights), *_ = class_maps(predictor, output)
        row, col = divmod(int(weights.argmax()), image.shape[1])
        top, left = (image.grid.starts(image.size[0])[one] for one in (row, col))
        x, y = marks[str(Path(output.image).relative_to(folder))]
        size = image.grid.size
        hits += max(abs(left + size / 2 - x), abs(top + size / 2 - y)) < (size + mark) / 2
    print(f"the peak of the map is at the mark in {hits} of {len(names)} images")


def memory(folder: Path, sides: list[int]) -> None:
    """Peak memory of a process that predicts one image of each side."""
    for side in sides:
        path = folder / f"{side}.tif"
        if not path.is_file():
            write_slide(path, side, side, 1, 40)
        command = [sys.executable, __file__, str(folder), "predict", "--sides", str(side)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def predict(folder: Path, side: int) -> None:
    """Predict one image, and print the peak memory of this process."""
    import vit

    predictor = vit.Predictor(folder / "tiles", device="cpu", precision="fp32")
    (prediction,) = predictor([folder / f"{side}.tif"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{side} px: {prediction.predictions[0]}, peak {peak:.2f} GiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("action", choices=["make", "train", "measure", "memory", "predict"])
    parser.add_argument("--side", type=int, default=8000)
    parser.add_argument("--mark", type=int, default=40)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--sides", type=int, nargs="+", default=[8000, 16000, 32000])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--kinds", default="tiles,whole")
    given = parser.parse_args()
    if given.action == "make":
        make(given.folder, given.side, given.mark)
    elif given.action == "train":
        train(given.folder, given.epochs, given.kinds, given.tile)
    elif given.action == "measure":
        measure(given.folder, given.mark)
    elif given.action == "memory":
        memory(given.folder, given.sides)
    else:
        predict(given.folder, given.sides[0])
