"""`vit predict`: classify or caption images with a trained model."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit.commands.backends import (
    ENGINES,
    ImagePredictor,
    check_ray,
    open_predictor,
    predict_with_ray,
    select_engine,
)
from vit.commands.command_options import (
    COMPILE_HELP,
    TTA_HELP,
    VIEWS,
    add_network_options,
    add_search_options,
    positive_int,
    probability,
)
from vit.commands.command_output import check_folder, check_output, is_device, notify, resolve_link
from vit.commands.image_arguments import find_images
from vit.commands.launcher import (
    SingleProcess,
    current_process_group,
    launch_if_requested,
    world_size,
)
from vit.errors import ConfigError, VitError, printable
from vit.exported.load_exported import EXPORTED
from vit.output.prediction_results import TOP_K

if TYPE_CHECKING:
    from vit.inference.process_group import ProcessGroup


STYLES = {".jsonl": "jsonl", ".csv": "csv", ".txt": "table", "": "table"}


def default_format(path: str | None, engine: str) -> str:
    """The format by the suffix of `path`; a table for standard output and devices.

    Parquet is only written by Ray's workers.

    Raises:
        VitError: The suffix is unknown.
    """
    if path is None or path == "-" or is_device(path):
        return "table"
    suffix = Path(path).suffix.lower()
    if suffix == ".parquet" and engine == "ray":
        return "parquet"
    if suffix not in STYLES:
        raise VitError(f"{printable(path)}: name it .jsonl or .csv, or add --format")
    return STYLES[suffix]


def is_resumable(args: argparse.Namespace) -> bool:
    """Whether the output goes to a file that --resume can continue."""
    return args.out not in (None, "-") and not is_device(args.out) and args.explain is None


def check_flags(args: argparse.Namespace, engine: str) -> None:
    """Refuse combinations of flags that exclude each other.

    Raises:
        ConfigError: The message names them.
    """
    file = args.out not in (None, "-") and not is_device(args.out)
    rules: list[tuple[bool, str]] = [
        (args.resume and not file, "--resume continues a file: give its name with --out"),
        (
            args.resume and args.explain is not None,
            "--resume does not work with --explain: drawings are always made anew",
        ),
        (
            args.embeddings is not None and not is_resumable(args),
            "--embeddings needs --out FILE (without --explain): rows and vectors are resumed "
            "together",
        ),
        (
            args.sort_with is not None and args.sort_into is None,
            "--sort-with needs --sort-into DIR",
        ),
        (
            args.embeddings is not None and file and same_file(args.embeddings, args.out),
            "--embeddings and --out are one file: give two names",
        ),
    ]
    for flag in ("resume", "explain", "embeddings", "sort_into", "threshold"):
        given = getattr(args, flag) not in (None, False)
        message = f"--{flag.replace('_', '-')} does not work with --engine ray"
        rules.append((engine == "ray" and given, message))
    rules.append((engine == "ray" and not file, "--engine ray writes files: give --out"))
    for broken, message in rules:
        if broken:
            raise ConfigError(message)


def check_processes(args: argparse.Namespace, engine: str, processes: int) -> None:
    """Refuse flags that do not work with several processes.

    Raises:
        ConfigError: The message names the flag.
    """
    if processes == 1:
        return
    if not is_resumable(args):
        raise ConfigError(
            f"{processes} processes write one file together: give --out FILE, without --explain"
        )
    if engine == "ray":
        raise ConfigError("--engine ray starts its own workers: start one process")
    if getattr(args, "search.temperature", 0):
        raise ConfigError(
            "--temperature samples by the index of an image in one list: start one process"
        )


def same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


WEIGHT_FILES = (".safetensors", ".pth", ".pth.tar", ".bin", ".pt", ".ckpt", ".npz")
WAYS = ("copy", "symlink", "hardlink")
# options that are None unless given; their help describes the default
UNSET = (
    *("format", "out", "explain", "top_k", "threshold", "engine", "tta"),
    *("embeddings", "sort_into", "sort_with"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, INPUT, and the options of outputs and of the network."""
    parser.usage = "vit predict MODEL INPUT [INPUT ...] [--out FILE [--resume]] [options]"
    parser.set_defaults(**dict.fromkeys(UNSET))
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
    _add_outputs(parser.add_argument_group("output files"))
    add_search_options(parser)
    group = add_network_options(parser)
    _add_engines(group)


def _add(group: Any, *flags: str, text: str, **options: Any) -> None:
    """Add a flag whose default is described in its help."""
    if options.get("action") != "store_true":
        options["default"] = argparse.SUPPRESS
    group.add_argument(*flags, help=text, **options)


def _add_rows(group: Any) -> None:
    _add(
        group,
        *("-k", "--top-k", "--topk"),
        type=positive_int,
        metavar="K",
        text=f"most probable classes to return (default: {TOP_K}; for a multi-label network all "
        "above their thresholds)",
    )
    _add(
        group,
        "--threshold",
        type=probability,
        metavar="P",
        text="minimum probability of a class (default: none; for a multi-label network the "
        "threshold of each class)",
    )
    _add(
        group,
        "--format",
        choices=["table", "jsonl", "csv"],
        text="output format (default: by the suffix of --out, else table)",
    )


def _add_outputs(group: Any) -> None:
    _add(
        group,
        "--out",
        metavar="FILE",
        text="file of results; named FILE.partial until it is complete (default: standard output)",
    )
    _add(
        group,
        "--resume",
        action="store_true",
        text="continue an interrupted FILE.partial; start from the beginning if there is none",
    )
    _add(
        group,
        "--overwrite",
        action="store_true",
        text="replace FILE, FILE.partial, and drawings of the same names in DIR",
    )
    _add(
        group,
        "--sort-into",
        metavar="DIR",
        text="copy each image into DIR/<predicted class>, or DIR/_unsure if the class is below "
        "--threshold; originals are not changed",
    )
    _add(
        group,
        "--sort-with",
        choices=WAYS,
        text="how images are placed in --sort-into (default: copy)",
    )
    _add(
        group,
        "--embeddings",
        metavar="FILE",
        text="file of image embeddings, the input of the network's head, as .npy or .parquet "
        "(needs --out)",
    )
    _add(
        group,
        "--explain",
        metavar="DIR",
        text="write attribution maps into this folder, per caption word or per top class, as PNG "
        "and JSON",
    )


def _add_engines(group: Any) -> None:
    _add(
        group,
        "--engine",
        choices=ENGINES,
        text="inference engine (default: torch; onnx for an .onnx, openvino for an .xml); ray "
        "distributes over a cluster",
    )
    _add(
        group,
        "--tta",
        choices=VIEWS,
        text=TTA_HELP,
    )
    _add(
        group,
        "--compile",
        action="store_true",
        text=COMPILE_HELP,
    )


def run(args: argparse.Namespace) -> int:
    """Predict; the exit code is 1 if images failed."""
    if os.path.isfile(args.model) and not args.model.lower().endswith((*WEIGHT_FILES, *EXPORTED)):
        name = printable(args.model)
        raise VitError(f"{name} is not a file of weights: MODEL comes first, then INPUT")
    engine = select_engine(args.model, args.engine)
    style = args.format or default_format(args.out, engine)
    check_flags(args, engine)
    launch_if_requested()
    check_processes(args, engine, world_size())
    group = current_process_group()
    images, failed = group.run_on_main(lambda: prepare_inputs(args, style, engine))
    if failed is None:
        failed = predict_images(args, group, images, style=style, engine=engine)
    elif group.rank:
        return 0
    if failed:
        notify(
            f"vit predict: {failed} of {len(images)} images failed; each has its error in its row"
        )
    return int(failed > 0)


def predict_images(
    args: argparse.Namespace,
    group: "SingleProcess | ProcessGroup",
    images: list[str],
    *,
    style: str,
    engine: str,
) -> int:
    """Predict `images` with the chosen engine; return how many failed."""
    if engine == "ray":
        top_k = args.top_k or TOP_K
        return predict_with_ray(args, images, style=style, top_k=top_k, notify=notify)
    predictor = open_predictor_on_all(args, group, images, engine)
    from vit.commands.prediction_job import PredictionJob, predict_to_file, predict_to_stream

    job = PredictionJob(args, style, engine, images, predictor, group)
    return predict_to_file(job) if is_resumable(args) else predict_to_stream(job)


def open_predictor_on_all(
    args: argparse.Namespace,
    group: "SingleProcess | ProcessGroup",
    images: list[str],
    engine: str,
) -> ImagePredictor:
    """Open the predictor in every process, with one precision.

    With --precision auto the first process chooses it, and a resumed prediction keeps the
    precision that it was begun with.
    """
    precision = args.precision
    if args.resume and precision == "auto":
        from vit.output.resumable_output import stored_settings

        out = resolve_link(args.out)
        precision = group.run_on_main(lambda: stored_settings(out).get("precision", "auto"))
    device = group.device(args.device)
    predictor = group.run_on_all(
        lambda: None if group.rank else open_predictor(args, engine, device, precision, images)
    )
    precision = group.run_on_main(lambda: predictor.precision if predictor else precision)
    return group.run_on_all(
        lambda: predictor or open_predictor(args, engine, device, precision, images)
    )


def prepare_inputs(
    args: argparse.Namespace, style: str, engine: str
) -> tuple[list[str], int | None]:
    """Check all paths, and list the images.

    Returns:
        The images, and the number of failures if --out is already complete, else None.

    Raises:
        VitError: A file cannot be read or written.
    """
    files = None
    if engine != "ray" and is_resumable(args):
        from vit.commands.predict_output import OutputFiles
        from vit.output.embeddings_file import check_embeddings

        if args.embeddings is not None:
            check_embeddings(args.embeddings)
        files = OutputFiles.of(args)
        files.check(resume=args.resume, overwrite=args.overwrite)
    elif engine == "ray":
        check_ray(args.out, style, overwrite=args.overwrite)
    else:
        check_output(None if args.out == "-" else args.out, overwrite=args.overwrite)
    if args.explain is not None:
        check_folder(args.explain, overwrite=args.overwrite)
    images = find_images(args.inputs, lists=engine == "ray")
    if files is not None and args.resume and not args.overwrite:
        failed = files.complete(images, style)
        if failed is not None:
            report_complete(args, len(images))
            return images, failed
    if args.sort_into is not None:
        from vit.output.sort_into_folders import check_sorting

        filled = args.overwrite or (files is not None and bool(files.unfinished_files))
        check_sorting(args.sort_into, args.inputs, images, filled=filled)
    return images, None


def report_complete(args: argparse.Namespace, images: int) -> None:
    """Report that there is nothing left to predict.

    Raises:
        ConfigError: --sort-into was given, whose completion is not recorded.
    """
    name = printable(args.out)
    if args.sort_into is not None:
        raise ConfigError(
            f"{name} is complete, and does not record whether the images were sorted: leave "
            "--sort-into out, or start again with --overwrite"
        )
    notify(
        f"vit predict: {name} is complete: {images:,} images, in the order of the inputs (the "
        "model and settings that wrote it are not recorded)"
    )
