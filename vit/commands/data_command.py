"""`vit data`: write the images of any source as a folder of class folders, or as tar shards."""

import argparse
from pathlib import Path

from vit.commands.command_output import Progress, notify
from vit.commands.command_parser import (
    add_data_options,
    add_max_pixels,
    add_task_option,
    dataset_spec,
)
from vit.text import printable

MAX_NAMED = 20  # bad images with a line of their own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        metavar="DATA",
        help="a folder of images, a list, tar shards, hf:NAME or a built-in set",
    )
    parser.add_argument("--to", choices=["folder", "shards"], required=True, help="what is written")
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="the folder that is made, whole or not at all"
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        help="most bytes of a shard, such as 256MB (the default) or 1GB",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace DIR, where vit data has written it"
    )
    add_task_option(parser, "what is written with the images")
    add_data_options(parser, without=("group",))
    add_max_pixels(parser)


def run(args: argparse.Namespace) -> int:
    from vit.data.sources.dataset_export import LABELS_FILE, export_data
    from vit.text import plural

    out = Path(args.out)
    with Progress("vit data") as progress:
        report = export_data(
            dataset_spec(args, all_splits=True),
            out,
            to=args.to,
            shard_size=args.shard_size,
            overwrite=args.overwrite,
            progress=progress,
        )
    for note in report.notes:
        notify(f"vit data: note: {note}")
    for bad in report.bad[:MAX_NAMED]:
        notify(f"vit data: left out {bad}")
    if (rest := len(report.bad) - MAX_NAMED) > 0:
        notify(f"vit data: left out {plural(rest, 'image')} more that cannot be read")
    shards = f" in {plural(report.files, 'shard')}" if args.to == "shards" else ""
    lines = printable(out / LABELS_FILE) if (out / LABELS_FILE).is_file() else ""
    more = f"; their classes are in {lines}, which is the DATA to train on" if lines else ""
    notify(f"vit data: wrote {plural(report.images, 'image')}{shards} to {printable(out)}{more}")
    return int(bool(report.bad))
