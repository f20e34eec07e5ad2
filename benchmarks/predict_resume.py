"""Kill a prediction at random moments, resume it, and compare it with one that was left alone.

    python benchmarks/predict_resume.py --images 5000 --kills 5
    python benchmarks/predict_resume.py --model model.onnx --processes 2 --format csv

The images are noise of many sizes, one in fifty cut short, so that rows are errors too. Each
attempt gets SIGKILL, SIGTERM or SIGINT at a random moment, wherever it is; then comes --resume, to
be killed again, and at last to be left alone. Its file must be, byte for byte, that of a prediction
that nothing disturbed. Linux only.
"""

import argparse
import contextlib
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from vit.config import Config, ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.model.build import build_classifier
from vit.output.resumable_output import ResumableOutput
from vit.weights.saved_model import save_model

ROOT = Path(__file__).parents[1]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def make_images(folder: Path, number: int) -> None:
    """JPEGs of noise, 24 to 160 pixels wide and high."""
    folder.mkdir()
    random_of = np.random.default_rng(0)
    for place in range(number):
        height, width = random_of.integers(24, 160, size=2)
        pixels = random_of.integers(0, 255, size=(height // 8 + 1, width // 8 + 1, 3))
        image = Image.fromarray(pixels.astype(np.uint8)).resize((int(width), int(height)))
        path = folder / f"{place:06d}.jpg"
        image.save(path)
        if place % 50 == 7:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def make_model(folder: Path) -> Path:
    """An untrained network of 100 classes."""
    settings = ModelConfig(
        image_size=64, patch_size=8, dim=192, depth=6, num_heads=3, num_classes=100
    )
    folder.mkdir()
    names = [f"class {number}" for number in range(100)]
    model = build_classifier(settings).eval()
    save_model(
        folder,
        model,
        config=Config(model=settings),
        classes=names,
        preprocessing=Preprocessing(image_size=(64, 64)),
    )
    return folder


def words(options: argparse.Namespace, model: Path, images: Path, out: Path) -> list[str]:
    """The command line."""
    launcher = [sys.executable]
    if options.processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(options.processes)]
    program = [str(ROOT / "predict.py"), str(model), str(images), "--resume", "--out", str(out)]
    sorted_into = out.parent / f"sorted-{out.stem}"
    more = ["--sort-into", str(sorted_into), "--sort-with", "symlink"] if options.sort else []
    return [*launcher, *program, *more]


def attempt(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start it, in a group of its own."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("ab") as file:
        return subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )


def strike(command: list[str], out: Path, number: int, most: float, log: Path) -> str | None:
    """Let it write its first new row, kill it some seconds later; None if it was done before."""
    process = attempt(command, log)
    before = ResumableOutput(str(out)).rows()
    while process.poll() is None and ResumableOutput(str(out)).rows() <= before:
        time.sleep(0.005)
    moment = random.uniform(0.0, most)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(moment)
        return None
    os.killpg(process.pid, number)
    process.wait()
    name, rows = signal.Signals(number).name, ResumableOutput(str(out)).rows()
    return f"{name} after {moment:.2f} s, exit {process.returncode}, {rows} rows"


def main() -> None:
    """Run, kill, resume, compare; exit code 1 where a byte differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--format", choices=["jsonl", "csv"], default="jsonl")
    parser.add_argument("--model", help="instead of a network of no training")
    parser.add_argument("--sort", action="store_true", help="sort images into folders too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_images(folder / "images", options.images)
        model = Path(options.model) if options.model else make_model(folder / "run")
        whole, cut = (folder / f"{name}.{options.format}" for name in ("whole", "cut"))
        began = time.monotonic()
        process = attempt(words(options, model, folder / "images", whole), folder / "whole.log")
        process.wait()
        took = time.monotonic() - began
        print(f"{platform.machine()}, {os.cpu_count()} cores, {options.images:,} images")
        print(
            f"left alone: {took:.1f} s, exit {process.returncode}, {whole.stat().st_size:,} bytes"
        )
        struck = 0
        command = words(options, model, folder / "images", cut)
        for number in range(options.kills):
            said = strike(command, cut, SIGNALS[number % 3], took / options.kills, folder / "log")
            if said is None:
                break
            struck += 1
            print(f"{struck}. {said}")
        process = attempt(command, folder / "log")
        code = process.wait()
        same = whole.read_bytes() == cut.read_bytes()
        left = sorted(path.name for path in folder.glob("*.partial*"))
        print(f"resumed to its end: exit {code}, left behind: {left}")
        if options.sort:
            trees = [
                {path.relative_to(root).as_posix() for path in root.rglob("*")}
                for root in (folder / "sorted-whole", folder / "sorted-cut")
            ]
            same = same and trees[0] == trees[1]
            print(f"sorted: {len(trees[0])} entries, {'the same' if same else 'DIFFERENT'}")
        print(f"{struck} kills: {'every byte is the same' if same else 'DIFFERENT'}")
        sys.exit(0 if same and not left else 1)


if __name__ == "__main__":
    main()
