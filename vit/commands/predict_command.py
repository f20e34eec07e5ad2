"""`vit predict`: classify or caption images with a trained model."""

import argparse
import os
import sys
from typing import Any

from vit.commands.command_options import (
    COMPILE_HELP,
    SEARCH_FIELDS,
    TTA_HELP,
    VIEWS,
    add_csv_options,
    add_network_options,
    add_search_options,
    positive_int,
    probability,
    search_from_args,
    share,
)
from vit.commands.command_output import Progress, notify
from vit.commands.command_parser import CommandParser
from vit.commands.launcher import launch_if_requested
from vit.errors import VitError
from vit.exported.engine import ENGINES, EXPORTED
from vit.output.prediction_results import TOP_K
from vit.text import printable

WEIGHT_FILES = (".safetensors", ".pth", ".pth.tar", ".bin", ".pt", ".ckpt", ".npz")
WAYS = ("copy", "symlink", "hardlink")


def add_arguments(parser: CommandParser) -> None:
    """Add MODEL, INPUT, and the options of outputs and of the network."""
    parser.essential = (
        *("model", "inputs", "top_k", "threshold", "format", "out", "resume", "overwrite"),
        *("sort_into", "embeddings", "explain", "batch_size", "device"),
    )
    parser.examples = (
        "vit predict runs/photos holiday/ --top-k 3",
        "vit predict runs/photos holiday/ --out labels.csv",
        "vit predict runs/photos 'holiday/*.jpg' --out labels.jsonl --resume",
    )
    parser.usage = "vit predict MODEL INPUT [INPUT ...] [--out FILE [--resume]] [options]"
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder, or any other weights with a head: timm/NAME, hf/OWNER/NAME, ...; "
        "or an .onnx or .xml of vit export (captioners: a run folder or an .onnx)",
    )
    parser.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="+",
        help="images, folders (searched recursively), patterns such as 'photos/*.jpg', "
        "or - for a list of paths on standard input",
    )
    _add_rows(parser.add_argument_group("results"))
    _add_outputs(parser.add_argument_group("files (results, sorted images, embeddings, maps)"))
    add_search_options(parser)
    group = add_network_options(parser)
    _add_engines(group)


def _add_rows(group: Any) -> None:
    group.add_argument(
        "-k",
        "--top-k",
        "--topk",
        type=positive_int,
        metavar="K",
        help=f"most probable classes to return (default: {TOP_K}; for a multi-label network all "
        "above their thresholds)",
    )
    group.add_argument(
        "--threshold",
        type=share,
        metavar="P",
        help="minimum probability of a class (default: none; for a multi-label network the "
        "threshold of each class, and 0 gives all classes)",
    )
    group.add_argument(
        "--reject",
        action="store_true",
        help="answer `unknown` where the network is too uncertain to be right as often as its "
        "calibration promises (98 %% of what is answered, or --target-precision of vit calibrate)",
    )
    group.add_argument(
        "--sets",
        type=probability,
        metavar="COVERAGE",
        help="add to each row the classes that contain the true one with this probability, such "
        "as 0.9",
    )
    group.add_argument(
        "--format",
        choices=["table", "jsonl", "csv", "xlsx"],
        help="output format (default: by the suffix of --out, else table); xlsx is a file for "
        "Excel and needs --out",
    )
    add_csv_options(group)


def _add_outputs(group: Any) -> None:
    group.add_argument(
        "--out",
        metavar="FILE",
        help="file of results; named FILE.partial until it is complete (default: standard output)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted FILE.partial; start from the beginning if there is none",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace FILE, FILE.partial, and drawings of the same names in DIR",
    )
    group.add_argument(
        "--sort-into",
        metavar="DIR",
        help="copy each image into DIR/<predicted class>, or DIR/_unsure if the class is below "
        "--threshold; originals are not changed",
    )
    group.add_argument(
        "--sort-with", choices=WAYS, help="how images are placed in --sort-into (default: copy)"
    )
    group.add_argument(
        "--embeddings",
        metavar="FILE",
        help="file of image embeddings, the input of the network's head, as .npy or .parquet "
        "(needs --out)",
    )
    group.add_argument(
        "--explain",
        metavar="DIR",
        help="write attribution maps into this folder, per caption word or per top class, as PNG "
        "and JSON",
    )
    group.add_argument(
        "--no-deletion",
        action="store_true",
        help="draw the maps of --explain without the deletion metric, which takes 119 passes "
        "an image",
    )


def _add_engines(group: Any) -> None:
    group.add_argument(
        "--engine",
        choices=ENGINES,
        help="inference engine (default: torch; onnx for an .onnx, openvino for an .xml); ray "
        "distributes over a cluster",
    )
    group.add_argument("--tta", choices=VIEWS, help=TTA_HELP)
    group.add_argument("--compile", action="store_true", help=COMPILE_HELP)


def run(args: argparse.Namespace) -> int:
    """Predict; the exit code is 1 if images failed."""
    if os.path.isfile(args.model) and not args.model.lower().endswith((*WEIGHT_FILES, *EXPORTED)):
        name = printable(args.model)
        raise VitError(f"{name} is not a file of weights: MODEL comes first, then INPUT")
    launch_if_requested()

    from vit.inference.prediction_job import predict
    from vit.inference.process_group import world_size

    processes, elsewhere = world_size(), (*SEARCH_FIELDS, "max_pixels")
    with Progress(
        "vit predict",
        share=f" of process 0 of {processes}" if processes > 1 else "",
        results_on_terminal=args.out in (None, "-") and sys.stdout.isatty(),
    ) as progress:
        failed = predict(
            **{name: value for name, value in vars(args).items() if name not in elsewhere},
            search=search_from_args(args),
            notify=lambda line: notify(f"vit predict: {line}"),
            progress=progress,
        )
    return int(failed > 0)
