"""`vit export`: a trained network becomes a file that runs without the code that trained it."""

import argparse
from typing import TYPE_CHECKING

from vit.commands.command_options import add_max_pixels, positive_int
from vit.commands.command_output import notify, write_json
from vit.errors import VitError
from vit.output.output_file import check_distinct, check_output
from vit.quick_imports import quick_imports
from vit.text import printable

if TYPE_CHECKING:
    from vit.export.export_options import Exported

# flags that `export` takes under their own names
EXPORT_OPTIONS = (
    *("tokens", "opset", "calibration", "samples", "dynamic", "static", "validation", "max_drop"),
    "no_calibration",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_max_pixels(parser)
    add("run", metavar="RUN", help="a run folder, or of a classifier any weights with a head")
    add(
        "--out",
        required=True,
        metavar="NAME.onnx|.xml|.pt2",
        help="the file to write; with a captioner NAME.decoder.onnx, the text decoder, is "
        "written beside it; with --to triton the folder REPOSITORY/NAME",
    )
    add(
        "--to",
        choices=["onnx", "openvino", "torch", "triton"],
        help="format: NAME.onnx, OpenVINO's NAME.xml, torch.export's NAME.pt2, or a model of a "
        "repository of Triton (default: by the ending of --out)",
    )
    add(
        "--precision",
        choices=["fp32", "fp16", "int8"],
        default="fp32",
        help="weights and arithmetic of the network",
    )
    add("--tokens", action="store_true", help="add the outputs tokens, embedding and attention")
    add("--opset", type=positive_int, metavar="N", help="version of ONNX's operators (default: 20)")
    add("--calibration", metavar="DATA", help="dataset whose training images int8 is fitted to")
    add("--samples", type=positive_int, metavar="N", help="calibration images (default: 200)")
    add("--dynamic", action="store_true", help="int8 without calibration images: less exact")
    add(
        "--static",
        action="store_true",
        help="int8 with the ranges that activations have on the calibration images, as OpenVINO "
        "fuses them best: less exact",
    )
    add(
        "--validation",
        metavar="DATA",
        help="labelled images on which top-1 (or mAP) of run and file are compared (default: "
        "those of --calibration)",
    )
    add(
        "--max-drop",
        type=float,
        metavar="SHARE",
        help="write no file that loses more of top-1, or of mAP, than this (default: 0.01)",
    )
    add("--no-calibration", action="store_true", help="write raw scores, not calibrated ones")
    add("--json", metavar="FILE", help="file for all measurements")
    add("--overwrite", action="store_true", help="replace files that exist")


def run(args: argparse.Namespace) -> int:
    check_output(args.json, overwrite=True)
    inputs = (args.run, args.calibration, args.validation)
    check_distinct({"--out": args.out, "--json": args.json}, inputs)

    with quick_imports():
        from vit.export.export_formats import export_model

    options = {name: getattr(args, name) for name in EXPORT_OPTIONS}
    report = export_model(
        args.run,
        args.out,
        to=args.to,
        precision=args.precision,
        overwrite=args.overwrite,
        notify=notify,
        on_written=_print_files,
        **options,
    )
    for line in report.lines():
        notify(line)
    write_json(args.json, report.to_dict())
    if not report.agrees:
        raise VitError(f"{printable(args.out)} does not agree with the run: do not use it")
    return 0


def _print_files(exported: "Exported") -> None:
    for path, size in exported.files:
        print(f"written: {printable(path)} ({size / 1e6:,.1f} MB)", flush=True)
