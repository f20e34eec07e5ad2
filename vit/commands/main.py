"""`vit COMMAND ...`: runs a command, and prints errors that users can fix as one line."""

import errno
import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vit.commands.command_parser import EXIT_USAGE, CommandParser
from vit.errors import DISK_FULL, REFUSED_PATH, VitError
from vit.process_resources import keep_freed_memory, limit_active_waiting
from vit.text import nearest, printable

# command -> what it does; each is a module of vit/commands with add_arguments() and run()
COMMANDS = {
    "demo": "train on the handwritten digits that come with the package, and label some",
    "train": "train a Vision Transformer on a folder of images, or a list of captions",
    "plan": "show the settings that vit train would choose for a data set, each with its reason",
    "tune": "search the settings that matter, from the plan on, and train the best of them",
    "pretrain": "learn from images without labels, for a training with few of them",
    "suggest": "name the images that are worth labelling first, as a list to fill in",
    "predict": "label images, or write captions of them, with a trained model",
    "evaluate": "measure a trained model on labelled images, or on images with captions",
    "report": "write the report of a finished run again",
    "calibrate": "measure how far the scores of a trained model can be trusted, and store it",
    "check": "find problems of a dataset: broken files, duplicates, leaks, suspicious labels",
    "compare": "show whether one of two or more trained models is better, on the same images",
    "runs": "list all runs below a folder in one table, with the settings in which they differ",
    "serve": "answer predictions over HTTP, and show a page for trying a model",
    "drift": "show whether images of the field have become different from the calibration's",
    "convert": "turn any weights into a folder of timm or Hugging Face",
    "export": "turn a trained network into an ONNX file, which runs without torch",
    "verify": "compare an exported file and the predictor with the network, on the same images",
    "data": "write images of any source as a folder or as tar shards",
    "models": "list the networks that can be built or loaded by name",
    "summary": "show a network's parts with shapes, parameters, FLOPs and memory",
}
DISTRIBUTED = ("train", "tune", "pretrain", "predict")
"""Commands that several processes run together."""

EXIT_INTERRUPTED = 130
CLOSED_PIPE = (errno.EPIPE, errno.EINVAL) if os.name == "nt" else (errno.EPIPE,)
"""Numbers of an OSError where the output has lost its reader."""


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


def refuse_other_distribution(folder: Path) -> None:
    """End the process where the distribution `vit`, another project, is in `folder` too."""
    for other in folder.glob("vit-*.dist-info"):
        print(
            f"vit: {other.stem} is another project, whose files replace some of this one in "
            f"{folder}: pip uninstall -y vit vit-toolkit, then pip install vit-toolkit",
            file=sys.stderr,
        )
        sys.exit(EXIT_USAGE)


def console(*first: str) -> None:
    """Entry point of a process: run `vit FIRST...` with the arguments of its command line."""
    # in another locale names of files and classes would differ from those that runs have stored
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)
    if os.name == "nt":  # a pipe or a file would get the code page of the system
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    refuse_other_distribution(Path(__file__).parents[2])
    words = [*first, *sys.argv[1:]]
    limit_active_waiting()
    if words[:1] != ["serve"]:  # whose memory has to stay small for weeks
        keep_freed_memory()
    try:
        code = main(words)
        sys.stdout.flush()
    except OSError as error:
        code = _end_output("vit", error)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if "triton" not in sys.modules:  # which would report every object that is left
        gc.freeze()  # else Python searches all objects of torch for cycles before it exits
    sys.exit(code)


def _end_output(name: str, error: OSError) -> int:
    """Return the exit code where the output has lost its reader, or is full, or a path is refused.

    Standard output that cannot be flushed is redirected, else Python's final flush fails too.
    """
    if error.errno in REFUSED_PATH and error.filename is not None:
        print(f"{name}: {printable(error.filename)}: {error.strerror}", file=sys.stderr)
        return VitError.exit_code
    closed = error.errno in CLOSED_PIPE
    if not closed:
        if error.errno not in DISK_FULL:
            raise error
        print(f"{name}: the output could not be written: {error.strerror}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if closed else VitError.exit_code


def run_command(name: str, words: list[str]) -> int:
    command = importlib.import_module(f"vit.commands.{name}_command")
    parser = CommandParser(prog=f"vit {name}", description=sentence(COMMANDS[name]))
    try:
        command.add_arguments(parser)
        args = parser.parse(words)
        if getattr(args, "max_pixels", None):
            importlib.import_module("vit.data.image_io").set_max_pixels(args.max_pixels)
        if name in DISTRIBUTED:
            launch_if_requested()
        code: int = command.run(args)
    except SystemExit as stop:
        return int(stop.code or 0)
    except VitError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not error.on_all_processes:
            where = "" if rank == "0" else f" (process {rank})"
            print(f"vit {name}{where}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except UnicodeEncodeError as error:
        near = printable(error.object[max(error.start - 20, 0) : error.end + 20])
        print(f"vit {name}: a name is not UTF-8, rename it: ...{near}...", file=sys.stderr)
        return VitError.exit_code
    except OSError as error:
        return _end_output(f"vit {name}", error)
    except KeyboardInterrupt:
        print(f"vit {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def requested_processes(environment: Mapping[str, str], parent: Sequence[str]) -> int:
    """Number of processes requested from accelerate's launcher, if it started a single one.

    The launcher marks CPU runs, and sets the address of the main process for several only.
    """
    marked = environment.get("ACCELERATE_USE_CPU") == "True" and "MASTER_ADDR" in environment
    if not marked or "WORLD_SIZE" in environment or "accelerate" not in " ".join(parent):
        return 1
    for word, following in zip(parent, [*parent[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in ("--num_processes", "--num-processes"):
            number = value or following
            return int(number) if number.isdecimal() else 1
    return 1


def launch_if_requested() -> None:
    """Replace this process by torch's launcher if accelerate's should start several on CPUs."""
    if "ACCELERATE_USE_CPU" not in os.environ or "MASTER_ADDR" not in os.environ:
        return
    import psutil  # accelerate brings it

    parent = psutil.Process().parent()
    count = requested_processes(os.environ, parent.cmdline() if parent else [])
    if count == 1:
        return
    print(f"starting {count} processes with torch.distributed.run", file=sys.stderr, flush=True)
    script = Path(sys.argv[0])
    # by its path: `-m` would let modules in the current folder stand in for installed ones
    program = ["-m", "vit"] if script.name == "__main__.py" else [str(script)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(count), *program, *sys.argv[1:]]
    os.execv(sys.executable, launcher)


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
        "`vit COMMAND --help` explains one, and `vit COMMAND --help-all` every flag of it; "
        "`vit --version`\nprints the version."
    )
