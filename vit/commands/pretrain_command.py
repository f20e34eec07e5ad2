"""`vit pretrain IMAGES [--method NAME] [settings]`: images without labels -> a run folder.

This is `vit train` with the task of the method: the same settings, data, loop and run folder.
"""

import argparse
import time
from pathlib import Path

from vit.commands.command_parser import SETTING, CommandParser
from vit.commands.train_command import (
    add_run_flags,
    add_settings,
    chosen_settings,
    notify_on_main,
    require_data,
    run_training,
)
from vit.config.collect_settings import collect_settings
from vit.config.setting_layers import Settings, default_run_folder
from vit.config.settings import PRETRAINING_TASKS
from vit.config.training_config import download_limit
from vit.errors import ConfigError

USUAL = "simclr"
"""The method where none is chosen."""
LEFT_OUT = ("task", "method")
"""Settings of `vit train` without a flag here; --method is the task."""
ESSENTIAL = (
    "model",
    "image_size",
    "epochs",
    "batch_size",
    "lr",
    "contrastive_temperature",
    "mask_ratio",
)


def add_arguments(parser: CommandParser) -> None:
    """Add IMAGES, --method, flags of the run folder, and a flag for every other setting."""
    parser.essential = (
        *("data", "method", "out", "setting_time", "resume", "overwrite", "config"),
        *(f"{SETTING}{name}" for name in ESSENTIAL),
    )
    parser.examples = (
        "vit pretrain photos/ --time 60m --out runs/pretrained",
        "vit pretrain photos/ --method mae --time 60m --out runs/pretrained",
        "vit train labelled/ --weights runs/pretrained",
    )
    parser.usage = (
        "vit pretrain IMAGES [--method simclr|lejepa|dino|mae] [--out RUN] [--resume] [settings...]"
    )
    parser.add_argument(
        "data",
        nargs="?",
        metavar="IMAGES",
        help="a folder of images, with or without class folders, a list of them (.csv, .jsonl, "
        ".xlsx), tar shards, hf:NAME, or a built-in set: digits, shapes",
    )
    parser.add_argument(
        "--method",
        choices=PRETRAINING_TASKS,
        help="recognise an image by another view of it (simclr, arXiv:2002.05709), predict views "
        "from each other (lejepa, arXiv:2511.08544), predict what a moving average of the network "
        "says of another view (dino, arXiv:2104.14294), or predict hidden patches (mae, "
        f"arXiv:2111.06377) (default: {USUAL})",
    )
    add_run_flags(parser, default="runs/<name of IMAGES>-pretrained")
    add_settings(parser, leave_out=LEFT_OUT)


def run(args: argparse.Namespace) -> int:
    """Pretrain; the exit code is 1 if images were left out, and that of an error otherwise."""
    began = time.monotonic()
    flags = chosen_settings(args)
    out = Path(args.out) if args.out else None
    if out is None and flags.get("data"):
        out = run_folder(str(flags["data"]))
    values = collect_settings(
        flags, config=args.config, out=out, resume=args.resume, notify=notify_on_main
    )
    require_data(values, args, "pretraining")
    out = out or run_folder(str(values["data"]))
    if download_limit(values.get("weights")) is not None:
        raise ConfigError(
            "weights=auto chooses weights for classes; name the weights to go on from, or leave "
            "--weights out"
        )
    task = chosen_method(values.get("task"), args.method)
    values = Settings(**values.layers, command={"task": task})
    return run_training(values, args, out, began=began, name="vit pretrain")


def run_folder(data: str) -> Path:
    """The run folder where none is given, apart from that of a training on the same images."""
    usual = default_run_folder(data)
    return usual.with_name(f"{usual.name}-pretrained")


def chosen_method(stored: str | None, given: str | None) -> str:
    """The task: that of a file or a run, which --method must not contradict, or --method."""
    if stored is None:
        return given or USUAL
    if stored not in PRETRAINING_TASKS or given not in (None, stored):
        raise ConfigError(
            f"--method {given or USUAL}: the settings have task={stored}; give other settings, or "
            "another --out"
        )
    return stored
