"""`vit calibrate`: measure how far the scores of a trained model can be trusted, and store it."""

import argparse
import os

from vit.commands.command_output import Progress, notify, print_result
from vit.commands.command_parser import (
    add_data_options,
    add_json_option,
    add_network_options,
    checked_settings,
    data_files,
    probability,
)
from vit.config import SourceConfig
from vit.config.inference_config import InferenceConfig
from vit.output.output_file import check_outputs
from vit.text import plural, printable

ROWS = {
    "ece": "calibration error",
    "ece_debiased": "without chance",
    "brier": "Brier score",
    "nll": "log loss",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run folder of a classifier")
    parser.add_argument(
        "data",
        metavar="DATA",
        help="labelled images that the network was not trained on, at least 50: a folder, a list "
        "(.csv, .jsonl, .xlsx), or the name of a built-in set",
    )
    parser.add_argument(
        "--target-precision",
        type=probability,
        metavar="P",
        help="share of the answers of `vit predict --reject` that has to be right (default: the "
        "highest of 0.99, 0.98, 0.95, 0.9, 0.85 and 0.8 that the images prove; 0.95 of a taxonomy)",
    )
    parser.add_argument(
        "--target-class",
        action="append",
        default=[],
        metavar="NAME",
        help="a class whose answers have to be so often right on their own; may be repeated. The "
        "answers of the other classes are, together (default: all classes together)",
    )
    add_data_options(parser, trained=True)
    add_json_option(parser, "where all numbers are written as well; an older file is replaced")
    add_network_options(parser, without=("no_calibration", "tta", "compile"))


def run(args: argparse.Namespace) -> int:
    settings = checked_settings(args, SourceConfig, InferenceConfig)
    check_outputs({"--json": args.json}, data_files(args))

    from vit.inference.calibrate import calibrate

    with Progress("vit calibrate") as progress:
        found = calibrate(
            args.run,
            args.data,
            split=args.split,
            target_precision=args.target_precision,
            target_class=args.target_class,
            **settings,
            notify=lambda note: notify(f"vit calibrate: {note}"),
            progress=progress,
        )
    lines = [f"{'images':<18} {found['calibration']['images']}"]
    for name, title in ROWS.items():
        before, after = found["before"][name], found["after"][name]
        decides = "; scores are scaled where this one falls" if name == "nll" else ""
        lines.append(
            f"{title:<18} {before:.4f} before, {after:.4f} after, on held-out images{decides}"
        )
    lines.append(f"{'stored in':<18} {printable(os.path.join(args.run, 'config.json'))}")
    print_result("\n".join(lines), args.json, found)
    for row in found["failed"]:
        notify(f"vit calibrate: {printable(row['image'])}: {printable(row['error'])}")
    if failed := len(found["failed"]):
        total = plural(failed + found["calibration"]["images"], "image")
        notify(f"vit calibrate: {failed:,} of {total} failed and are left out of the calibration")
    return int(bool(found["failed"]))
