"""Is a number learned better by regression than by a classifier over bins, and do intervals hold?

    python benchmarks/regression.py FOLDER make PHOTOS    # four sets with known numbers
    python benchmarks/regression.py FOLDER train --time 120s
    python benchmarks/regression.py FOLDER measure

angle       of a wedge in noise, from 0 to 90 degrees
count       of discs of random sizes, from 1 to 20
brightness  mean of the pixels of a photograph that was made lighter or darker
blur        deviation of the Gaussian that a photograph was blurred with, from 0 to 4 pixels

Each set has train.csv and test.csv (image, the number, and its bin: a tenth of the training
images). A run of `--target NUMBER` and one of `--target bin` get the same time; a bin answers with
the mean of its training images, the most probable one alone or all by their probability. Intervals
are measured on the test images in 200 draws: each half calibrates, and the other half is counted,
by the answers of the run and by those of its ONNX file.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter

SETS = ("angle", "count", "brightness", "blur")
TRAIN, TEST, BINS, SIDE = 1600, 800, 10, 64
DRAWS, COVERAGE = 200, 0.9


def angle(random: np.random.Generator, _photo: Path) -> tuple[Image.Image, float]:
    """A wedge of random place, length and tone."""
    value = random.uniform(0, 90)
    image = canvas(random)
    length, width = random.uniform(18, 28), random.uniform(5, 9)
    x, y = random.uniform(26, 38, 2)
    along = np.array([np.cos(np.radians(value)), -np.sin(np.radians(value))])
    across = np.array([-along[1], along[0]])
    centre = np.array([x, y])
    corners = [centre + length * along, *(centre - 8 * along + s * width * across for s in (1, -1))]
    tone = (*random.integers(0, 90, 3).tolist(),)
    ImageDraw.Draw(image).polygon([(*corner,) for corner in corners], fill=tone)
    return noisy(image, random), value


def count(random: np.random.Generator, _photo: Path) -> tuple[Image.Image, float]:
    """Discs that do not touch."""
    number, discs = int(random.integers(1, 21)), list[tuple[float, float, float]]()
    image = canvas(random)
    while len(discs) < number:
        x, y, radius = (*random.uniform(6, SIDE - 6, 2), random.uniform(2, 5))
        if all(np.hypot(x - a, y - b) > radius + r + 1 for a, b, r in discs):
            discs.append((x, y, radius))
            tone = (*random.integers(0, 110, 3).tolist(),)
            ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), tone)
    return noisy(image, random), number


def brightness(random: np.random.Generator, photo: Path) -> tuple[Image.Image, float]:
    """A photograph by a random factor; the number is that of the pixels as they are stored."""
    pixels = np.asarray(Image.open(photo).convert("RGB"), np.float32)
    pixels = (pixels * random.uniform(0.3, 1.2)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels), float(pixels.mean())


def blur(random: np.random.Generator, photo: Path) -> tuple[Image.Image, float]:
    """A photograph, blurred."""
    value = random.uniform(0, 4)
    return Image.open(photo).convert("RGB").filter(ImageFilter.GaussianBlur(value)), value


def canvas(random: np.random.Generator) -> Image.Image:
    """A light ground."""
    return Image.new("RGB", (SIDE, SIDE), (*random.integers(170, 240, 3).tolist(),))


def noisy(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """The image with the noise of a camera."""
    noise = random.normal(0, 12, (SIDE, SIDE, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def make(folder: Path, photos: Path) -> None:
    """The four sets; photographs of train/ and val/ are in different sets."""
    for number, name in enumerate(SETS):
        draw = {"angle": angle, "count": count, "brightness": brightness, "blur": blur}[name]
        random = np.random.default_rng(number)
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        rows: dict[str, list[tuple[str, float]]] = {}
        for split, images in (("train", TRAIN), ("test", TEST)):
            sources = [*sorted((photos / "train").rglob("*.jpg"))]
            random.shuffle(sources)
            half = len(sources) * 2 // 3
            sources = sources[:half] if split == "train" else sources[half:]
            rows[split] = []
            for place in range(images):
                image, value = draw(random, sources[place % len(sources)])
                file = f"{split}-{place:04}.png"
                image.save(target / file)
                rows[split].append((file, value))
        values = np.array([value for _, value in rows["train"]])
        edges = np.quantile(values, np.linspace(0, 1, BINS + 1)[1:-1])
        for split, written in rows.items():
            with (target / f"{split}.csv").open("w", newline="") as out:
                table = csv.writer(out)
                table.writerow(["image", name, "bin"])
                for image_name, value in written:
                    table.writerow([image_name, value, f"bin{np.searchsorted(edges, value)}"])


def train(folder: Path, length: dict[str, Any], sets: list[str], seed: int) -> None:
    """Both runs of each set."""
    import vit

    for name in sets:
        for target in (name, "bin"):
            out = folder / name / f"run-{target}-{seed}"
            vit.train(
                str(folder / name / "train.csv"),
                out,
                target=(target,),
                seed=seed,
                device="cpu",
                **length,
                overwrite=out.exists(),
            )


def read(path: Path, column: str) -> tuple[list[str], list[str]]:
    """Images of a list, and a column."""
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    return [str(path.parent / row["image"]) for row in rows], [row[column] for row in rows]


def measure(folder: Path, sets: list[str], seed: int) -> None:
    """Errors on the test images, and how often intervals hold the number."""
    import vit

    for name in sets:
        images, cells = read(folder / name / "test.csv", name)
        wanted = np.array([*map(float, cells)])
        _, numbers = read(folder / name / "train.csv", name)
        _, bins = read(folder / name / "train.csv", "bin")
        means = {
            one: np.mean([float(n) for n, b in zip(numbers, bins, strict=True) if b == one])
            for one in {*bins}
        }
        predictor = vit.Predictor(folder / name / f"run-bin-{seed}", device="cpu")
        found = predictor(images, top_k=BINS)
        best = np.array([means[one.predictions[0][0]] for one in found])
        mixed = np.array([sum(means[b] * p for b, p in one.predictions) for one in found])
        rows: dict[str, Any] = {"set": name}
        rows |= {"bin": mae(best, wanted), "bins by probability": mae(mixed, wanted)}
        run = folder / name / f"run-{name}-{seed}"
        answers = [one.answers for one in vit.Predictor(run, device="cpu")(images)]
        values = np.array([one[name] for one in answers])
        rows["regression"] = mae(values, wanted)
        rows["share of bin"] = rows["regression"] / rows["bin"]
        ends = np.array([[one[f"{name}_low"], one[f"{name}_high"]] for one in answers])
        rows["the run's own interval holds"] = float(
            ((ends[:, 0] <= wanted) & (wanted <= ends[:, 1])).mean()
        )
        vit.export_onnx(run, run / "exported.onnx")
        exported = vit.Predictor(run / "exported.onnx")(images)
        others = np.array([one.answers[name] for one in exported])
        rows["largest difference of ONNX"] = float(np.abs(others - values).max())
        for engine, found_values in {"torch": values, "ONNX": others}.items():
            held = coverage(torch.from_numpy(np.abs(found_values - wanted)), seed)
            rows[f"{DRAWS} draws, {engine}"] = held
        print(json.dumps(rows), flush=True)


def mae(values: Any, wanted: Any) -> float:
    """Mean absolute error."""
    return float(np.abs(values - wanted).mean())


def coverage(residuals: torch.Tensor, seed: int) -> float:
    """Mean share of the other half that intervals of one half hold."""
    from vit.evaluation.number_metrics import conformal_half_widths

    random, held = torch.Generator().manual_seed(seed), []
    for _ in range(DRAWS):
        order = torch.randperm(len(residuals), generator=random)
        one, other = order.chunk(2)
        held.append(
            float(
                (residuals[other] <= conformal_half_widths(residuals[one])[COVERAGE])
                .double()
                .mean()
            )
        )
    return sum(held) / len(held)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("action", choices=["make", "train", "measure"])
    parser.add_argument("photos", type=Path, nargs="?")
    parser.add_argument("--time", default="120s")
    parser.add_argument("--epochs", type=int, help="instead of a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sets", nargs="+", default=[*SETS])
    given = parser.parse_args()
    if given.action == "make":
        make(given.folder, given.photos)
    elif given.action == "train":
        length = {"epochs": given.epochs} if given.epochs else {"time": given.time}
        train(given.folder, length, given.sets, given.seed)
    else:
        measure(given.folder, given.sets, given.seed)
