"""`vit check`: finds problems of a dataset before training."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from vit.atomic_files import write_bytes
from vit.commands.command_output import Progress, notify, print_result
from vit.commands.command_parser import (
    add_data_options,
    add_fields,
    add_json_option,
    add_max_pixels,
    add_task_option,
    data_files,
    dataset_spec,
    options_of,
    settings_from_args,
)
from vit.config.settings import Section, setting
from vit.data.workbook import check_size, is_workbook
from vit.output.output_file import check_outputs, open_output
from vit.paths import is_group_list
from vit.text import plural, printable

MAX_ERROR_LINES = 10


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of `vit check`."""

    html: str | None = None
    """Page with thumbnails, which needs no network; an older file is replaced."""
    weights: str | None = None
    """A run folder, timm/NAME, hf/OWNER/NAME, ...: its features find suspected labels and more
    images that are alike."""
    rows: str | None = None
    """rows.jsonl of vit train --folds, or of vit evaluate --out: predictions that find suspected
    labels, of networks that have not seen the images."""
    write_list: str | None = None
    """Suspected labels as a list (.csv, .jsonl, .xlsx) of image, label and likely class, to review:
    vit train --exclude FILE leaves its images out, --corrections FILE takes its labels."""
    write_groups: str | None = None
    """All images with the scenes and sources that a training finds, as a list (.csv) of image,
    group and source, to edit: vit train --group FILE.csv takes them."""
    overwrite: bool = False
    """Replace an older file of --write-list or --write-groups."""
    device: str | None = setting(None, needs={"weights": "a network computes there"})
    """Where --weights computes: cpu, cuda, cuda:N or mps (default: the best one here)."""
    workers: int | None = setting(None, "-j", least=1)
    """Processes that read images (default: one a core, at most 16), and threads with --weights (at
    most 8)."""
    axes: str = ""
    """Axes of TIFFs that are the channels, as for vit train."""
    no_cache: bool = False
    """Look at every image again, and keep nothing for the next time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.write_list is not None and self.weights is None and self.rows is None:
            why = "suspected labels are found by --weights SOURCE or --rows FILE; give one"
            self.refuse("write_list", why)
        if self.write_groups is not None and not is_group_list(self.write_groups):
            self.refuse("write_groups", "give it the end .csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", metavar="DATA", help="a folder of images, or any other source of vit train"
    )
    add_task_option(parser, "what a training would learn")
    add_data_options(parser)
    add_max_pixels(parser)
    add_json_option(parser, "where all problems are written; an older file is replaced")
    add_fields(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = options_of(args, Options)
    write_list, html = options.write_list, options.html
    groups = options.write_groups
    outputs = {"--json": args.json, "--html": html}
    outputs |= {"--write-list": write_list, "--write-groups": groups}
    inputs = (*data_files(args), options.weights, options.rows)
    if groups is not None and settings_from_args(args).get("group") is not None:
        options.refuse("write_groups", "--group names the groups already; leave one of the two out")
    check_outputs(outputs, inputs, overwrite=options.overwrite)
    if write_list is not None and is_workbook(write_list):
        check_size(0, 3, what="--write-list")

    from vit.inference.label_errors import check

    with Progress("vit check") as progress:
        report = check(
            dataset_spec(args),
            weights=options.weights,
            rows=options.rows,
            device=options.device,
            workers=options.workers,
            cache=not options.no_cache,
            axes=options.axes,
            progress=lambda stage, done, total: progress(done, total, stage),
            notify=lambda note: notify(f"vit check: {note}"),
        )
    table = None if groups is None else report.groups_table()
    lines = report.lines(MAX_ERROR_LINES, hint=html is None and args.json is None)

    def write() -> None:
        if html is not None:
            from vit.evaluation.data_pages import check_page

            with open_output(html) as out:
                out.write(check_page(report))
            notify(f"vit check: {printable(html)} written; open it in a browser")
        if write_list is not None:
            from vit.inference.label_errors import write_suspects

            number = plural(write_suspects(report, write_list), "suspected label")
            notify(f"vit check: {number} written to {printable(write_list)}")

        if groups is not None and table is not None:
            write_bytes(Path(groups), table)
            notify(
                f"vit check: {printable(groups)} written; edit it, and vit train "
                f"{printable(args.data)} --group {printable(groups)} takes it"
            )

    print_result("\n".join(lines), args.json, report.to_dict(), write=write)
    return int(report.failed)
