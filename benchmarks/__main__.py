"""Speed and memory of this toolkit beside its peers; results go to benchmarks/results.

    python -m benchmarks                          the parts that need no files of yours
    python -m benchmarks forward step --rounds 15
    python -m benchmarks loading prediction --images PHOTOS --timm-repo pytorch-image-models
    python -m benchmarks pretraining --images PHOTOS --memory
    python -m benchmarks --gpu                    every GPU test, then forward, step, loading

docs/performance.md says how each part could mislead, and what to expect.
"""

import argparse
import contextlib
import importlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from benchmarks.timing import (
    Clock,
    Comparison,
    hardware,
    heading,
    in_own_processes,
    peak_alone,
    run_alone,
    serve_turns,
    slug,
    table,
    take_turns,
)

ROOT = Path(__file__).parents[1]
# part -> the function that returns its comparisons
PARTS = {
    "forward": "networks",
    "step": "networks",
    "small": "networks",
    "exported": "networks",
    "variants": "networks",
    "attention": "networks",
    "captioning": "captions",
    "loading": "loaders",
    "startup": "whole_commands",
    "prediction": "whole_commands",
    "checkpoints": "whole_commands",
    "accuracy": "plan",
    "accuracy_by_time": "accuracy_by_time",
    "distillation": "distillation",
    "pretraining": "pretraining",
    "coverage": "coverage",
    "calibration": "coverage",
    "groups": "group_coverage",
}
NEED_FILES = (
    *("loading", "prediction", "pretraining"),
    *("accuracy", "accuracy_by_time", "distillation", "coverage", "calibration"),
)
LONG = ("attention", "checkpoints", "groups")
GPU_PARTS = ("forward", "step")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-b", "--batch-size", type=int, nargs="+", help="instead of the part's own")
    parser.add_argument("--model", help="a preset, instead of the part's own")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--only", nargs="+", default=[], help="words of the ways' names")
    parser.add_argument("--compile", action="store_true", help="compiled networks too")
    parser.add_argument("--memory", action="store_true", help="peak of each way, in its process")
    parser.add_argument("--cpu-time", action="store_true", help="count processor seconds")
    parser.add_argument(
        "--images", type=Path, help="a folder of images: loading, prediction, pretraining"
    )
    parser.add_argument(
        "--data", type=Path, help="DATA of vit train: accuracy, accuracy_by_time, distillation"
    )
    parser.add_argument("--times", nargs="+", default=["60s", "120s", "240s"], help="as --data")
    parser.add_argument(
        "--run", type=Path, help="a run folder: prediction; the teacher: distillation"
    )
    parser.add_argument("--runs", type=Path, nargs="+", help="run folders: coverage, calibration")
    parser.add_argument(
        "--predictions",
        type=Path,
        help="a folder that keeps those of --runs, or the networks of accuracy_by_time",
    )
    parser.add_argument("--draws", type=int, default=1000, help="of a simulation: coverage, groups")
    parser.add_argument("--timm-repo", type=Path, help="timm's repository, for its inference.py")
    parser.add_argument("--yolo", type=Path, help="ultralytics' command: accuracy_by_time")
    parser.add_argument("--figure", type=Path, help="SVG to write: accuracy_by_time")
    parser.add_argument("--workers", type=int, default=2, help="loader processes")
    parser.add_argument("--gpu", action="store_true", help="GPU tests and parts, one file")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--turns", nargs=2, help=argparse.SUPPRESS)
    return parser


def comparisons(part: str, options: argparse.Namespace) -> Iterator[Comparison | str]:
    """What `part` compares, or tables that it made itself."""
    module = importlib.import_module(f"benchmarks.{PARTS[part]}")
    yield from getattr(module, part)(options)


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]} is not a part: choose of {', '.join(PARTS)}")
    warnings.simplefilter("ignore")
    import torch

    if options.gpu and options.device == "cpu":
        options.device = "cuda"
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no GPU here")
    if options.threads:
        torch.set_num_threads(options.threads)
    names = options.parts or [name for name in PARTS if name not in NEED_FILES + LONG]
    if options.gpu and not options.parts:
        names = [*GPU_PARTS, *(["loading"] if options.images else [])]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        if options.alone or options.turns:
            title, way = options.alone or options.turns
            found = next(
                one
                for one in comparisons(names[0], options)
                if isinstance(one, Comparison) and one.title == title
            )
            if options.alone:
                print(run_alone(found, way, options.device))
            else:
                serve_turns(found, way, Clock(options.cpu_time, options.device))
            return 0
        return measure(names, options)


def measure(names: list[str], options: argparse.Namespace) -> int:
    """Measure and write all parts; 1 if GPU tests fail."""
    words = [word for word in sys.argv[1:] if not word.startswith("--gpu")]
    what = "gpu" if options.gpu else "-".join(names) if options.parts else "all"
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{what}_{slug(hardware(options.device))}_{date.today()}.md"
    failed = False
    with (options.out / name).open("w", encoding="utf-8") as file:

        def write(text: str) -> None:
            print(text, flush=True)
            print(text, file=file, flush=True)

        write(heading(sys.argv[1:], options.device, options.rounds))
        if options.gpu:
            passed, text = gpu_tests()
            failed = not passed
            write(text)
        clock = Clock(options.cpu_time, options.device)
        for part in names:
            write(f"## {part}\n")
            for comparison in comparisons(part, options):
                if isinstance(comparison, str):
                    write(comparison)
                    continue
                alone = [part, *[word for word in words if word not in PARTS]]
                with (
                    in_own_processes(comparison, alone)
                    if comparison.own_processes and options.device == "cpu"
                    else contextlib.nullcontext(comparison)
                ) as turns:
                    seconds, missing = take_turns(turns, options.rounds, clock, options.only)
                peaks = {}
                if options.memory:
                    peaks = {way: peak_alone(alone, comparison.title, way) for way in seconds}
                write(table(comparison, seconds, missing, peaks))
    print(f"written to {options.out / name}")
    return int(failed)


def gpu_tests() -> tuple[bool, str]:
    """Run the tests marked `gpu`; whether all passed, and the last lines of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()[-20:]
    return done.returncode == 0, "\n".join(["## tests", "", "```", *lines, "```", ""])


if __name__ == "__main__":
    sys.exit(main())
