"""Argument parser of the commands: errors of one line, and a help of one screen.

    vit train --help        the essential flags, and the names of the groups
    vit train --help NAME   the flags of a group, or one flag
    vit train --help-all    every flag

A command without a list of essential flags shows every flag with `--help`.
"""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from vit.config.parser import nearest
from vit.text import printable

EXIT_USAGE = 2
SETTING = "setting_"
"""Prefix of settings in the namespace: commands have flags of the same names."""


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
        self.words: Sequence[str] = ()
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
        self.words = words
        # argparse ends an optional list of words at the first flag, even if it is still empty
        has_list = any(one.nargs == "*" and not one.option_strings for one in self._actions)
        parse = self.parse_known_intermixed_args if has_list else self.parse_known_args
        parsed, unknown = parse(words)
        if unknown:
            data = self._data_of(parsed)
            if data is not None and not unknown[0].startswith("-"):
                from vit.data.sources.dataset_spec import extra_arguments_message

                extra = [word for word in unknown if word[:1] != "-"]
                before = words[max(words.index(extra[0]) - 1, 0)]
                self.error(extra_arguments_message(data, extra, before))
            word = unknown[0].split("=")[0]
            hint = nearest(word, self._option_string_actions)
            self.error(f"{printable(unknown[0])} is not an argument{hint}")
        return parsed

    def _data_of(self, parsed: argparse.Namespace) -> str | None:
        """The value of DATA; None for commands without it."""
        actions = (one for one in self._actions if one.metavar == "DATA" and not one.option_strings)
        return next((getattr(parsed, one.dest) for one in actions), None)

    def error(self, message: str) -> NoReturn:
        line = " ".join(printable(message).split())
        names = (word for word in self.words if word.startswith("-") and os.path.lexists(word))
        if name := next(names, ""):
            line += f"; for the file or folder of this name, write ./{printable(name)}"
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
    """A flag with at most two names and the first sentence of its help, maybe with its default."""
    sentence, _, rest = str(action.help).partition(" (default")
    sentence = re.split(r"[.;] |\.$", sentence)[0]
    flags = sorted(action.option_strings, key=lambda flag: flag.startswith("--"))
    names = [*flags[:1], *(flag for flag in flags[1:2] if not flags[0].startswith("--"))]
    return argparse.Action(
        [", ".join(names)] if names else [],
        action.dest,
        nargs=action.nargs,
        choices=action.choices,
        metavar=action.metavar,
        help=f"{sentence} (default{rest}" if default and rest else sentence,
    )
