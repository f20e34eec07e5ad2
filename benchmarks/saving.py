"""What checkpoints cost: the digits recipe with a ViT-Ti, saved as always and not saved at all.

    python benchmarks/saving.py [--pairs 5] [--epochs 3]

Runs take turns, so that a busy machine disturbs both kinds alike; each pair gives one ratio of the
seconds from the first step to the last save. Also how long the training itself stands still: the
copy that is taken of weights, average and optimiser state.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from vit.config import Config
from vit.config.parser import make_config, read_settings
from vit.training.checkpoint import checkpoint_manager
from vit.training.train import train
from vit.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
TINY = {"dim": 192, "depth": 12, "num_heads": 3}


def seconds(config: Config, *, saving: bool) -> tuple[float, float]:
    """Seconds of a training without its start and its report, and those spent copying."""
    taken, copied = [], []
    run_all, snapshot = Trainer.run_all, checkpoint_manager.take_snapshot

    def timed_run(self: Trainer) -> object:
        began = time.perf_counter()
        result = run_all(self)
        taken.append(time.perf_counter() - began)
        return result

    def timed_copy(*args: object, **options: object) -> object:
        began = time.perf_counter()
        result = snapshot(*args, **options)
        copied.append(time.perf_counter() - began)
        return result

    patches = [
        mock.patch.object(Trainer, "run_all", timed_run),
        mock.patch("vit.training.checkpoint.checkpoint_manager.take_snapshot", timed_copy),
        mock.patch("vit.training.trainer.finish_run"),
    ]
    if not saving:
        patches.append(mock.patch.object(checkpoint_manager.CheckpointManager, "save"))
    with tempfile.TemporaryDirectory() as folder:
        for patch in patches:
            patch.start()
        train(config, Path(folder) / "run")
        mock.patch.stopall()
    return taken[0], sum(copied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    recipe = read_settings(ROOT / "configs/digits.yaml")
    config = make_config({**recipe, **TINY, "epochs": args.epochs, "warmup_epochs": 1})
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    ratios = []
    for pair in range(args.pairs):
        order = (True, False) if pair % 2 else (False, True)
        found = {saving: seconds(config, saving=saving) for saving in order}
        (saved, copied), (bare, _) = found[True], found[False]
        ratios.append(saved / bare)
        print(f"saved {saved:.2f} s  not {bare:.2f} s  {ratios[-1]:.4f}  copying {copied:.3f} s")
    print(
        f"median ratio {statistics.median(ratios):.4f} of {args.pairs} pairs, {args.epochs} epochs"
    )


if __name__ == "__main__":
    main()
