"""One process beside two workers of Ray, of which one is killed: seconds, and whether files agree.

    python benchmarks/ray_prediction.py RUN PICTURES [--times 5] [--workers 2]

PICTURES are answered `--times` over: alone, by all workers, and by all of which one is killed
`--after` seconds of its life. Needs psutil.
"""

import argparse
import contextlib
import os
import signal
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import torch

from vit.data.sources.open_dataset import list_images
from vit.inference.predictor import Predictor
from vit.inference.ray_inference import predict_with_ray
from vit.output.prediction_results import FORMATS, Layout


def kill_one(after: float, told: list[float]) -> None:
    """Kill one of Ray's workers below this process, `after` seconds after the first is there."""
    found: list[psutil.Process] = []
    while not found:
        time.sleep(0.2)
        with contextlib.suppress(psutil.Error):  # some end while they are asked
            below = psutil.Process().children(recursive=True)
            found += [process for process in below if "MapWorker" in " ".join(process.cmdline())]
    time.sleep(after)
    os.kill(found[0].pid, signal.SIGKILL)
    told.append(time.perf_counter())


def note_time(times: list[float], _note: str) -> None:
    """Append the time at which a note comes."""
    times.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("images")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--after", type=float, default=20.0, help="seconds before a worker dies")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as each worker of Ray
    images = list_images([args.images]) * args.times
    folder = Path(tempfile.mkdtemp())
    began = time.perf_counter()
    predictor = Predictor(args.run, precision="fp32", device="cpu", workers=1)
    loaded = time.perf_counter()
    line = FORMATS["jsonl"](Layout(5, predictor.classes, images))[1]
    expected = "".join(map(line, predictor.stream(images))).encode()
    alone = time.perf_counter() - loaded
    print(f"{len(images)} images; one process: {alone:.1f} s after {loaded - began:.1f} s to load")
    for kill in (False, True):
        out, killed = folder / f"{kill}.jsonl", list[float]()
        began = time.perf_counter()
        if kill:
            threading.Thread(target=kill_one, args=(args.after, killed), daemon=True).start()
        ready: list[float] = []
        predict_with_ray(
            args.run, images, str(out), style="jsonl", top_k=5, workers=args.workers,
            settings={"precision": "fp32", "device": "cpu"},
            notify=partial(note_time, ready),
        )  # fmt: skip
        ended = time.perf_counter()
        what = f"one killed after {killed[0] - began:.1f} s" if killed else "none killed"
        same = "the same bytes" if out.read_bytes() == expected else "ANOTHER FILE"
        print(
            f"{args.workers} workers, {what}: {ended - began:.1f} s, of which "
            f"{ready[0] - began:.1f} to start; {same}"
        )


if __name__ == "__main__":
    main()
