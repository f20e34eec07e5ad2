"""`vit runs FOLDER`: all runs below a folder in one table."""

import argparse
import shutil

from vit.commands.command_output import print_result
from vit.commands.command_parser import add_json_option
from vit.evaluation.runs_table import COLUMNS, runs
from vit.output.output_file import check_outputs, open_output, standard_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default="runs",
        help="searched for run folders, with all folders below it (default: runs)",
    )
    parser.add_argument(
        "--sort",
        default="score",
        metavar="COLUMN",
        help=f"{', '.join(COLUMNS)}, or a setting; the best, newest or smallest first "
        "(default: score)",
    )
    parser.add_argument("--reverse", action="store_true", help="sort the other way round")
    parser.add_argument(
        "--html",
        "--out",
        metavar="FILE",
        help="the table as a page that sorts and links to the reports, which needs no network; an "
        "older file is replaced",
    )
    add_json_option(
        parser,
        "where the table is written as well; - for standard output, instead; an older file is "
        "replaced",
    )


def run(args: argparse.Namespace) -> int:
    check_outputs({"--html": args.html, "--json": args.json})
    table = runs(args.folder, sort=args.sort, reverse=args.reverse)

    def write() -> None:
        if args.html is not None:
            with open_output(args.html) as out:
                out.write(table.page(args.html))

    width = shutil.get_terminal_size().columns if standard_output().isatty() else None
    text = "\n".join(line[:width] for line in table.lines())
    print_result(text, args.json, table.to_dict(), write=write)
    return 0
