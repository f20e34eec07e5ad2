"""Settings of inference: how a network runs over images. Flags, help and arguments are its fields.

vit.Predictor("runs/photos", batch_size=32, tta="flip")
vit predict runs/photos holiday/ --batch-size 32 --tta flip
"""

import inspect
import os
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from vit.config.config_section import Section, setting
from vit.config.data_config import check_intensity_range
from vit.config.parser import Setting, convert, field_docs, nearest
from vit.errors import ConfigError
from vit.text import printable


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(Section):
    """How a network runs over images."""

    batch_size: int | None = setting(None, "-b")
    """Images in one pass through the network (default: 4 to 64 on a CPU, by the size of the images;
    else 64)."""
    device: str | None = None
    """Where the network computes: cpu, cuda, cuda:N or mps (default: the best one here)."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the network; auto is bf16 where the hardware has it and it is faster, which is
    tried once on a CPU with many images."""
    workers: int | None = setting(None, "-j")
    """Threads that read images, and compute on a CPU (default: one a core, at most 8)."""
    keep_aspect: bool = False
    """Keep the aspect ratio of images, with at most as many patches as usual, instead of a square
    crop; the last digits then depend on the other images of a batch."""
    intensity_range: tuple[float, float] | None = None
    """Values of images of more than 8 bits per channel that become black and white (default: as in
    training)."""
    no_calibration: bool = False
    """Return raw scores, without the calibration that the run has measured."""
    merge_tokens: int | None = None
    """Patches merged in each block: faster, less exact (default: as in training)."""
    patch_size: int | None = None
    """Pixels on a side of a patch, best one that --patch-sizes trained: larger is faster, smaller
    more exact (default: as in training)."""
    tta: Literal["flip", "crops"] | None = None
    """Test-time augmentation, classification only: average over an image and its mirror image
    (flip), or over ten crops (crops: centre and corners, mirrored too)."""
    compile: bool = False
    """Compile the network with torch.compile, which takes a minute and pays for many images."""
    search: Any = None
    """Search of captions (vit.generation.generation_config); greedy decoding by default."""
    embeddings: bool = False
    """Return an `embedding` with each prediction; the weights then need no head."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "workers"):
            if getattr(self, name) is not None:
                self.check_at_least(1, name)
        check_intensity_range(self.intensity_range)


@cache
def settings_of(kind: type) -> dict[str, Setting]:
    """The fields of a dataclass of settings by name, with the sentence under each as its help."""
    hints, docs = typing.get_type_hints(kind, include_extras=True), field_docs(kind)
    return {
        field.name: Setting(
            name=field.name,
            section="",
            kind=hints[field.name],
            default=field.default,
            help=" ".join(docs[field.name].split()).removesuffix("."),
            aliases=field.metadata.get("aliases", ()),
        )
        for field in fields(kind)
    }


def split_settings(given: Mapping[str, Any], purpose: str, *kinds: type) -> list[Any]:
    """Settings by name as objects of `kinds`: a value goes to the first one that has its name.

    Args:
        purpose: What an unknown name is not a setting of, such as "a prediction".
    """
    parts: list[dict[str, Any]] = [{} for _ in kinds]
    for name, value in given.items():
        index = next((n for n, kind in enumerate(kinds) if name in settings_of(kind)), None)
        if index is None:
            known = [name for kind in kinds for name in settings_of(kind)]
            raise ConfigError(
                f"{printable(name)} is not a setting of {purpose}{nearest(name, known)}"
            )
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        wanted = settings_of(kinds[index])[name].kind
        parts[index][name] = plain if wanted is Any else convert(wanted, plain, name)
    return [kind(**part) for kind, part in zip(kinds, parts, strict=True)]


def inference_config(
    config: InferenceConfig | None, settings: Mapping[str, Any], purpose: str = "a Predictor"
) -> InferenceConfig:
    """`config`, or one of `settings` by name: the arguments of a Python call."""
    if config is not None and not settings:
        return config
    given = (
        {} if config is None else {one.name: getattr(config, one.name) for one in fields(config)}
    )
    found: InferenceConfig = split_settings({**given, **settings}, purpose, InferenceConfig)[0]
    return found


def accepts_settings(*kinds: type) -> Callable[[Callable[..., Any]], Any]:
    """Show the fields of `kinds` in the signature of a function that takes `**settings`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        shown = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        names = {one.name for one in shown}
        for kind in kinds:
            for name, found in settings_of(kind).items():
                if name not in names:
                    names.add(name)
                    shown.append(
                        inspect.Parameter(
                            name,
                            inspect.Parameter.KEYWORD_ONLY,
                            default=found.default,
                            annotation=found.kind,
                        )
                    )
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate
