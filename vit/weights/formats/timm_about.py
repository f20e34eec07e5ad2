"""What timm's `pretrained_cfg` says beside the network: names of classes, and preprocessing."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, WeightsError, printable
from vit.weights.formats.timm_building import known_about

RESIZES = {"center": "crop", "squash": "squash"}


def arguments(content: Mapping[str, Any]) -> dict[str, Any]:
    """timm's config.json as the arguments of `read_timm`; older files have one level only.

    Raises:
        WeightsError: It names no architecture.
    """
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
    """How pictures are prepared, or why that is not known.

    Args:
        about: timm's `pretrained_cfg`.
        image_size: Side of the pictures that the network takes.
    """
    if not {"mean", "std", "crop_pct"} <= about.keys():
        return None, ()
    mode, share = about.get("crop_mode") or "center", about["crop_pct"]
    if mode not in RESIZES:
        return None, (f"preprocessing is not known: timm's crop_mode={mode!r} is not one of ours",)
    try:
        return (
            Preprocessing(
                image_size=(image_size, image_size),
                resize=RESIZES[mode],  # type: ignore[arg-type]  # checked by the class
                crop_share=share,
                interpolation=about.get("interpolation") or "bicubic",
                mean=tuple(about["mean"]),
                std=tuple(about["std"]),
            ),
            (),
        )
    except (ConfigError, TypeError, ValueError) as error:
        return None, (f"preprocessing is not known: timm's {printable(error)}",)


def class_names(
    names: Sequence[str] | Mapping[Any, str] | None, count: int
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """`names` by output, where they name all `count` outputs, or why they do not.

    Args:
        names: A list, or the names by number; None where there are none.
        count: Outputs of the network.
    """
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
    if len(set(found)) != count:
        return None, ("class names are not known: two classes have the same name",)
    return found, ()


def imagenet_names(
    name: str, about: Mapping[str, Any], count: int
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """WordNet numbers of the classes, where timm's tag says that ImageNet was trained on last.

    Args:
        name: timm's, with or without a tag, such as vit_base_patch16_224.augreg_in21k_ft_in1k.
        about: timm's `pretrained_cfg`, which may have the tag instead.
        count: Outputs of the network.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    base, _, tag = name.partition(".")
    tag = tag or str(about.get("tag") or "")
    subset = infer_imagenet_subset({"num_classes": count})
    known = known_about(f"{base}.{tag}").get("num_classes") == count
    if subset is None or not known or not re.search(r"(^|_)in\d+k", tag):
        return None, ()
    note = f"class names are the WordNet numbers of {subset}, which the tag {tag} stands for"
    return tuple(ImageNetInfo(subset).label_names()), (note,)
