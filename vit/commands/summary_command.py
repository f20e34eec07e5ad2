"""`vit summary MODEL`: the parts of a network, with shapes, parameters, FLOPs and memory."""

import argparse
import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit.commands.command_output import notify, print_result
from vit.commands.command_parser import (
    add_json_option,
    add_setting,
    positive_int,
    settings_from_args,
)
from vit.config import ModelConfig
from vit.config.presets import PRESETS
from vit.config.setting_layers import all_settings, checked, make_config, model_settings
from vit.output.output_file import check_outputs
from vit.paths import path_argument

if TYPE_CHECKING:
    from vit.evaluation.model_summary import Cost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "vit summary MODEL [-b N] [--json FILE] [settings of the network...]"
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
    add_json_option(
        parser, "write every part and all numbers here as well; - for standard output, instead"
    )
    group = parser.add_argument_group("network (MODEL gives what is not set here)")
    for setting in all_settings().values():
        if setting.section == "model":
            add_setting(group, setting)


def run(args: argparse.Namespace) -> int:
    check_outputs({"--json": args.json}, [args.model])
    config = network_config(args.model, checked(settings_from_args(args)))
    if (Path(args.model) / "tokenizer.json").is_file():
        notify("vit summary: this is the encoder alone; the decoder of its captions is not counted")

    from vit.evaluation.model_summary import cost_of, summary_lines

    cost = cost_of(config, batch_size=args.batch_size)
    settings = {"model": args.model, "settings": dataclasses.asdict(config)}
    text = "\n".join(summary_lines(args.model, config, cost))
    print_result(text, args.json, {**settings, **dataclasses.asdict(cost)})
    return 0


def summary(model: str | os.PathLike[str], *, batch_size: int = 128, **settings: Any) -> "Cost":
    """Parameters, FLOPs and memory of a network: `vit summary`.

        cost = vit.summary("vit_small_patch16_224", num_classes=10)
        print(cost.parameters, cost.flops)

    Args:
        model: A preset, a run folder, or other weights that are on this disk.
        batch_size: Images of the training step whose memory is estimated.
        settings: Settings of the network that differ.

    Raises:
        VitError: There is no such network, or the settings do not fit.
    """
    from vit.evaluation.model_summary import cost_of

    name = path_argument("model", model, "a preset, a run folder or weights")
    return cost_of(network_config(name, model_settings(settings)), batch_size=batch_size)


def network_config(model: str, settings: dict[str, object]) -> ModelConfig:
    """Settings of the network `model`, a preset or a source of weights, changed by `settings`."""
    source = re.match(r"(~|\.|hf-hub:)", model.lower()) or "/" in model
    if model in PRESETS or not (source or os.path.exists(model)):
        return make_config({**settings, "model": model}).model
    from vit.weights.load_model import read_source_config

    return dataclasses.replace(read_source_config(model), **settings)  # type: ignore[arg-type]
