"""Are grades learned better with their order than as classes without one?

    python benchmarks/grades.py FOLDER make PHOTOS     # a draw for each seed
    python benchmarks/grades.py FOLDER train --epochs 12
    python benchmarks/grades.py FOLDER measure

The grade of a photograph of 64 pixels is the Gaussian that it was blurred with, or the share of it
that is covered with rust; noise is on top. Each draw has train.csv and test.csv (image, grade) of
different photographs. Runs by the plan, of the same draw, seed and epochs; of blur, at one scale:

order       vit train train.csv --target grade --order 0,1,2,3,4
flat        vit train train.csv --target grade --task classify
unsmoothed  the same with --smoothing 0, as the plan of an order has it

Of the test images: quadratic weighted kappa, its difference to each flat run with the 95 % interval
of 2,000 resamplings of the images, and the same of the median and rounded mean of the calibrated
distributions in place of the most probable grade.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

GRADES = ("0", "1", "2", "3", "4")
KINDS = ("blur", "rust")
SIDE, TEST, DRAWS = 64, 800, 2000
SCALED: dict[str, dict[str, Any]] = {  # an image of another scale has another blur
    "blur": {"random_crop": "simple", "start_image_size": SIDE},
    "rust": {},
}
SIGMA, NOISE = 0.4, 0.03  # blur of a grade above the one below it, in pixels; noise of 1
RUST = np.array([0.55, 0.27, 0.1])
RUNS: dict[str, dict[str, Any]] = {
    "order": {"order": GRADES},
    "flat": {"task": "classify"},
    "unsmoothed": {"task": "classify", "smoothing": 0.0},
}
Array = NDArray[Any]


def draw(photo: Path, grade: int, kind: str, random: np.random.Generator) -> Image.Image:
    """A photograph with its grade drawn into it."""
    image = Image.open(photo).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    if kind == "blur" and grade:
        image = image.filter(ImageFilter.GaussianBlur(SIGMA * grade))
    pixels = np.asarray(image, np.float64) / 255
    if kind == "rust":
        specks = Image.fromarray(random.integers(0, 256, (SIDE, SIDE), np.uint8))
        field = np.asarray(specks.filter(ImageFilter.GaussianBlur(1.5)), np.float64)
        share = np.clip(0.03 + 0.035 * grade + random.normal(0, 0.012), 0, 1)
        covered = field >= np.quantile(field, 1 - share)
        pixels = np.where(covered[..., None], 0.35 * pixels + 0.65 * RUST, pixels)
    pixels = (pixels + random.normal(0, NOISE, pixels.shape)).clip(0, 1)
    return Image.fromarray((pixels * 255).round().astype(np.uint8))


def make(folder: Path, photos: Path, kind: str, seeds: list[int], images: int) -> None:
    """A draw for each seed."""
    for seed in seeds:
        random = np.random.default_rng(seed)
        sources = sorted(photos.rglob("*.jpg"))
        random.shuffle(sources)
        target = folder / f"{kind}-{seed}"
        target.mkdir(parents=True, exist_ok=True)
        parts = {"test": sources[:TEST], "train": sources[TEST : TEST + images]}
        for split, some in parts.items():
            with (target / f"{split}.csv").open("w", newline="") as out:
                table = csv.writer(out)
                table.writerow(["image", "grade"])
                for number, photo in enumerate(some):
                    grade, file = int(random.integers(len(GRADES))), f"{split}-{number:04}.png"
                    draw(photo, grade, kind, random).save(target / file)
                    table.writerow([file, grade])


def train(folder: Path, kind: str, seeds: list[int], epochs: int, runs: list[str]) -> None:
    """The runs of each draw."""
    import vit

    for seed in seeds:
        for name in runs:
            out = folder / f"{kind}-{seed}" / f"run-{name}"
            vit.train(
                str(out.parent / "train.csv"),
                out,
                target=("grade",),
                seed=seed,
                epochs=epochs,
                device="cpu",
                overwrite=out.exists(),
                **SCALED[kind],
                **RUNS[name],
            )


def answers_of(run: Path, images: list[str]) -> dict[str, Array]:
    """Way of deciding -> the grade of each image."""
    import vit

    found = vit.Predictor(run, device="cpu")(images, top_k=len(GRADES))
    shares = np.array([[dict(one.predictions)[grade] for grade in GRADES] for one in found])
    middle = (shares.cumsum(1) < 0.5).sum(1).clip(max=len(GRADES) - 1)
    mean = (shares @ np.arange(len(GRADES))).round().astype(int)
    return {"most probable": shares.argmax(1), "median": middle, "mean": mean}


def kappa(wanted: Array, answers: Array) -> float:
    """Quadratic weighted kappa."""
    apart = np.subtract.outer(np.arange(len(GRADES)), np.arange(len(GRADES))) ** 2
    given, found = (np.bincount(one, minlength=len(GRADES)) for one in (wanted, answers))
    by_chance = float((np.outer(given, found) * apart).sum()) / len(wanted)
    return 1 - float(((wanted - answers) ** 2).sum()) / by_chance


def interval(wanted: Array, answers: Array, other: Array) -> list[float]:
    """Ends of 95 % of the resampled differences of kappa."""
    random = np.random.default_rng(0)
    places = random.integers(len(wanted), size=(DRAWS, len(wanted)))
    apart = [kappa(wanted[one], answers[one]) - kappa(wanted[one], other[one]) for one in places]
    return [round(float(end), 4) for end in np.quantile(apart, [0.025, 0.975])]


def measure(folder: Path, kind: str, seeds: list[int], runs: list[str]) -> None:
    """Kappa of each run, a line each, and its difference to the flat ones."""
    for seed in seeds:
        data = folder / f"{kind}-{seed}"
        with (data / "test.csv").open(newline="") as file:
            rows = [*csv.DictReader(file)]
        wanted = np.array([int(row["grade"]) for row in rows])
        images = [str(data / row["image"]) for row in rows]
        found = {name: answers_of(data / f"run-{name}", images) for name in runs}
        for name, ways in found.items():
            for way, answers in ways.items():
                line: dict[str, Any] = {"seed": seed, "run": name, "answer": way}
                line["kappa"] = round(kappa(wanted, answers), 4)
                line["right"] = round(float((answers == wanted).mean()), 4)
                for base in sorted({"flat", "unsmoothed"} & {*runs} - {name}):
                    flat = found[base]["most probable"]
                    line[f"less {base}"] = round(kappa(wanted, answers) - kappa(wanted, flat), 4)
                    line[f"interval, {base}"] = interval(wanted, answers, flat)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("action", choices=["make", "train", "measure"])
    parser.add_argument("photos", type=Path, nargs="?")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", choices=[*RUNS], default=[*RUNS])
    given = parser.parse_args()
    if given.action == "make":
        make(given.folder, given.photos, given.kind, given.seeds, given.images)
    elif given.action == "train":
        train(given.folder, given.kind, given.seeds, given.epochs, given.runs)
    else:
        measure(given.folder, given.kind, given.seeds, given.runs)
