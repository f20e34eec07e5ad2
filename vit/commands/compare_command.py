"""`vit compare`: is one of two or more trained models better than another, on the same images?"""

import argparse
from string import ascii_uppercase
from typing import TYPE_CHECKING

from vit.commands.command_output import Progress, notify, print_result
from vit.commands.command_parser import (
    add_data_options,
    add_json_option,
    add_network_options,
    checked_settings,
    data_files,
    dataset_spec,
)
from vit.config.inference_config import InferenceConfig
from vit.output.output_file import check_outputs, open_output
from vit.text import align_columns, printable

if TYPE_CHECKING:
    from vit.evaluation.paired_comparison import RunsComparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, letter in (("run_a", "A"), ("run_b", "B")):
        parser.add_argument(
            name,
            metavar=f"RUN_{letter}",
            help=f"network {letter}: a run folder, other weights with a head, or an exported file",
        )
    parser.add_argument(
        "more",
        metavar="RUN_C",
        nargs="*",
        help="more networks: every two are compared, with a correction for the number of pairs",
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="always last: labelled images that none was trained on: a folder, a list (.csv, "
        ".jsonl, .xlsx), or the name of a built-in set",
    )
    add_data_options(parser, trained=True)
    add_json_option(parser, "where all numbers are written as well; an older file is replaced")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="a page with the images that only some of them get right, which needs no network; an "
        "older file is replaced",
    )
    add_network_options(parser, without=("tta", "compile"))


def run(args: argparse.Namespace) -> int:
    settings = checked_settings(args, InferenceConfig)
    outputs = {"--json": args.json, "--html": args.html}
    check_outputs(outputs, (args.run_a, args.run_b, *args.more, *data_files(args)))

    from vit.inference.compare import compare_runs

    with Progress("vit compare") as progress:
        found = compare_runs(
            [args.run_a, args.run_b, *args.more],
            dataset_spec(args),
            **settings,
            notify=lambda note: notify(f"vit compare: {note}"),
            progress=progress,
        )

    def write() -> None:
        if args.html is not None:
            with open_output(args.html) as out:
                out.write(found.page())

    print_result("\n".join(result_lines(found)), args.json, found.to_dict(), write=write)
    for row in found.failed:
        notify(f"vit compare: {printable(row['image'])}: {printable(row['error'])}")
    return int(bool(found.failed))


def result_lines(found: "RunsComparison") -> list[str]:
    """What is printed: a line for each run, a table of all pairs, a sentence."""
    lines = []
    for letter, name, side in zip(ascii_uppercase, found.names, found.sides, strict=False):
        score, limits = next(iter(side)), side[f"{next(iter(side))}_interval"]
        between = "" if limits is None else f"  (95 % interval: {limits[0]:.2%} to {limits[1]:.2%})"
        unit = " mAP" if score == "map" else ""
        lines.append(f"{letter}  {side[score]:.2%}{unit}{between}  {printable(name)}")
    titles = ("pair", "points", "95 % interval", "p", "adjusted", "needed", "the second is")
    rows = [titles]
    for (a, b), pair in found.pairs.items():
        low, high = pair.interval
        needed = pair.images_needed(found.strictest)
        rows.append(
            (
                f"{ascii_uppercase[a]} {ascii_uppercase[b]}",
                f"{100 * pair.difference:+.2f}",
                f"{100 * low:+.2f} to {100 * high:+.2f}",
                f"{pair.p_value:.2g}",
                f"{found.adjusted[a, b]:.2g}",
                "" if needed is None else f"{needed:,}",
                found.verdicts[a, b],
            )
        )
    table = align_columns(rows, left={len(titles) - 1})
    return [*lines, "", *table, "", found.sentence()]
