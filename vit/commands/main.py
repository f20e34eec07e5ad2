"""`vit COMMAND ...`: runs a command, and prints errors that users can fix as one line."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vit.config.parser import nearest
from vit.errors import VitError
from vit.text import printable

# command -> what it does; each is a module of vit/commands with add_arguments() and run()
COMMANDS = {
    "train": "train a Vision Transformer on a folder of images, or a list of captions",
    "plan": "show the settings that vit train would choose for a data set, each with its reason",
    "tune": "search the settings that matter, from the plan on, and train the best of them",
    "predict": "label images, or write captions of them, with a trained model",
    "evaluate": "measure a trained model on labelled images, or on images with captions",
    "check": "find problems of a dataset: broken files, duplicates, leaks, suspicious labels",
    "convert": "turn any weights into a folder of timm or Hugging Face",
    "export": "turn a trained network into an ONNX file, which runs without torch",
    "verify": "compare an exported file and the predictor with the network, on the same images",
    "data": "write images of any source as a folder or as tar shards",
    "models": "list the networks that can be built or loaded by name, and their options",
    "summary": "show a network's parts with shapes, parameters, FLOPs and memory",
}

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Prints errors as one line, and suggests the nearest flag for an unknown one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse `words`; unknown arguments exit with code 2."""
        # argparse ends an optional list of words at the first flag, even if it is still empty
        has_list = any(one.nargs == "*" and not one.option_strings for one in self._actions)
        parse = self.parse_known_intermixed_args if has_list else self.parse_known_args
        parsed, unknown = parse(words)
        if unknown:
            data = self._data_of(parsed)
            if data is not None and not unknown[0].startswith("-"):
                from vit.data.sources.input_hints import extra_arguments_message

                self.error(
                    extra_arguments_message(data, [word for word in unknown if word[:1] != "-"])
                )
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
        self.exit(EXIT_USAGE, f"{self.prog}: {line} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        from vit.version import __version__

        print(f"vit {__version__}")
        return 0
    if words[0] not in COMMANDS:
        hint = nearest(words[0], COMMANDS)
        print(
            f"vit: {printable(words[0])} is not a command{hint} (see vit --help)", file=sys.stderr
        )
        return EXIT_USAGE
    return run_command(words[0], words[1:])


def console(*first: str) -> None:
    """Entry point of a process: run `vit FIRST...` with the arguments of its command line."""
    try:
        code = main([*first, *sys.argv[1:]])
        sys.stdout.flush()
    except BrokenPipeError:
        code = _discard_stdout()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _discard_stdout() -> int:
    """Redirect stdout after a broken pipe, so that Python's final flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def run_command(name: str, words: list[str]) -> int:
    """Parse the arguments of one command and run it."""
    command = importlib.import_module(f"vit.commands.{name}_command")
    parser = Parser(prog=f"vit {name}", description=sentence(COMMANDS[name]))
    try:
        command.add_arguments(parser)
        code: int = command.run(parser.parse(words))
    except SystemExit as stop:
        return int(stop.code or 0)
    except VitError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not error.on_all_processes:
            where = "" if rank == "0" else f" (process {rank})"
            print(f"vit {name}{where}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return _discard_stdout()
    except KeyboardInterrupt:
        print(f"vit {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def sentence(line: str) -> str:
    """`line` with a capital and a full stop."""
    return f"{line[0].upper()}{line[1:]}."


def usage() -> str:
    """The help of `vit`: every command with its description."""
    rows = "\n".join(f"  {name:<10} {line}" for name, line in COMMANDS.items())
    return (
        "usage: vit COMMAND [arguments]\n\n"
        "From a folder of images to a trusted Vision Transformer.\n\n"
        f"{rows}\n\n"
        "`vit COMMAND --help` explains one; `vit --version` prints the version."
    )
