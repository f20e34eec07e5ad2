"""timm's registry of pretrained Vision Transformers, read without a network connection."""

import difflib
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from vit.errors import WeightsError
from vit.text import printable
from vit.weights.formats.timm_network import MODULES, is_supported


@dataclass(frozen=True)
class RegistryEntry:
    """One set of pretrained weights.

    Args:
        hub_id: Repository on the Hugging Face Hub; None for a few old ones.
        url: Other URL of the weights; None for most.
        license: License of the weights; None if unknown.
        image_size: Height and width of the input in pixels.
    """

    name: str
    hub_id: str | None
    url: str | None
    license: str | None
    image_size: tuple[int, int]


def pretrained_names() -> list[str]:
    """All pretrained models in the supported modules of timm, in timm's order."""
    import timm

    return [name for m in MODULES for name in timm.list_models(pretrained=True, module=m)]


def search(pattern: str) -> list[RegistryEntry]:
    """Supported models whose name contains `pattern` or matches it as a shell pattern."""
    word = pattern.lower().removeprefix("timm/")
    named = [name for name in pretrained_names() if word in name or fnmatch(name, word)]
    found = [name for name in named if is_supported(name)]
    if named and not found:
        raise WeightsError(f"no supported timm model matches '{printable(pattern)}'")
    if not found:
        raise WeightsError(
            f"no pretrained timm model matches '{printable(pattern)}'{suggest_names(word)}"
        )
    return [entry for name in found if (entry := find_entry(name)) is not None]


def find_entry(name: str) -> RegistryEntry | None:
    """Registry entry of `name`, with timm's default tag if it has none.

    None: timm has no such model, or no weights for it.
    """
    import timm
    from timm.models import get_deprecated_models

    current = get_deprecated_models().get(name) or name
    try:
        found: Any = timm.get_pretrained_cfg(current)
    except RuntimeError:  # an architecture of timm, but no such training of it
        return None
    if found is None or not (found.hf_hub_id or found.url):
        return None
    full = f"{found.architecture}.{found.tag}" if found.tag else str(found.architecture)
    return RegistryEntry(
        name=full,
        hub_id=found.hf_hub_id or None,
        url=found.url or None,
        license=found.license or None,
        image_size=(int(found.input_size[-2]), int(found.input_size[-1])),
    )


def suggest_names(name: str) -> str:
    """The nearest model names, as the end of an error message."""
    known = pretrained_names()
    near = [other for other in known if other.startswith(name)][:3]
    near = near or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; the nearest are {', '.join(f'timm/{other}' for other in near)}" if near else ""
    return f"{hint}; `vit models --pretrained` lists all"
