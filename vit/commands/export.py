"""`vit export`: a trained captioner becomes ONNX files, which run without torch."""

import argparse

from vit.commands.output import say
from vit.errors import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run folder of vit train --task caption")
    parser.add_argument(
        "--out",
        required=True,
        metavar="NAME.onnx",
        help="the file to write; NAME.decoder.onnx, which writes the words, comes beside it",
    )
    parser.add_argument(
        "--precision", choices=["fp32"], default="fp32", help="arithmetic of the graphs"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")


def run(args: argparse.Namespace) -> int:
    from vit.export.onnx_file import export_onnx

    exported = export_onnx(args.run, args.out, precision=args.precision, overwrite=args.overwrite)
    say(f"same as torch up to {exported.difference:.1e} of the largest value, on random inputs")
    for path, size in exported.files:
        print(f"written: {printable(path)} ({size / 1e6:,.1f} MB)")
    return 0
