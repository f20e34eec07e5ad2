"""`vit drift`: are the images of the field different from those of the calibration?"""

import argparse

from vit.commands.command_output import Progress, notify, print_result
from vit.commands.command_parser import (
    add_fields,
    add_json_option,
    add_max_pixels,
    checked_settings,
)
from vit.config.inference_config import InferenceConfig
from vit.output.output_file import check_outputs
from vit.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run folder of a classifier")
    parser.add_argument(
        "data",
        metavar="FILE|IMAGES",
        nargs="+",
        help="a file of `vit serve RUN --watch FILE` (.jsonl), or images, folders and patterns, "
        "which are predicted and compared in their order, that of time",
    )
    add_json_option(parser, "where all numbers are written as well; an older file is replaced")
    group = parser.add_argument_group("network (how it runs over IMAGES)")
    add_fields(group, InferenceConfig, only=("batch_size", "device", "precision", "workers"))
    add_max_pixels(group)


def run(args: argparse.Namespace) -> int:
    """Compare; the exit code is 1 if images could not be read."""
    settings = checked_settings(args, InferenceConfig)
    check_outputs({"--json": args.json}, args.data)

    from vit.inference.drift import drift

    with Progress("vit drift") as progress:
        found = drift(
            args.run,
            args.data,
            **settings,
            notify=lambda note: notify(f"vit drift: {note}"),
            progress=progress,
        )
    print_result(found.sentence(), args.json, found.to_dict())
    for row in found.failed:
        notify(f"vit drift: {printable(row['image'])}: {printable(row['error'])}")
    return int(bool(found.failed))
