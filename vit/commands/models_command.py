"""`vit models`: networks that can be built by name, and timm's pretrained ones, also measured."""

import argparse

from vit.commands.command_output import print_result
from vit.commands.command_parser import add_json_option, add_setting, settings_from_args
from vit.config.presets import PRESETS, count_flops, count_parameters, find_presets
from vit.config.setting_layers import Settings, all_settings, checked
from vit.config.training_config import AUTO_WEIGHTS
from vit.errors import ConfigError
from vit.quick_imports import quick_imports

FLOPS_NOTE = (
    "FLOPs of one image: 2 for each multiply-add, of which papers often count 1; "
    "`vit summary NAME` shows the parts."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pattern",
        metavar="PATTERN",
        nargs="?",
        default="*",
        help="part of a name, or a pattern such as 'vit_*_patch16_*'",
    )
    parser.add_argument(
        "--pretrained",
        action="store_true",
        help="list timm's pretrained weights instead, as --weights takes them",
    )
    parser.add_argument(
        "--try",
        dest="data",
        metavar="DATA",
        help="measure on these images the networks that vit train --weights auto chooses from",
    )
    add_setting(parser, all_settings()["time"])
    add_json_option(parser, "with --try, where the table is written as JSON")


def run(args: argparse.Namespace) -> int:
    if args.data is not None:
        if args.pretrained or args.pattern != "*":
            raise ConfigError("--try DATA measures all at hand: leave PATTERN and --pretrained out")
        return try_backbones(args)
    for name, value in {"time": settings_from_args(args).get("time"), "json": args.json}.items():
        if value is not None:
            raise ConfigError(f"--{name} is for --try DATA: give it, or leave --{name} out")
    return list_pretrained(args.pattern) if args.pretrained else list_presets(args.pattern)


def try_backbones(args: argparse.Namespace) -> int:
    """Print what `vit train DATA --weights auto` would choose, and what it measured for it."""
    chosen = checked({"data": args.data, "weights": AUTO_WEIGHTS, **settings_from_args(args)})
    with quick_imports():
        from vit.training.backbone_selection import table_lines
        from vit.training.plan import plan_training

    _, plan = plan_training(Settings(flag=chosen))
    if not plan.backbones:
        raise ConfigError(f"--try {args.data}: no network was measured, as the lines above say")
    print_result("\n".join(table_lines(plan.backbones)), args.json, plan.backbones)
    return 0


def list_pretrained(pattern: str) -> int:
    """Print timm's pretrained networks with their image sizes and licences."""
    from vit.weights.formats import timm_network

    found = timm_network.search(pattern)
    width = max(len(entry.name) for entry in found) + len("timm/")
    print(f"{'name':<{width}}  image    license")
    for entry in found:
        size = "x".join(map(str, entry.image_size))
        print(f"timm/{entry.name:<{width - 5}}  {size:<7}  {entry.license or 'not stated'}")
    return 0


def list_presets(pattern: str) -> int:
    """Print the networks that can be built by name, their sizes and what they cost."""
    found = find_presets(pattern)
    width = max(len(name) for name in found)
    print(f"{'name':<{width}}  parameters    FLOPs  image  patch   dim  depth  heads")
    for name in found:
        sizes = PRESETS[name]
        millions, billions = count_parameters(sizes) / 1e6, count_flops(sizes) / 1e9
        print(
            f"{name:<{width}}  {millions:>8.1f} M  {billions:>5.1f} G  {sizes['image_size']:>5}  "
            f"{sizes['patch_size']:>5}  {sizes['dim']:>4}  {sizes['depth']:>5}  "
            f"{sizes['num_heads']:>5}"
        )
    print(f"\n{FLOPS_NOTE}")
    return 0
