"""`vit models`: networks that can be built by name, and timm's pretrained ones."""

import argparse

from vit.config.presets import PRESETS, count_flops, count_parameters, find_presets

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


def run(args: argparse.Namespace) -> int:
    return list_pretrained(args.pattern) if args.pretrained else list_presets(args.pattern)


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
