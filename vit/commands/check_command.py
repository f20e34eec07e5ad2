"""`vit check`: finds problems of a dataset before training."""

import argparse
from contextlib import ExitStack
from types import TracebackType

from vit.commands.command_options import (
    add_list_options,
    add_setting,
    positive_int,
    settings_from_args,
)
from vit.commands.command_output import check_output, notify, open_output, standard_output
from vit.commands.command_progress import Progress
from vit.config.parser import all_settings
from vit.errors import ConfigError

MOST_LINES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(json=None, html=None, weights=None, workers=None, device=None)
    parser.add_argument(
        "data", metavar="DATA", help="a folder of images, or any other source of vit train"
    )
    add_list_options(parser)
    add_setting(parser, all_settings()["group"])
    parser.add_argument(
        "--json",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="where all problems are written; an older file is replaced",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="a page with thumbnails, which needs no network; an older file is replaced",
    )
    parser.add_argument(
        "--weights",
        metavar="SOURCE",
        default=argparse.SUPPRESS,
        help="a run folder, timm/NAME, hf/OWNER/NAME, ...: its features find suspected labels and "
        "more images that are alike",
    )
    parser.add_argument(
        "--device",
        metavar="D",
        default=argparse.SUPPRESS,
        help="where --weights computes: cpu, cuda, cuda:N or mps (default: the best one here)",
    )
    parser.add_argument(
        "-j",
        "--workers",
        type=positive_int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="processes that read images (default: one a core, at most 16)",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="look at every image again, and keep nothing for the next time",
    )


def run(args: argparse.Namespace) -> int:
    if args.device is not None and args.weights is None:
        raise ConfigError("--device is where a network computes: give --weights SOURCE as well")
    for path in (args.json, args.html):
        check_output(path, overwrite=True)

    from vit.data.checks.dataset_check import check_dataset
    from vit.data.sources.dataset_spec import DatasetSpec
    from vit.output.prediction_results import to_json

    asked = DatasetSpec(
        args.data,
        args.images,
        args.image_column,
        args.label_column,
        settings_from_args(args).get("group"),
        allow_outside=args.allow_outside,
    )
    with Stages() as stages:
        report = check_dataset(
            asked,
            workers=args.workers,
            cache=not args.no_cache,
            progress=stages.told,
            notify=lambda note: notify(f"vit check: {note}"),
        )
    if args.weights is not None:
        from vit.inference.label_errors import find_label_errors

        report = find_label_errors(
            report,
            args.weights,
            device=args.device,
            notify=lambda note: notify(f"vit check: {note}"),
        )
    if args.json is not None:
        with open_output(args.json) as out:
            out.write(to_json(report.to_dict(), indent=2) + "\n")
    if args.html is not None:
        from vit.evaluation.check_report import check_page

        with open_output(args.html) as out:
            out.write(check_page(report))
    print("\n".join(report.lines(MOST_LINES)), file=standard_output(), flush=True)
    return int(report.failed)


class Stages:
    """Progress of one work after another; use it in a `with`."""

    def __init__(self) -> None:
        self.works = ExitStack()
        self.name: str | None = None

    def __enter__(self) -> "Stages":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.works.close()

    def told(self, name: str, done: int, total: int) -> None:
        """So many of so many images have been read, or compared, as `name` says."""
        if name != self.name:
            self.works.close()
            self.name = name
            work = Progress(total, share=f" {name}", command="vit check")
            self.work = self.works.enter_context(work)
        self.work.update(done - self.work.done)
