"""What resuming costs at step k: it reads no skipped batch, so k makes no difference.

    python benchmarks/resuming.py [--repeats 5]

Reads a checkpoint of a long run on the digits as if it were of step k, and measures from there to
the end of the first step. The steps take turns, so that a busy machine disturbs all alike.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

from vit.config.parser import make_config, read_settings
from vit.training.checkpoint.checkpoint import CHECKPOINTS, find_checkpoints
from vit.training.train import train
from vit.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
STEPS = (0, 1_005, 100_010, 1_000_015)


class Stop(Exception):
    """The first step is done."""


def resumed(folder: Path, config: object, step: int, per_epoch: int) -> float:
    """Seconds from reading the checkpoint to the end of the first step, as if at `step`."""
    began = []

    def begin(self: Trainer, resuming: bool) -> None:
        began.append(time.perf_counter())
        original(self, resuming)
        self.run.step, self.epoch = step, step // per_epoch

    def after_step(*_: object) -> None:
        began.append(time.perf_counter())
        raise Stop

    original = Trainer.begin
    with (
        mock.patch.object(Trainer, "begin", begin),
        mock.patch.object(Trainer, "after_step", after_step),
        contextlib.suppress(Stop),
    ):
        train(config, folder, resume=True)
    return began[1] - began[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    recipe = read_settings(ROOT / "configs/digits.yaml")
    config = make_config({**recipe, "epochs": 100_000, "warmup_epochs": 1, "workers": 0})
    per_epoch = 1442 // config.data.batch_size
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"

        def after_step(self: Trainer, _: object) -> None:
            self.save()
            self.checkpoints.wait()
            raise Stop

        with mock.patch.object(Trainer, "after_step", after_step), contextlib.suppress(Stop):
            train(config, folder)
        assert find_checkpoints(folder / CHECKPOINTS)
        for _ in range(args.repeats):
            for step in STEPS:
                found[step].append(resumed(folder, config, step, per_epoch))
    for step, times in found.items():
        middle = statistics.median(times)
        print(f"step {step:>9,}: {middle:.3f} s (from {min(times):.3f} to {max(times):.3f})")


if __name__ == "__main__":
    main()
