"""`vit train DATA [settings]`: settings from a preset, a YAML file and flags -> a run folder."""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.commands.command_output import notify
from vit.commands.command_parser import SETTING, CommandParser, add_setting, settings_from_args
from vit.config import SECTIONS, Config
from vit.config.collect_settings import call_settings, collect_settings
from vit.config.data_config import BY_NUMBER
from vit.config.setting_layers import Settings, all_settings, checked, default_run_folder
from vit.errors import ConfigError
from vit.output.output_file import check_output, resolve_link
from vit.quick_imports import quick_imports
from vit.text import quoted

TITLES = {
    "training": "training",
    "finetune": "fine-tuning (the weights decide the network; settings have other defaults then)",
    "distillation": "distillation (learn from the answers of a trained classifier)",
    "model": "network (a preset gives what is not set here)",
    "decoder": "captions: the decoder and its words (with --task caption)",
    "pretraining": "pretraining (without labels: vit pretrain)",
    "data": "data",
    "augment": "augmentation",
    "run": "run (device, precision, checkpoints, tracking)",
}
"""Group of flags of each section; `--help NAME` takes a title up to a bracket or colon."""
ESSENTIAL = ("weights", "model", "image_size", "epochs", "batch_size", "lr", "balance")
"""Settings in the short help of every command that trains."""

FOLD_SCORES = ("kappa", "top1", "balanced_accuracy", "map", "cider", "bleu4", "loss")
"""Scores that are printed of a cross-validation; folds.json has all."""


def add_arguments(parser: CommandParser) -> None:
    """Add DATA, flags of the run folder, and a flag for every setting."""
    parser.essential = (
        *("data", "out", "setting_time", "resume", "overwrite", "config", "setting_task"),
        *(f"{SETTING}{name}" for name in (*ESSENTIAL, "folds")),
    )
    parser.examples = (
        "vit train photos/ --time 20m",
        "vit train photos/ --weights auto --time 20m",
        "vit train --resume --out runs/photos",
    )
    parser.usage = "vit train DATA [--config FILE] [--out RUN] [--resume] [settings...]"
    parser.add_argument(
        "data",
        nargs="?",
        metavar="DATA",
        help="a folder of images, a list of them or of captions (.csv, .jsonl, .xlsx), tar shards, "
        "hf:NAME, or a built-in set: digits, shapes",
    )
    add_run_flags(parser, default="runs/<name of DATA>")
    add_settings(parser)


def add_run_flags(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Add --config, and the flags of the run folder, which is `default` without --out."""
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--out", "--output", metavar="RUN", help=f"the run folder (default: {default})"
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


def add_settings(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Add a flag for every setting except DATA and those in `leave_out`, in groups by section."""
    for section in SECTIONS:
        group = parser.add_argument_group(TITLES[section])
        for setting in all_settings().values():
            if setting.section == section and setting.name not in ("data", *leave_out):
                add_setting(group, setting)


def run(args: argparse.Namespace) -> int:
    """Train; the exit code is 1 if images were left out, and that of an error otherwise."""
    began = time.monotonic()
    values = collect_settings(
        chosen_settings(args),
        config=args.config,
        out=args.out,
        resume=args.resume,
        notify=notify_on_main,
    )
    require_data(values, args, "run")
    return run_training(values, args, args.out, began=began)


def run_training(
    values: Settings, args: argparse.Namespace, out: Any, *, began: float, name: str = "vit train"
) -> int:
    """Train, or draw the first batch; `name` is that of the command."""
    if args.show_batch is not None:
        check_show_batch(args)
        from vit.training.show_batch import show_batch

        show_batch(values, resolve_link(args.show_batch))
        return 0
    if values.get("folds") is not None and values.get("fold") is None:
        record = cross_validate(values, out, resume=args.resume, overwrite=args.overwrite)
        if os.environ.get("RANK", "0") == "0":
            print(format_folds(record), flush=True)
        return int(bool(record["failed"]))
    with quick_imports():
        from vit.training.train import OuterCommand, train

    part_of = None if name == "vit train" else OuterCommand(name, Path(out))
    again = {"resume": args.resume, "overwrite": args.overwrite}
    result = train(values, out, began=began, part_of=part_of, **again)
    return int(bool(result.failed))


def chosen_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given on the command line, DATA among them."""
    flags = settings_from_args(args)
    return checked(flags if args.data is None else {**flags, "data": args.data})


def require_data(values: Mapping[str, Any], args: argparse.Namespace, kind: str) -> None:
    """Raise ConfigError if `values` name no data; `kind` is what --resume continues."""
    if values.get("data"):
        return
    order: tuple[str, ...] = values.get("order") or ()
    if len(order) == 1 and order != (BY_NUMBER,):  # no scale has one grade
        raise ConfigError(
            f"--order took {order[0]} for a grade, and DATA is missing: write DATA first, "
            f"vit train {quoted(order[0])} --order"
        )
    raise ConfigError(
        f"{args.out}: no {kind} to resume there; give the --out of one, or DATA"
        if args.resume and args.out
        else "DATA is missing: give a folder of images, a list, tar shards, a built-in set "
        f"(digits, shapes), or --resume with the --out of a {kind}"
    )


def notify_on_main(note: str) -> None:
    """`notify` in the main process of a launch."""
    if os.environ.get("RANK", "0") == "0":
        notify(note)


def check_show_batch(args: argparse.Namespace) -> None:
    """Check that the image can be written, before the data are opened."""
    for flag in ("out", "resume"):
        if getattr(args, flag):
            raise ConfigError(
                f"--show-batch trains nothing, so --{flag} has no meaning: leave one of them out"
            )
    from vit.data.contact_sheet import check_sheet_name

    check_sheet_name(args.show_batch)
    check_output(args.show_batch, overwrite=args.overwrite)


def cross_validate(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train once for each fold, and evaluate it on the images held out: `vit train --folds`.

        scores = vit.cross_validate("photos/", "runs/folds", folds=5)
        print(scores["mean"]["top1"], scores["interval"]["top1"])

    Args:
        config: DATA, a YAML file, settings by name or a Config, as for `vit.train`; `folds` is the
            number of folds.
        out: Folder of the run folders fold-1, fold-2 and so on; `runs/<name of the data>` if
            omitted.
        resume: Skip finished folds, and resume the one that is not.
        overwrite: Delete all existing runs of folds, once the first fold begins.
        settings: More settings by name, unless `config` is a Config.

    Returns:
        The content of OUT/folds.json: `scores` of each fold, their `mean` and `interval`; and
        `failed`, unreadable images with the reason. Of classes, OUT/rows.jsonl has a row for each
        image, and OUT/label_errors.csv the suspected labels. With pretrained weights, OUT/soup is
        the network of all folds, the mean of their weights.

    Raises:
        VitError: An error that the user can fix; the message has the remedy.
    """
    from vit.inference.fold_results import evaluate_fold, join_folds, save_fold_soup
    from vit.training.cross_validation import train_folds

    config = call_settings(config, settings, out=out, resume=resume, notify=notify_on_main)
    if config.get("folds") is None:
        raise ConfigError("folds is missing: give the number of folds, such as folds=5")
    record = train_folds(config, out, measure=evaluate_fold, resume=resume, overwrite=overwrite)
    if os.environ.get("RANK", "0") == "0":
        data = str(config.get("data"))
        folder = Path(out or default_run_folder(data))
        for line in join_folds(folder, record["folds"], data, config.get("labels")):
            notify(line)
        save_fold_soup(folder, record["folds"], notify)
    return record


def format_folds(record: Mapping[str, Any]) -> str:
    """Text of the scores of all folds, with mean and interval."""
    from vit.evaluation.metric_rows import METRICS

    rows = [(f"fold {fold}", scores) for fold, scores in record["scores"].items()]
    metrics = {name: METRICS[name] for name in FOLD_SCORES if name in record["mean"]}
    lines = ["         " + "".join(f"{metric.title:>20}" for metric in metrics.values())]
    for title, scores in [*rows, ("mean", record["mean"])]:
        cells = "".join(f"{metric.text(scores[name]):>20}" for name, metric in metrics.items())
        lines.append(f"{title:<9}{cells}")
    ends = [[*map(one.text, record["interval"][name] or ())] for name, one in metrics.items()]
    cells = "".join(f"{' to '.join(pair) or '-':>20}" for pair in ends)
    lines.append(f"{record['level']:<9.0%}" + cells)
    return "\n".join([*lines, f"({record['level']:.0%} interval: {record['method']})"])
