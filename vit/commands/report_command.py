"""`vit report RUN [DATA]`: writes report.html of a finished run again."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from vit.commands.command_output import Progress
from vit.commands.command_parser import add_fields, options_of
from vit.config.settings import Section, setting
from vit.text import printable


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of `vit report`."""

    device: str | None = None
    """cpu, cuda, cuda:N or mps (default: that of the training)."""
    corruptions: bool = False
    """A section on corrupted images, as of vit evaluate --corruptions: 31 passes over the
    validation images."""
    workers: int | None = setting(None, "-j", least=0)
    """Loader processes (default: as in training)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="?",
        help="where the images of the training are now (default: where they were)",
    )
    add_fields(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = options_of(args, Options)

    from vit.training.final_report import finished_config, report

    finished_config(Path(args.run))  # refused before anything is measured
    robustness = None
    if options.corruptions:
        from vit.inference.evaluate import evaluate_held_out

        with Progress("vit report") as progress:
            robustness = evaluate_held_out(
                args.run, args.data, device=options.device, corruptions=True, progress=progress
            )["robustness"]
    path = report(
        args.run, args.data, device=options.device, workers=options.workers, robustness=robustness
    )
    print(f"written: {printable(path)}")
    return 0
