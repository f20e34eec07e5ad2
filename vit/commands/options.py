"""Flags that several commands share."""

import argparse


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """How a saved model is run: batch size, device, precision, threads."""
    # set first and suppressed below: the help then says in words what leaving them out means
    parser.set_defaults(batch_size=None, device=None, workers=None)
    group = parser.add_argument_group("how the network runs")
    group.add_argument(
        "-b",
        "--batch-size",
        type=whole_number,
        default=argparse.SUPPRESS,
        metavar="N",
        help="pictures in one pass through the network (default: 16 on a CPU, else 64)",
    )
    group.add_argument(
        "--device",
        default=argparse.SUPPRESS,
        metavar="D",
        help="cpu, cuda, cuda:N or mps (default: the best one here)",
    )
    group.add_argument(
        "--precision",
        choices=["auto", "fp32", "bf16", "fp16"],
        default="auto",
        help="arithmetic of the network; auto is bf16 where the hardware has it",
    )
    group.add_argument(
        "-j",
        "--workers",
        type=whole_number,
        default=argparse.SUPPRESS,
        metavar="N",
        help="threads that read pictures (default: one a core, at most 8)",
    )


def whole_number(word: str) -> int:
    """A number of at least 1, typed as a flag."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)
