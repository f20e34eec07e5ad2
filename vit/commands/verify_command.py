"""`vit verify`: compares the exported file and the predictor with the evaluated network."""

import argparse

from vit.commands.command_output import notify, print_result
from vit.commands.command_parser import add_json_option, add_max_pixels
from vit.output.output_file import check_outputs
from vit.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder, or of a classifier any weights with a head; or the X.onnx or X.xml of "
        "vit export, its run with --run",
    )
    parser.add_argument(
        "images",
        metavar="IMAGE",
        nargs="*",
        default=[],
        help="images, folders or patterns to compare on (default: up to 50 validation images "
        "of the run's data, or drawn ones where these are not found)",
    )
    parser.add_argument(
        "--run",
        dest="run_folder",
        metavar="RUN",
        help="the run, or other weights, that X.onnx is compared with (default: what it names)",
    )
    parser.add_argument(
        "--engine",
        choices=["onnx", "openvino"],
        help="what computes the file (default: by its suffix)",
    )
    add_max_pixels(parser)
    add_json_option(parser, "where all numbers are written as well; an older file is replaced")


def run(args: argparse.Namespace) -> int:
    check_outputs({"--json": args.json}, [args.model, args.run_folder, *args.images])
    from vit.export.verification import verify

    report = verify(
        args.model,
        args.images or None,
        run=args.run_folder,
        engine=args.engine,
        notify=lambda note: notify(f"vit verify: {note}"),
    )
    print_result("\n".join(report.lines()), args.json, report.to_dict())
    for row in report.failures:
        where = "" if row["path"] == "all" else f" ({printable(row['path'])})"
        notify(f"vit verify: {printable(row['image'])}: {printable(row['error'])}{where}")
    for line in report.complaints():
        notify(f"vit verify: {line}")
    return int(not report.agrees or bool(report.failures))
