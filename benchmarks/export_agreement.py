"""How far exported files are from torch, on photographs of many sizes, modes and orientations.

    python benchmarks/export_agreement.py RUN FILE.onnx [FILE.onnx ...] --photos DIR [DIR ...]
        [--images 240] [--batches 1 2 5 33] [--out TABLE.md]

Photographs are resized to 20 to 4,000 px a side and written in the modes, formats and EXIF
orientations that people have, the same ones at every call. Torch computes the saved preprocessing
and the network by hand, one image at a time, in float32.
"""

import argparse
import io
import math
import platform
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import PIL
import torch
from PIL import Image

from vit.data.image_io import read_image
from vit.export.verification import ModelOutputs, by_reference_code
from vit.inference.predictor import Predictor
from vit.weights.saved_model import load_run

Saver = Callable[[Image.Image, Path, Image.Exif], Path]


def saver(suffix: str, mode: str = "RGB", **options: Any) -> Saver:
    """Writes an image in a format and a mode."""

    def save(image: Image.Image, path: Path, exif: Image.Exif) -> Path:
        there = path.with_suffix(suffix)
        converted = of_mode(image, mode)
        with_exif: dict[str, Any] = {} if suffix in (".gif", ".bmp", ".ppm") else {"exif": exif}
        converted.save(there, **with_exif, **options)
        return there

    save.__name__ = f"{suffix[1:]} {mode}" + (" progressive" if options.get("progressive") else "")
    return save


def of_mode(image: Image.Image, mode: str) -> Image.Image:
    """An RGB image in another mode, with holes where the mode has transparency."""
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    if mode in ("LA", "RGBA"):
        grey = image.convert("L")
        converted = image.convert(mode)
        converted.putalpha(grey.point(lambda value: 255 if value > 60 else 4 * value))
        return converted
    return image.convert(mode)


SAVERS = (
    *(saver(".jpg", quality=90), saver(".jpg", quality=80, progressive=True)),
    *(saver(".jpg", "L", quality=85), saver(".jpg", "CMYK", quality=90)),
    *(saver(".png"), saver(".png", "L"), saver(".png", "LA"), saver(".png", "P")),
    *(saver(".png", "RGBA"), saver(".png", "1"), saver(".png", "I;16")),
    *(saver(".webp", quality=85), saver(".webp", "RGBA", quality=85)),
    *(saver(".gif", "P"), saver(".tif"), saver(".tif", "CMYK"), saver(".tif", "I;16")),
    *(saver(".bmp"), saver(".ppm")),
)


def make_images(photos: list[str], folder: Path, count: int) -> list[str]:
    """Files of many kinds; sides are drawn evenly on a scale of logarithms."""
    random = np.random.default_rng(0)
    paths = []
    for number in range(count):
        image = read_image(photos[number * len(photos) // count])
        low, high = math.log(20), math.log(4000)
        width, height = (round(math.exp(x)) for x in random.uniform(low, high, 2))
        if number % 3:  # most keep nearly their aspect
            height = min(4000, max(20, round(width * image.height / image.width)))
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        resized = image.resize((width, height), Image.Resampling.BICUBIC)
        save = SAVERS[number % len(SAVERS)]
        paths.append(str(save(resized, folder / f"{number:04}", exif)))
    return paths


def table(run: str, files: list[str], photos: list[str], count: int, batches: list[int]) -> str:
    """The table, a row for each file and batch size."""
    out = io.StringIO()
    loaded = load_run(run)
    with tempfile.TemporaryDirectory() as place:
        paths = make_images(photos, Path(place), count)
        sides = [side for path in paths for side in read_image(path).size]
        truth = by_reference_code(loaded, paths)
        for file in files:
            for batch in batches:
                runner = Predictor(file, batch_size=batch)
                precision = runner.metadata.get("precision", "fp32")
                rows = [one.probabilities for batch in runner.batches(paths) for one in batch]
                apart, same = [], 0
                for one, row in zip(truth, rows, strict=True):
                    assert isinstance(one, ModelOutputs), one
                    assert isinstance(row, np.ndarray), row
                    apart.append(float(np.abs(row - one.probabilities).max()))
                    same += int(row.argmax() == one.probabilities.argmax())
                worst = int(np.argmax(apart))
                kind = SAVERS[worst % len(SAVERS)].__name__
                size = "{} x {}".format(*read_image(paths[worst]).size)
                out.write(
                    f"| {Path(run).name} | {precision} | {batch} | {len(paths)} | "
                    f"{same / len(paths):.2%} | {max(apart):.2g} | {np.median(apart):.1g} | "
                    f"{kind}, {size} |\n"
                )
                print(out.getvalue().splitlines()[-1], flush=True)
    return f"{min(sides)} to {max(sides)} px\n{out.getvalue()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--photos", nargs="+", required=True)
    parser.add_argument("--images", type=int, default=240)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 5, 33])
    parser.add_argument("--out", help="where the table is added")
    args = parser.parse_args()
    photos = sorted(
        str(path)
        for folder in args.photos
        for path in Path(folder).rglob("*")
        if path.suffix.lower() in (".jpg", ".jpeg", ".png")
    )
    sides, rows = table(args.run, args.files, photos, args.images, args.batches).split("\n", 1)
    head = (
        f"{args.images} images made of {len(photos)} photographs, {sides}, in {len(SAVERS)} "
        f"kinds of files and 8 orientations. torch {torch.__version__}, onnxruntime "
        f"{onnxruntime.__version__}, Pillow {PIL.__version__}, {platform.machine()}, "
        f"{date.today()}.\n\n"
        "| run | precision | batch | images | same top-1 | largest difference of a probability | "
        "median of each image's largest | worst image |\n|---|---|---|---|---|---|---|---|\n"
    )
    if args.out:
        there = Path(args.out)
        before = there.read_text(encoding="utf-8") + "\n" if there.exists() else ""
        there.write_text(f"{before}{head}{rows}", encoding="utf-8")


if __name__ == "__main__":
    main()
