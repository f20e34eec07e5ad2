"""`vit plan DATA [--time T]`: the settings that `vit train` would choose, each with its reason."""

import argparse

from vit.commands.command_parser import SETTING, CommandParser
from vit.commands.train_command import ESSENTIAL, add_settings, chosen_settings
from vit.config.setting_layers import Settings, write_settings
from vit.output.output_file import check_outputs
from vit.quick_imports import quick_imports
from vit.text import quoted

HEADER = "A plan made by vit plan; every setting may be changed.\nTrain it: vit train --config THIS"


def add_arguments(parser: CommandParser) -> None:
    """Add DATA, the file of the recipe, and a flag for every setting."""
    parser.essential = (
        *("data", "save", "overwrite", "setting_time"),
        *(f"{SETTING}{name}" for name in ESSENTIAL if name != "model"),  # which the plan chooses
    )
    parser.examples = (
        "vit plan photos/ --time 20m",
        "vit plan photos/ --time 20m --save plan.yaml && vit train photos/ -c plan.yaml",
    )
    parser.usage = "vit plan DATA [--time T] [--save FILE] [settings...]"
    parser.add_argument("data", metavar="DATA", help="as for vit train")
    parser.add_argument("--save", metavar="FILE", help="write the settings as a YAML file")
    parser.add_argument("--overwrite", action="store_true", help="replace an older FILE")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan, and write it to a file if requested."""
    chosen = Settings(flag=chosen_settings(args))
    check_outputs({"--save": args.save}, [args.data], overwrite=args.overwrite)
    with quick_imports():
        from vit.training.plan import check_plannable, is_planned, plan_lines, plan_training
        from vit.training.settings_from_data import group_lines
        from vit.training.teacher import teacher_lines

    check_plannable(chosen)
    pretrained = not is_planned(chosen)
    config, plan = plan_training(chosen)
    lines = [*plan_lines(plan, config), *teacher_lines(config, plan.facts.images)]
    if plan.listing is not None:
        lines += group_lines(config, plan.listing)
    print("\n".join(lines))
    if args.save is not None:
        # what pretrained weights decide is known when they are read
        only = {*plan.values} if pretrained else None
        write_settings(args.save, config, HEADER, only=only)
    if pretrained:
        same = "vit train, with the same DATA and flags"
        print(f"train it: vit train -c {quoted(args.save)}" if args.save else f"train it: {same}")
    return 0
