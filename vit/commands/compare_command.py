"""`vit compare`: is one of two or more trained models better than another, on the same images?"""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vit.commands.command_options import (
    add_data_options,
    add_json_option,
    add_network_options,
    checked_settings,
    data_files,
    dataset_spec,
)
from vit.commands.command_output import Progress, notify, print_result
from vit.config.inference_config import InferenceConfig
from vit.errors import ConfigError
from vit.output.output_file import check_outputs, open_output
from vit.paths import is_saved_model
from vit.text import align_columns, printable

if TYPE_CHECKING:
    from vit.inference.compare import Comparison, RunsComparison


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
    if is_saved_model(args.data):
        raise ConfigError(
            f"{printable(args.data)} is a run folder: the images come last, "
            "vit compare RUN_A RUN_B [RUN_C ...] DATA"
        )

    from vit.inference.compare import compare, compare_runs

    data = dataset_spec(args)
    found: Comparison | RunsComparison
    with Progress("vit compare") as progress:
        options = {
            **settings,
            "notify": lambda note: notify(f"vit compare: {note}"),
            "progress": progress,
        }
        if args.more:
            found = compare_runs([args.run_a, args.run_b, *args.more], data, **options)
            lines = several_lines(found.to_dict())
        else:
            found = compare(args.run_a, args.run_b, data, **options)
            lines = [*two_lines(args, found.to_dict()), found.counts.sentence()]

    def write() -> None:
        if args.html is not None:
            with open_output(args.html) as out:
                out.write(found.page())

    print_result("\n".join(lines), args.json, found.to_dict(), write=write)
    for row in found.failed:
        notify(f"vit compare: {printable(row['image'])}: {printable(row['error'])}")
    return int(bool(found.failed))


def two_lines(args: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """A line for each of two runs."""
    lines = []
    for letter, key, name in zip("AB", "ab", (args.run_a, args.run_b), strict=True):
        lines.append(
            f"{letter}  {score_text(result[key])}  "
            f"only {letter} right: {result[f'only_{key}_right']}  {printable(name)}"
        )
    return lines


def score_text(side: Mapping[str, Any]) -> str:
    """The score of a network with its interval."""
    name = "map" if "map" in side else "top1"
    limits = side[f"{name}_interval"]
    between = "" if limits is None else f"  (95 % interval: {limits[0]:.2%} to {limits[1]:.2%})"
    return f"{side[name]:.2%}{' mAP' if name == 'map' else ''}{between}"


def several_lines(result: dict[str, Any]) -> list[str]:
    """What is printed of more than two runs: a line for each, a table of all pairs, a sentence."""
    lines = [f"{row['name']}  {score_text(row)}  {printable(row['run'])}" for row in result["runs"]]
    titles = ("pair", "points", "95 % interval", "p", "adjusted", "needed", "the second is")
    rows = [titles]
    for row in result["pairs"]:
        low, high = row["difference_interval"]
        needed = row["images_needed"]
        rows.append(
            (
                f"{row['a']} {row['b']}",
                f"{100 * row['difference']:+.2f}",
                f"{100 * low:+.2f} to {100 * high:+.2f}",
                f"{row['p_value']:.2g}",
                f"{row['p_adjusted']:.2g}",
                "" if needed is None else f"{needed:,}",
                row["verdict"],
            )
        )
    table = align_columns(rows, left={len(titles) - 1})
    return [*lines, "", *table, "", result["sentence"]]
