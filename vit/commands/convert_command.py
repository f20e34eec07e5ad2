"""`vit convert`: any source of weights becomes a folder that another library opens."""

import argparse
from dataclasses import dataclass

from vit.commands.command_output import notify
from vit.commands.command_parser import add_fields, options_of
from vit.config.settings import Section, setting
from vit.text import printable


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of `vit convert`."""

    overwrite: bool = False
    """Replace FOLDER where it exists."""
    merge_tokens: int | None = setting(None, least=0)
    """0 leaves out the merging that SOURCE was trained with, which no other library has."""
    image: str | None = None
    """Image on which both libraries are compared (default: the sheet of digits)."""
    push: str | None = None
    """OWNER/NAME: upload FOLDER to the Hugging Face hub as well."""
    private: bool = False
    """Make a new repository of --push private."""


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
    add_fields(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = options_of(args, Options)

    from vit.weights.convert import convert_model

    url = convert_model(args.source, args.to, args.out, notify=notify, **vars(options))
    print(f"written: {printable(args.out)}")
    if url is not None:
        print(f"pushed: {url}")
    return 0
