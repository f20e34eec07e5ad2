"""Whole commands from a cold shell: start-up, prediction, checkpoints."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

import vit
from benchmarks.timing import Comparison, Missing, Run

ROOT = Path(__file__).parents[1]
VIT = (sys.executable, "-m", "vit")
# loader processes would live on for seconds, and hold the output open
FIRST_STEP = """
import gc, multiprocessing, os, sys
gc.disable()
from vit.training.trainer import Trainer
gc.enable()
def stop(*_):
    for loader in multiprocessing.active_children():
        loader.kill()
    os._exit(0)
Trainer.after_step = stop
from vit.commands.main import main
main(sys.argv[1:])
"""
NO_CHECKPOINTS = (
    "import sys; from vit.training.checkpoint.checkpoint_writer import CheckpointManager;"
    "CheckpointManager.save = lambda *_, **__: None;"
    "from vit.commands.main import main; main(sys.argv[1:])"
)


def command(words: Sequence[object], folder: Path, *, code: int = 0) -> Run:
    """Runs a command in `folder`.

    Raises:
        SystemExit: It ends with another exit code.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run() -> None:
        done = subprocess.run(
            [*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode != code:
            raise SystemExit(f"{' '.join(map(str, words))}\n{done.stderr[-2000:]}")

    return run


def timm_inference(options: argparse.Namespace, run: Path, images: Path) -> Run:
    """timm's inference.py, which is in its repository and not in its package."""
    if options.timm_repo is None:
        raise Missing("give timm's repository with --timm-repo")
    script = options.timm_repo.resolve() / "inference.py"
    words = [sys.executable, script, images, "--model", f"local-dir:{run}", "--device", "cpu"]
    out = ["--results-file", "timm", "--topk", "5", "--no-console-results"]
    return command([*words, *out], options.folder)


def untrained_run(folder: Path, name: str = "vit_tiny_patch16_224") -> Path:
    """A run folder of random weights."""
    from vit.config import Config
    from vit.data.preprocessing import Preprocessing
    from vit.weights.saved_model import save_model

    model = vit.create_model(name, num_classes=10)
    config = vit.make_config({"data": "digits", "model": name, "num_classes": 10})
    run = folder / "run"
    run.mkdir()
    save_model(
        run, model.eval(), config=Config(model=config.model),
        classes=tuple("abcdefghij"), preprocessing=Preprocessing(image_size=(224, 224)),
    )  # fmt: skip
    return run


def photograph(folder: Path) -> Path:
    """A folder with one JPEG of 500 x 375."""
    (folder / "one").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    image = Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC)
    image.save(folder / "one" / "photo.jpg", quality=90)
    return folder / "one"


def startup(options: argparse.Namespace) -> Iterator[Comparison]:
    """From a cold shell, as people wait for it; the files of libraries are in memory."""
    folder = options.folder
    run, images = untrained_run(folder), photograph(folder)
    photo = images / "photo.jpg"

    def exported() -> Run:
        file = folder / "model.onnx"
        if not file.exists():
            vit.export_onnx(run, file)
        return command([*VIT, "predict", file, photo], folder)

    def timm_folder() -> Run:
        import timm

        model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
        names = {"label_names": [*"abcdefghij"]}
        timm.models.save_for_hf(model, folder / "timm", model_config=names)
        return command([*VIT, "predict", folder / "timm", photo], folder)

    def first_step(*settings: object) -> Run:
        words = ["train", "digits", "--overwrite", "--out", folder / "trained", *settings]
        return command([sys.executable, "-c", FIRST_STEP, *words, "--device", "cpu"], folder)

    ways: dict[str, Callable[[], Run]] = {
        "python -c 'import torch'": lambda: command([sys.executable, "-c", "import torch"], folder),
        "vit --help": lambda: command([*VIT, "--help"], folder),
        "vit train --help": lambda: command([*VIT, "train", "--help"], folder),
        "a wrong flag": lambda: command([*VIT, "train", "--epohcs", 3], folder, code=2),
        "vit predict RUN, one image": lambda: command([*VIT, "predict", run, photo], folder),
        "vit predict FILE.onnx, one image": exported,
        "vit predict FOLDER of timm, one image": timm_folder,
        "timm inference.py, one image": lambda: timm_inference(options, run, images),
        "vit train digits -c FILE, to the first step": partial(
            first_step, "-c", ROOT / "configs" / "digits.yaml"
        ),
        "vit train digits, planned, to the first step": first_step,
    }
    yield Comparison(title="Start-up", ways=ways, unit="runs", warm_ups=1)


def prediction(options: argparse.Namespace) -> Iterator[Comparison]:
    """A folder of images from start to end, beside timm's inference.py on the same run folder."""
    if options.images is None:
        raise SystemExit("prediction: give a folder of images with --images")
    from vit.data.sources.open_dataset import list_images

    images = options.images.resolve()
    run = options.run.resolve() if options.run else untrained_run(options.folder)
    words = [*VIT, "predict", run, images, "--out", "rows.jsonl", "--overwrite"]
    ours = partial(command, words, options.folder)
    yield Comparison(
        title=f"Prediction of {images.name}",
        ways={
            "timm inference.py": lambda: timm_inference(options, run, images),
            "vit predict": ours,
            "vit predict --precision fp32": partial(
                command, [*words, "--precision", "fp32"], options.folder
            ),
        },
        count=len(list_images([str(images)])),
        warm_ups=1,
    )


def checkpoints(options: argparse.Namespace) -> Iterator[Comparison]:
    """What saving costs: three epochs of the digits with a ViT-Ti, saved as always or never."""
    words = ["train", "digits", "--model", "vit_tiny_patch16_224", "--image-size", 32]
    words += ["--patch-size", 4, "--epochs", 3, "--warmup-epochs", 1, "-b", 64, "--overwrite"]
    words += ["--device", "cpu", "--out", options.folder / "saved"]
    code = [sys.executable, "-c", NO_CHECKPOINTS]
    yield Comparison(
        title="Training with and without checkpoints",
        ways={
            "saved": partial(command, [*VIT, *words], options.folder),
            "never saved": partial(command, [*code, *words], options.folder, code=1),
        },
        unit="runs",
        warm_ups=1,
    )
