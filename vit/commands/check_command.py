"""`vit check`: finds problems of a dataset before training."""

import argparse

from vit.commands.command_options import (
    add_data_options,
    add_json_option,
    add_max_pixels,
    add_task_option,
    data_files,
    dataset_spec,
    positive_int,
)
from vit.commands.command_output import Progress, notify, print_result
from vit.data.workbook import check_size, is_workbook
from vit.errors import ConfigError
from vit.output.output_file import check_outputs, open_output
from vit.text import plural, printable

MAX_ERROR_LINES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", metavar="DATA", help="a folder of images, or any other source of vit train"
    )
    add_task_option(parser, "what a training would learn")
    add_data_options(parser)
    add_max_pixels(parser)
    add_json_option(parser, "where all problems are written; an older file is replaced")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="a page with thumbnails, which needs no network; an older file is replaced",
    )
    parser.add_argument(
        "--weights",
        metavar="SOURCE",
        help="a run folder, timm/NAME, hf/OWNER/NAME, ...: its features find suspected labels and "
        "more images that are alike",
    )
    parser.add_argument(
        "--rows",
        metavar="FILE",
        help="rows.jsonl of vit train --folds, or of vit evaluate --out: predictions that find "
        "suspected labels, of networks that have not seen the images",
    )
    parser.add_argument(
        "--write-list",
        metavar="FILE",
        help="suspected labels as a list (.csv, .jsonl, .xlsx) of image, label and likely class, "
        "to review: vit train --exclude FILE leaves its images out, --corrections FILE takes its "
        "labels",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an older file of --write-list"
    )
    parser.add_argument(
        "--device",
        metavar="D",
        help="where --weights computes: cpu, cuda, cuda:N or mps (default: the best one here)",
    )
    parser.add_argument(
        "-j",
        "--workers",
        type=positive_int,
        metavar="N",
        help="processes that read images (default: one a core, at most 16), and threads with "
        "--weights (at most 8)",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="look at every image again, and keep nothing for the next time",
    )


def run(args: argparse.Namespace) -> int:
    if args.device is not None and args.weights is None:
        raise ConfigError("--device is where a network computes: give --weights SOURCE as well")
    if args.write_list is not None and args.weights is None and args.rows is None:
        raise ConfigError(
            "--write-list: suspected labels are found by --weights SOURCE or --rows FILE; give one"
        )
    outputs = {"--json": args.json, "--html": args.html, "--write-list": args.write_list}
    inputs = (*data_files(args), args.weights, args.rows)
    check_outputs(outputs, inputs, overwrite=args.overwrite)
    if args.write_list is not None and is_workbook(args.write_list):
        check_size(0, 3, what="--write-list")

    from vit.inference.label_errors import check

    with Progress("vit check") as progress:
        report = check(
            dataset_spec(args),
            weights=args.weights,
            rows=args.rows,
            device=args.device,
            workers=args.workers,
            cache=not args.no_cache,
            progress=lambda stage, done, total: progress(done, total, stage),
            notify=lambda note: notify(f"vit check: {note}"),
        )
    lines = report.lines(MAX_ERROR_LINES, hint=args.html is None and args.json is None)

    def write() -> None:
        if args.html is not None:
            from vit.evaluation.data_pages import check_page

            with open_output(args.html) as out:
                out.write(check_page(report))
            notify(f"vit check: {printable(args.html)} written; open it in a browser")
        if args.write_list is not None:
            from vit.inference.label_errors import write_suspects

            number = plural(write_suspects(report, args.write_list), "suspected label")
            notify(f"vit check: {number} written to {printable(args.write_list)}")

    print_result("\n".join(lines), args.json, report.to_dict(), write=write)
    return int(report.failed)
