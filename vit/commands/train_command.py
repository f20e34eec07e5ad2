"""`vit train DATA [settings]`: settings from a preset, a YAML file and flags -> a run folder."""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit.commands.command_options import add_setting, settings_from_args
from vit.commands.command_output import check_output, notify, resolve_link
from vit.commands.launcher import launch_if_requested
from vit.config import SECTIONS, Config
from vit.config.finetune_config import AUTO_WEIGHTS
from vit.config.parser import all_settings, checked, default_run_folder, make_config, read_settings
from vit.config.training_config import TIME_DECIDES
from vit.errors import ConfigError, RunError, printable

if TYPE_CHECKING:
    from vit.data.sources.open_dataset import Listing

TITLES = {
    "training": "training",
    "finetune": "fine-tuning (the weights decide the network; settings have other defaults then)",
    "model": "network (a preset gives what is not set here)",
    "decoder": "captions: the decoder and its words (with --task caption)",
    "data": "data",
    "augment": "augmentation",
    "run": "the run",
}


FOLDS_FILE = "folds.json"
SCORES = {
    "top1": "top-1",
    "balanced_accuracy": "balanced accuracy",
    "map": "mAP",
    "cider": "CIDEr",
    "bleu4": "BLEU-4",
    "loss": "loss",
}
"""What is printed of a cross-validation; folds.json has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """DATA, what happens to the run folder, and a flag for every setting."""
    parser.usage = "vit train DATA [--config FILE] [--out RUN] [--resume] [settings...]"
    parser.add_argument(
        "data",
        nargs="?",
        metavar="DATA",
        help="a folder of images, a list of them (.csv, .jsonl; of captions with --task caption), "
        "tar shards, hf:NAME, torchvision:NAME, or a built-in set: digits, shapes",
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
    parser.add_argument(
        "--show-batch",
        metavar="FILE",
        help="draw the first batch as the network will see it (.png, .jpg, .webp), and train "
        "nothing; --overwrite replaces FILE alone",
    )
    add_settings(parser)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting but DATA, in groups by section."""
    for section in SECTIONS:
        group = parser.add_argument_group(TITLES[section])
        for setting in all_settings().values():
            if setting.section == section and setting.name != "data":
                add_setting(group, setting)


def run(args: argparse.Namespace) -> int:
    """Train; the exit code is 1 where images were left out, or comes with the error."""
    began = time.monotonic()
    launch_if_requested()
    values, stored = gather(args)
    if not values.get("data"):
        raise ConfigError(
            f"{printable(args.out)}: no run to resume there; give the --out of one, or DATA"
            if args.resume and args.out
            else "DATA is missing: give a folder of images, a list, tar shards, a built-in set "
            "(digits, shapes), or --resume with the --out of a run"
        )
    given = checked(values)
    if args.show_batch is not None:
        check_show_batch(args)
    config, listing = (make_config(values), None) if stored else planned(given)
    if args.show_batch is not None:
        return show(args, config, [*given])
    if config.data.folds is not None and config.data.fold is None:
        return run_folds(config, args, [*given])
    from vit.training.train import train

    result = train(
        config,
        args.out,
        resume=args.resume,
        overwrite=args.overwrite,
        given=[*given],
        began=began,
        listing=listing,
    )
    return int(bool(result.failed))


def planned(given: Mapping[str, Any]) -> "tuple[Config, Listing | None]":
    """Settings as given, and what the plan says of the others where it has a say.

    Returns:
        The settings, and what the data hold, where they were listed for the plan.
    """
    from vit.training.plan import is_planned, plan_training, summary_lines

    if not is_planned(given):
        return make_config(given), None
    config, plan = plan_training(given)
    if os.environ.get("RANK", "0") == "0":
        for line in summary_lines(plan):
            notify(line)
    return config, plan.listing


def check_show_batch(args: argparse.Namespace) -> None:
    """Refuse a drawing that could not be written, before anything is looked at.

    Raises:
        VitError: It cannot be made or written, or a run was asked for too.
    """
    for flag in ("out", "resume"):
        if getattr(args, flag):
            raise ConfigError(
                f"--show-batch trains nothing, so --{flag} has no meaning: leave one of them out"
            )
    from vit.data.contact_sheet import sheet_format

    sheet_format(args.show_batch)
    check_output(args.show_batch, overwrite=args.overwrite)


def show(args: argparse.Namespace, config: Config, given: list[str]) -> int:
    """Draw the first batch; no run is begun, and none is touched.

    Raises:
        VitError: The drawing cannot be made.
    """
    from vit.training.show_batch import show_batch

    show_batch(config, resolve_link(args.show_batch), given=given)
    return 0


def run_folds(config: Config, args: argparse.Namespace, given: list[str]) -> int:
    """Train every fold, and print what they say together."""
    from vit.data.sources.dataset_spec import DatasetSpec
    from vit.inference.evaluate import evaluate
    from vit.training.cross_validation import train_folds

    asked, device = (
        dataclasses.replace(DatasetSpec.from_config(config.data), split="val"),
        config.run.device,
    )

    def measure(folder: Path) -> dict[str, Any]:
        """Scores of a fold on the images that it held out, as `vit evaluate` has them."""
        return evaluate(folder, asked, device=None if device == "auto" else device)

    record = train_folds(
        config,
        args.out,
        measure=measure,
        resume=args.resume,
        overwrite=args.overwrite,
        given=given,
    )
    if os.environ.get("RANK", "0") == "0":
        print(format_folds(record), flush=True)
    return int(bool(record["failed"]))


def format_folds(record: Mapping[str, Any]) -> str:
    """The scores of all folds for reading."""
    rows = [(f"fold {fold}", scores) for fold, scores in record["scores"].items()]
    names = [name for name in SCORES if name in record["mean"]]
    lines = ["         " + "".join(f"{SCORES[name]:>20}" for name in names)]
    for title, scores in [*rows, ("mean", record["mean"])]:
        lines.append(f"{title:<9}" + "".join(f"{scores[name]:>20.4f}" for name in names))
    ends = [record["interval"][name] for name in names]
    cells = "".join(f"{f'{low:.4f} to {high:.4f}':>20}" for low, high in ends)
    lines.append(f"{record['level']:<9.0%}" + cells)
    return "\n".join([*lines, f"({record['level']:.0%} interval: {record['method']})"])


def gather(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Settings as given, the flags over the file, and whether there is a file.

    A run that is resumed brings its own settings, so DATA and flags may be left out.
    """
    flags = settings_from_args(args)
    if args.data is not None:
        flags["data"] = args.data
    flags = checked(flags)
    source, resumed = args.config, False
    if source is None and args.resume and (args.out or args.data):
        folder = Path(args.out or default_run_folder(args.data))
        if (folder / FOLDS_FILE).is_file():
            settings = checked(read_fold_settings(folder / FOLDS_FILE))
            if flags.get("weights") == AUTO_WEIGHTS and settings.get("weights") is not None:
                del flags["weights"]
            return {**settings, **flags}, True
        stored = folder / "config.yaml"
        source, resumed = (stored, True) if stored.is_file() else (None, False)
    if source is None:
        return flags, False
    try:
        values = checked(read_settings(source))
    except ConfigError as error:
        where = printable(source)
        raise ConfigError(str(error) if where in str(error) else f"{where}: {error}") from None
    if resumed:
        flags.pop("time", None)  # what it decided stands in the run's settings
        if flags.get("weights") == AUTO_WEIGHTS and values.get("weights") is not None:
            del flags["weights"]
        return {**values, **flags}, True
    if "time" in flags and values.get("steps") is not None:  # which another time decided
        values = {name: value for name, value in values.items() if name not in TIME_DECIDES}
    return {**values, **scaled_warmup(values, flags), **flags}, True


def scaled_warmup(values: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, float]:
    """The warm-up of a file in fewer epochs that a flag chose: the same share of them, noted.

    Args:
        values: Settings of the file.
        flags: Those that were typed; a warm-up among them stays as it is.
    """
    warmup, epochs = values.get("warmup_epochs"), flags.get("epochs")
    of = values.get("epochs", all_settings()["epochs"].default)
    fixed = "warmup_epochs" in flags or values.get("steps") is not None
    if fixed or not warmup or epochs is None or not 0 < epochs < of:
        return {}
    shrunk = round(warmup * epochs / of, 4)
    if os.environ.get("RANK", "0") == "0":
        notify(
            f"note: warmup_epochs={shrunk:g} instead of {warmup:g}: the file has it for {of:,} "
            f"epochs, and --epochs is {epochs:,}"
        )
    return {"warmup_epochs": shrunk}


def read_fold_settings(path: Path) -> dict[str, Any]:
    """The settings that a cross-validation was begun with.

    Raises:
        RunError: Its record is damaged.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{printable(path)} is damaged ({printable(error)}); delete it") from None
