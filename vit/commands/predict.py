"""`vit predict`: label images with a trained model."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vit.commands.options import add_network_options, whole_number
from vit.commands.output import check_output, is_device, open_output, progress_bar, say
from vit.errors import DataError, VitError, printable

WEIGHT_FILES = (".safetensors", ".pth", ".pth.tar", ".bin", ".pt", ".ckpt", ".npz")
SUFFIXES = {".jsonl": "jsonl", ".csv": "csv", ".txt": "table", "": "table"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(format=None, out=None)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder, or any other weights with a head: timm/NAME, hf/OWNER/NAME, ...",
    )
    parser.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="+",
        help="pictures, folders (with all below them), patterns such as 'photos/*.jpg', "
        "or - for a list of paths on standard input",
    )
    parser.add_argument(
        "-k",
        "--top-k",
        "--topk",
        type=whole_number,
        default=5,
        metavar="K",
        help="most probable classes to name (default: 5)",
    )
    parser.add_argument(
        "--format",
        choices=["table", "jsonl", "csv"],
        default=argparse.SUPPRESS,
        help="how results are written (default: as the name of --out ends, else table)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="where results are written (default: standard output)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE where it exists")
    add_network_options(parser)


def style_of(path: str | None) -> str:
    """The format that the name of `path` asks for; a table on standard output and devices.

    Raises:
        VitError: The name ends in something else.
    """
    if path is None or is_device(path):
        return "table"
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise VitError(f"{printable(path)}: name it .jsonl or .csv, or add --format")
    return SUFFIXES[suffix]


def run(args: argparse.Namespace) -> int:
    if os.path.isfile(args.model) and not args.model.lower().endswith(WEIGHT_FILES):
        name = printable(args.model)
        raise VitError(f"{name} is no file of weights: MODEL comes first, then INPUT")
    path = None if args.out == "-" else args.out
    style = args.format or style_of(path)
    check_output(path, overwrite=args.overwrite)
    images = find_images(args.inputs)

    from vit.inference.predictor import Predictor
    from vit.inference.results import FORMATS, Layout

    predictor = Predictor(
        args.model,
        device=args.device,
        batch_size=args.batch_size,
        precision=args.precision,
        workers=args.workers,
        keep_aspect=args.keep_aspect,
        merge_tokens=args.merge_tokens,
        patch_size=args.patch_size,
    )
    top_k = min(args.top_k, len(predictor.classes))
    header, line = FORMATS[style](Layout(top_k, predictor.classes, images))
    shown = path is None and sys.stdout.isatty()
    failed = 0
    with (
        progress_bar(len(images), unit="image", results_on_terminal=shown) as bar,
        open_output(path) as out,
    ):
        out.write(header)
        for prediction in predictor.stream(images, top_k=top_k):
            out.write(line(prediction))
            failed += prediction.error is not None
            bar.update()
    if failed:
        say(f"vit predict: {failed} of {len(images)} images failed; each has its error in its row")
    return int(failed > 0)


def find_images(inputs: Sequence[str]) -> list[str]:
    """Paths of all `inputs` in their order, `-` replaced by the list on standard input.

    Raises:
        DataError: There is not one picture.
    """
    images: list[str] = []
    notes: list[str] = []
    for word in inputs:
        images += read_names() if word == "-" else expand(word, notes, alone=len(inputs) == 1)
    for note in notes:
        say(f"vit predict: {note}")
    if not images:
        raise DataError("the list on standard input is empty; give one path a line")
    return images


def expand(word: str, notes: list[str], *, alone: bool) -> list[str]:
    """Paths that one input means; a folder without pictures is an error of its own among others.

    Raises:
        DataError: A pattern matches nothing, or the only input is a folder without pictures.
    """
    from vit.data.sources import list_images

    try:
        return list_images([word], notes=notes)
    except DataError:
        if alone or not os.path.isdir(word):
            raise
        return [word]


def read_names() -> list[str]:
    """Paths on standard input, one a line, or with NUL between them as `find -print0` writes."""
    raw = sys.stdin.buffer.read()
    if b"\0" in raw:
        names = raw.split(b"\0")
    else:
        names = [line.removesuffix(b"\r") for line in raw.split(b"\n")]
    return [os.fsdecode(name) for name in names if name]
