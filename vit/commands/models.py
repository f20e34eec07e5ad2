"""`vit models`: the networks that can be built by name, and the pretrained ones of timm."""

import argparse
import difflib
from fnmatch import fnmatch
from typing import Any

from vit.errors import ConfigError, printable
from vit.presets import PRESETS


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
    """Print timm's pretrained networks with their picture sizes and licences.

    Raises:
        WeightsError: None is called like `pattern`.
    """
    from vit.weights import registry

    found = registry.matching(pattern)
    width = max(len(entry.name) for entry in found) + len("timm/")
    print(f"{'name':<{width}}  image    license")
    for entry in found:
        size = "x".join(map(str, entry.image_size))
        print(f"timm/{entry.name:<{width - 5}}  {size:<7}  {entry.license or 'not stated'}")
    return 0


def list_presets(pattern: str) -> int:
    """Print the networks that can be built by name, and their sizes.

    Raises:
        ConfigError: None is called like `pattern`.
    """
    found = matching(pattern)
    width = max(len(name) for name in found)
    print(f"{'name':<{width}}  parameters  image  patch   dim  depth  heads")
    for name in found:
        sizes = PRESETS[name]
        millions = count_parameters(sizes) / 1e6
        print(
            f"{name:<{width}}  {millions:>8.1f} M  {sizes['image_size']:>5}  "
            f"{sizes['patch_size']:>5}  {sizes['dim']:>4}  {sizes['depth']:>5}  "
            f"{sizes['num_heads']:>5}"
        )
    return 0


def matching(pattern: str) -> list[str]:
    """Presets with `pattern` in their name, or that fit it as a shell pattern.

    Raises:
        ConfigError: There is none; the message has the nearest names.
    """
    word = pattern.lower()
    found = [name for name in PRESETS if word in name or fnmatch(name, word)]
    if not found:
        near = difflib.get_close_matches(word, PRESETS, n=3, cutoff=0.3)
        hint = f"; the nearest are {', '.join(near)}" if near else "; leave it out to see all"
        raise ConfigError(f"no model is called like '{printable(pattern)}'{hint}")
    return found


def count_parameters(sizes: dict[str, Any], *, num_classes: int = 1000) -> int:
    """Parameters of a preset for RGB pictures, biases included, without building it."""
    dim, patch_size = int(sizes["dim"]), int(sizes["patch_size"])
    patches = (int(sizes["image_size"]) // patch_size) ** 2
    embedding = (3 * patch_size**2 + 1) * dim
    tokens = dim + (1 + patches) * dim  # class token, and a position for it and every patch
    block = 12 * dim**2 + 13 * dim  # attention 4 (dim² + dim), MLP 8 dim² + 5 dim, norms 4 dim
    head = 2 * dim + (dim + 1) * num_classes
    return embedding + tokens + int(sizes["depth"]) * block + head
