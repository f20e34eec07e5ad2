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
from vit.output.output_file import check_outputs, open_output
from vit.quick_imports import quick_imports
from vit.text import percent, plural, printable

WEAKEST = 5
COLUMNS = ("precision", "recall", "f1")
TITLES = {"average_precision": "AP"}


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
        help="a page with all numbers, classifiers only; an older file is replaced",
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
            from vit.evaluation.classification_report import evaluation_page

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


# title, key of the score, format (% also of none), and what follows it
CAPTION_ROWS = (
    ("loss a token", "loss", ".4f", ""),
    ("of other images", "loss_shuffled", ".4f", "  (the same captions, shuffled)"),
    *((f"BLEU-{order}", f"bleu{order}", "%", "") for order in range(1, 5)),
    ("ROUGE-L", "rouge_l", "%", ""),
    ("CIDEr-D", "cider", ".4f", "  (of at most 10)"),
    ("chrF", "chrf", "%", ""),
    ("exact", "exact", "%", ""),
    ("distinct", "distinct", "%", "  (different captions)"),
)
CLASS_ROWS = (
    ("top-5", "top5", "%", ""),
    ("balanced accuracy", "balanced_accuracy", "%", ""),
    ("macro F1", "macro_f1", "%", ""),
    ("loss", "loss", ".4f", ""),
    ("calibration error", "ece", "%", "  (mean gap between confidence and accuracy; {} by chance)"),
    ("Brier score", "brier", ".4f", ""),
)
MULTILABEL_ROWS = (
    ("macro F1", "macro_f1", "%", "  (each class from its threshold on)"),
    ("micro F1", "micro_f1", "%", ""),
    ("all classes right", "subset_accuracy", "%", ""),
    ("wrong decisions", "hamming", "%", ""),
    ("loss", "loss", ".4f", ""),
    (
        *("calibration error", "ece", "%"),
        "  (mean gap between probability and share of yes; {} by chance)",
    ),
    ("Brier score", "brier", ".4f", ""),
)


def format_scores(scores: dict[str, Any]) -> str:
    """Text of the scores of captions, of classes, or of both."""
    if "map" in scores:
        lines = class_lines(scores, "mAP", "map", MULTILABEL_ROWS)
    elif "bleu4" in scores:
        lines = [f"{'images':<18} {scores['count']}", *score_lines(scores, CAPTION_ROWS)]
        lines += ["", "examples"]
        for row in scores["examples"]:
            lines += [
                f"  {printable(row['image'])}",
                f"    says       {printable(row['caption'])}",
                f"    reference  {printable(row['reference'])}",
            ]
        if "top1" in scores:
            classes = {**scores, "loss": scores["class_loss"]}
            lines += ["", *class_lines(classes, "top-1", "top1", CLASS_ROWS)]
    elif "top1" in scores:
        lines = class_lines(scores, "top-1", "top1", CLASS_ROWS)
    else:  # of another task
        numbers = {name: value for name, value in scores.items() if isinstance(value, int | float)}
        lines = [f"{name:<18} {value:.6g}" for name, value in numbers.items()]
    return "\n".join([*lines, *slice_lines(scores), *robustness_lines(scores)])


def score_lines(scores: Mapping[str, Any], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each of the `rows` above."""
    lines = []
    for title, key, form, more in rows:
        value = percent(scores[key]) if form == "%" else f"{scores[key]:{form}}"
        lines.append(f"{title:<18} {value}{more.format(percent(scores.get('ece_chance')))}")
    return lines


def class_lines(
    scores: Mapping[str, Any], title: str, score: str, rows: Sequence[tuple[str, ...]]
) -> list[str]:
    """The score that ranks networks with its interval, the `rows`, and the weakest classes."""
    between = ""
    if interval := scores[f"{score}_interval"]:
        low, high = interval
        groups = f", of {plural(scores['groups'], 'group')}" if "groups" in scores else ""
        between = f"  (95 % interval: {low:.2%} to {high:.2%}{groups})"
    columns = ("average_precision", *COLUMNS) if score == "map" else COLUMNS
    return [
        f"{'images':<18} {scores['count']}",
        f"{title:<18} {percent(scores[score])}{between}",
        *score_lines(scores, rows),
        *weakest_classes(scores["per_class"], columns),
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
    from vit.evaluation.charts import SCORES

    title = SCORES[found["score"]]
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


def weakest_classes(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """Table of the classes with the lowest average precision, else F1."""
    present = [row for row in rows if row["count"]]
    by = columns[0] if columns[0] not in COLUMNS else "f1"
    worst = sorted(present, key=lambda row: row[by])[:WEAKEST]
    width = max([13, *(len(printable(row["label"])) for row in worst)])
    titles = "".join(f"{TITLES.get(name, name):>11}" for name in columns)
    lines = ["", f"{'weakest classes':<{width + 2}}{'images':>8}{titles}"]
    for row in worst:
        cells = "".join(f"{row[name]:>11.2%}" for name in columns)
        lines.append(f"  {printable(row['label']):<{width}}{row['count']:>8}{cells}")
    if absent := len(rows) - len(present):
        lines.append(f"{absent} of the model's classes have no image here")
    return lines
