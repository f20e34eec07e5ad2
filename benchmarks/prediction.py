"""How fast `vit predict` is beside timm's inference.py, as whole commands on the same files.

    python benchmarks/prediction.py --run RUN --images DIR --timm inference.py [--rounds 5]

timm's inference.py is in its repository, not in its package; it opens the same run folder
(`local-dir:RUN`) with its own defaults but for the device. The commands take turns, so that a busy
machine disturbs both alike: a ratio is the median over rounds. Start-up is the time for one
image. Memory is the peak of the resident sets of a command's processes together, asked for 20
times a second; shared pages count in each. Linux only.

    --memory 1000 10000     instead: our peak for so many images, in turn from DIR
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[1]


class Cost(NamedTuple):
    """What a command took."""

    seconds: float
    processor: float
    """Seconds of all its processes on a core."""
    memory: float
    """MiB at the peak, of all its processes together."""


def measured(words: list[str], folder: Path, names: str = "") -> Cost:
    """Run a command in `folder`, with `names` on its standard input.

    Raises:
        SystemExit: It fails.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    (folder / "names").write_text(names)
    before, began, peak = os.times(), time.perf_counter(), 0
    with (folder / "names").open() as inputs, (folder / "log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdin=inputs, stdout=log, stderr=log
        )
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.05)
    if process.returncode:
        sys.exit(f"{' '.join(words)}\n{(folder / 'log').read_text()[-2000:]}")
    after = os.times()
    processor = sum(
        getattr(after, name) - getattr(before, name)
        for name in ("children_user", "children_system")
    )
    return Cost(time.perf_counter() - began, processor, peak / 2**20)


def resident(pid: int) -> int:
    """Bytes that a process and its children hold."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for one in (parent, *parent.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.Error:  # it has just ended
        pass
    return total


def ours(args: argparse.Namespace, images: Path) -> list[str]:
    words = [sys.executable, "-m", "vit", "predict", str(args.run), str(images)]
    return [*words, "--out", "ours.jsonl", "--overwrite", *args.flags.split()]


def theirs(args: argparse.Namespace, images: Path) -> list[str]:
    words = [sys.executable, str(args.timm), str(images), "--model", f"local-dir:{args.run}"]
    out = ["--results-file", "theirs", "--topk", "5", "--no-console-results"]
    return [*words, "--device", "cpu", *out]


def images_of(folder: Path) -> list[Path]:
    return sorted(path.resolve() for path in folder.rglob("*") if path.is_file())


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Both ways in turn, on all images and on one."""
    paths = images_of(args.images)
    single = folder / "one"
    single.mkdir()
    shutil.copy(paths[0], single)
    measured(ours(args, args.images), folder)  # reads the files, and tries the precision
    taken: dict[tuple[str, str], list[Cost]] = {}
    for turn in range(args.rounds):
        for what, images in (("all", args.images), ("one", single)):
            for name, command in (("ours", ours), ("timm", theirs))[:: 1 if turn % 2 else -1]:
                cost = measured(command(args, images), folder)
                taken.setdefault((what, name), []).append(cost)
                print(f"{turn} {what} {name}: {cost}", file=sys.stderr, flush=True)
    print(f"{len(paths):,} images, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| what | ours | timm | ratio (of each round) |")
    print("|---|---|---|---|")
    for title, what, field, count in (
        ("images/s, whole command", "all", 0, len(paths)),
        ("images a second of a core", "all", 1, len(paths)),
        ("start-up, s", "one", 0, 0),
        ("start-up, s of a core", "one", 1, 0),
        ("peak memory, MiB", "all", 2, 0),
    ):
        mine, other = ([cost[field] for cost in taken[what, name]] for name in ("ours", "timm"))
        ratios = sorted(theirs / mine for mine, theirs in zip(mine, other, strict=True))
        shown = [statistics.median(values) for values in (mine, other)]
        shown = [count / value if count else value for value in shown]
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        middle = statistics.median(ratios)
        print(f"| {title} | {shown[0]:,.1f} | {shown[1]:,.1f} | {middle:.2f}x ({spread}) |")


def grow(args: argparse.Namespace, folder: Path) -> None:
    """Our peak memory for growing lists."""
    paths = images_of(args.images)
    print("| images | peak memory, MiB | images/s |")
    print("|---|---|---|")
    for count in args.memory:
        names = "".join(f"{path}\n" for path in islice(cycle(paths), count))
        cost = measured(ours(args, Path("-")), folder, names)
        print(f"| {count:,} | {cost.memory:,.0f} | {count / cost.seconds:,.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--timm", type=Path, help="timm's inference.py")
    parser.add_argument("--flags", default="", help="more of ours, such as '--compile'")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, nargs="+", default=[])
    args = parser.parse_args()
    args.run, args.images = args.run.resolve(), args.images.resolve()
    if args.timm is None and not args.memory:
        parser.error("give --timm inference.py, or --memory")
    args.timm = args.timm and args.timm.resolve()
    with tempfile.TemporaryDirectory() as folder:
        (grow if args.memory else compare)(args, Path(folder))


if __name__ == "__main__":
    main()
