"""`vit evaluate`: measure a trained model on images with classes or captions."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from vit.commands.command_options import (
    COMPILE_HELP,
    TTA_HELP,
    VIEWS,
    add_csv_options,
    add_data_options,
    add_json_option,
    add_network_options,
    add_search_options,
    data_files,
    dataset_spec,
    inference_settings,
    positive_int,
)
from vit.commands.command_output import Progress, notify, print_result
from vit.errors import ConfigError
from vit.output.output_file import check_outputs, open_output
from vit.quick_imports import quick_imports
from vit.text import percent, plural, printable

WEAKEST = 5
COLUMNS = {"precision": "precision", "recall": "recall", "f1": "f1"}


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
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="a row for each image, .jsonl, .csv or .xlsx: image, the cells of a list, label, its "
        "score, predictions; with several labels an image, its true labels and those above their "
        "thresholds",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an older file of --out")
    parser.add_argument(
        "--top-k",
        type=positive_int,
        metavar="K",
        help="predicted classes in a row of --out (default: 5; of a multi-label network all above "
        "their thresholds)",
    )
    parser.add_argument(
        "--all-scores",
        action="store_true",
        help="the score of every class in a row of --out, in columns class_score_NAME",
    )
    add_csv_options(parser)
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="a page with all numbers, classifiers only; an older file is replaced",
    )
    parser.add_argument(
        "--slice",
        metavar="COLUMN",
        action="append",
        default=[],
        help="accuracy by the values of a column of a list too; may be repeated (always: by image "
        "size, aspect, brightness, sharpness, file type, frequency of the class, folder)",
    )
    parser.add_argument(
        "--corruptions",
        action="store_true",
        help="measure images with noise, blur, JPEG artefacts, other brightness and contrast, and "
        "rotated ones as well, each in five severities: 30 more passes over the images",
    )
    add_search_options(parser)
    add_network_options(parser)
    parser.add_argument("--tta", choices=VIEWS, help=TTA_HELP)
    parser.add_argument("--compile", action="store_true", help=COMPILE_HELP)


def run(args: argparse.Namespace) -> int:
    outputs = {"--json": args.json, "--out": args.out, "--html": args.html}
    check_outputs(outputs, (args.model, *data_files(args)), overwrite=args.overwrite)
    if args.top_k is not None and args.out is None:
        raise ConfigError("--top-k is the number of classes in a row: give --out FILE as well")
    if args.all_scores and args.out is None:
        raise ConfigError("--all-scores are columns of the rows: give --out FILE as well")

    with quick_imports():
        from vit.inference.evaluate import evaluate

    with Progress("vit evaluate") as progress:
        scores = evaluate(
            args.model,
            dataset_spec(args),
            **inference_settings(args),
            out=args.out,
            top_k=args.top_k,
            all_scores=args.all_scores,
            csv_separator=args.csv_separator,
            csv_digits=args.csv_digits,
            slice=args.slice,
            corruptions=args.corruptions,
            page=args.html is not None,
            notify=lambda note: notify(f"vit evaluate: {note}"),
            progress=progress,
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


def format_scores(scores: dict[str, Any]) -> str:
    """Text of the scores of captions, of classes, or of both."""
    return "\n".join([_task_summary(scores), *slice_lines(scores), *robustness_lines(scores)])


def _task_summary(scores: dict[str, Any]) -> str:
    if "map" in scores:
        return multilabel_summary(scores)
    if "bleu4" not in scores:
        return class_summary(scores) if "top1" in scores else plain_summary(scores)
    captions = caption_summary(scores)
    if "top1" not in scores:
        return captions
    return captions + "\n\n" + class_summary({**scores, "loss": scores["class_loss"]})


def plain_summary(scores: dict[str, Any]) -> str:
    """The numbers of another task: each score that is one."""
    numbers = {name: value for name, value in scores.items() if isinstance(value, int | float)}
    return "\n".join(f"{name:<18} {value:.6g}" for name, value in numbers.items())


def caption_summary(scores: dict[str, Any]) -> str:
    """Text of the scores of captions, with examples."""
    bleu = "  ".join(f"{scores[f'bleu{order}']:.2%}" for order in range(1, 5))
    lines = [
        f"images             {scores['count']}",
        f"loss a token       {scores['loss']:.4f}",
        f"of other images  {scores['loss_shuffled']:.4f}  (the same captions, shuffled)",
        f"BLEU-1 to -4       {bleu}",
        f"ROUGE-L            {scores['rouge_l']:.2%}",
        f"CIDEr-D            {scores['cider']:.4f}  (of at most 10)",
        f"chrF               {scores['chrf']:.2%}",
        f"exact              {scores['exact']:.2%}",
        f"distinct           {scores['distinct']:.2%}  (different captions)",
        "",
        "examples",
    ]
    for row in scores["examples"]:
        lines += [
            f"  {printable(row['image'])}",
            f"    says       {printable(row['caption'])}",
            f"    reference  {printable(row['reference'])}",
        ]
    return "\n".join(lines)


def multilabel_summary(scores: dict[str, Any]) -> str:
    """Text of the scores of a multi-label network, with the classes of lowest precision last."""
    interval = scores["map_interval"]
    between = ""
    if interval:
        between = f"  (95 % interval: {interval[0]:.2%} to {interval[1]:.2%}{of_groups(scores)})"
    lines = [
        f"images             {scores['count']}",
        f"mAP                {percent(scores['map'])}{between}",
        f"macro F1           {percent(scores['macro_f1'])}  (each class from its threshold on)",
        f"micro F1           {scores['micro_f1']:.2%}",
        f"all classes right  {scores['subset_accuracy']:.2%}",
        f"wrong decisions    {scores['hamming']:.2%}",
        f"loss               {scores['loss']:.4f}",
        f"calibration error  {scores['ece']:.2%}  (mean gap between probability and share of yes; "
        f"{scores['ece_chance']:.2%} by chance)",
        f"Brier score        {scores['brier']:.4f}",
    ]
    columns = {"AP": "average_precision", **COLUMNS}
    return "\n".join([*lines, *weakest_classes(scores["per_class"], columns)])


def of_groups(scores: Mapping[str, Any]) -> str:
    """What an interval takes as independent, if that is not the images."""
    return f", of {plural(scores['groups'], 'group')}" if "groups" in scores else ""


def class_summary(scores: dict[str, Any]) -> str:
    """Text of the scores of a classifier, with the classes of lowest F1 last."""
    low, high = scores["top1_interval"]
    lines = [
        f"images             {scores['count']}",
        f"top-1              {scores['top1']:.2%}  (95 % interval: {low:.2%} to {high:.2%}"
        f"{of_groups(scores)})",
        f"top-5              {scores['top5']:.2%}",
        f"balanced accuracy  {scores['balanced_accuracy']:.2%}",
        f"macro F1           {scores['macro_f1']:.2%}",
        f"loss               {scores['loss']:.4f}",
        f"calibration error  {scores['ece']:.2%}  (mean gap between confidence and accuracy; "
        f"{scores['ece_chance']:.2%} by chance)",
        f"Brier score        {scores['brier']:.4f}",
    ]
    return "\n".join([*lines, *weakest_classes(scores["per_class"], COLUMNS, by="f1")])


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


def weakest_classes(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, by: str = "average_precision"
) -> list[str]:
    """Table of the classes with the lowest score `by`; `columns` maps titles to scores."""
    present = [row for row in rows if row["count"]]
    worst = sorted(present, key=lambda row: row[by])[:WEAKEST]
    width = max([13, *(len(printable(row["label"])) for row in worst)])
    titles = "".join(f"{title:>11}" for title in columns)
    lines = ["", f"{'weakest classes':<{width + 2}}{'images':>8}{titles}"]
    for row in worst:
        cells = "".join(f"{row[name]:>11.2%}" for name in columns.values())
        lines.append(f"  {printable(row['label']):<{width}}{row['count']:>8}{cells}")
    if absent := len(rows) - len(present):
        lines.append(f"{absent} of the model's classes have no image here")
    return lines
