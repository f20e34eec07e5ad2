"""Whether the accuracy on new sources that a training reports is that on new cameras.

    python -m benchmarks.new_sources DATA [--draws 10] [--image-size 32] [--set NAME=VALUE]

In each draw the photographs of DATA (folders of classes) are taken by 5 to 40 simulated cameras,
with shares as 1 / rank: a colour cast, a tone curve, blur, noise, a vignette and a JPEG quality of
each, and bursts of crops. A third of the photographs, by 20 other cameras, are not trained on: how
often the network is right there is the truth. What tells cameras apart is, by turns, the EXIF data,
a folder, the file name, or the file format.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageFilter

import vit
from vit.commands.main import main as main_command
from vit.data.random_seed import random_seed
from vit.weights.saved_model import load_run

NEW_CAMERAS = 20
WAYS = ("camera", "folder", "file name", "file format")
TRAINING: dict[str, Any] = {
    "patch_size": 4, "dim": 64, "depth": 3, "num_heads": 2, "batch_size": 64, "device": "cpu",
    "precision": "fp32", "workers": 1, "report": "fast",
}  # fmt: skip


class Camera:
    """Changes photographs in its own way, the same for the same seed."""

    def __init__(self, seed: int, side: int) -> None:
        rng = np.random.default_rng(seed)
        self.name = f"cam{seed:x}"
        self.gains = np.exp(rng.normal(0, 0.2, 3))
        self.gamma = float(np.exp(rng.normal(0, 0.25)))
        self.blur = float(rng.uniform(0, 0.03)) * side
        self.noise = float(rng.uniform(0, 16))
        self.vignette = float(rng.uniform(0, 0.8))
        self.quality = int(rng.integers(25, 96))
        self.longer = int(rng.integers(0, 8))
        self.rng, self.shots = rng, 0

    def take(self, image: Image.Image) -> Image.Image:
        """A photograph of `image`, cut as in a burst."""
        width, height = image.size
        left, top, right, bottom = self.rng.uniform(0, 0.08, 4)
        box = (left * width, top * height, width * (1 - right), height * (1 - bottom))
        size = (width + self.longer, height)  # of the sensor
        cut = image.resize(size, Image.Resampling.BICUBIC, box)
        values = np.asarray(cut.filter(ImageFilter.GaussianBlur(self.blur)), dtype=np.float64) / 255
        y, x = np.mgrid[-1 : 1 : size[1] * 1j, -1 : 1 : size[0] * 1j]
        values = (
            values**self.gamma * self.gains * (1 - self.vignette * (x * x + y * y) / 2)[..., None]
        )
        values += self.rng.normal(0, self.noise / 255, values.shape)
        return Image.fromarray((255 * values.clip(0, 1)).astype(np.uint8))

    def save(self, image: Image.Image, folder: Path, way: str) -> None:
        """Write a photograph, with what tells its camera."""
        self.shots += 1
        anonymous = f"{random_seed(self.name, self.shots):016x}"
        exif, quality = Image.Exif(), 90
        if way == "camera":
            exif[ExifTags.Base.Model] = self.name
        elif way == "folder":
            folder = folder / self.name
        elif way == "file name":
            anonymous = f"{self.name}_{self.shots:05}"
        quality = self.quality
        if way != "file format":  # all files are of one size and quality
            image, quality = image.resize((64, 64) if image.height <= 64 else (160, 160)), 90
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{anonymous}.jpg", quality=quality, exif=exif)


class Result(NamedTuple):
    """Of one draw, all in [0, 1]."""

    cameras: int
    way: str
    truth: float
    random: float
    new: dict[str, Any] | None
    covered: float
    classes: float
    """Mean size of the sets of 90 %."""
    right: float
    """Share of the answers with --reject that are right, on new cameras."""
    answered: float
    promised: float


def write_photographs(
    files: Sequence[tuple[Path, str]], cameras: Sequence[Camera], out: Path, way: str, rng: Any
) -> None:
    shares = np.array([1 / rank for rank in range(1, len(cameras) + 1)])
    for path, label in files:
        camera = cameras[rng.choice(len(cameras), p=shares / shares.sum())]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            camera.save(camera.take(image), out / label, way)


def draw(data: Path, number: int, photographs: int, epochs: int, image_size: int) -> Result:
    """Train one network, and measure it on new cameras."""
    rng = np.random.default_rng(number)
    files = [(path, path.parent.name) for path in sorted(data.rglob("*.*"))]
    files = [files[at] for at in rng.permutation(len(files))[:photographs]]
    cut, count, way = len(files) // 3, int(rng.integers(5, 41)), WAYS[number % len(WAYS)]
    cameras = [Camera(1000 * number + at, image_size) for at in range(count + NEW_CAMERAS)]
    with tempfile.TemporaryDirectory() as folder:
        own, field = Path(folder) / "own", Path(folder) / "field"
        write_photographs(files[cut:], cameras[:count], own, way, rng)
        for camera in cameras[count:]:
            some = files[:cut][cameras.index(camera) - count :: NEW_CAMERAS]
            write_photographs(some, [camera], field, "file name", rng)
        run = vit.train(
            str(own), out=str(Path(folder) / "run"), epochs=epochs, seed=number,
            image_size=image_size, **TRAINING,
        ).folder  # fmt: skip
        kept = vit.evaluate(run, str(own), device="cpu")
        found = vit.evaluate(run, str(field), split="val", device="cpu")
        out = f"{folder}/rows.jsonl"
        command = ["predict", str(run), str(field), "--reject", "--sets", "0.9", "--out", out]
        assert main_command([*command, "--device", "cpu"]) == 0
        rows = [json.loads(line) for line in Path(out).read_text().splitlines()]
        calibration = load_run(run).calibration
    true = [Path(row["image"]).parent.name for row in rows]
    pairs = [*zip(rows, true, strict=True)]
    answers = [
        row["predictions"][0]["label"] == name for row, name in pairs if "unknown" not in row
    ]
    covered = [name in row["set"] for row, name in pairs]
    sizes = [len(row["set"]) for row in rows]
    promise = (calibration and calibration.target_precision) or 0.0
    return Result(
        count, way, found["top1"], kept["top1"], kept.get("new_source"),
        statistics.fmean(covered), statistics.fmean(sizes),
        statistics.fmean(answers) if answers else 1.0, len(answers) / len(rows), promise,
    )  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """All draws, and what holds in how many."""
    lines = [
        "| cameras | told by | on new cameras | among known | said of new | by | sets: covered | "
        "classes | right answers | promised | answered |",
        "|" + "---|" * 11,
    ]
    inside, errors, plain, sets, kept = [], [], [], [], []
    for one in results:
        said = "-"
        if one.new is not None:
            low, high = one.new["top1_interval"]
            said = f"{one.new['top1']:.1%} ({low:.1%} to {high:.1%}), {one.new['sources']}"
            inside.append(low <= one.truth <= high)
            errors.append(one.new["top1"] - one.truth)
        plain.append(one.random - one.truth)
        sets.append(one.covered >= 0.9)
        kept.append(one.right >= one.promised)
        lines.append(
            f"| {one.cameras} | {one.way} | {one.truth:.1%} | {one.random:.1%} | {said} | "
            f"{(one.new or {}).get('by', '-')} | {one.covered:.1%} | {one.classes:.2f} | "
            f"{one.right:.1%} | {one.promised:.0%} | {one.answered:.0%} |"
        )
    return "\n".join([
        *lines,
        "",
        f"- inside the interval: {sum(inside)} of {len(inside)} draws",
        f"- error of the second number: mean {statistics.fmean(errors):+.1%}, "
        f"mean of absolute values {statistics.fmean(map(abs, errors)):.1%}",
        f"- of top-1 of the validation images: mean {statistics.fmean(plain):+.1%}, "
        f"mean of absolute values {statistics.fmean(map(abs, plain)):.1%}",
        f"- sets that cover 90 %: {sum(sets)} of {len(sets)}",
        f"- thresholds that keep their promise: {sum(kept)} of {len(kept)}",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--photographs", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--patch-size", type=int, default=4)
    parser.add_argument(
        "--set", action="append", default=[], help="another setting of the training"
    )
    args = parser.parse_args()
    TRAINING["patch_size"] = args.patch_size
    TRAINING.update(one.split("=", 1) for one in args.set)
    results = []
    for number in range(args.first, args.first + args.draws):
        results.append(draw(args.data, number, args.photographs, args.epochs, args.image_size))
        print(table(results), flush=True)


if __name__ == "__main__":
    main()
