"""The papers' tables of sizes, under timm's names.

tiny and small: Touvron et al., DeiT, table 1, arXiv:2012.12877. base, large and huge: Dosovitskiy
et al., table 1, arXiv:2010.11929.
"""

import difflib
from typing import Any

from vit.errors import ConfigError

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"dim": 192, "depth": 12, "num_heads": 3},
    "small": {"dim": 384, "depth": 12, "num_heads": 6},
    "base": {"dim": 768, "depth": 12, "num_heads": 12},
    "large": {"dim": 1024, "depth": 24, "num_heads": 16},
    "huge": {"dim": 1280, "depth": 32, "num_heads": 16},
}

# size -> (patch size, image size), as timm registers them
VARIANTS: dict[str, list[tuple[int, int]]] = {
    "tiny": [(16, 224), (16, 384)],
    "small": [(8, 224), (16, 224), (16, 384), (32, 224), (32, 384)],
    "base": [(8, 224), (16, 224), (16, 384), (32, 224), (32, 384)],
    "large": [(14, 224), (16, 224), (16, 384), (32, 224), (32, 384)],
    "huge": [(14, 224)],
}

PRESETS: dict[str, dict[str, Any]] = {
    f"vit_{size}_patch{patch_size}_{image_size}": {
        **SIZES[size],
        "patch_size": patch_size,
        "image_size": image_size,
    }
    for size, variants in VARIANTS.items()
    for patch_size, image_size in variants
}


def preset(name: str) -> dict[str, Any]:
    """Model settings of the preset called `name`.

    Raises:
        ConfigError: No preset has this name; the message has the nearest ones.
    """
    if name not in PRESETS:
        alike = difflib.get_close_matches(name, PRESETS, n=3)
        near = [known for known in PRESETS if known.startswith(name)][:3] or alike or [*PRESETS][:3]
        raise ConfigError(
            f"model={name!r} is not a preset; the nearest are {', '.join(near)} "
            "(`vit models` lists all)"
        )
    return dict(PRESETS[name])


def task_defaults(task: str | None) -> dict[str, Any]:
    """Settings that a task has where nobody chose others; those of classes are the fields' own.

    A caption tells left from right, and what an image shows at its edges.
    """
    return {"hflip": 0.0, "min_crop": 0.5} if "caption" in (task or "") else {}
