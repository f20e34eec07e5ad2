"""`vit convert`: any source of weights becomes a folder that another library opens."""

import argparse
from pathlib import Path

from vit.commands.command_options import count
from vit.commands.command_output import notify
from vit.errors import ConfigError, printable


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
    parser.set_defaults(merge_tokens=None)
    parser.add_argument(
        "--merge-tokens",
        type=count,
        default=argparse.SUPPRESS,
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
    import vit.data.sources.builtin_datasets
    from vit.data.image_io import read_image
    from vit.weights.convert import check_parity, convert
    from vit.weights.hub import check_repository_name, push_to_hub
    from vit.weights.load_model import describe_source

    if args.push:
        check_repository_name(args.push)
    elif args.private:
        raise ConfigError("--private is of a repository: give --push OWNER/NAME as well")
    image = args.image or str(
        Path(vit.data.sources.builtin_datasets.__file__).parent / "digits.png"
    )
    read_image(image)  # before anything is written
    pretrained, lines = convert(
        args.source,
        args.to,
        args.out,
        overwrite=args.overwrite,
        merge_tokens=args.merge_tokens,
    )
    for line in [*describe_source(args.source, pretrained), *lines]:
        notify(line)
    for line in check_parity(pretrained, Path(args.out), args.to, image):
        notify(line)
    print(f"written: {printable(args.out)}")
    if args.push:
        print(f"pushed: {push_to_hub(Path(args.out), args.push, private=args.private)}")
    return 0
