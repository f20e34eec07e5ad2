"""Converts preprocessor_config.json of transformers to our Preprocessing and back.

    ViT, SigLIP, DINOv3, BEiT (Data2Vec)    resize to (height, width)
    DeiT                                    the same, and a centre crop
    CLIP, BiT (DINOv2)                      shortest edge, and a centre crop

Resizing is the same, but transformers' centre crop rounds half pixels down and ours to even, and
with torchvision installed another implementation resizes: single bytes differ by one, rarely more.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vit.config import DataConfig
from vit.data.preprocessing import CLIP_COLOURS, IMAGENET_COLOURS, Preprocessing, Triple
from vit.errors import ConfigError, WeightsError
from vit.text import printable

RESAMPLES = {2: "bilinear", 3: "bicubic"}
BYTE = 1 / 255
HALF = (0.5, 0.5, 0.5)


def _defaults(
    size: Any, resample: int, colours: tuple[Any, Any], crop: int | None = None
) -> dict[str, Any]:
    return {
        "size": size,
        "resample": resample,
        "image_mean": colours[0],
        "image_std": colours[1],
        "do_center_crop": crop is not None,
        "crop_size": crop,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": BYTE,
        "do_normalize": True,
    }


SQUARE = {"height": 224, "width": 224}
SHORTEST = {"shortest_edge": 224}
# Defaults by class prefix: "ViT" for ViTImageProcessor, ViTFeatureExtractor, ...
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": _defaults(SQUARE, 2, (HALF, HALF)),
    "DeiT": _defaults({"height": 256, "width": 256}, 3, (HALF, HALF), 224),
    "Beit": _defaults(SQUARE, 3, (HALF, HALF)),
    "Bit": _defaults(SHORTEST, 3, CLIP_COLOURS, 224),
    "CLIP": _defaults(SHORTEST, 3, CLIP_COLOURS, 224),
    "Siglip": _defaults(SQUARE, 3, (HALF, HALF)),
    "DINOv3ViT": _defaults(SQUARE, 2, IMAGENET_COLOURS),
}
# The class of a file that names none, by model type, as in AutoImageProcessor.
OF_MODEL_TYPE = {
    **dict.fromkeys(("vit", "vit_mae", "vit_msn", "ijepa"), "ViT"),
    "deit": "DeiT",
    **dict.fromkeys(("beit", "data2vec-vision"), "Beit"),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), "Bit"),
    "dinov3_vit": "DINOv3ViT",
    **dict.fromkeys(("clip", "clip_vision_model"), "CLIP"),
    **dict.fromkeys(("siglip", "siglip_vision_model"), "Siglip"),
}
STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")
BY_EDGE = ("Bit", "CLIP")
"""Classes where one number is the shortest edge; in the others it is both sides."""


def read_processor(
    processor: Mapping[str, Any] | None, image_size: int, model_type: str | None = None
) -> tuple[Preprocessing | None, tuple[str, ...]]:
    """Convert an image processor of transformers.

    Args:
        image_size: Input size of the network in pixels.

    Returns:
        Our Preprocessing, None if it cannot be expressed; and notes for the user. If only the
        resizing cannot be expressed, it is our usual one, with the given mean and std.
    """
    if processor is None:
        return None, ("there is no preprocessor_config.json: how images are prepared is unknown",)
    inner = processor.get("image_processor", processor)
    try:
        kind, values = _values(inner if isinstance(inner, Mapping) else {}, model_type)
        mean, std = _normalisation(values)
        usual = replace(Preprocessing.from_config(DataConfig(), image_size), mean=mean, std=std)
    except ConfigError as error:
        why = printable(error)
        return None, (f"preprocessor_config.json: {why}: how images are prepared is left open",)
    try:
        found = _resizing(values, usual, by_edge=kind in BY_EDGE)
    except ConfigError as error:
        return usual, (
            f"preprocessor_config.json: {printable(error)}: its mean and std are used, but images "
            f"are resized by {usual.interpolation}, the middle {usual.crop_share:.0%} to "
            f"{image_size} px",
        )
    side = found.image_size[0]
    if side == image_size:
        return found, ()
    return found, (
        f"images are prepared at {side} pixels, the positions are those of {image_size}",
    )


def _values(given: Mapping[str, Any], model_type: str | None) -> tuple[str, Mapping[str, Any]]:
    """Class of the processor, and its settings over the defaults of this class."""
    name = given.get("image_processor_type", given.get("feature_extractor_type"))
    match = re.fullmatch(r"(\w+?)(FeatureExtractor|ImageProcessor(Fast|Pil)?)", str(name))
    kind = OF_MODEL_TYPE.get(str(model_type)) if name is None else match and match[1]
    if kind is None or kind not in PROCESSORS:
        raise ConfigError(f"the processor {name!r} is unknown")
    return kind, {**PROCESSORS[kind], **given}


def _normalisation(values: Mapping[str, Any]) -> tuple[Triple, Triple]:
    """Mean and std; ConfigError if pixels are scaled otherwise."""
    if values["do_rescale"] is not True:
        raise ConfigError(f"do_rescale={values['do_rescale']!r}, here this is always done")
    factor = values["rescale_factor"]
    if not (isinstance(factor, int | float) and abs(factor - BYTE) < 1e-9):
        raise ConfigError(f"rescale_factor={factor!r} is not 1 / 255")
    for key, value in values.items():
        if str(key).startswith("do_") and key not in STEPS and value:
            raise ConfigError(f"{key}={value!r}, here this is never done")
    if values["do_normalize"] is not True:
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return _triple(values, "image_mean"), _triple(values, "image_std")


def _resizing(values: Mapping[str, Any], usual: Preprocessing, *, by_edge: bool) -> Preprocessing:
    """Our Preprocessing with the resizing of `values`; ConfigError if it cannot be expressed."""
    if values["do_resize"] is not True:
        raise ConfigError(f"do_resize={values['do_resize']!r}, here this is always done")
    resample = values["resample"]
    if type(resample) is not int or resample not in RESAMPLES:
        raise ConfigError(f"resample={resample!r} is neither bilinear (2) nor bicubic (3)")
    resize, image_size, share = _geometry(values, by_edge)
    return replace(
        usual,
        image_size=(image_size, image_size),
        resize="crop" if resize == "crop" else "squash",
        crop_share=share,
        interpolation="bilinear" if resample == 2 else "bicubic",
    )


def _geometry(values: Mapping[str, Any], by_edge: bool) -> tuple[str, int, float]:
    """Resize mode, side of the result, and the fraction of the resized side that is cropped."""
    size, crops = values["size"], values["do_center_crop"] is True
    if type(size) is int:
        size = {"shortest_edge": size} if by_edge else {"height": size, "width": size}
    if not isinstance(size, Mapping):
        raise ConfigError(f"size={size!r}")
    size = {key: side for key, side in size.items() if side is not None}
    if size.keys() == {"shortest_edge"}:
        kind, full = "crop", size["shortest_edge"]
        if not crops:
            raise ConfigError(f"size={size!r} without a centre crop gives no square")
    elif size.keys() == {"height", "width"} and size["height"] == size["width"]:
        kind, full = "squash", size["height"]
    else:
        raise ConfigError(f"size={size!r} is no square")
    crop = values["crop_size"] if crops else full
    if isinstance(crop, Mapping):
        sides = {side for side in crop.values() if side is not None}
        crop = sides.pop() if len(sides) == 1 else None
    if type(full) is not int or type(crop) is not int or not 0 < crop <= full:
        raise ConfigError(f"size={size!r} with crop_size={values['crop_size']!r}")
    return kind, crop, _share(crop, full)


def _share(crop: int, full: int) -> float:
    """Largest float share for which Preprocessing's `floor(crop / share)` equals `full`."""
    share = crop / full
    while math.floor(crop / share) < full:
        share = math.nextafter(share, 0)
    return share


def _triple(values: Mapping[str, Any], key: str) -> Triple:
    given = values[key]
    if (
        not isinstance(given, list | tuple)
        or len(given) != 3
        or any(type(value) not in (int, float) for value in given)
    ):
        raise ConfigError(f"{key}={given!r} is not three numbers")
    red, green, blue = map(float, given)
    return red, green, blue


def write_processor(preprocessing: Preprocessing, image_size: int) -> dict[str, Any]:
    """preprocessor_config.json for `preprocessing`; AutoImageProcessor and pipeline() take it.

    Args:
        image_size: Input size of the network in pixels.
    """
    if preprocessing.image_size != (image_size, image_size):
        height, width = preprocessing.image_size
        raise WeightsError(
            "transformers cannot express a preprocessing that makes images of "
            f"{height} x {width} for a network of {image_size} x {image_size}"
        )
    full = math.floor(image_size / preprocessing.crop_share)
    squashes = preprocessing.resize == "squash"
    both = {"height": full, "width": full}
    crops = full != image_size or not squashes
    crop = {
        "do_center_crop": True,
        "crop_size": {"height": image_size, "width": image_size},
    }
    return {
        # ViT's processor cannot crop; BiT's supports both forms of size
        "image_processor_type": "BitImageProcessor" if crops else "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": both if squashes else {"shortest_edge": full},
        "resample": 2 if preprocessing.interpolation == "bilinear" else 3,
        **(crop if crops else {}),
        "do_rescale": True,
        "rescale_factor": BYTE,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }


def processor_notes(preprocessing: Preprocessing) -> tuple[str, ...]:
    """Notes if transformers' centre crop is shifted by one pixel.

    A margin of 3, 7 or 11 pixels leaves 1.5, 3.5 or 5.5 on each side: our crop starts at 2, 4 or
    6, transformers' at 1, 3 or 5.
    """
    size = preprocessing.image_size[0]
    if (math.floor(size / preprocessing.crop_share) - size) % 4 == 3:
        return ("transformers cuts the centre out one pixel further up and left",)
    if preprocessing.resize == "crop":
        return ("transformers cuts the centre of some images one pixel further up or left",)
    return ()
