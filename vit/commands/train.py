"""`vit train DATA [settings]`: settings from a preset, a YAML file and flags -> a run folder."""

import argparse
import time
import typing
from pathlib import Path
from typing import Any, Literal

from vit.commands.launching import start_processes_if_asked
from vit.config import SECTIONS
from vit.errors import ConfigError, printable
from vit.presets import preset
from vit.settings import Setting, all_settings, checked, default_folder, make_config, read_settings

TITLES = {
    "training": "training",
    "finetune": "fine-tuning (the weights decide the network; settings have other defaults then)",
    "model": "network (a preset gives what is not set here)",
    "data": "data",
    "augment": "augmentation",
    "run": "the run",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """DATA, what happens to the run folder, and a flag for every setting."""
    parser.usage = "vit train DATA [--config FILE] [--out RUN] [--resume] [settings...]"
    parser.add_argument(
        "data", nargs="?", metavar="DATA", help="a folder of images, or a built-in set: digits"
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--out", "--output", metavar="RUN", help="the run folder; runs/<name of DATA> if left out"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --out from its last checkpoint"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete the run that is in --out first"
    )
    for section in SECTIONS:
        group = parser.add_argument_group(TITLES[section])
        for setting in all_settings().values():
            if setting.section == section and setting.name != "data":
                add_setting(group, setting)


def add_setting(group: Any, setting: Setting) -> None:
    """One flag: its text is checked with the settings of a file, so errors are the same."""
    flags = [f"--{setting.name.replace('_', '-')}", *setting.aliases]
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": f"set.{setting.name}"}
    options["help"] = f"{setting.help}{default_shown(setting)}".replace("%", "%%")
    if setting.kind in (bool, bool | None):
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        return
    if choices := choices_of(setting.kind):
        options["metavar"] = "{" + "|".join(choices) + "}"
    else:
        options["metavar"] = setting.name.split("_")[-1].upper()
    if count := numbers_taken(setting.kind):
        options["nargs"] = count
    group.add_argument(*flags, **options)


def default_shown(setting: Setting) -> str:
    """What --help says of the value where the flag is not given."""
    if setting.name == "num_classes":
        return ""
    if setting.name in preset(str(all_settings()["model"].default)):
        return " (default: the preset's)"
    if setting.default is None:
        return ""
    number = isinstance(setting.default, float)
    return f" (default: {setting.default:.4g})" if number else f" (default: {setting.default})"


def choices_of(kind: Any) -> tuple[str, ...]:
    """The words that a flag of this type takes; none where it takes any."""
    for option in (kind, *typing.get_args(kind)):
        if typing.get_origin(option) is Literal:
            return typing.get_args(option)
    return ()


def numbers_taken(kind: Any) -> int:
    """How many values a flag of this type takes; 0 for the ordinary one."""
    for option in (kind, *typing.get_args(kind)):
        if typing.get_origin(option) is tuple:
            return len(typing.get_args(option))
    return 0


def run(args: argparse.Namespace) -> int:
    """Train; the exit code is 1 where pictures were left out, or comes with the error."""
    began = time.monotonic()
    start_processes_if_asked()
    values = gather(args)
    config = make_config(values)
    if not config.data.data:
        raise ConfigError(
            "DATA is missing: give a folder of images, a built-in set (digits), or --resume with "
            "the --out of a run"
        )
    from vit.training.train import train

    given = checked(values)
    result = train(
        config,
        args.out,
        resume=args.resume,
        overwrite=args.overwrite,
        given=[*given],
        began=began,
    )
    return int(bool(result.failed))


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """Settings as given, the flags over the file.

    A run that is resumed brings its own settings, so DATA and flags may be left out.
    """
    flags = {key[4:]: value for key, value in vars(args).items() if key.startswith("set.")}
    if args.data is not None:
        flags["data"] = args.data
    flags = checked(flags)
    source = args.config
    if source is None and args.resume and (args.out or args.data):
        stored = Path(args.out or default_folder(args.data)) / "config.yaml"
        source = stored if stored.is_file() else None
    if source is None:
        return flags
    try:
        values = checked(read_settings(source))
    except ConfigError as error:
        where = printable(source)
        raise ConfigError(str(error) if where in str(error) else f"{where}: {error}") from None
    return {**values, **flags}
