"""Accuracy against milliseconds of one image on a CPU, of ONNX files of several toolkits.

    python -m benchmarks accuracy_by_time --data FOLDER --times 180s --yolo COMMAND --figure SVG

FOLDER has train/ and val/ with a folder for each class. Every network is trained from scratch in
the same time: the plan's, ViT-Ti and ViT-S by `vit train --time`; ultralytics' by its own program,
COMMAND, with its own `time`; those of timm by its transforms and its optimiser in a loop of this
file. Each has one thread and no loader process, and the clock of its process counts processor
seconds, so that other work on the machine takes nothing from it. Each keeps its best epoch on the
validation images.

All files answer these images by onnxruntime with one thread, from decoded pixels to a class: the
resize is in our files, and Pillow's before the others. --predictions FOLDER keeps the networks.
"""

import argparse
import ast
import copy
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.timing import Clock, Comparison, Missing, Run, take_turns
from benchmarks.whole_commands import ROOT, VIT
from tools.tour_figures import COLOURS, GRID, INK, scale, spread
from vit.config.setting_layers import make_config
from vit.evaluation.charts import log_ticks, nice_ticks
from vit.evaluation.exact_tests import wilson_interval
from vit.exported.onnx_session import OnnxSession

SIDE = 96
"""Pixels of the images of all networks but the plan's."""
OURS: dict[str, tuple[object, ...]] = {
    "vit, the plan's network": (),
    "vit, ViT-Ti/16": ("--model", "vit_tiny_patch16_224", "--image-size", SIDE),
    "vit, ViT-S/16": ("--model", "vit_small_patch16_224", "--image-size", SIDE),
}
TIMM = ("resnet18", "mobilenetv3_small_100")
YOLO = "yolo11n-cls"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LR, WEIGHT_DECAY, BATCH, SMOOTHING, MIN_CROP = 2e-3, 0.05, 64, 0.1, 0.35
"""Of timm's networks, with AdamW."""
WARMUP = 0.1
"""Share of their training in which the learning rate grows."""
TIMED = 32
"""Images of a turn."""
CLOCK = """
import concurrent.futures, queue, selectors, subprocess, threading, time  # wait by the real clock
began = time.time()
time.monotonic = time.perf_counter = time.process_time
time.time = lambda: began + time.process_time()
"""
"""A sitecustomize.py by which a program counts processor seconds."""

Pixels = NDArray[np.uint8]
Answer = Callable[[Pixels], str]
"""The class of an image, (height, width, 3)."""


class Row(NamedTuple):
    """A file in the table and the figure."""

    name: str
    megabytes: float
    processor_seconds: float
    """Of its training."""
    right: int
    images: int
    milliseconds: float


def accuracy_by_time(options: argparse.Namespace) -> Iterator[str]:
    """Train and export all networks, measure their files; a table, and a figure."""
    if options.data is None:
        raise SystemExit("accuracy_by_time: give a folder with train/ and val/ as --data")
    data = options.data.resolve()
    limit = make_config({"data": "digits", "time": options.times[0]}).training.seconds
    assert limit is not None, "the duration was parsed"
    folder = (options.predictions or options.folder).resolve()
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(CLOCK, encoding="utf-8")
    trained = {
        name: kept(folder / slug(name), partial(train_ours, data, limit, words))
        for name, words in OURS.items()
    }
    for name in TIMM:
        trained[f"timm, {name}"] = kept(folder / name, partial(train_timm, data, limit, name))
    missing = ""
    try:
        of_yolo = partial(train_yolo, data, limit, options.yolo)
        trained[f"ultralytics, {YOLO}"] = kept(folder / YOLO, of_yolo)
    except Missing as error:
        missing = f"\n\nWithout ultralytics: {error}."
    files = {
        f"{name}, {file.stem}" if name in OURS else name: (file, seconds)
        for name, seconds in trained.items()
        for file in sorted((folder / slug(name)).glob("*.onnx"))
    }
    yield measure_files(files, data / "val", options) + missing


def slug(name: str) -> str:
    return name.split(", ")[-1].replace(" ", "-").replace("/", "-").replace("'", "")


def kept(folder: Path, train: Callable[[Path], float]) -> float:
    """Processor seconds of a training to `folder`, which is not repeated."""
    record = folder / "seconds.json"
    if not record.exists():
        folder.mkdir(exist_ok=True)
        record.write_text(json.dumps(train(folder)), encoding="utf-8")
    return float(json.loads(record.read_text(encoding="utf-8")))


def run(words: Sequence[object], folder: Path, *, path: str = "") -> float:
    """Run a command in `folder`, whose parent has the clock; returns its processor seconds.

    Raises:
        SystemExit: It failed.
    """
    paths = os.pathsep.join(filter(None, [str(folder.parent), path]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "log.txt").open("a+", encoding="utf-8") as log:
        command = [*map(str, words)]
        if subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log).returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)}\n{log.read()[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train_ours(data: Path, limit: float, words: Sequence[object], folder: Path) -> float:
    """`vit train --time`, exported in float32 and in int8."""
    out = folder / "run"
    train = [*VIT, "train", data, "--time", f"{limit:g}s", *words, "--out", out, "--workers", 0]
    seconds = run([*train, "--overwrite"], folder, path=str(ROOT))
    export = [*VIT, "export", out, "--overwrite", "--out"]
    run([*export, folder / "fp32.onnx"], folder, path=str(ROOT))
    int8 = [folder / "int8.onnx", "--precision", "int8", "--calibration", data]
    run([*export, *int8], folder, path=str(ROOT))
    return seconds


def train_yolo(data: Path, limit: float, program: Path | None, folder: Path) -> float:
    """Ultralytics' own commands, in its own environment, from random weights.

    Raises:
        Missing: `program` is not given.
    """
    if program is None:
        raise Missing("give its command with --yolo")
    words = [program.absolute(), "classify", "train", f"model={YOLO}.yaml", f"data={data}"]
    words += [f"imgsz={SIDE}", f"time={limit / 3600}", "pretrained=False", "device=cpu"]
    words += ["workers=0", "plots=False", f"project={folder}", "name=run", "exist_ok=True"]
    seconds = run(words, folder)
    weights = folder / "run" / "weights" / "best.pt"
    run([program.absolute(), "export", f"model={weights}", "format=onnx"], folder)
    weights.with_suffix(".onnx").rename(folder / "fp32.onnx")
    return seconds


def train_timm(data: Path, limit: float, name: str, folder: Path) -> float:
    """A network of timm for `limit` processor seconds, in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.accuracy_by_time", name, data, limit, "fp32.onnx"]
    return run(words, folder, path=str(ROOT))


def learn(name: str, data: Path, limit: float, out: Path) -> None:
    """Train a network of timm until this process has taken `limit` seconds, and export it."""
    import onnx
    import timm
    import torch
    from timm.data import create_transform
    from timm.optim import create_optimizer_v2
    from torch.nn import functional as F
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    from vit.precision import autocast, resolve_precision

    transform = create_transform(
        SIDE, is_training=True, scale=(MIN_CROP, 1.0), color_jitter=None, mean=MEAN, std=STD
    )
    train = ImageFolder(str(data / "train"), transform)
    loader: Any = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    images, names = read_images(data / "val")
    held_out = torch.from_numpy(np.concatenate([prepare(image, MEAN, STD) for image in images]))
    labels = torch.tensor([train.classes.index(each) for each in names])
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=len(train.classes))
    network = network.to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(network, "adamw", lr=LR, weight_decay=WEIGHT_DECAY)
    precision = resolve_precision("auto", "cpu")
    best, weights, epochs = -1, network.state_dict(), 0
    while time.process_time() < limit:
        network.train()
        for batch, targets in loader:
            share = min(time.process_time() / limit, 1.0)
            for group in optimizer.param_groups:
                decay = (1 + math.cos(math.pi * share)) / 2
                group["lr"] = LR * min(share / WARMUP, decay)
            with autocast(precision, torch.device("cpu")):
                logits = network(batch.to(memory_format=torch.channels_last))
            F.cross_entropy(logits.float(), targets, label_smoothing=SMOOTHING).backward()
            optimizer.step()
            optimizer.zero_grad()
            if share == 1.0:
                break
        epochs += 1
        network.eval()
        with torch.inference_mode(), autocast(precision, torch.device("cpu")):
            answers = torch.cat([network(part).argmax(1) for part in held_out.split(BATCH)])
        if (right := int((answers == labels).sum())) > best:
            best, weights = right, copy.deepcopy(network.state_dict())
    print(f"{epochs} epochs, {best} of {len(labels)} right", flush=True)
    network.load_state_dict(weights)
    program = torch.onnx.export(network.eval(), (held_out[:1],), dynamo=True, verbose=False)
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, {"classes": json.dumps(train.classes)})
    onnx.save(model, out)


def read_images(folder: Path) -> tuple[list[Pixels], list[str]]:
    """Decoded images with their classes."""
    files = sorted(file for file in folder.glob("*/*") if file.is_file())
    images = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    return images, [file.parent.name for file in files]


def prepare(
    image: Pixels, mean: Sequence[float] = (0.0,) * 3, std: Sequence[float] = (1.0,) * 3
) -> NDArray[np.float32]:
    """The square in the middle, resized and normalised, (1, 3, SIDE, SIDE)."""
    height, width = image.shape[:2]
    edge = min(height, width)
    left, top = (width - edge) / 2, (height - edge) / 2
    box = (left, top, left + edge, top + edge)
    resized = Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    values = (np.asarray(resized) / 255 - np.asarray(mean)) / np.asarray(std)
    return np.ascontiguousarray(values.transpose(2, 0, 1)[None], dtype=np.float32)


def open_file(file: Path) -> Answer:
    """What answers by an ONNX file of any of the toolkits."""
    session = OnnxSession(file, threads=1)
    metadata = session.metadata
    normalise: Callable[[Pixels], NDArray[Any]] = partial(prepare, mean=MEAN, std=STD)
    if "preprocessing" in metadata:  # ours
        normalise = lambda image: image[None]  # noqa: E731
    elif "names" in metadata:  # those of ultralytics
        normalise = prepare
        names = [*ast.literal_eval(metadata["names"]).values()]
    classes = json.loads(metadata["classes"]) if "classes" in metadata else names
    (given, *_), place = session.inputs, 0
    if "probabilities" in session.outputs:
        place = session.outputs.index("probabilities")
    return lambda image: str(classes[int(session({given: normalise(image)})[place][0].argmax())])


def measure_files(
    files: Mapping[str, tuple[Path, float]], folder: Path, options: argparse.Namespace
) -> str:
    """Accuracy and time of each file on the images of `folder`; the figure too."""
    images, labels = read_images(folder)
    ways = {name: open_file(file) for name, (file, _) in files.items()}
    chosen = images[:: max(len(images) // TIMED, 1)][:TIMED]

    def answer_all(way: Answer) -> Run:
        return lambda: [way(image) for image in chosen]

    comparison = Comparison(
        title="one image", ways={name: partial(answer_all, way) for name, way in ways.items()}
    )
    turns, _ = take_turns(comparison, options.rounds, Clock(options.cpu_time), [])
    rows = []
    for name, (file, seconds) in files.items():
        right = sum(ways[name](image) == label for image, label in zip(images, labels, strict=True))
        middle = 1000 * statistics.median(turns[name]) / len(chosen)
        size = file.stat().st_size / 1e6
        rows.append(Row(name, size, seconds, right, len(images), middle))
    if options.figure:
        options.figure.write_text(draw(rows), encoding="utf-8")
    return table(rows, turns)


def table(rows: Sequence[Row], turns: Mapping[str, Sequence[float]]) -> str:
    """A row for each file; times are those of the first by those of the same round."""
    lines = [
        "| file | MB | processor seconds of training | right, 95 % interval | ms an image "
        "| speed, least to largest |",
        "|---|---|---|---|---|---|",
    ]
    first = turns[rows[0].name]
    for row in rows:
        low, high = wilson_interval(row.right, row.images)
        ratios = [one / own for one, own in zip(first, turns[row.name], strict=True)]
        middle = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(
            f"| {row.name} | {row.megabytes:.1f} | {row.processor_seconds:.0f} "
            f"| {row.right / row.images:.1%} ({low:.1%} to {high:.1%}) "
            f"| {row.milliseconds:.2f} | {middle} |"
        )
    return "\n".join([*lines, ""])


def draw(rows: Sequence[Row]) -> str:
    """Accuracy by logarithmic time as SVG: a colour for each toolkit, int8 as rings."""
    times = [row.milliseconds for row in rows]
    shares = [100 * row.right / row.images for row in rows]
    first, last = min(times) / 1.2, max(times) * 1.2
    x_ticks = [tick for tick in log_ticks(first, last) if first <= tick <= last]
    y_ticks = nice_ticks(min(shares), max(shares))
    left, right, top, bottom = 62, 420, 34, 300
    to_x = scale(first, last, left, right, log=True)
    to_y = scale(y_ticks[0], y_ticks[-1], bottom, top, log=False)
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="350" viewBox="0 0 640 350" '
        f'role="img" font-family="system-ui, sans-serif" font-size="14" fill="{INK}">',
        "<title>Accuracy by milliseconds of an image, one thread of a CPU</title>",
        '<text x="8" y="18">validation images right, %</text>',
        f'<text x="{(left + right) / 2:.0f}" y="344" text-anchor="middle">ms an image</text>',
    ]
    for value in y_ticks:
        y = to_y(value)
        lines.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{GRID}"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 5:.1f}" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        text = f'<text x="{to_x(value):.1f}" y="{bottom + 20}" text-anchor="middle">'
        lines.append(f"{text}{value:g}</text>")
    toolkits = [*dict.fromkeys(row.name.split(", ")[0] for row in rows)]
    for row, share, y in zip(rows, shares, spread([*map(to_y, shares)], 17), strict=True):
        colour = COLOURS[toolkits.index(row.name.split(", ")[0])]
        x, own_y = to_x(row.milliseconds), to_y(share)
        fill, radius = ("none", 8) if row.name.endswith("int8") else (colour, 5)
        lines += [
            f'<path d="M{x:.1f} {own_y:.1f}L{right + 12} {y:.1f}" stroke="{colour}55"/>',
            f'<circle cx="{x:.1f}" cy="{own_y:.1f}" r="{radius}" fill="{fill}" '
            f'stroke="{colour}" stroke-width="2"/>',
            f'<text x="{right + 16}" y="{y + 5:.1f}" fill="{colour}">{escape(row.name)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    network_name, images_folder, seconds, file = sys.argv[1:]
    learn(network_name, Path(images_folder), float(seconds), Path(file))
