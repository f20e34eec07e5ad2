"""Accuracy and wall time of the plan: `vit train DATA --time T`, nothing else, for times and seeds.

    python benchmarks/plan.py photos/ --times 60s 120s 240s --seeds 0 1 2 > curve.md

Prints a Markdown table: of each time the median, least and largest validation top-1 over the seeds,
and the wall time of the whole command as a share of what was given. Run it on a quiet machine:
whatever else runs takes steps from the training. Validation images choose the best epoch, so they
flatter it a little; measure images that are not in DATA with `vit evaluate` before you quote one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vit.config import TrainingConfig


def trained(
    data: str, duration: str, seed: int, folder: Path, extra: list[str]
) -> dict[str, float]:
    """Best validation top-1, and wall seconds as a share of `duration`."""
    out = folder / f"{duration}-{seed}"
    words = ["train", data, "--time", duration, "--seed", str(seed), "--out", str(out), *extra]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "vit", *words], check=True, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - began
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "epoch"]
    seconds = TrainingConfig(time=duration).seconds
    assert seconds is not None
    return {"top1": max(event["val_top1"] for event in events), "share": wall / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--times", nargs="+", default=["60s", "120s", "240s", "480s", "960s"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args, extra = parser.parse_known_args()
    print(
        "| time | top-1, median (least to largest) | wall time of the time given |\n|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for duration in args.times:
            runs = [trained(args.data, duration, seed, Path(folder), extra) for seed in args.seeds]
            top1 = sorted(100 * run["top1"] for run in runs)
            shares = ", ".join(f"{run['share']:.1%}" for run in runs)
            middle = statistics.median(top1)
            print(
                f"| {duration} | {middle:.1f} % ({top1[0]:.1f} to {top1[-1]:.1f}) | {shares} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
