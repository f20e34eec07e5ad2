"""Which flags of `vit predict` go together, and what follows from them."""

import argparse
import os
from pathlib import Path

from vit.commands.output import is_device
from vit.errors import ConfigError, VitError, printable

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
            "--temperature draws words by the number of a picture in one list: start one process"
        )


def same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
