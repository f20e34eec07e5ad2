"""Accuracy and wall time of the plan on your own data: `vit train DATA --time T`, nothing else.

Validation images choose the best epoch, so they flatter it a little; measure images that are not in
DATA with `vit evaluate` before you quote one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator

import vit
from benchmarks.whole_commands import VIT, command


def accuracy(options: argparse.Namespace) -> Iterator[str]:
    """`vit train DATA --time T`, nothing else: validation top-1 over three seeds, and the time."""
    if options.data is None:
        raise SystemExit("accuracy: give DATA with --data")
    rows = ["| time | top-1, median (least to largest) | wall time / time given |", "|---|---|---|"]
    for duration in options.times:
        top1, shares = [], []
        for seed in range(3):
            out = options.folder / f"{duration}-{seed}"
            words = [*VIT, "train", options.data, "--time", duration, "--seed", seed, "--out", out]
            began = time.perf_counter()
            command(words, options.folder.parent)()
            wall = time.perf_counter() - began
            lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            events = [event for event in map(json.loads, lines) if event["event"] == "epoch"]
            top1.append(100 * max(event["val_top1"] for event in events))
            seconds = vit.make_config({"data": "digits", "time": duration}).training.seconds
            assert seconds is not None
            shares.append(f"{wall / seconds:.1%}")
        middle = f"{statistics.median(top1):.1f} % ({min(top1):.1f} to {max(top1):.1f})"
        rows.append(f"| {duration} | {middle} | {', '.join(shares)} |")
    yield "\n".join([f"### vit train {options.data.name} --time T", "", *rows, ""])
