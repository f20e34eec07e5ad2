"""Flags that several commands share."""

import argparse
import contextlib
import re
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit.commands.command_parser import SETTING
from vit.config.parser import Setting, all_settings, choices_of
from vit.config.presets import preset

if TYPE_CHECKING:
    from vit.data.sources.dataset_spec import DatasetSpec

SEARCH_FIELDS = {
    **{name: name for name in ("beams", "n_best", "length_penalty", "temperature", "top_p")},
    **{name: name for name in ("repetition_penalty", "min_tokens", "max_tokens", "seed")},
    "sample_top_k": "top_k",  # --top-k is that of classes
}
"""Flag -> field of vit.generation.generation_config.Search."""
VIEWS = ("flip", "crops")
TTA_HELP = (
    "test-time augmentation, classification only: average over an image and its mirror image "
    "(flip), or over ten crops (crops: centre and corners, mirrored too)"
)
COMPILE_HELP = (
    "compile the network with torch.compile, which takes a minute and pays for many images"
)


NO_CALIBRATION_HELP = "return raw scores, without the calibration that the run has measured"


def add_network_options(parser: argparse.ArgumentParser, *, calibrated: bool = True) -> Any:
    """Add flags of inference: batch size, device, precision, threads, patches; and, where scores
    may be `calibrated`, --no-calibration.

    Returns:
        The argument group, for further flags.
    """
    group = parser.add_argument_group("network (how it runs)")
    group.add_argument(
        "-b",
        "--batch-size",
        type=positive_int,
        metavar="N",
        help="images in one pass through the network (default: 4 to 64 on a CPU, the more the "
        "smaller the images; else 64)",
    )
    group.add_argument(
        "--device", metavar="D", help="cpu, cuda, cuda:N or mps (default: the best one here)"
    )
    group.add_argument(
        "--precision",
        choices=["auto", "fp32", "bf16", "fp16"],
        default="auto",
        help="arithmetic of the network; auto is bf16 where the hardware has it and it is faster, "
        "which is tried once on a CPU with many images",
    )
    group.add_argument(
        "-j",
        "--workers",
        type=positive_int,
        metavar="N",
        help="threads that read images, and compute on a CPU (default: one a core, at most 8)",
    )
    group.add_argument(
        "--keep-aspect",
        action="store_true",
        help="keep the aspect ratio of images, with at most as many patches as usual, instead of a "
        "square crop",
    )
    group.add_argument(
        "--intensity-range",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        help="values of images of more than 8 bits per channel that become black and white "
        "(default: as in training)",
    )
    add_max_pixels(group)
    if calibrated:
        group.add_argument("--no-calibration", action="store_true", help=NO_CALIBRATION_HELP)
    add_patch_options(group)
    return group


def add_max_pixels(group: Any) -> None:
    """Add --max-pixels, which `run_command` sets for the process."""
    limit = all_settings()["max_pixels"]
    text = f"{limit.help}{default_text(limit)}"
    group.add_argument("--max-pixels", type=positive_int, metavar="N", help=text)


def add_patch_options(group: Any) -> None:
    """Add flags of the patches."""
    group.add_argument(
        "--merge-tokens",
        type=count,
        metavar="N",
        help="patches merged in each block: faster, less exact (default: as in training)",
    )
    group.add_argument(
        "--patch-size",
        type=positive_int,
        metavar="P",
        help="pixels on a side of a patch, best one that --patch-sizes trained: larger is faster, "
        "smaller more exact (default: as in training)",
    )


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add flags of caption generation; see `search_from_args`."""
    group = parser.add_argument_group(
        "captions",
        "Captioning models only; greedy decoding by default.",
    )
    for flag, kind, metavar, text in (
        ("beams", positive_int, "N", "beams of beam search (default: 1)"),
        ("n-best", positive_int, "K", "captions per image, at most --beams (default: 1)"),
        ("length-penalty", float, "P", "beams are compared by score / tokens^P (default: 1)"),
        (
            "temperature",
            float,
            "T",
            "sample from softmax(logits / T) (default: 0, no sampling)",
        ),
        (
            "top-p",
            float,
            "P",
            "nucleus sampling: tokens of total probability P (default: 1)",
        ),
        ("sample-top-k", positive_int, "K", "sample among the K likeliest tokens (default: all)"),
        (
            "repetition-penalty",
            float,
            "R",
            "penalty of tokens generated already (default: 1)",
        ),
        ("min-tokens", count, "N", "tokens before a caption may end (default: 1)"),
        ("max-tokens", positive_int, "N", "longest caption in tokens (default: as in training)"),
        ("seed", count, "N", "seed of sampling (default: 0)"),
    ):
        group.add_argument(
            f"--{flag}", type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text
        )


def search_from_args(args: argparse.Namespace) -> Any:
    """The Search of the given flags, or None without any."""
    given = {field: getattr(args, flag) for flag, field in SEARCH_FIELDS.items() if flag in args}
    if not given:
        return None
    from vit.errors import ConfigError
    from vit.generation.generation_config import Search

    try:
        return Search(**given)
    except ConfigError as error:
        raise ConfigError(re.sub(r"\btop_k=", "sample_top_k=", str(error))) from None


def inference_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `Predictor` and `evaluate`, from the flags of `add_network_options`, the search
    and --tta, --compile and --no-calibration."""
    names = ("device", "batch_size", "precision", "workers", "keep_aspect", "merge_tokens")
    more = ("patch_size", "tta", "compile", "no_calibration")
    settings = {name: getattr(args, name) for name in (*names, *more)}
    deep = None if args.intensity_range is None else tuple(args.intensity_range)
    return {**settings, "search": search_from_args(args), "intensity_range": deep}


def count(word: str) -> int:
    """Parse an integer of at least 0."""
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 0")
    return int(word)


def positive_int(word: str) -> int:
    """Parse an integer of at least 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)


def probability(word: str) -> float:
    """Parse a number in (0, 1]."""
    if not (number := share(word)):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number above 0 and at most 1")
    return number


def share(word: str) -> float:
    """Parse a number in [0, 1]."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(word)) <= 1:
            return number
    raise argparse.ArgumentTypeError(f"{word!r} is not a number from 0 to 1")


def add_json_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --json."""
    parser.add_argument("--json", metavar="FILE", help=what)


def add_csv_options(group: Any) -> None:
    """Add --csv-separator and --csv-digits."""
    from vit.output.prediction_results import SEPARATORS

    group.add_argument(
        "--csv-separator",
        choices=[*SEPARATORS],
        help="separator of CSV (default: comma); semicolon, with a decimal comma, is what Excel "
        "opens in most of Europe",
    )
    group.add_argument(
        "--csv-digits",
        type=csv_digits,
        metavar="N",
        help="decimal digits of scores in CSV, or full for all (default: 4)",
    )


def csv_digits(word: str) -> int | str:
    """Parse --csv-digits."""
    return word if word == "full" else count(word)


def add_setting(group: Any, setting: Setting) -> None:
    """Add the flag of a setting; its value stays text and is checked like one from a file."""
    flags = [f"--{setting.name.replace('_', '-')}", *setting.aliases]
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": f"{SETTING}{setting.name}"}
    commas = " Separated by commas." if is_comma_separated(setting.kind) else ""
    options["help"] = f"{setting.help}{commas}{default_text(setting)}".replace("%", "%%")
    if setting.kind in (bool, bool | None):
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        return
    if choices := choices_of(setting.kind):
        options["metavar"] = "{" + "|".join(choices) + "}"
    else:
        options["metavar"] = setting.name.split("_")[-1].upper()
    if count := value_count(setting.kind):
        options["nargs"] = count
    group.add_argument(*flags, **options)


def default_text(setting: Setting) -> str:
    """The default of a setting as --help shows it."""
    if setting.name == "num_classes":
        return ""
    if setting.name in preset(str(all_settings()["model"].default)):
        return " (default: the preset's)"
    if setting.default in (None, ()):
        return ""
    number = isinstance(setting.default, float)
    return f" (default: {setting.default:.4g})" if number else f" (default: {setting.default})"


def value_count(kind: Any) -> int:
    """Number of values of a fixed-length tuple; 0 for other types."""
    for option in (kind, *typing.get_args(kind)):
        if typing.get_origin(option) is tuple and Ellipsis not in typing.get_args(option):
            return len(typing.get_args(option))
    return 0


def is_comma_separated(kind: Any) -> bool:
    """Whether the type is a tuple of any length, given as one comma-separated word."""
    return any(
        typing.get_origin(option) is tuple and Ellipsis in typing.get_args(option)
        for option in (kind, *typing.get_args(kind))
    )


def settings_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """Values of the flags of `add_setting` by setting name, not yet checked."""
    given = {name: value for name, value in vars(args).items() if name.startswith(SETTING)}
    return {name.removeprefix(SETTING): value for name, value in given.items()}


def add_task_option(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add `--task`, for commands that read a dataset as a training of that task does."""
    parser.add_argument(
        "--task",
        choices=choices_of(all_settings()["task"].kind),
        metavar="{" + "|".join(choices_of(all_settings()["task"].kind)) + "}",  # one has a comma
        help=f"{purpose}: classes, captions or both (default: classes, one or several an image)",
    )


DATA_SETTINGS = (
    *("images", "image_column", "label_column", "caption_column", "allow_outside"),
    *("labels", "group"),
)
"""Settings of a training that say how DATA is read."""


def add_data_options(
    parser: argparse.ArgumentParser, *, trained: bool = False, without: Sequence[str] = ()
) -> None:
    """Add flags that say how DATA is read; of the data of a `trained` network one split is read."""
    usual = "; default: as in the training, for its data" if trained else ""
    group = parser.add_argument_group(f"data (how DATA is read{usual})")
    if trained:
        group.add_argument("--split", default="val", metavar="NAME", help="which part of DATA")
    for name in DATA_SETTINGS:
        if name not in without:
            add_setting(group, all_settings()[name])


def data_files(args: argparse.Namespace) -> tuple[str, str | None]:
    """DATA and the list of its labels, which no output may replace."""
    return args.data, settings_from_args(args).get("labels")


def dataset_spec(args: argparse.Namespace, **settings: Any) -> "DatasetSpec":
    """The DatasetSpec of DATA and the flags of `add_data_options` and `add_task_option`."""
    from vit.data.sources.dataset_spec import as_dataset_spec

    given = settings_from_args(args)
    given["label_list"] = given.pop("labels", None)
    given["split"] = getattr(args, "split", None)
    return as_dataset_spec(args.data, settings, task=getattr(args, "task", None), **given)
