"""`vit predict`: classify or caption images with a trained model."""

import argparse
import sys

from vit.commands.command_output import Progress, notify
from vit.commands.command_parser import (
    SETTING,
    CommandParser,
    add_fields,
    add_network_options,
    add_search_options,
    checked_settings,
)
from vit.config.inference_config import InferenceConfig, PredictionConfig

RESULTS = ("top_k", "threshold", "reject", "sets", "format", "csv_separator", "csv_digits")


def add_arguments(parser: CommandParser) -> None:
    """Add MODEL, INPUT, and the options of outputs and of the network."""
    shown = (
        *("top_k", "threshold", "format", "out", "resume", "overwrite", "sort_into"),
        *("embeddings", "explain", "batch_size", "device"),
    )
    parser.essential = ("model", "inputs", *(f"{SETTING}{name}" for name in shown))
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
    results = parser.add_argument_group("results")
    files = parser.add_argument_group("files (results, sorted images, embeddings, maps)")
    add_fields(results, PredictionConfig, only=RESULTS)
    add_fields(files, PredictionConfig, without=("model", "inputs", "engine", *RESULTS))
    add_search_options(parser)
    network = add_network_options(parser)
    add_fields(network, PredictionConfig, only=("engine",))


def run(args: argparse.Namespace) -> int:
    """Predict; the exit code is 1 if images failed."""
    settings = checked_settings(args, PredictionConfig, InferenceConfig)

    from vit.inference.prediction_job import predict, world_size

    processes = world_size()
    with Progress(
        "vit predict",
        share=f" of process 0 of {processes}" if processes > 1 else "",
        results_on_terminal=settings.get("out", "-") == "-" and sys.stdout.isatty(),
    ) as progress:
        failed = predict(
            args.model,
            args.inputs,
            notify=lambda line: notify(f"vit predict: {line}"),
            progress=progress,
            **settings,
        )
    return int(failed > 0)
