"""What a teacher gives a student of half its cost in equal minutes, of training and of the teacher.

    python -m benchmarks distillation --data DATA --times 5m 10m [--run TEACHER]

Without --run the teacher is trained by the plan for TEACHER_FACTOR times as long. The student has
the teacher's network with half of its blocks. Both students of a seed have the same settings, data
split and time; that of the student with a teacher includes the teacher's pass over the images.
Validation images choose the best epoch of both, and those of the teacher.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.whole_commands import VIT, command
from vit.config.setting_layers import make_config, read_settings
from vit.evaluation.model_summary import cost_of

TEACHER_FACTOR = 3
SEEDS = range(3)
NETWORK = (
    *("image_size", "patch_size", "dim", "num_heads", "hidden_dim"),
    *("stem", "stem_depth", "stem_width", "stem_stride"),
)
"""Settings that a student has of its teacher, as the plan takes them."""


def distillation(options: argparse.Namespace) -> Iterator[str]:
    """Validation top-1 of three students alone and with a teacher, paired by seed."""
    if options.data is None:
        raise SystemExit("distillation: give DATA with --data")
    rows = [
        "| time | student / teacher FLOPs | teacher | alone | soft | gain, least to largest |",
        "|---|---|---|---|---|---|",
    ]
    for duration in options.times:
        teacher = options.run or train_teacher(options, duration)
        flags, share = half_network(teacher)
        alone, taught = [], []
        for seed in SEEDS:
            words = [*flags, "--time", duration, "--seed", seed]
            alone.append(train(options, f"{duration}-{seed}-alone", words))
            with_teacher = [*words, "--teacher", teacher.resolve()]
            taught.append(train(options, f"{duration}-{seed}-taught", with_teacher))
        gains = [with_it - without for with_it, without in zip(taught, alone, strict=True)]
        cells = (
            *(duration, f"{share:.0%}", f"{best_top1(teacher):.1f} %"),
            *(f"{statistics.median(alone):.1f} %", f"{statistics.median(taught):.1f} %"),
            f"{statistics.median(gains):+.1f} ({min(gains):+.1f} to {max(gains):+.1f})",
        )
        rows.append(f"| {' | '.join(cells)} |")
    yield "\n".join([f"### Students of {options.data.name}, median of 3 seeds", "", *rows, ""])


def train_teacher(options: argparse.Namespace, duration: str) -> Path:
    """A teacher by the plan, which has TEACHER_FACTOR times the students' time."""
    seconds = make_config({"data": "digits", "time": duration}).training.seconds
    assert seconds is not None, "the duration was parsed"
    train(options, f"{duration}-teacher", ["--time", f"{TEACHER_FACTOR * seconds:g}s"])
    return Path(options.folder / f"{duration}-teacher")


def half_network(teacher: Path) -> tuple[list[object], float]:
    """Flags of a network with half of the teacher's blocks, and its share of the FLOPs."""
    config = make_config(read_settings(teacher / "config.yaml"))
    settings = {name: getattr(config.model, name) for name in NETWORK}
    settings |= {"depth": max(config.model.depth // 2, 1)}
    given = {name: value for name, value in settings.items() if value is not None}
    flags = [word for name, value in given.items() for word in (flag(name), value)]
    half = make_config({**given, "num_classes": config.model.num_classes}).model
    return flags, cost_of(half, batch_size=1).flops / cost_of(config.model, batch_size=1).flops


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def train(options: argparse.Namespace, name: str, words: list[object]) -> float:
    """Validation top-1 in percent of `vit train DATA` with `words`."""
    out = options.folder / name
    data = options.data.resolve()
    command([*VIT, "train", data, *words, "--out", out], options.folder)()
    return best_top1(out)


def best_top1(run: Path) -> float:
    """Largest validation top-1 of a run in percent."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "epoch"]
    return 100 * max(float(event["val_top1"]) for event in events)
