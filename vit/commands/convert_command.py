"""`vit convert`: any source of weights becomes a folder that another library opens."""

import argparse

from vit.commands.command_options import count
from vit.commands.command_output import notify
from vit.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a run folder, timm/NAME, hf/OWNER/NAME, a folder or file of any ViT library",
    )
    parser.add_argument(
        "--to", required=True, choices=["timm", "huggingface"], help="whose folder it becomes"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace FOLDER where it exists")
    parser.add_argument(
        "--merge-tokens",
        type=count,
        metavar="N",
        help="0 leaves out the merging that SOURCE was trained with, which no other library has",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        help="image on which both libraries are compared (default: the sheet of digits)",
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="upload FOLDER to the Hugging Face hub as well"
    )
    parser.add_argument(
        "--private", action="store_true", help="make a new repository of --push private"
    )


def run(args: argparse.Namespace) -> int:
    from vit.weights.convert import convert_model

    url = convert_model(
        args.source,
        args.to,
        args.out,
        overwrite=args.overwrite,
        merge_tokens=args.merge_tokens,
        image=args.image,
        push=args.push,
        private=args.private,
        notify=notify,
    )
    print(f"written: {printable(args.out)}")
    if url is not None:
        print(f"pushed: {url}")
    return 0
