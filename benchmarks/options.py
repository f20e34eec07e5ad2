"""What each option of the network does to accuracy, speed and memory, one word changed at a time.

    python benchmarks/options.py CIFAR CLOTHING --out results.jsonl [--seeds 0 1 2] [--only NAME...]
    python benchmarks/options.py --cost --out results.jsonl [--only NAME...]
    python benchmarks/options.py --table results.jsonl

CIFAR and CLOTHING are folders with train/ and val/. Every run starts from scratch and takes less
than a minute on one core: so short a budget ranks options for small data and small networks, and
for nothing else. A run that is in --out already is not made again.

--cost times a training step of ViT-Ti/16 at 224 px, batch 8, against the first row's in interleaved
pairs, by the processor's time of one thread, which other work on the machine disturbs less than the
clock; and takes the most memory of a process that makes three steps, less one that makes none.
"""

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import vit
from vit.config.setting_layers import make_config

# name -> the settings that differ from the first row's
OPTIONS: dict[str, dict[str, Any]] = {
    "base": {},
    "position: none": {"position": "none"},
    "position: sinusoidal_1d": {"position": "sinusoidal_1d"},
    "position: sinusoidal_2d": {"position": "sinusoidal_2d"},
    "position: rotary": {"position": "rotary"},
    "position: relative": {"position": "relative"},
    "norm: rmsnorm": {"norm": "rmsnorm"},
    "norm_order: post": {"norm_order": "post"},
    "norm_order: sandwich": {"norm_order": "sandwich"},
    "qk_norm": {"qk_norm": True},
    "parallel_blocks": {"parallel_blocks": True},
    "layer_scale: 1e-4": {"layer_scale": 1e-4},
    "activation: relu": {"activation": "relu"},
    "feedforward: swiglu, 2/3 wide": {"feedforward": "swiglu", "hidden_dim": 172},
    "feedforward: moe": {"feedforward": "moe"},
    "pooling: mean": {"pooling": "mean"},
    "pooling: attention": {"pooling": "attention"},
    "registers: 4": {"registers": 4},
    "num_kv_heads: 1": {"num_kv_heads": 1},
    "repeat_blocks: 2, depth: 2": {"repeat_blocks": 2, "depth": 2},
    "patch_dropout: 0.25": {"patch_dropout": 0.25},
    "merge_tokens: 6": {"merge_tokens": 6},
}
SHARED = {
    "dim": 64,
    "depth": 4,
    "num_heads": 2,
    "optimizer": "adamw",
    "lr": 2e-3,
    "weight_decay": 0.05,
    "batch_size": 64,
    "warmup_epochs": 0.5,
    "interpolation": "bilinear",
    "crop_share": 1,
    "workers": 0,
    "device": "cpu",
    "precision": "fp32",
}
DATA = {
    "cifar": {"image_size": 32, "patch_size": 4, "epochs": 4, "min_crop": 0.6},
    "clothing": {"image_size": 48, "patch_size": 6, "epochs": 6, "min_crop": 0.35},
}


def train(folder: Path, settings: dict[str, Any], out: Path) -> dict[str, Any]:
    """One run; the last line of its metrics and its seconds."""
    began = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        vit.train(make_config({**settings, "data": str(folder)}), out)
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    epochs = [event for event in map(json.loads, lines) if event["event"] == "epoch"]
    return {**epochs[-1], "wall": round(time.perf_counter() - began, 1)}


def measure(args: argparse.Namespace) -> None:
    folders = {"cifar": args.cifar, "clothing": args.clothing}
    done = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    known = {tuple(row["run"]) for row in map(json.loads, done) if "run" in row}
    for seed in args.seeds:
        for name in args.only or OPTIONS:
            for data, folder in folders.items():
                key = (name, data, seed)
                if key in known:
                    continue
                settings = {**SHARED, **DATA[data], **OPTIONS[name], "seed": seed}
                with tempfile.TemporaryDirectory() as out:
                    row = {"run": key, **train(folder, settings, Path(out) / "run")}
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{name} on {data}, seed {seed}: {row['val_top1']:.1%} in {row['wall']} s")


class Trained:
    """ViT-Ti/16 with the settings of an option, and what makes steps of it."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        # sizes of the small study are not those of ViT-Ti
        scaled = {"hidden_dim": 512, "depth": 6}
        changes = {key: scaled.get(key, value) for key, value in OPTIONS[name].items()}
        self.network = vit.create_model("vit_tiny_patch16_224", num_classes=10, **changes).train()
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4)
        self.images, self.labels = torch.randn(8, 3, 224, 224), torch.arange(8)

    def step(self) -> float:
        """One step; the processor's seconds."""
        began = time.process_time()
        F.cross_entropy(self.network(self.images), self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - began


def peak(name: str, steps: int) -> float:
    """MiB that a process of its own holds at most while it makes `steps` steps."""
    command = [sys.executable, __file__, "--peak", name, str(steps)]
    # freed tensors go back to the system at once, so that gaps of the heap do not count
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        ["env", *(f"{key}={value}" for key, value in environment.items()), *command],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def cost(args: argparse.Namespace) -> None:
    """Speed and memory of each option against the base."""
    torch.set_num_threads(1)
    base = Trained("base")
    bare = peak("base", 0)
    for name in args.only or OPTIONS:
        other = Trained(name)
        for trained in (base, other):
            trained.step()
        ratios = [other.step() / base.step() for _ in range(args.pairs)]
        row = {
            "cost": name,
            "ratio": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
            "mib": peak(name, 3) - bare,
        }
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: {row['ratio']:.2f} of the base's time, {row['mib']:.0f} MiB", flush=True)


def table(path: Path) -> None:
    """Top-1 of the last epoch for each seed, the mean difference to the base, and the costs."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    costs = {row["cost"]: row for row in rows if "cost" in row}
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if "run" in row:
            name, data, seed = row["run"]
            found.setdefault((name, data), {})[seed] = 100 * row["val_top1"]
    heads = [f"{data}, top-1 % | against base" for data in DATA]
    print("| option | " + " | ".join(heads) + " | time of a step | memory of a step, MiB |")
    print("|---|" + "---|" * 2 * len(DATA) + "---|---|")
    for name in OPTIONS:
        cells = []
        for data in DATA:
            mine, base = found.get((name, data), {}), found.get(("base", data), {})
            both = sorted(mine.keys() & base.keys())
            apart = [mine[seed] - base[seed] for seed in both]
            cells += [
                " ".join(f"{mine[seed]:.1f}" for seed in sorted(mine)) or "-",
                f"{statistics.mean(apart):+.1f}" if apart and name != "base" else "",
            ]
        spent = costs.get(name)
        cells += [f"{spent['ratio']:.2f}", f"{spent['mib']:.0f}"] if spent else ["-", "-"]
        print(f"| `{name}` | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cifar", type=Path, nargs="?")
    parser.add_argument("clothing", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=OPTIONS)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--peak", nargs=2, metavar=("OPTION", "STEPS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak is not None:
        torch.set_num_threads(1)
        trained = Trained(args.peak[0])
        for _ in range(int(args.peak[1])):
            trained.step()
        # not rusage's, which begins with that of the process that started this one
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        print(int(status.split("VmHWM:")[1].split()[0]) / 2**10)
    elif args.table is not None:
        table(args.table)
    elif args.cost:
        cost(args)
    elif args.clothing is None or args.out is None:
        parser.error("give both folders and --out, or --table")
    else:
        measure(args)


if __name__ == "__main__":
    main()
