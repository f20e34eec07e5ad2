"""`vit suggest`: names the images that are worth labelling first."""

import argparse
from dataclasses import dataclass
from typing import Literal

from vit.commands.command_output import Progress, notify, write_json
from vit.commands.command_parser import (
    add_data_options,
    add_fields,
    add_json_option,
    add_max_pixels,
    add_setting,
    checked_settings,
    options_of,
    positive_int,
)
from vit.config import SourceConfig
from vit.config.inference_config import InferenceConfig
from vit.config.setting_layers import all_settings
from vit.config.settings import Section
from vit.data.workbook import check_size, is_workbook
from vit.output.output_file import check_outputs, open_output
from vit.text import printable, quoted

MAX_FAILED = 20
"""Unreadable images that are named on the terminal."""


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of `vit suggest`."""

    out: str | None = None
    """List (.csv, .xlsx, .jsonl) of image, label and likely class, whose labels an annotator fills
    in: vit train IMAGES --labels FILE (default: CSV on standard output)."""
    overwrite: bool = False
    """Replace an existing --out, with the labels that are in it."""
    labels: str | None = None
    """List of images with their labels so far, such as an earlier --out: these are not suggested
    again, and say which images are uncertain."""
    order: Literal["typical", "uncertain"] | None = None
    """Typical images of every kind, or uncertain and different ones (default: typical, and
    uncertain with --labels)."""
    seed: int = 0
    """Seed of the clustering."""
    html: str | None = None
    """A page with thumbnails and file names, which needs no network; an older file is replaced."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        metavar="IMAGES",
        help="a folder of images, or any other source of vit train; labels in it are ignored",
    )
    parser.add_argument(
        "--weights",
        metavar="SOURCE",
        required=True,
        help="a run folder, also of vit pretrain, timm/NAME, hf/OWNER/NAME, ...: its features say "
        "which images are alike",
    )
    parser.add_argument(
        "-n", type=positive_int, default=300, metavar="N", help="number of images (default: 300)"
    )
    add_fields(parser, Options)
    add_json_option(parser, "where the choice is written as JSON; an older file is replaced")
    add_data_options(parser, without=("caption_column", "target", "labels", "group"))
    add_setting(parser, all_settings()["exclude"])
    add_max_pixels(parser)
    add_fields(parser, InferenceConfig, only=("batch_size", "device", "precision", "workers"))


def run(args: argparse.Namespace) -> int:
    """Suggest; the exit code is 1 if images could not be read."""
    settings = checked_settings(args, SourceConfig, InferenceConfig)
    options = options_of(args, Options)
    out, labels, html = options.out, options.labels, options.html
    outputs = {"--out": out, "--json": args.json, "--html": html}
    inputs = (args.data, args.weights, labels, settings.get("exclude"))
    check_outputs(outputs, inputs, overwrite=options.overwrite)
    if out is not None and is_workbook(out):
        check_size(args.n, 3, what="--out")

    from vit.inference.suggest import suggest

    with Progress("vit suggest") as progress:
        found = suggest(
            args.data,
            weights=args.weights,
            n=args.n,
            order=options.order,
            seed=options.seed,
            **settings,
            progress=lambda stage, done, total: progress(done, total, stage),
            notify=lambda note: notify(f"vit suggest: {note}"),
        )
    found.write(out)
    write_json(args.json, found.to_dict())
    if html is not None:
        from vit.evaluation.data_pages import suggestions_page

        rows = [(one.image, one.path, one.likely, one.margin) for one in found.suggested]
        heading = found.root.resolve().name or str(found.root)
        with open_output(html) as page:
            page.write(suggestions_page(heading, found.lines(), rows, found.failed))
    for image, reason in found.failed[:MAX_FAILED]:
        notify(f"vit suggest: left out {printable(image)}: {printable(reason)}")
    if len(found.failed) > MAX_FAILED:
        rest = len(found.failed) - MAX_FAILED
        notify(f"vit suggest: left out {rest:,} more unreadable images (--json FILE has all)")
    for line in found.lines():
        notify(f"vit suggest: {line}")
    if out is not None:
        column = next(name for name, content in found.columns if content == "label")
        append = f" append it to {printable(labels)}," if labels is not None else ""
        notify(
            f"vit suggest: {printable(out)} written; fill in its column {printable(column)},"
            f"{append} then vit train {quoted(args.data)} --labels "
            f"{quoted(labels or out)} --weights {quoted(args.weights)}"
        )
    return int(bool(found.failed))
