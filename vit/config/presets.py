"""The papers' tables of sizes, under timm's names.

tiny and small: Touvron et al., DeiT, table 1, arXiv:2012.12877. base, large and huge: Dosovitskiy
et al., table 1, arXiv:2010.11929.
"""

from fnmatch import fnmatch
from typing import Any

from vit.errors import ConfigError
from vit.text import nearest, nearest_names

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
    """Model settings of the preset called `name`."""
    if name not in PRESETS:
        near = [known for known in PRESETS if known.startswith(name)][:3]
        near = near or nearest_names(name, PRESETS) or [*PRESETS][:3]
        raise ConfigError(
            f"model={name!r} is not a preset; the nearest are {', '.join(near)} "
            "(`vit models` lists all)"
        )
    return dict(PRESETS[name])


def task_defaults(task: str | None) -> dict[str, Any]:
    """Defaults of a task that differ from those of the fields.

    Captions mention left and right, and what is at the edges of an image. Angles, lengths, counts
    and colours are numbers that flips, crops and changes of colour alter.
    """
    if task in ("regression", "attributes"):
        return {"hflip": 0.0, "random_crop": "simple"}
    return {"hflip": 0.0, "min_crop": 0.5} if "caption" in (task or "") else {}


def find_presets(pattern: str) -> list[str]:
    """Presets whose name contains `pattern` or matches it as a shell pattern."""
    word = pattern.lower()
    found = [name for name in PRESETS if word in name or fnmatch(name, word)]
    if not found:
        hint = nearest(word, PRESETS) or "; leave it out to see all"
        raise ConfigError(f"no model is called like '{pattern}'{hint}")
    return found


def count_parameters(sizes: dict[str, Any], *, num_classes: int = 1000) -> int:
    """Parameters of a preset for RGB images, computed from its sizes."""
    dim, patch_size = int(sizes["dim"]), int(sizes["patch_size"])
    patches = (int(sizes["image_size"]) // patch_size) ** 2
    embedding = (3 * patch_size**2 + 1) * dim
    tokens = dim + (1 + patches) * dim  # class token, and a position for it and every patch
    block = 12 * dim**2 + 13 * dim  # attention 4 (dim² + dim), MLP 8 dim² + 5 dim, norms 4 dim
    head = 2 * dim + (dim + 1) * num_classes
    return embedding + tokens + int(sizes["depth"]) * block + head


def count_flops(sizes: dict[str, Any], *, num_classes: int = 1000) -> int:
    """FLOPs of a preset for one RGB image, computed from its sizes: 2 for each multiply-add.

    Matrix products and attention in the forward pass, as in vit/evaluation/model_summary.py.
    """
    dim, patch_size = int(sizes["dim"]), int(sizes["patch_size"])
    patches = (int(sizes["image_size"]) // patch_size) ** 2
    tokens = patches + 1
    embedding = patches * 3 * patch_size**2 * dim
    # queries, keys, values and output 4 dim², MLP 8 dim²; scores and their mix, tokens dim each
    block = tokens * (12 * dim**2 + 2 * tokens * dim)
    return 2 * (embedding + int(sizes["depth"]) * block + dim * num_classes)
