"""`vit tune DATA --time T`: a search from the plan on, and the best settings trained."""

import argparse
import os
import time

from vit.commands.command_parser import SETTING, CommandParser
from vit.commands.train_command import ESSENTIAL, add_settings, chosen_settings, require_data
from vit.quick_imports import quick_imports


def add_arguments(parser: CommandParser) -> None:
    """Add DATA, flags of the folder, and a flag for every setting."""
    fixed = (name for name in ESSENTIAL if name not in ("weights", "model", "epochs"))
    parser.essential = (
        *("data", "setting_time", "out", "resume"),
        *(f"{SETTING}{name}" for name in fixed),
    )
    parser.examples = (
        "vit tune photos/ --time 2h",
        "vit tune --resume --out runs/photos-tune",
    )
    parser.usage = "vit tune DATA --time T [--out FOLDER] [settings...]"
    parser.add_argument("data", nargs="?", metavar="DATA", help="as for vit train")
    parser.add_argument(
        "--out",
        "--output",
        metavar="FOLDER",
        help="where the run folders of trials and of the best one go; "
        "runs/<name of DATA>-tune if left out",
    )
    parser.add_argument("--resume", action="store_true", help="continue the tuning in --out")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Tune; the exit code is 1 if images were left out, and that of an error otherwise."""
    began = time.monotonic()
    values = chosen_settings(args)
    if not (args.resume and args.out):
        require_data(values, args, "tuning")
    with quick_imports():
        from vit.training.tune import result_line, tune

    result = tune(values, args.out, resume=args.resume, began=began)
    if os.environ.get("RANK", "0") == "0":
        print(result_line(result), flush=True)
    return int(bool(result.training.failed))
