"""`vit verify`: compares the exported file and the predictor with the evaluated network."""

import argparse
import os

from vit.commands.command_output import notify, print_result
from vit.commands.command_parser import add_json_option, add_max_pixels
from vit.errors import VitError
from vit.exported.engine import exported_engine
from vit.output.output_file import check_outputs
from vit.text import printable, quoted


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


def check_order(model: str, images: list[str]) -> None:
    """Raise if a run and an exported file are given side by side, without --run."""
    exported = [word for word in images if exported_engine(word)]
    runs = [word for word in images if os.path.isfile(os.path.join(word, "model.safetensors"))]
    if not exported and not runs:
        return
    is_run = os.path.isdir(model)
    if len(exported) + len(runs) > 1 or bool(runs) == is_run:
        word = printable((exported + runs)[0])
        raise VitError(f"{word} is no image: give one MODEL, its run with --run, then IMAGEs")
    file, run = (exported[0], model) if is_run else (model, runs[0])
    rest = [quoted(word) for word in images if word not in (file, run)]
    words = " ".join(["vit verify", quoted(file), "--run", quoted(run), *rest[:3]])
    more = " ..." if len(rest) > 3 else ""
    raise VitError(f"an exported file comes first, and its run with --run: {words}{more}")


def run(args: argparse.Namespace) -> int:
    check_order(args.model, args.images)
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
