"""`vit summary MODEL`: the parts of a network, with shapes, parameters, FLOPs and memory."""

import argparse
import dataclasses
import re
import typing
from collections.abc import Sequence
from pathlib import Path

from vit.commands.command_options import add_setting, positive_int, settings_from_args
from vit.commands.command_output import check_output, notify, open_output
from vit.config import ModelConfig
from vit.config.parser import all_settings, checked, make_config
from vit.config.presets import PRESETS
from vit.errors import ConfigError, printable
from vit.text import format_bytes, format_count

if typing.TYPE_CHECKING:
    from vit.evaluation.model_summary import Cost, Memory, Part

HEADER = ("part", "made of", "output", "parameters", "share", "FLOPs", "share")
NOTE = (
    "FLOPs: of one image, forward; products of matrices and attention, 2 for each multiply-add "
    "(papers often count 1)."
)
# Numbers a tensor may have: more cannot be counted in 64 bits of bytes.
MOST_NUMBERS = 2**60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "vit summary MODEL [-b N] [--json FILE] [settings of the network...]"
    parser.set_defaults(json=None)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a preset (`vit models`), a run folder, or other weights that are on this disk",
    )
    parser.add_argument(
        "-b",
        "--batch-size",
        type=positive_int,
        default=all_settings()["batch_size"].default,
        metavar="N",
        help="images of the training step whose memory is estimated (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="write every part and all numbers here as well; - for standard output, instead",
    )
    group = parser.add_argument_group("network (MODEL gives what is not set here)")
    for setting in all_settings().values():
        if setting.section == "model":
            add_setting(group, setting)


def run(args: argparse.Namespace) -> int:
    to_file = args.json not in (None, "-")
    if to_file:
        check_output(args.json, overwrite=True)
    config = described(args.model, checked(settings_from_args(args)))
    check_countable(config, args.batch_size)
    if (Path(args.model) / "tokenizer.json").is_file():
        notify("vit summary: this is the encoder alone; the decoder of its captions is not counted")

    from vit.evaluation.model_summary import cost_of
    from vit.output.prediction_results import to_json

    cost = cost_of(config, batch_size=args.batch_size)
    if args.json is not None:
        content = {
            "model": args.model,
            "settings": dataclasses.asdict(config),
            **dataclasses.asdict(cost),
        }
        with open_output(args.json if to_file else None) as out:
            out.write(to_json(content, indent=2) + "\n")
    if args.json != "-":
        with open_output(None) as out:
            out.write("\n".join(page(printable(args.model), config, cost)) + "\n")
    return 0


def described(model: str, settings: dict[str, object]) -> ModelConfig:
    """The network called `model`, with `settings` in place of its own.

    Raises:
        VitError: There is no such preset, folder or file, or the settings do not fit.
    """
    remote = re.match(r"(~|\.|local-dir:|hf-hub:|hf_hub:)", model.lower())
    if model in PRESETS or not (remote or "/" in model or there(model)):
        return make_config({**settings, "model": model}).model
    from vit.weights.load_model import read_source_config

    return dataclasses.replace(read_source_config(model), **settings)  # type: ignore[arg-type]


def there(path: str) -> bool:
    """Whether anything on this disk has this name."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def check_countable(config: ModelConfig, batch_size: int) -> None:
    """Refuse sizes beyond every computer.

    Raises:
        ConfigError: A tensor would have more numbers than can be counted.
    """
    rows, cols = config.grid
    tokens = rows * cols + config.num_prefix_tokens
    widest = max(config.dim, config.feedforward_dim, config.patch_size**2 * config.channels)
    numbers = max(
        batch_size * tokens * max(3 * widest, config.num_heads * tokens),
        widest * max(3 * widest, config.num_classes),
    )
    if numbers > MOST_NUMBERS:
        raise ConfigError(
            f"a tensor of this network has about {numbers:.0e} numbers for a batch of "
            f"{batch_size}; choose smaller sizes"
        )


def page(name: str, config: ModelConfig, cost: "Cost") -> list[str]:
    """The lines for people."""
    size = f"{config.channels} x {config.image_size} x {config.image_size}"
    head = (
        f"{name}: {format_count(cost.parameters, '.2f')} parameters, "
        f"{format_count(cost.flops, '.2f')} FLOPs for an image of {size}"
    )
    rows = [HEADER, *table(cost)]
    return [head, "", *aligned(rows), "", NOTE, "", *memory_lines(cost.memory)]


def table(cost: "Cost") -> list[tuple[str, ...]]:
    """A row a part; equal blocks are one row, with the sums of all of them."""
    rows = []
    for part in cost.parts:
        if not part.parts:
            rows.append(row(part, part.name, cost))
        for numbers in folded(part.parts):
            block, times = part.parts[numbers[0] - 1], len(numbers)
            again = f", each {block.calls} times" if block.calls > 1 else ""
            label = f"blocks {spans(numbers)} (x {times}{again})"
            rows.append(row(block, label, cost, times))
            rows += [row(inside, f"  {inside.name}", cost, times) for inside in block.parts]
    total = (
        "total",
        "",
        "",
        format_count(cost.parameters, ".2f"),
        "",
        format_count(cost.flops, ".2f"),
        "",
    )
    return [*rows, total]


def row(part: "Part", name: str, cost: "Cost", times: int = 1) -> tuple[str, ...]:
    """Cells of one line of the table."""
    parameters, flops = part.parameters * times, part.flops * times
    return (
        name,
        ", ".join(part.kinds),
        " x ".join(map(str, part.shape or ())),
        format_count(parameters, ".2f"),
        share(parameters, cost.parameters),
        format_count(flops, ".2f"),
        share(flops, cost.flops),
    )


def folded(blocks: Sequence["Part"]) -> list[list[int]]:
    """Numbers of equal blocks, counted from 1, together; in the order of their first."""
    alike: dict[Part, list[int]] = {}
    for number, block in enumerate(blocks, 1):
        alike.setdefault(block, []).append(number)
    return [*alike.values()]


def spans(numbers: Sequence[int]) -> str:
    """`1-12` for neighbours, `2, 4 .. 12` for equal steps, `1-2, 4-5` for others."""
    step = numbers[1] - numbers[0] if len(numbers) > 3 else 1
    if step > 1 and [*numbers] == [*range(numbers[0], numbers[-1] + 1, step)]:
        return f"{numbers[0]}, {numbers[1]} .. {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns: words to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        padded = [
            cell.ljust(width) if index < 3 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def memory_lines(memory: "Memory") -> list[str]:
    """The estimate, in words."""
    multilabel = "1 image" if memory.batch_size == 1 else f"{memory.batch_size} images"
    return [
        "Memory, estimated without what libraries, kernels and gaps take; fp32 if not said:",
        f"  weights                  {format_bytes(memory.weights)}, "
        f"in bf16 {format_bytes(memory.weights_bf16)}",
        f"  inference, 1 image     {format_bytes(memory.inference)}, weights included",
        f"  training, {multilabel:<14} {format_bytes(memory.training)} at most at once; "
        "during the step",
        f"    weights                {format_bytes(memory.weights)}",
        f"    gradients              {format_bytes(memory.gradients)}",
        f"    AdamW's two moments    {format_bytes(memory.moments)}",
        f"    kept for the backward  {format_bytes(memory.kept)} of images and activations",
    ]


def share(part: int, whole: int) -> str:
    """`part` in `whole` as a percentage; nothing for nothing."""
    return f"{part / whole:.1%}" if part else ""
