"""`vit evaluate`: measure a trained model on images with classes or captions."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from vit.commands.command_output import Progress, notify, print_result
from vit.commands.command_parser import (
    add_data_options,
    add_fields,
    add_json_option,
    add_network_options,
    add_search_options,
    checked_settings,
    data_files,
)
from vit.config import SourceConfig
from vit.config.inference_config import EvaluationConfig, InferenceConfig
from vit.evaluation.metric_rows import describe_new_sources, metric_of, metric_rows
from vit.output.output_file import check_outputs, open_output
from vit.quick_imports import quick_imports
from vit.text import percent, plural, printable

WEAKEST = 5
KINDS_OF_NODES = {"leaves": "leaves", "higher_nodes": "higher nodes", "unknown": "unknown"}
COLUMNS = {"average_precision": "AP", "precision": "precision", "recall": "recall", "f1": "f1"}
"""Titles of the scores of a class."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder, any other weights with a head (timm/NAME, hf/OWNER/NAME, ...), or a "
        "classifier's file of vit export (.onnx, .xml)",
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="a folder of labelled images, a list of them (.csv, .jsonl, .xlsx), or the name of a "
        "built-in set; for a captioner a list of captions, or a folder with one",
    )
    add_data_options(parser, trained=True)
    add_json_option(parser, "where all numbers are written as well; an older file is replaced")
    add_fields(parser, EvaluationConfig, without=("page",))
    parser.add_argument("--overwrite", action="store_true", help="replace an older file of --out")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="a page with all scores, of classifiers and of numbers; an older file is replaced",
    )
    add_search_options(parser)
    add_network_options(parser)


def run(args: argparse.Namespace) -> int:
    settings = checked_settings(args, EvaluationConfig, SourceConfig, InferenceConfig)
    outputs = {"--json": args.json, "--out": settings.get("out"), "--html": args.html}
    check_outputs(outputs, (args.model, *data_files(args)), overwrite=args.overwrite)

    with quick_imports():
        from vit.inference.evaluate import evaluate

    with Progress("vit evaluate") as progress:
        scores = evaluate(
            args.model,
            args.data,
            split=args.split,
            page=args.html is not None,
            notify=lambda note: notify(f"vit evaluate: {note}"),
            progress=progress,
            **settings,
        )

    def write() -> None:
        if args.html is not None:
            from vit.evaluation.classification_page import evaluation_page

            with open_output(args.html) as out:
                out.write(evaluation_page(args.model, args.data, scores))

    print_result(format_scores(scores), args.json, scores, write=write)
    failed = scores["failed"]
    for row in failed:
        notify(f"vit evaluate: {printable(row['image'])}: {printable(row['error'])}")
    if failed:
        total = scores["count"] + len(failed)
        notify(
            f"vit evaluate: {len(failed)} of {total} images failed and are left out of the numbers"
        )
    return int(bool(failed))


def format_scores(scores: Mapping[str, Any]) -> str:
    """Text of all metrics, of the weakest classes, and of examples of captions."""
    lines = [f"{'images':<18} {scores['count']}", *metric_lines(scores)]
    if "new_source" in scores:
        lines.append(describe_new_sources(scores["new_source"]))
    for name, found in scores.get("questions", {}).items():
        lines += ["", f"{printable(name)}, {plural(found['count'], 'image')}", *metric_lines(found)]
    lines += tree_lines(scores)
    if "per_class" in scores:
        lines += weakest_classes(scores["per_class"])
    for row in scores.get("examples", ()):
        lines += [
            *("", printable(row["image"])),
            f"  says       {printable(row['caption'])}",
            f"  reference  {printable(row['reference'])}",
        ]
    return "\n".join([*lines, *slice_lines(scores), *robustness_lines(scores)])


def metric_lines(scores: Mapping[str, Any]) -> list[str]:
    lines = []
    groups = f", of {plural(scores['groups'], 'group')}" if "groups" in scores else ""
    for row in metric_rows(scores):
        metric, notes = row.metric, row.metric.note.format(percent(scores.get("ece_chance")))
        if "questions" in scores and row.name == "mae":
            notes = "mean over the targets, in standard deviations of the training images"
        if row.interval:
            notes = f"95 % interval: {' to '.join(map(metric.text, row.interval))}{groups}"
        if metric.title:
            more = f"  ({notes})" if notes else ""
            lines.append(f"{metric.title:<18} {metric.text(row.value)}{more}")
    return lines


def tree_lines(scores: Mapping[str, Any]) -> list[str]:
    """The accuracy of each level of a tree, and the answers that are its nodes."""
    if "levels" not in scores:
        return []
    lines = [""]
    for row in scores["levels"]:
        interval = " to ".join(map(percent, row.get("interval", ())))
        nodes = f"{plural(row['nodes'], 'node')}; 95 % interval: {interval or '-'}"
        name = f"level {row['level']}"
        lines.append(f"{name:<18} {percent(row.get('accuracy'))}  ({nodes})")
    found = scores["answers"]
    interval = " to ".join(map(percent, found["precision_interval"] or ()))
    kinds = (f"{found[key]:.0%} {words}" for key, words in KINDS_OF_NODES.items())
    return [
        *lines,
        f"{'answers':<18} {percent(found['precision'])} right  (95 % interval: {interval or '-'})",
        f"{'':<18} {', '.join(kinds)} of the images",
        f"{'distance':<18} {found['distance']:.4f} edges of an answer from the class, "
        f"{found['class_distance']:.4f} of the best class",
    ]


def slice_lines(scores: Mapping[str, Any]) -> list[str]:
    """The slices that are less accurate than the rest."""
    rows = scores.get("slices", [])
    flagged = [row["sentence"] for row in rows if row["flagged"]]
    if not rows:
        return []
    number = f"{len(flagged) or 'none'} of {plural(len(rows), 'slice')}"
    head = f"{number} of the images is less accurate than the rest, beyond chance"
    if len(flagged) > 1:
        head = head.replace(" is ", " are ")
    if untested := sum(row["p_value"] is None for row in rows):
        head += f"; {untested} of fewer than 5 groups, or beside fewer, cannot be tested"
    return ["", f"{head} (--html FILE or --json FILE has all)", *(f"  {one}" for one in flagged)]


def robustness_lines(scores: Mapping[str, Any]) -> list[str]:
    """Table of the score on corrupted images."""
    found = scores.get("robustness")
    if found is None:
        return []
    title = metric_of(found["score"]).title
    table: dict[str, list[float | None]] = {}
    for row in found["corruptions"]:
        table.setdefault(row["corruption"], []).append(row[found["score"]])
    severities = "".join(f"{number:>9}" for number in range(1, 6))
    lines = ["", f"{f'{title} by severity':<18}{severities}"]
    for name, values in table.items():
        cells = "".join(f"{percent(value):>9}" for value in values)
        lines.append(f"  {name.replace('_', ' '):<16}{cells}")
    lines.append(f"mean {percent(found['mean'])}, of images as they are {percent(found['clean'])}")
    return lines


def weakest_classes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Table of the classes with the lowest average precision, else F1."""
    present = [row for row in rows if row["count"]]
    columns = [name for name in COLUMNS if name in rows[0]]
    worst = sorted(present, key=lambda row: row.get("average_precision", row["f1"]))[:WEAKEST]
    width = max([13, *(len(printable(row["label"])) for row in worst)])
    titles = "".join(f"{COLUMNS[name]:>11}" for name in columns)
    lines = ["", f"{'weakest classes':<{width + 2}}{'images':>8}{titles}"]
    for row in worst:
        cells = "".join(f"{row[name]:>11.2%}" for name in columns)
        lines.append(f"  {printable(row['label']):<{width}}{row['count']:>8}{cells}")
    if absent := len(rows) - len(present):
        lines.append(f"{absent} of the model's classes have no image here")
    return lines
