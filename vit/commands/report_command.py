"""`vit report RUN [DATA]`: writes report.html of a finished run again."""

import argparse
from pathlib import Path

from vit.commands.command_options import count
from vit.commands.command_output import Progress
from vit.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="?",
        help="where the images of the training are now (default: where they were)",
    )
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda, cuda:N or mps (default: that of the training)"
    )
    parser.add_argument(
        "--corruptions",
        action="store_true",
        help="a section on corrupted images, as of vit evaluate --corruptions: 31 passes over the "
        "validation images",
    )
    parser.add_argument(
        "-j",
        "--workers",
        type=count,
        metavar="N",
        help="loader processes (default: as in training)",
    )


def run(args: argparse.Namespace) -> int:
    from vit.training.final_report import finished_config, report

    finished_config(Path(args.run))  # refused before anything is measured
    robustness = None
    if args.corruptions:
        from vit.inference.evaluate import evaluate_held_out

        with Progress("vit report") as progress:
            robustness = evaluate_held_out(
                args.run, args.data, device=args.device, corruptions=True, progress=progress
            )["robustness"]
    path = report(
        args.run, args.data, device=args.device, workers=args.workers, robustness=robustness
    )
    print(f"written: {printable(path)}")
    return 0
