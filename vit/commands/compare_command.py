"""`vit compare`: is one of two trained models better than the other, on the same images?"""

import argparse

from vit.commands.command_options import (
    add_json_option,
    add_list_options,
    add_network_options,
    dataset_spec,
    inference_settings,
)
from vit.commands.command_output import image_bar, notify, write_json
from vit.output.output_file import check_output, open_output, standard_output
from vit.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(html=None, tta=None, compile=False)
    for name, letter in (("run_a", "A"), ("run_b", "B")):
        parser.add_argument(
            name,
            metavar=f"RUN_{letter}",
            help=f"network {letter}: a run folder, or any other weights with a head",
        )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="labelled images that neither was trained on: a folder, a list (.csv, .jsonl), or the "
        "name of a built-in set",
    )
    parser.add_argument("--split", default="val", metavar="NAME", help="which part of DATA")
    add_list_options(parser, "that of the training, or the usual")
    add_json_option(parser, "where all numbers are written as well; an older file is replaced")
    parser.add_argument(
        "--html",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="a page with the images that only one of them gets right, which needs no network; an "
        "older file is replaced",
    )
    add_network_options(parser)


def run(args: argparse.Namespace) -> int:
    for path in (args.json, args.html):
        check_output(path, overwrite=True)

    from vit.inference.compare import compare

    settings = inference_settings(args)
    with image_bar() as progress:
        found = compare(
            args.run_a,
            args.run_b,
            dataset_spec(args, split=args.split),
            **settings,
            notify=lambda note: notify(f"vit compare: {note}"),
            progress=progress,
        )
    result = found.to_dict()
    write_json(args.json, result)
    if args.html is not None:
        with open_output(args.html) as out:
            out.write(found.page())
    lines = []
    for letter, key, name in zip("AB", "ab", (args.run_a, args.run_b), strict=True):
        low, high = result[key]["top1_interval"]
        lines.append(
            f"{letter}  {result[key]['top1']:.2%}  (95 % interval: {low:.2%} to {high:.2%})  "
            f"only {letter} right: {result[f'only_{key}_right']}  {printable(name)}"
        )
    print("\n".join([*lines, found.counts.sentence()]), file=standard_output(), flush=True)
    for row in found.failed:
        notify(f"vit compare: {printable(row['image'])}: {printable(row['error'])}")
    return int(bool(found.failed))
