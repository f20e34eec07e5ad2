"""Flags that several commands share."""

import argparse
import contextlib
import dataclasses
import re
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from vit.commands.command_parser import SETTING
from vit.config import Section, SourceConfig
from vit.config.parser import Setting, all_settings, choices_of, settings_of, split_settings
from vit.config.presets import preset
from vit.errors import ConfigError
from vit.generation.generation_config import Search

if TYPE_CHECKING:
    from vit.data.sources.dataset_spec import DatasetSpec

T = TypeVar("T", bound=Section)
SEARCH_FLAGS = {"top_k": "sample_top_k"}  # --top-k is that of classes
"""Field of vit.generation.generation_config.Search -> its flag, where they differ."""


def add_fields(
    group: Any,
    kind: type,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    flags: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each field of a dataclass of settings; see `settings_from_args`.

    Args:
        flags: Names of flags that are not those of their fields.
    """
    for name, setting in settings_of(kind).items():
        if name not in without and (only is None or name in only):
            add_setting(group, dataclasses.replace(setting, name=(flags or {}).get(name, name)))


def add_network_options(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> Any:
    """Add the flags of InferenceConfig and --max-pixels.

    Returns:
        The argument group, for further flags.
    """
    from vit.config.inference_config import InferenceConfig  # `vit train --help` needs none

    group = parser.add_argument_group("network (how it runs)")
    add_fields(group, InferenceConfig, without=("search", "embeddings", *without))
    add_max_pixels(group)
    return group


def add_max_pixels(group: Any) -> None:
    """Add --max-pixels, which `run_command` sets for the process."""
    limit = all_settings()["max_pixels"]
    text = f"{limit.help}{default_text(limit)}"
    group.add_argument("--max-pixels", type=positive_int, metavar="N", help=text)


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add flags of caption generation; see `search_from_args`."""
    text = "Captioning models only; greedy decoding by default."
    add_fields(parser.add_argument_group("captions", text), Search, flags=SEARCH_FLAGS)


def search_from_args(args: argparse.Namespace) -> Search | None:
    """The Search of the given flags, or None without any."""
    flags = {SEARCH_FLAGS.get(name, name): name for name in settings_of(Search)}
    values = settings_from_args(args)
    given = {name: values[flag] for flag, name in flags.items() if flag in values}
    if not given:
        return None
    try:
        return split_settings(given, "a search", Search)[0]  # type: ignore[no-any-return]
    except ConfigError as error:
        raise ConfigError(re.sub(r"\btop_k=", "sample_top_k=", str(error))) from None


def checked_settings(args: argparse.Namespace, *kinds: type) -> dict[str, Any]:
    """Settings of `kinds` whose flags are given, by name, for a function that takes them.

    They are checked here, so that a wrong one is refused before torch is imported.
    """
    values = settings_from_args(args)
    given = {name: values[name] for kind in kinds for name in settings_of(kind) if name in values}
    configs = split_settings(given, "this command", *kinds)
    # of two with one name the first decides, as in split_settings
    checked = {name: value for one in configs[::-1] for name, value in vars(one).items()}
    checked = {name: checked[name] for name in given}
    search = search_from_args(args)
    return checked if search is None else {**checked, "search": search}


def options_of(args: argparse.Namespace, kind: type[T]) -> T:
    """The options of a command, a dataclass, from the flags of its fields."""
    options: T = split_settings(checked_settings(args, kind), "this command", kind)[0]
    return options


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


def add_setting(group: Any, setting: Setting) -> None:
    """Add the flag of a setting; its value stays text and is checked like one from a file."""
    flags = [f"--{setting.name.replace('_', '-')}", *setting.aliases]
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": f"{SETTING}{setting.name}"}
    commas = " Separated by commas." if is_comma_separated(setting.kind) and setting.section else ""
    options["help"] = f"{setting.help}{commas}{default_text(setting)}".replace("%", "%%")
    if setting.kind in (bool, bool | None):
        action: Any = argparse.BooleanOptionalAction if setting.section else "store_true"
        group.add_argument(*flags, action=action, **options)
        return
    if not setting.section and is_comma_separated(setting.kind):
        options["action"] = "append"
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
    if setting.section and setting.name in preset(str(all_settings()["model"].default)):
        return " (default: the preset's)"
    if setting.default in (None, ()) or (setting.default is False and not setting.section):
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


def add_data_options(
    parser: argparse.ArgumentParser, *, trained: bool = False, without: Collection[str] = ()
) -> None:
    """Add flags that say how DATA is read; of the data of a `trained` network one split is read."""
    usual = "; default: as in the training, for its data" if trained else ""
    group = parser.add_argument_group(f"data (how DATA is read{usual})")
    if trained:
        group.add_argument("--split", default="val", metavar="NAME", help="which part of DATA")
    for name in settings_of(SourceConfig):
        if name not in ("data", "exclude", "corrections", *without):
            add_setting(group, all_settings()[name])


def data_files(args: argparse.Namespace) -> tuple[str, str | None]:
    """DATA and the list of its labels, which no output may replace."""
    return args.data, settings_from_args(args).get("labels")


def dataset_spec(args: argparse.Namespace, **settings: Any) -> "DatasetSpec":
    """The DatasetSpec of DATA and the flags of `add_data_options` and `add_task_option`."""
    from vit.data.sources.dataset_spec import as_dataset_spec

    source: SourceConfig = split_settings(
        checked_settings(args, SourceConfig), "the data", SourceConfig
    )[0]
    split, task = getattr(args, "split", None), getattr(args, "task", None)
    return as_dataset_spec(args.data, settings, task=task, source=source, split=split)
