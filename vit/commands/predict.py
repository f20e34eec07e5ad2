"""`vit predict`: label images, or write captions of them, with a trained model."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vit.commands.options import (
    add_network_options,
    add_search_options,
    search_given,
    whole_number,
)
from vit.commands.output import (
    check_folder,
    check_output,
    is_device,
    open_output,
    progress_bar,
    say,
)
from vit.errors import ConfigError, DataError, VitError, printable

if TYPE_CHECKING:
    from vit.inference.predictor import Predictor
    from vit.runtime.captions import CaptionRunner

WEIGHT_FILES = (".safetensors", ".pth", ".pth.tar", ".bin", ".pt", ".ckpt", ".npz")
EXPORTED = ".onnx"
TOP_K = 5
SUFFIXES = {".jsonl": "jsonl", ".csv": "csv", ".txt": "table", "": "table"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(format=None, out=None, explain=None, top_k=None)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder, or any other weights with a head: timm/NAME, hf/OWNER/NAME, ...; "
        "captions are written by run folders, and by the .onnx of vit export",
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
        default=argparse.SUPPRESS,
        metavar="K",
        help=f"most probable classes to name (default: {TOP_K})",
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
    parser.add_argument(
        "--explain",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="draw each caption into this folder: where the network looked at each word, as a PNG, "
        "and as numbers in a JSON",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace FILE where it exists, and drawings of the same names in DIR",
    )
    add_search_options(parser)
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
    if os.path.isfile(args.model) and not args.model.lower().endswith((*WEIGHT_FILES, EXPORTED)):
        name = printable(args.model)
        raise VitError(f"{name} is no file of weights: MODEL comes first, then INPUT")
    path = None if args.out == "-" else args.out
    style = args.format or style_of(path)
    check_output(path, overwrite=args.overwrite)
    if args.explain is not None:
        check_folder(args.explain, overwrite=args.overwrite)
    images = find_images(args.inputs)

    failed = answer(opened(args), images, args, style=style, path=path)
    if failed:
        say(f"vit predict: {failed} of {len(images)} images failed; each has its error in its row")
    return int(failed > 0)


def opened(args: argparse.Namespace) -> "Predictor | CaptionRunner":
    """What answers: an exported network without torch, or one that torch computes.

    Raises:
        VitError: It cannot be used as asked.
    """
    settings = {
        "device": args.device,
        "batch_size": args.batch_size,
        "precision": args.precision,
        "workers": args.workers,
        "keep_aspect": args.keep_aspect,
        "merge_tokens": args.merge_tokens,
        "patch_size": args.patch_size,
        "search": search_given(args),
    }
    if args.model.lower().endswith(EXPORTED):
        from vit.runtime.captions import runner_like

        return runner_like(args.model, explain=args.explain, **settings)
    from vit.inference.predictor import Predictor

    return Predictor(args.model, **settings)


def answer(
    predictor: "Predictor | CaptionRunner",
    images: list[str],
    args: argparse.Namespace,
    *,
    style: str,
    path: str | None,
) -> int:
    """Write an answer for each of `images`; returns how many have an error instead.

    Raises:
        ConfigError: What was asked for is not in this network.
    """
    from vit.runtime.results import FORMATS, Layout, unended_note

    top_k = classes_named(predictor, args.top_k)
    layout = Layout(top_k, predictor.classes, images, predictor.n_best)
    header, line = FORMATS[style](layout)
    if args.explain is None:
        predictions = predictor.stream(images, top_k=max(top_k, 1))
    else:
        from vit.inference.drawing import check_drawable, explained
        from vit.inference.predictor import Predictor

        assert isinstance(predictor, Predictor), "an exported network explains nothing"
        check_drawable(predictor)
        predictions = explained(predictor, images, args.explain, top_k=top_k)
    shown = path is None and sys.stdout.isatty()
    failed = captions = unended = 0
    with (
        progress_bar(len(images), unit="image", results_on_terminal=shown) as bar,
        open_output(path) as out,
    ):
        out.write(header)
        for prediction in predictions:
            out.write(line(prediction))
            failed += prediction.error is not None
            captions += len(prediction.captions)
            unended += sum(not caption.ended for caption in prediction.captions)
            bar.update()
    if unended:
        say(f"vit predict: {unended_note(unended, captions)}")
    return failed


def classes_named(predictor: "Predictor | CaptionRunner", asked: int | None) -> int:
    """How many classes a row names; none where the network has none.

    Raises:
        ConfigError: Some were asked for, and it has none.
    """
    if asked is not None and not predictor.classes:
        raise ConfigError(
            f"top_k={asked}: this network writes captions and names no classes; leave it out, or "
            "ask for several captions with --beams and --n-best"
        )
    return min(asked or TOP_K, len(predictor.classes))


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
