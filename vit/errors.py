"""What a user can mend, as exceptions whose message says what, where and the remedy in one line."""

import os
import shlex
import unicodedata

JOINERS = "\u200c\u200d"


class VitError(Exception):
    """Base of every error a user can mend; the command line prints it and exits with its code."""

    exit_code = 2
    everywhere = True
    """Whether all processes of a distributed run meet it, so that one may speak for all."""


class ConfigError(VitError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another one."""


class DataError(VitError, ValueError):
    """A data set cannot be used as it is."""


class WeightsError(VitError, ValueError):
    """A file of weights is damaged, or does not fit the network."""


class RunError(VitError):
    """A run folder is missing, taken, or cannot be written or resumed."""


class BadImage(VitError, ValueError):
    """One image cannot be read.

    Args:
        path: The file.
        reason: Why, in a few words, without the file's name.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{printable(self.path)}: {printable(self.reason)}"


def printable(name: object) -> str:
    """`name` on one line, safe on a terminal.

    Control characters, escape sequences, invisible and direction marks (Unicode category C), line
    separators and undecodable bytes become backslash escapes; everything else stays as it is, also
    the joiners that words of some scripts and emoji are made with.
    """
    text = os.fsdecode(name) if isinstance(name, bytes | os.PathLike) else str(name)
    return "".join(_escape(character) for character in text)


def quoted(path: object) -> str:
    """`path` as a shell takes it, for a command that somebody may copy."""
    return shlex.quote(printable(path))


def _escape(character: str) -> str:
    safe = unicodedata.category(character)[0] != "C" and character not in "\u2028\u2029"
    if safe or character in JOINERS:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
