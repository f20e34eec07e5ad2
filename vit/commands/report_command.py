"""`vit report RUN [DATA]`: writes report.html of a finished run again."""

import argparse

from vit.commands.command_options import count
from vit.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(device=None, workers=None)
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="?",
        help="where the images of the training are now (default: where they were)",
    )
    parser.add_argument(
        "--device",
        metavar="D",
        default=argparse.SUPPRESS,
        help="cpu, cuda, cuda:N or mps (default: that of the training)",
    )
    parser.add_argument(
        "-j",
        "--workers",
        type=count,
        metavar="N",
        default=argparse.SUPPRESS,
        help="loader processes (default: as in training)",
    )


def run(args: argparse.Namespace) -> int:
    from vit.training.final_report import report

    path = report(args.run, args.data, device=args.device, workers=args.workers)
    print(f"written: {printable(path)}")
    return 0
