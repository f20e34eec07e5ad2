"""Flags that several commands share."""

import argparse
import re
import typing
from typing import Any, Literal

from vit.config.parser import Setting, all_settings
from vit.config.presets import preset

# flags with another name in vit.generation.generation_config.Search: --top-k is that of classes
SEARCH_NAMES = {"sample-top-k": "top_k"}
VIEWS = ("flip", "crops")
TTA_HELP = (
    "answer by the mean over several views of an image: it and its mirror image, or those of its "
    "centre and four corners, ten in all; of classes alone"
)
COMPILE_HELP = (
    "compile the network with torch.compile, which takes a minute and pays for many images"
)


def add_network_options(parser: argparse.ArgumentParser) -> Any:
    """How a saved model is run: batch size, device, precision, threads, patches.

    Returns:
        The group, for more flags of one command.
    """
    # set first and suppressed below: the help then says in words what leaving them out means
    parser.set_defaults(batch_size=None, device=None, workers=None)
    parser.set_defaults(merge_tokens=None, patch_size=None)
    group = parser.add_argument_group("how the network runs")
    group.add_argument(
        "-b",
        "--batch-size",
        type=positive_int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="images in one pass through the network (default: 4 to 64 on a CPU, the more the "
        "smaller the images; else 64)",
    )
    group.add_argument(
        "--device",
        default=argparse.SUPPRESS,
        metavar="D",
        help="cpu, cuda, cuda:N or mps (default: the best one here)",
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
        default=argparse.SUPPRESS,
        metavar="N",
        help="threads that read images, and compute on a CPU (default: one a core, at most 8)",
    )
    group.add_argument(
        "--keep-aspect",
        action="store_true",
        help="show the network whole images in their own aspect, with at most as many patches "
        "as usual, instead of a square of each",
    )
    add_patch_options(group)
    return group


def add_patch_options(group: Any) -> None:
    """Other patches than those of the training."""
    group.add_argument(
        "--merge-tokens",
        type=count,
        default=argparse.SUPPRESS,
        metavar="N",
        help="patches merged in each block: faster, less exact (default: as in training)",
    )
    group.add_argument(
        "--patch-size",
        type=positive_int,
        default=argparse.SUPPRESS,
        metavar="P",
        help="pixels on a side of a patch, best one that --patch-sizes trained: larger is faster, "
        "smaller more exact (default: as in training)",
    )


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """How captions are looked for; `search_from_args` says what was typed."""
    group = parser.add_argument_group(
        "how captions are written",
        "Of a captioner alone; the likeliest word each time if not said.",
    )
    for flag, kind, metavar, text in (
        ("beams", positive_int, "N", "sentences that are written side by side (default: 1)"),
        ("n-best", positive_int, "K", "captions of each image, at most --beams (default: 1)"),
        ("length-penalty", float, "P", "beams are compared by score / tokens^P (default: 1)"),
        (
            "temperature",
            float,
            "T",
            "draw words from softmax(logits / T) (default: 0, drawing none)",
        ),
        ("top-p", float, "P", "draw among the fewest words of probability P (default: 1)"),
        ("sample-top-k", positive_int, "K", "draw among the K likeliest words (default: all)"),
        ("repetition-penalty", float, "R", "makes words less likely that are there (default: 1)"),
        ("min-tokens", count, "N", "tokens before a caption may end (default: 1)"),
        ("max-tokens", positive_int, "N", "longest caption in tokens (default: as in training)"),
        ("seed", count, "N", "decides what is drawn (default: 0)"),
    ):
        name = f"search.{SEARCH_NAMES.get(flag, flag.replace('-', '_'))}"
        group.add_argument(
            f"--{flag}", type=kind, default=argparse.SUPPRESS, dest=name, metavar=metavar, help=text
        )


def search_from_args(args: argparse.Namespace) -> Any:
    """The Search that was typed, or None where none of its flags was.

    Raises:
        ConfigError: The flags contradict each other.
    """
    given = {key[7:]: value for key, value in vars(args).items() if key.startswith("search.")}
    if not given:
        return None
    from vit.errors import ConfigError
    from vit.generation.generation_config import Search

    try:
        return Search(**given)
    except ConfigError as error:
        raise ConfigError(re.sub(r"\btop_k=", "sample_top_k=", str(error))) from None


def count(word: str) -> int:
    """A number of at least 0, typed as a flag."""
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 0")
    return int(word)


def positive_int(word: str) -> int:
    """A number of at least 1, typed as a flag."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)


def probability(word: str) -> float:
    """A number above 0 and at most 1, typed as a flag."""
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number above 0 and at most 1")
    return number


def add_setting(group: Any, setting: Setting) -> None:
    """One flag: its text is checked with the settings of a file, so errors are the same."""
    flags = [f"--{setting.name.replace('_', '-')}", *setting.aliases]
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": f"set.{setting.name}"}
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
    """What --help says of the value where the flag is not given."""
    if setting.name == "num_classes":
        return ""
    if setting.name in preset(str(all_settings()["model"].default)):
        return " (default: the preset's)"
    if setting.default in (None, ()):
        return ""
    number = isinstance(setting.default, float)
    return f" (default: {setting.default:.4g})" if number else f" (default: {setting.default})"


def choices_of(kind: Any) -> tuple[str, ...]:
    """The words that a flag of this type takes; none where it takes any."""
    for option in (kind, *typing.get_args(kind)):
        if typing.get_origin(option) is Literal:
            return typing.get_args(option)
    return ()


def value_count(kind: Any) -> int:
    """How many values a flag of this type takes; 0 for the ordinary one, and one with commas."""
    for option in (kind, *typing.get_args(kind)):
        if typing.get_origin(option) is tuple and Ellipsis not in typing.get_args(option):
            return len(typing.get_args(option))
    return 0


def is_comma_separated(kind: Any) -> bool:
    """Whether a flag of this type takes any number of values, in one word."""
    return any(
        typing.get_origin(option) is tuple and Ellipsis in typing.get_args(option)
        for option in (kind, *typing.get_args(kind))
    )


def settings_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """What was typed for flags of `add_setting`, by the settings' names, not yet checked."""
    return {key[4:]: value for key, value in vars(args).items() if key.startswith("set.")}


def add_list_options(
    parser: argparse.ArgumentParser, usual: str = "found by its usual names"
) -> None:
    """How a list or a table is read; `usual` is what is done about columns that nobody names."""
    parser.set_defaults(images=None, image_column=None, label_column=None)
    parser.add_argument(
        "--images",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="folder of the images of a list (default: its own, or the one beside it with them)",
    )
    for name, of in (("image", "the images"), ("label", "the classes")):
        parser.add_argument(
            f"--{name}-column",
            metavar="COLUMN",
            default=argparse.SUPPRESS,
            help=f"column of {of} in a list or table (default: {usual})",
        )
    parser.add_argument(
        "--allow-outside",
        action="store_true",
        help="take images of a list that lie outside of its folder, or of --images",
    )
