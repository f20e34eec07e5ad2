"""`vit demo`: a first model without any images: trains on the digits of the package, labels some.

The same as `vit train digits --out runs/demo` and `vit predict runs/demo IMAGE...`.
"""

import argparse
import os
from pathlib import Path

from vit.commands import train_command
from vit.commands.command_output import notify
from vit.commands.command_parser import SETTING, CommandParser

RUN = "runs/demo"
LABELLED = 2
"""Digits of each class that are labelled after the training."""


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of the run folder, and a flag for every setting but those of other data."""
    parser.essential = ("out", "overwrite", f"{SETTING}epochs", f"{SETTING}seed")
    parser.examples = ("vit demo", "vit demo --epochs 5 --out runs/short")
    parser.usage = "vit demo [--out RUN] [settings...]"
    parser.set_defaults(data="digits", config=None, resume=False, show_batch=None)
    parser.add_argument(
        "--out", metavar="RUN", help=f"the run folder (default: {RUN}, which is replaced)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete the run that is in --out first"
    )
    train_command.add_settings(parser, leave_out=("task", "folds", "fold"))


def run(args: argparse.Namespace) -> int:
    """Train, and print the predictions of some validation images."""
    args.overwrite = args.overwrite or args.out is None
    args.out = args.out or RUN
    code = train_command.run(args)
    if code or os.environ.get("RANK", "0") != "0":
        return code
    from vit.commands.main import run_command

    code = run_command("predict", [args.out, *some_digits(), "--top-k", "2"])
    notify(
        f"vit demo: how good it is: {args.out}/report.html, in a browser; your own images, in one "
        "folder per class: vit train FOLDER --time 20m"
    )
    return code


def some_digits() -> list[str]:
    """Paths of `LABELLED` validation images of each class."""
    from vit.data.sources.builtin_datasets import digits_folder

    classes: list[Path] = sorted((digits_folder() / "val").iterdir())
    return [str(path) for each in classes for path in sorted(each.glob("*.png"))[:LABELLED]]
