"""`vit predict`: label images, or write captions of them, with a trained model.

Which flags of `vit predict` go together, and what follows from them.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit.commands.backends import ENGINES, Answers, check_ray, engine_of, opened, predict_with_ray
from vit.commands.command_options import (
    COMPILE_HELP,
    TTA_HELP,
    VIEWS,
    add_network_options,
    add_search_options,
    probability,
    whole_number,
)
from vit.commands.command_output import check_folder, check_output, is_device, notify, resolved
from vit.commands.image_arguments import find_images
from vit.commands.launcher import (
    SingleProcess,
    current_process_group,
    processes_started,
    start_processes_if_asked,
)
from vit.errors import ConfigError, VitError, printable
from vit.exported.load_exported import EXPORTED
from vit.output.prediction_results import TOP_K

if TYPE_CHECKING:
    from vit.inference.process_group import ProcessGroup


STYLES = {".jsonl": "jsonl", ".csv": "csv", ".txt": "table", "": "table"}


def style_of(path: str | None, engine: str) -> str:
    """The format that the name of `path` asks for; a table on standard output and devices.

    Parquet is written by Ray's workers alone.

    Raises:
        VitError: The name ends in something else.
    """
    if path is None or path == "-" or is_device(path):
        return "table"
    suffix = Path(path).suffix.lower()
    if suffix == ".parquet" and engine == "ray":
        return "parquet"
    if suffix not in STYLES:
        raise VitError(f"{printable(path)}: name it .jsonl or .csv, or add --format")
    return STYLES[suffix]


def survives(args: argparse.Namespace) -> bool:
    """Whether a kill leaves rows with which one can go on."""
    return args.out not in (None, "-") and not is_device(args.out) and args.explain is None


def check_together(args: argparse.Namespace, engine: str) -> None:
    """Refuse flags that do not go together.

    Raises:
        ConfigError: Two do not; the message names them.
    """
    file = args.out not in (None, "-") and not is_device(args.out)
    rules: list[tuple[bool, str]] = [
        (args.resume and not file, "--resume goes on with a file: give its name with --out"),
        (
            args.resume and args.explain is not None,
            "--resume does not go with --explain: drawings are made anew each time",
        ),
        (
            args.embeddings is not None and not survives(args),
            "--embeddings goes with --out FILE (and not with --explain): rows and vectors are "
            "resumed together",
        ),
        (
            args.sort_with is not None and args.sort_into is None,
            "--sort-with says how: say where with --sort-into DIR",
        ),
        (
            args.embeddings is not None and file and same_file(args.embeddings, args.out),
            "--embeddings and --out are one file: give two",
        ),
    ]
    for flag in ("resume", "explain", "embeddings", "sort_into", "threshold"):
        given = getattr(args, flag) not in (None, False)
        words = f"--{flag.replace('_', '-')} does not go with --engine ray"
        rules.append((engine == "ray" and given, words))
    rules.append((engine == "ray" and not file, "--engine ray writes files: give --out"))
    for broken, words in rules:
        if broken:
            raise ConfigError(words)


def check_processes(args: argparse.Namespace, engine: str, processes: int) -> None:
    """Refuse what several processes cannot do together.

    Raises:
        ConfigError: The message names it.
    """
    if processes == 1:
        return
    if not survives(args):
        raise ConfigError(
            f"{processes} processes write one file together: give --out FILE, without --explain"
        )
    if engine == "ray":
        raise ConfigError("--engine ray starts its own workers: start one process")
    if getattr(args, "search.temperature", 0):
        raise ConfigError(
            "--temperature draws words by the number of an image in one list: start one process"
        )


def same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


WEIGHT_FILES = (".safetensors", ".pth", ".pth.tar", ".bin", ".pt", ".ckpt", ".npz")
WAYS = ("copy", "symlink", "hardlink")
# what every option that is not typed is; the help says in words what that means
UNSET = (
    *("format", "out", "explain", "top_k", "threshold", "engine", "tta"),
    *("embeddings", "sort_into", "sort_with"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, INPUT, and what happens to the answers; then how the network runs."""
    parser.usage = "vit predict MODEL INPUT [INPUT ...] [--out FILE [--resume]] [options]"
    parser.set_defaults(**dict.fromkeys(UNSET))
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder, or any other weights with a head: timm/NAME, hf/OWNER/NAME, ...; "
        "or an .onnx or .xml of vit export. Captions are written by run folders and by .onnx",
    )
    parser.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="+",
        help="images, folders (with all below them), patterns such as 'photos/*.jpg', "
        "or - for a list of paths on standard input",
    )
    _add_rows(parser.add_argument_group("what is written of each image"))
    _add_outputs(parser.add_argument_group("where it is written"))
    add_search_options(parser)
    group = add_network_options(parser)
    _add_engines(group)


def _add(group: Any, *flags: str, text: str, **options: Any) -> None:
    """A flag whose default the help tells in words."""
    if options.get("action") != "store_true":
        options["default"] = argparse.SUPPRESS
    group.add_argument(*flags, help=text, **options)


def _add_rows(group: Any) -> None:
    _add(
        group,
        *("-k", "--top-k", "--topk"),
        type=whole_number,
        metavar="K",
        text=f"most probable classes to name (default: {TOP_K}; where an image may have several, "
        "all above their thresholds)",
    )
    _add(
        group,
        "--threshold",
        type=probability,
        metavar="P",
        text="name no class that is less probable (default: name them all; where an image may "
        "have several, each from its own threshold on)",
    )
    _add(
        group,
        "--format",
        choices=["table", "jsonl", "csv"],
        text="how results are written (default: as the name of --out ends, else table)",
    )


def _add_outputs(group: Any) -> None:
    _add(
        group,
        "--out",
        metavar="FILE",
        text="the results; until they are complete they are in FILE.partial (default: standard "
        "output)",
    )
    _add(
        group,
        "--resume",
        action="store_true",
        text="go on with FILE.partial, which a kill left; begin where there is none",
    )
    _add(
        group,
        "--overwrite",
        action="store_true",
        text="replace FILE and what is unfinished of it, and drawings of the same names in DIR",
    )
    _add(
        group,
        "--sort-into",
        metavar="DIR",
        text="put each image into a folder in DIR that is called as its best class, or _unsure "
        "where that is below --threshold; originals stay as they are",
    )
    _add(
        group,
        "--sort-with",
        choices=WAYS,
        text="how images get there (default: copy)",
    )
    _add(
        group,
        "--embeddings",
        metavar="FILE",
        text="a vector for each image as .npy or .parquet: what the head of the network sees "
        "(with --out)",
    )
    _add(
        group,
        "--explain",
        metavar="DIR",
        text="draw into this folder where the network looked, at each word of a caption or for "
        "the best classes, as a PNG, and as numbers in a JSON",
    )


def _add_engines(group: Any) -> None:
    _add(
        group,
        "--engine",
        choices=ENGINES,
        text="what computes (default: torch; onnx for an .onnx, openvino for an .xml); ray spreads "
        "the work over a cluster",
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
    """Answer; the exit code is 1 where images failed."""
    if os.path.isfile(args.model) and not args.model.lower().endswith((*WEIGHT_FILES, *EXPORTED)):
        name = printable(args.model)
        raise VitError(f"{name} is no file of weights: MODEL comes first, then INPUT")
    engine = engine_of(args.model, args.engine)
    style = args.format or style_of(args.out, engine)
    check_together(args, engine)
    start_processes_if_asked()
    check_processes(args, engine, processes_started())
    group = current_process_group()
    images, failed = group.run_on_main(lambda: look_before(args, style, engine))
    if failed is None:
        failed = answer(args, group, images, style=style, engine=engine)
    elif group.rank:
        return 0
    if failed:
        notify(
            f"vit predict: {failed} of {len(images)} images failed; each has its error in its row"
        )
    return int(failed > 0)


def answer(
    args: argparse.Namespace,
    group: "SingleProcess | ProcessGroup",
    images: list[str],
    *,
    style: str,
    engine: str,
) -> int:
    """Returns how many of `images` failed."""
    if engine == "ray":
        top_k = args.top_k or TOP_K
        return predict_with_ray(args, images, style=style, top_k=top_k, notify=notify)
    predictor = opened_alike(args, group, images, engine)
    from vit.commands.predict_task import Task, kept, shown

    task = Task(args, style, engine, images, predictor, group)
    return kept(task) if survives(args) else shown(task)


def opened_alike(
    args: argparse.Namespace, group: "SingleProcess | ProcessGroup", images: list[str], engine: str
) -> Answers:
    """What answers, in the same arithmetic in all processes and after a resume.

    With --precision auto the first process decides, before anything is written, and a resumed work
    keeps what was decided.
    """
    if args.resume and args.precision == "auto":
        from vit.output.resumable_output import begun_with

        out = resolved(args.out)
        args.precision = group.run_on_main(lambda: begun_with(out).get("precision", "auto"))

    def begin() -> Answers:
        predictor = opened(args, engine, group.device(args.device))
        autotune = getattr(predictor, "autotune_precision", None)
        if autotune is not None:
            autotune(images)
        return predictor

    if group.processes == 1:
        return begin()
    first = group.run_on_all(begin if group.rank == 0 else lambda: None)
    args.precision = group.run_on_main(lambda: getattr(first, "precision", args.precision))
    return group.run_on_all(lambda: first or begin())


def look_before(args: argparse.Namespace, style: str, engine: str) -> tuple[list[str], int | None]:
    """The images, after all checks of files; and failures where all are answered already.

    Raises:
        VitError: Something cannot be read or written.
    """
    files = None
    if engine != "ray" and survives(args):
        from vit.commands.predict_output import Files
        from vit.output.embeddings_file import check_embeddings

        if args.embeddings is not None:
            check_embeddings(args.embeddings)
        files = Files.of(args)
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
            say_complete(args, len(images))
            return images, failed
    if args.sort_into is not None:
        from vit.output.sort_into_folders import check_sorting

        filled = args.overwrite or (files is not None and bool(files.left))
        check_sorting(args.sort_into, args.inputs, images, filled=filled)
    return images, None


def say_complete(args: argparse.Namespace, images: int) -> None:
    """Say that there is nothing to do, and how that is known.

    Raises:
        ConfigError: Images were to be sorted.
    """
    name = printable(args.out)
    if args.sort_into is not None:
        raise ConfigError(
            f"{name} is complete, and does not say whether the images were sorted: leave "
            "--sort-into out, or begin again with --overwrite"
        )
    notify(
        f"vit predict: {name} is complete: {images:,} images, in the order of the inputs (which "
        "model and settings wrote it is not known)"
    )
