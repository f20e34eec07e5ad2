"""`vit export`: a trained network becomes a file that runs without the code that trained it."""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vit.commands.command_output import notify, write_json
from vit.commands.command_parser import add_fields, add_max_pixels, options_of
from vit.config.inference_config import ExportOptions
from vit.errors import VitError
from vit.output.output_file import check_distinct, check_output
from vit.quick_imports import quick_imports
from vit.text import printable

if TYPE_CHECKING:
    from vit.export.export_request import Exported


@dataclass(frozen=True, kw_only=True)
class Options(ExportOptions):
    """Options of `vit export`, those of `vit.export_model`."""

    to: Literal["onnx", "openvino", "torch"] | None = None
    """Format: NAME.onnx, OpenVINO's NAME.xml, or torch.export's NAME.pt2 (default: by the ending of
    --out)."""
    overwrite: bool = False
    """Replace files that exist."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_max_pixels(parser)
    add("run", metavar="RUN", help="a run folder, or of a classifier any weights with a head")
    add(
        "--out",
        required=True,
        metavar="NAME.onnx|.xml",
        help="the file to write; with a captioner NAME.decoder.onnx, the text decoder, is "
        "written beside it",
    )
    add_fields(parser, Options)
    add("--json", metavar="FILE", help="file for all measurements")


def run(args: argparse.Namespace) -> int:
    options = options_of(args, Options)
    check_output(args.json, overwrite=True)
    inputs = (args.run, options.calibration, options.validation)
    check_distinct({"--out": args.out, "--json": args.json}, inputs)

    with quick_imports():
        from vit.export.export_formats import export_model

    report = export_model(
        args.run, args.out, notify=notify, on_written=_print_files, **vars(options)
    )
    for line in report.lines():
        notify(line)
    write_json(args.json, report.to_dict())
    if not report.agrees:
        raise VitError(f"{args.out} does not agree with the run: do not use it")
    return 0


def _print_files(exported: "Exported") -> None:
    for path, size in exported.files:
        print(f"written: {printable(path)} ({size / 1e6:,.1f} MB)", flush=True)
