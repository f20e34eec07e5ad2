"""`vit models`: networks that can be built by name, what can be chosen, timm's pretrained ones."""

import argparse
import textwrap
import typing
from fnmatch import fnmatch
from typing import Any

from vit.commands.command_options import is_comma_separated
from vit.config.parser import TYPE_NAMES, Setting, all_settings, choices_of, nearest
from vit.config.presets import PRESETS, count_flops, count_parameters, find_presets, preset
from vit.errors import ConfigError

FLOPS_NOTE = (
    "FLOPs of one image: 2 for each multiply-add, of which papers often count 1; "
    "`vit summary NAME` shows the parts."
)

SECTIONS = "model", "decoder"
"""Of the settings of a network; those of the text decoder are for `--task caption`."""
OPTIONS_NOTE = (
    "[...] is the default. Flags: --norm-order post, --qk-norm, --no-class-token; keys in YAML: "
    "norm_order: post."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pattern",
        metavar="PATTERN",
        nargs="?",
        default="*",
        help="part of a name, or a pattern such as 'vit_*_patch16_*'",
    )
    lists = parser.add_mutually_exclusive_group()
    lists.add_argument(
        "--pretrained",
        action="store_true",
        help="list timm's pretrained weights instead, as --weights takes them",
    )
    lists.add_argument(
        "--options",
        action="store_true",
        help="list every setting of the network instead",
    )


def run(args: argparse.Namespace) -> int:
    if args.options:
        return list_options(args.pattern)
    return list_pretrained(args.pattern) if args.pretrained else list_presets(args.pattern)


def list_options(pattern: str) -> int:
    """Print every setting of the network with its choices or type, default and help."""
    every = all_settings().values()
    settings = [one for section in SECTIONS for one in every if one.section == section]
    names = {name: setting for setting in settings for name in names_of(setting)}
    word = pattern.lower().lstrip("-").replace("-", "_")
    found = [setting for name, setting in names.items() if word in name or fnmatch(name, word)]
    if not found:
        hint = nearest(word, names) or "; leave it out to see all"
        raise ConfigError(f"no option of the network is called like '{pattern}'{hint}")
    for option in dict.fromkeys(found):
        print(f"{option.name}: {values_of(option)}")
        print(textwrap.indent(option.help, "    "))
    print(f"\n{OPTIONS_NOTE}")
    return 0


def names_of(setting: Setting) -> list[str]:
    """Name and long aliases of a setting, without dashes."""
    flags = (alias[2:].replace("-", "_") for alias in setting.aliases if alias[:2] == "--")
    return [setting.name, *flags]


def values_of(setting: Setting) -> str:
    """The choices of a setting, or its type; the default in brackets."""
    default = default_word(setting)
    if words := ("false", "true") if setting.kind is bool else choices_of(setting.kind):
        return " ".join(f"[{word}]" if word == default else word for word in words)
    plain = next(TYPE_NAMES[kind] for kind in kinds_of(setting.kind) if kind in TYPE_NAMES)
    many = ", or several with commas" if is_comma_separated(setting.kind) else ""
    return f"{plain}{many} [{default}]"


def kinds_of(kind: Any) -> list[Any]:
    """A type and the types inside it."""
    return [kind, *(inner for part in typing.get_args(kind) for inner in kinds_of(part))]


def default_word(setting: Setting) -> str:
    """The default of a setting; of sizes `the preset's`."""
    if setting.name == "num_classes":
        return "the data's"
    if setting.name in preset(str(all_settings()["model"].default)):
        return "the preset's"
    if setting.default in (None, ()):
        return "none"
    return str(setting.default).lower() if setting.kind is bool else str(setting.default)


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
