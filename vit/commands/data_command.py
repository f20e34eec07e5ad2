"""`vit data`: write the images of any source as a folder of class folders, or as tar shards."""

import argparse
import re
from pathlib import Path

from vit.commands.command_options import add_list_options
from vit.commands.command_output import notify, progress_bar
from vit.errors import ConfigError, printable

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LEAST = 10**6
MOST_NAMED = 20  # bad images with a line of their own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="DATA",
        help="a folder of images, a list, tar shards, hf:NAME, torchvision:NAME or a built-in set",
    )
    parser.add_argument("--to", choices=["folder", "shards"], required=True, help="what is written")
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="the folder that is made, whole or not at all"
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        default=argparse.SUPPRESS,
        help="most bytes of a shard, such as 256MB (the default) or 1GB",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace DIR, where vit data has written it",
    )
    parser.add_argument(
        "--streaming",
        action="store_true",
        help="of hf:NAME to shards: do not keep the source on this disk",
    )
    add_list_options(parser)
    parser.set_defaults(shard_size=None)


def run(args: argparse.Namespace) -> int:
    from vit.data.sources.dataset_export import (
        LABELS_FILE,
        check_target,
        export_dataset,
        stream_dataset,
    )
    from vit.data.sources.huggingface_datasets import PREFIX
    from vit.text import plural

    if args.shard_size is not None and args.to == "folder":
        raise ConfigError(f"shard_size={printable(args.shard_size)}: a folder has no shards")
    if args.streaming and (args.to != "shards" or not args.source.startswith(PREFIX)):
        raise ConfigError("streaming: only from hf:NAME to shards; leave it out")
    max_bytes, out = parse_size(args.shard_size or "256MB"), Path(args.out)
    local = args.source.removeprefix(PREFIX)
    check_target(out, local, overwrite=args.overwrite)
    columns = {"image_column": args.image_column, "label_column": args.label_column}
    if args.streaming:
        with progress_bar(0, unit="image", results_on_terminal=False) as bar:
            report = stream_dataset(
                args.source, out, max_bytes=max_bytes, progress=bar.update, **columns
            )
    else:
        from vit.data.sources.dataset_spec import DatasetSpec
        from vit.data.sources.open_dataset import read_source

        where = {"images": args.images, "allow_outside": args.allow_outside}
        index = read_source(DatasetSpec(args.source, all_splits=True, **columns, **where))
        total = sum(map(len, index.splits.values()))
        with progress_bar(total, unit="image", results_on_terminal=False) as bar:
            report = export_dataset(
                index, args.source, out, to=args.to, max_bytes=max_bytes, progress=bar.update
            )
    for note in report.notes:
        notify(f"vit data: note: {note}")
    for bad in report.bad[:MOST_NAMED]:
        notify(f"vit data: left out {bad}")
    if (rest := len(report.bad) - MOST_NAMED) > 0:
        notify(f"vit data: left out {plural(rest, 'image')} more that cannot be read")
    shards = f" in {plural(report.files, 'shard')}" if args.to == "shards" else ""
    lines = printable(out / LABELS_FILE) if (out / LABELS_FILE).is_file() else ""
    more = f"; their classes are in {lines}, which is the DATA to train on" if lines else ""
    notify(f"vit data: wrote {plural(report.images, 'image')}{shards} to {printable(out)}{more}")
    return int(bool(report.bad))


def parse_size(size: str) -> int:
    """Bytes of a size such as 256MB.

    Raises:
        ConfigError: It is none, or too small for a shard.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", size.strip().upper())
    unit = (found[2] if found[2].endswith("B") or not found[2] else f"{found[2]}B") if found else ""
    if found is None or unit not in (*UNITS, "B"):
        raise ConfigError(f"shard_size={printable(size)}: expected a size such as 256MB or 1GB")
    number = int(float(found[1]) * UNITS.get(unit, 1))
    if number < LEAST:
        raise ConfigError(f"shard_size={printable(size)}: must be at least 1MB")
    return number
