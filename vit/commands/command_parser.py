"""Parser of a command, with errors of one line and a help of one screen; flags made from settings.

    vit train --help        the essential flags, and the names of the groups
    vit train --help NAME   the flags of a group, or one flag
    vit train --help-all    every flag

A command without a list of essential flags shows every flag with `--help`.
"""

import argparse
import contextlib
import dataclasses
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from vit.config import Section, SourceConfig
from vit.config.setting_layers import all_settings
from vit.config.settings import Setting, choices_of, settings_of, split_settings
from vit.errors import ConfigError
from vit.generation.generation_config import Search
from vit.text import nearest, printable

if TYPE_CHECKING:
    from vit.data.sources.dataset_spec import DatasetSpec

EXIT_USAGE = 2
SETTING = "setting_"
"""Prefix of settings in the namespace: commands have flags of the same names."""
WIDEST = 70
"""Columns of the values of a flag in the short help."""
T = TypeVar("T", bound=Section)
SEARCH_FLAGS = {"top_k": "sample_top_k"}  # --top-k is that of classes
"""Field of vit.generation.generation_config.Search -> its flag, where they differ."""


class HelpAction(argparse.Action):
    """Prints the help of a command, of a group of flags or of one flag, and exits."""

    def __init__(self, *, everything: bool, **options: Any) -> None:
        nargs = 0 if everything else "?"
        super().__init__(nargs=nargs, **options)
        self.everything = everything

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        _namespace: argparse.Namespace,
        values: Any,
        _option: str | None = None,
    ) -> NoReturn:
        assert isinstance(parser, CommandParser)
        if self.everything or not (values or parser.essential):
            print(parser.format_help(), end="")
        else:
            print(parser.format_topic(values) if values else parser.format_short_help(), end="")
        parser.exit(0)


class CommandParser(argparse.ArgumentParser):
    """Prints errors as one line, and suggests the nearest flag for an unknown one.

    Attributes:
        essential: Names (`dest`) of the flags that the short help shows, in its order.
        examples: Commands that the short help ends with.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self.essential: Sequence[str] = ()
        self.examples: Sequence[str] = ()
        self.add_argument(
            "-h",
            "--help",
            action=HelpAction,
            everything=False,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            metavar="NAME",
            help="show this help, or that of a group of flags or of one flag",
        )
        self.add_argument(
            "--help-all",
            action=HelpAction,
            everything=True,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse `words`; unknown arguments exit with code 2."""
        # argparse ends an optional list of words at the first flag, even if it is still empty
        has_list = any(one.nargs == "*" and not one.option_strings for one in self._actions)
        parse = self.parse_known_intermixed_args if has_list else self.parse_known_args
        parsed, unknown = parse(words)
        if unknown and not unknown[0].startswith("-"):
            self.error(f"{unknown[0]} is one argument too many; names with spaces need quotes")
        if unknown:
            hint = nearest(unknown[0].split("=")[0], self._option_string_actions)
            self.error(f"{unknown[0]} is not an argument{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        line = " ".join(printable(message).split())
        self.exit(EXIT_USAGE, f"{self.prog}: {line} (see {self.prog} --help)\n")

    def topics(self) -> dict[str, Any]:
        """Groups of flags by the name that `--help NAME` takes: the title up to a bracket."""
        titles = ((re.split(r" \(|:", str(one.title))[0], one) for one in self._action_groups[2:])
        return {title.lower().replace(" ", "-"): group for title, group in titles}

    def format_short_help(self) -> str:
        """The essential flags, each with the first sentence of its help, and how to see more."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        formatter.start_section(None)
        flags = {action.dest: action for action in self._actions}
        for name in self.essential:  # the plan of a training replaces defaults of settings
            formatter.add_argument(shortened(flags[name], default=not name.startswith(SETTING)))
        formatter.end_section()
        count = sum(bool(action.option_strings) for action in self._actions)
        rows = {
            "--help-all": f"all {count} flags",
            "--help GROUP": "a group: " + ", ".join(self.topics()),
            "--help FLAG": f"one flag, such as {self.prog} --help "
            + self.essential[-1].removeprefix(SETTING).replace("_", "-"),
        }
        formatter.start_section("more help")
        for flag, text in rows.items():
            formatter.add_argument(argparse.Action([flag], "", nargs=0, help=text))
        formatter.end_section()
        examples = "".join(f"  {line}\n" for line in self.examples)
        return formatter.format_help() + (f"\nexamples:\n{examples}" if examples else "")

    def format_topic(self, name: str) -> str:
        """The flags of the group `name`, or the flag `name`; else exits with code 2."""
        word = name.lstrip("-").lower().replace("_", "-")
        groups = self.topics()
        formatter = self._get_formatter()
        if group := groups.get(word):
            formatter.start_section(str(group.title))
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
        elif action := self._option_string_actions.get(f"--{word}"):
            formatter.start_section(None)
            formatter.add_argument(action)
        else:
            flags = [flag.lstrip("-") for flag in self._option_string_actions]
            hint = nearest(word, [*groups, *flags])
            self.error(
                f"--help {printable(name)}: no group or flag is called so{hint}; "
                f"groups: {', '.join(groups)}"
            )
        formatter.end_section()
        return formatter.format_help()


def shortened(action: argparse.Action, *, default: bool) -> argparse.Action:
    """A flag with at most two names and the first sentence of its help, maybe with its default;
    values that fill a line are those of `--help FLAG`."""
    sentence, _, rest = str(action.help).partition(" (default")
    sentence = re.split(r"[.;] |\.$", sentence)[0]
    flags = sorted(action.option_strings, key=lambda flag: flag.startswith("--"))
    names = [*flags[:1], *(flag for flag in flags[1:2] if not flags[0].startswith("--"))]
    return argparse.Action(
        [", ".join(names)] if names else [],
        action.dest,
        nargs=action.nargs,
        choices=action.choices,
        metavar="NAME" if len(str(action.metavar)) > WIDEST else action.metavar,
        help=f"{sentence} (default{rest}" if default and rest else sentence,
    )


def add_fields(
    group: Any,
    kind: type,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    flags: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each field of a dataclass of settings, of its name unless `flags` has another;
    see `settings_from_args`."""
    for name, setting in settings_of(kind).items():
        if name not in without and (only is None or name in only):
            add_setting(group, dataclasses.replace(setting, name=(flags or {}).get(name, name)))


def add_network_options(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> Any:
    """Add the flags of InferenceConfig and --max-pixels; return their group."""
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
    given = _given(args, *kinds)
    configs = split_settings(given, "this command", *kinds)
    # of two with one name the first decides, as in split_settings
    checked = {name: value for one in configs[::-1] for name, value in vars(one).items()}
    checked = {name: checked[name] for name in given}
    search = search_from_args(args)
    return checked if search is None else {**checked, "search": search}


def options_of(args: argparse.Namespace, kind: type[T]) -> T:
    """The options of a command, a dataclass, from the flags of its fields."""
    options: T = split_settings(_given(args, kind), "this command", kind)[0]
    return options


def _given(args: argparse.Namespace, *kinds: type) -> dict[str, Any]:
    values = settings_from_args(args)
    return {name: values[name] for kind in kinds for name in settings_of(kind) if name in values}


def positive_int(word: str) -> int:
    """Parse an integer of at least 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)


def probability(word: str) -> float:
    """Parse a number in (0, 1]."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(word)) <= 1:
            return number
    raise argparse.ArgumentTypeError(f"{word!r} is not a number above 0 and at most 1")


def add_json_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", metavar="FILE", help=what)


def add_setting(group: Any, setting: Setting) -> None:
    """Add the flag of a setting; its value stays text and is checked like one from a file."""
    own = [f"--{setting.name.replace('_', '-')}"] if setting.properties.named else []
    flags = [*own, *setting.properties.aliases]
    if not flags:  # a setting of files only
        return
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": f"{SETTING}{setting.name}"}
    commas = " Separated by commas." if is_comma_separated(setting.kind) and setting.section else ""
    text = setting.help if setting.section else setting.help.removesuffix(".")
    options["help"] = f"{text}{commas}{default_text(setting)}".replace("%", "%%")
    if setting.kind in (bool, bool | None):
        action: Any = argparse.BooleanOptionalAction if setting.section else "store_true"
        group.add_argument(*flags, action=action, **options)
        return
    if not setting.section and is_comma_separated(setting.kind):
        options["action"] = "append"
    if len(choices := choices_of(setting.kind)) > 1:
        options["metavar"] = "{" + "|".join(choices) + "}"
    else:
        options["metavar"] = setting.name.split("_")[-1].upper()
    if count := value_count(setting.kind):
        options["nargs"] = count
    if setting.properties.alone:
        options |= {"nargs": "?", "const": setting.properties.alone}
    group.add_argument(*flags, **options)


def default_text(setting: Setting) -> str:
    if setting.name == "num_classes":
        return ""
    if setting.properties.decided_by == "preset":
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

    source = options_of(args, SourceConfig)
    split, task = getattr(args, "split", None), getattr(args, "task", None)
    return as_dataset_spec(args.data, settings, task=task, source=source, split=split)
