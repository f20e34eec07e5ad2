"""`vit export`: a trained network becomes a file that runs without the code that trained it."""

import argparse
from typing import Any

from vit.commands.command_options import positive_int
from vit.commands.command_output import check_output, notify, open_output
from vit.errors import VitError, printable

# flags that are passed to export() under their own name
EXPORT_OPTIONS = ("tokens", "opset", "calibration", "samples", "dynamic", "validation", "max_drop")


SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(to=None)
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder, or of a classifier any weights with a head")
    add(
        "--out",
        required=True,
        metavar="NAME.onnx|.xml|.pt2",
        help="the file to write; with a captioner NAME.decoder.onnx, the text decoder, is "
        "written beside it",
    )
    add(
        "--to",
        choices=[*SUFFIXES],
        default=argparse.SUPPRESS,
        help="format: NAME.onnx, OpenVINO's NAME.xml, or torch.export's NAME.pt2 (default: "
        "by the ending of --out)",
    )
    add(
        "--precision",
        choices=["fp32", "fp16", "int8"],
        default="fp32",
        help="weights and arithmetic of the network",
    )
    add("--tokens", action="store_true", help="add the outputs tokens, embedding and attention")
    add("--opset", type=positive_int, metavar="N", help="version of ONNX's operators (default: 20)")
    add("--calibration", metavar="DATA", help="dataset whose training images calibrate int8")
    add(
        "--samples",
        type=positive_int,
        metavar="N",
        help="calibration images (default: 200)",
    )
    add("--dynamic", action="store_true", help="int8 without calibration")
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
    add("--json", metavar="FILE", help="file for all measurements")
    add("--overwrite", action="store_true", help="replace files that exist")


def run(args: argparse.Namespace) -> int:
    check_output(args.json, overwrite=True)

    by_suffix = (to for to, suffix in SUFFIXES.items() if args.out.lower().endswith(suffix))
    to = args.to or next(by_suffix, "onnx")

    from vit.export.export_formats import export
    from vit.export.verification import verify

    options = {name: getattr(args, name) for name in EXPORT_OPTIONS}
    exported = export(
        args.run,
        args.out,
        to=to,
        precision=args.precision,
        overwrite=args.overwrite,
        notify=notify,
        **options,
    )
    notify(f"same as torch up to {exported.difference:.1e} of the largest value, on random inputs")
    for path, size in exported.files:
        print(f"written: {printable(path)} ({size / 1e6:,.1f} MB)")
    report = verify(args.run, args.out) if to != "torch" else None
    for line in () if report is None else (*report.lines(), *report.complaints()):
        notify(line)
    if args.json is not None:
        from vit.output.prediction_results import to_json

        with open_output(args.json) as out:
            out.write(to_json(export_record(args, to, exported, report), indent=2) + "\n")
    if report is not None and not report.agrees:
        raise VitError(f"{printable(args.out)} does not agree with the run: do not use it")
    return 0


def export_record(args: argparse.Namespace, to: str, exported: Any, report: Any) -> dict[str, Any]:
    """The JSON record of an export."""
    from dataclasses import asdict

    return {
        "run": args.run,
        "to": to,
        "precision": args.precision,
        "files": [{"path": str(path), "bytes": size} for path, size in exported.files],
        "difference": exported.difference,
        "accuracy": None if exported.accuracy is None else asdict(exported.accuracy),
        "verification": None if report is None else report.to_dict(),
    }
