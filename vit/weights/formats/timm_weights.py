"""Reads timm's weights and its config.json.

Our parameter names are timm's; the patch projection is a matrix here and a convolution there, and
rotary networks (timm's Eva) and BEiT name and order some parts differently (state_dict_names.py).
Settings are those of timm's own network (timm_network.py), or inferred from the tensors alone;
class names and preprocessing are in its `pretrained_cfg`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, WeightsError
from vit.model.build import check_fit, meta_model
from vit.weights.formats.infer_architecture import (
    NOTHING,
    REMEDY,
    bias_table,
    infer_config,
    infer_preprocessing,
    is_vision_transformer,
)
from vit.weights.formats.original_checkpoints import to_timm_names
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.state_dict_names import (
    FAULTS,
    convert_timm,
    deduplicate_names,
    rename_timm,
    to_float32,
)
from vit.weights.formats.timm_network import timm_facts

EVA = re.compile(r"blocks\.0\.attn\.q_(bias|proj\..*)")
RESIZES = {"center": "crop", "squash": "squash", "border": "pad"}


def read_timm(
    state: Mapping[str, Tensor],
    *,
    architecture: str | None,
    model_args: Mapping[str, Any] = NOTHING,
    pretrained_cfg: Mapping[str, Any] = NOTHING,
    label_names: Sequence[str] | Mapping[Any, str] | None = None,
    other_names: Collection[str] = (),
    where: str,
) -> Pretrained:
    """Convert weights with timm's names or those of the original repositories.

    Args:
        other_names: Names of integers in the file, which may tell its family.
    """
    try:
        about = dict(pretrained_cfg)
        theirs, notes = to_timm_names(state)
        theirs, order, tag_classes = to_float32(theirs), None, None
        if architecture is None:
            eva = [name for name in theirs if EVA.fullmatch(name)]
            if eva and bias_table(theirs) is None:
                raise WeightsError(f"{eva[0]} is one of timm's many Eva networks; {REMEDY}")
            config, assumptions = infer_config(rename_timm(theirs), original=(*state, *other_names))
        else:
            config, order, about, tag_classes, assumptions = timm_facts(
                architecture, model_args, about, theirs, named=bool(label_names)
            )
        ours, dropped = convert_timm(rename_timm(theirs), config, order)
        check_fit(ours, meta_model(config))
        names = label_names or about.get("label_names") or tag_classes
        classes, on_classes = class_names(names, config.num_classes)
        prepared, on_images = preprocessing(about, config.image_size)
        if prepared is None and not on_images and config.channels == 3:
            prepared, on_images = infer_preprocessing(state.keys(), config.image_size)
    except FAULTS as error:
        raise WeightsError(f"{where}: {error}") from None
    terms = about.get("license")
    return Pretrained(
        state=ours,
        config=config,
        classes=classes,
        preprocessing=prepared,
        license=terms if isinstance(terms, str) else None,
        origin=f"timm {architecture}" if architecture else "a network in timm's names",
        notes=(*notes, *assumptions, *dropped, *on_classes, *on_images),
    )


def looks_like_timm(state: Mapping[str, Tensor]) -> bool:
    """Whether `read_timm` recognises the names in `state`."""
    try:
        return is_vision_transformer(to_timm_names(state)[0])
    except WeightsError:
        return False


def read_timm_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Parse timm's config.json to keyword arguments of `read_timm`; older files are flat."""
    about = content.get("pretrained_cfg", content)
    parts = {"model_args": content.get("model_args") or {}, "pretrained_cfg": about}
    name = content.get("architecture")
    if not isinstance(name, str) or not all(isinstance(part, Mapping) for part in parts.values()):
        raise WeightsError("config.json names no architecture of timm")
    names = [part.get(key) for part in (content, about) for key in ("label_names", "labels")]
    return {"architecture": name, **parts, "label_names": next(filter(None, names), None)}


def preprocessing(
    about: Mapping[str, Any], image_size: int
) -> tuple[Preprocessing | None, tuple[str, ...]]:
    """Preprocessing in timm's `pretrained_cfg`, and a note if it is unknown."""
    if not {"mean", "std", "crop_pct"} <= about.keys():
        return None, ()
    mode, share = about.get("crop_mode") or "center", about["crop_pct"]
    if mode not in RESIZES:
        return None, (f"preprocessing is not known: timm's crop_mode={mode!r} is not one of ours",)
    try:
        stored = {
            "image_size": (image_size, image_size),
            "resize": RESIZES[mode],
            "crop_share": share,
            "interpolation": about.get("interpolation") or "bicubic",
            "mean": about["mean"],
            "std": about["std"],
        }
        return Preprocessing.from_dict(stored), ()
    except (ConfigError, TypeError, ValueError) as error:
        return None, (f"preprocessing is not known: timm's {error}",)


def class_names(
    names: Sequence[str] | Mapping[Any, str] | None, count: int
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Class names by output, and a note if they are invalid."""
    if not names or not count:
        return None, ()
    if isinstance(names, Mapping):
        numbers = [str(number) for number in range(count)]
        by_number = {str(number): name for number, name in names.items()}
        names = [by_number[number] for number in numbers if number in by_number]
    found = tuple(names) if isinstance(names, list | tuple) else ()
    if not found or not all(isinstance(name, str) for name in found):
        return None, ("class names are not known: label_names is no list of names",)
    if len(found) != count:
        return None, (f"class names are not known: {len(found)} names for {count} outputs",)
    return deduplicate_names(found)
