"""`vit tune DATA --time T`: a search from the plan on, and the best settings trained."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from vit.commands.command_options import positive_int, settings_from_args
from vit.commands.launcher import launch_if_requested
from vit.commands.train_command import add_settings
from vit.config.parser import checked, default_run_folder
from vit.errors import ConfigError, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """DATA, the folder, and a flag for every setting."""
    parser.usage = (
        "vit tune DATA --time T [--out FOLDER] [--trials N] [--resume] [settings that are fixed...]"
    )
    parser.add_argument("data", nargs="?", metavar="DATA", help="as for vit train")
    parser.add_argument(
        "--out",
        "--output",
        metavar="FOLDER",
        help="where trials, page and recipe go, and the run folder `best`; "
        "runs/<name of DATA>-tune if left out",
    )
    parser.add_argument(
        "--trials",
        type=positive_int,
        metavar="N",
        help="how many settings are tried, the plan among them; as many as are worth their time "
        "if left out",
    )
    parser.add_argument("--resume", action="store_true", help="continue the tuning in --out")
    parser.add_argument(
        "--overwrite", action="store_true", help="delete the tuning that is in --out first"
    )
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Tune; the exit code is 1 where images were left out, or comes with the error."""
    began = time.monotonic()
    launch_if_requested()
    values, trials = gather(args)
    if not values.get("data"):
        raise ConfigError(
            f"{printable(args.out)}: no tuning to resume there; give the --out of one, or DATA"
            if args.resume and args.out
            else "DATA is missing: give a folder of images, a list, tar shards, a built-in set "
            "(digits, shapes), or --resume with the --out of a tuning"
        )
    from vit.training.tune import tune

    result = tune(
        values,
        args.out,
        trials=trials,
        resume=args.resume,
        overwrite=args.overwrite,
        began=began,
    )
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(result.lines), flush=True)
    return int(bool(result.training.failed))


def gather(args: argparse.Namespace) -> tuple[dict[str, Any], int | None]:
    """Settings as given, and the number of trials; a tuning that is resumed brings its own.

    Raises:
        RunError: Its record is damaged.
    """
    flags = settings_from_args(args)
    if args.data is not None:
        flags["data"] = args.data
    flags = checked(flags)
    if not args.resume or not (args.out or args.data):
        return flags, args.trials
    from vit.training.tune import TUNE_FILE, read_record

    path = Path(args.out or f"{default_run_folder(args.data)}-tune") / TUNE_FILE
    if not path.is_file():
        return flags, args.trials
    record = read_record(path)
    return {**record["settings"], **flags}, (
        record["asked"] if args.trials is None else args.trials
    )
