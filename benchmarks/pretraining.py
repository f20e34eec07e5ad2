"""Pretraining on a folder of images, beside lightly with the same network, views and batch.

    python -m benchmarks pretraining --images PHOTOS --memory

A run is the second pass over EPOCH_STEPS batches, with the loading of the images; each way has a
process of its own, whose peak is that of the process that computes. lightly's part is its
transform, projection head and loss in a loop of torch's loader and AdamW, as in its examples. It
has our own encoder, with the stem that the plan chooses; and timm's, as its users do.
"""

import argparse
import importlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.timing import Comparison, Run

SIDE, BATCH, EPOCH_STEPS = 64, 128, 20
BLOCKS: dict[str, Any] = {"image_size": SIDE, "dim": 192, "depth": 6, "num_heads": 6}
STEM = {"patch_size": 16, "stem": "conv", "stem_depth": 4, "stem_width": 24}
PLANNED = {"position": "sinusoidal_2d", "pooling": "mean", "class_token": False}
PLAIN = {"patch_size": 8, "stem": "linear", "position": "learned", "pooling": "class_token"}
NETWORKS: dict[str, dict[str, Any]] = {
    "ours": {**BLOCKS, **STEM, **PLANNED},
    "timm": {**BLOCKS, **PLAIN, "class_token": True},
}
TITLES = {
    "ours": f"SimCLR, {SIDE} px, 6 blocks of 192 behind a convolutional stem, batches of {BATCH}",
    "timm": f"SimCLR, {SIDE} px in patches of 8, 6 blocks of 192, batches of {BATCH}; timm's ViT",
}


def pretraining(options: argparse.Namespace) -> Iterator[Comparison]:
    """SimCLR with two views of each image."""
    if options.images is None:
        raise SystemExit("pretraining: give a folder of images with --images")

    def way(name: str, network: str) -> Run:
        if name.startswith("lightly"):
            importlib.import_module("lightly")
        words = [sys.executable, "-m", "benchmarks.pretraining", name, network]

        def run() -> float:
            done = subprocess.run(
                [*words, str(options.images.resolve()), str(options.workers)],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise SystemExit(f"{name}\n{done.stderr[-2000:]}")
            return float(done.stdout.split()[-1])

        return run

    names = ("vit pretrain", "lightly, float32", "lightly, bf16")
    for network, title in TITLES.items():
        yield Comparison(
            title=title,
            ways={name: partial(way, name, network) for name in names},
            count=EPOCH_STEPS * BATCH,
            warm_ups=0,
        )


def vit_seconds(network: str, images: Path) -> float:
    """Seconds of the second epoch of `vit pretrain`, as it is with a plan."""
    from vit.tasks.task import get_task
    from vit.training.train import train

    settings = {**get_task("simclr").planned_settings, **NETWORKS[network]}
    settings |= {"start_image_size": None, "cache": "ram", "interpolation": "bilinear"}
    settings |= {"optimizer": "muon", "batch_size": BATCH, "warmup_epochs": 1}
    settings |= {"epochs": 2, "epoch_steps": EPOCH_STEPS}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        train({"data": str(images), "task": "simclr", **settings}, out, report=False)
        events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        *_, last = (event for event in events if event["event"] == "epoch")
    return float(EPOCH_STEPS * BATCH / last["images_per_second"])


def lightly_seconds(network: str, images: Path, *, bf16: bool, workers: int) -> float:
    """Seconds of the second pass over as many batches."""
    import torch
    from lightly.data import LightlyDataset
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform
    from timm.models.vision_transformer import VisionTransformer
    from torch.utils.data import DataLoader

    from vit.config import ModelConfig
    from vit.model.build import assemble_model

    encoder: torch.nn.Module
    if network == "timm":
        encoder = VisionTransformer(
            img_size=SIDE, patch_size=8, embed_dim=192, depth=6, num_heads=6, num_classes=0
        )
    else:
        encoder = assemble_model(ModelConfig(**NETWORKS[network], num_classes=0))
    head = SimCLRProjectionHead(BLOCKS["dim"], 512, 128)
    loss_of = NTXentLoss(temperature=0.2)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-3)
    loader: DataLoader[Any] = DataLoader(
        LightlyDataset(str(images), transform=SimCLRTransform(input_size=SIDE)),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for _ in range(2):
        began = time.perf_counter()
        for views, *_ in itertools.islice(batches, EPOCH_STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                first, second = (head(encoder(view)) for view in views)
            loss = loss_of(first.float(), second.float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - began
    return seconds


if __name__ == "__main__":
    name, network, folder, workers = sys.argv[1:]
    if name.startswith("vit"):
        print(vit_seconds(network, Path(folder)))
    else:
        bf16 = name.endswith("bf16")
        print(lightly_seconds(network, Path(folder), bf16=bf16, workers=int(workers)))
