"""What a picture means as RGB, whatever mode its file has."""

from typing import Any

import numpy as np
from PIL import Image

from vit.data.regular import Refused


def to_rgb(image: Image.Image) -> Image.Image:
    """A loaded picture of any mode as RGB; transparency over white, deep channels scaled."""
    if image.mode[0] in "IF":
        return Image.fromarray(_scaled(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        colour = image.convert("RGBA")
        white = Image.new("RGBA", colour.size, "white")
        return Image.alpha_composite(white, colour).convert("RGB")
    if image.mode == "LAB":
        from PIL import ImageCms

        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
        assert converted is not None
        return converted
    return image if image.mode == "RGB" else image.convert("RGB")


def _scaled(grey: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Grey values of 16 or 32 bits, (height, width), as bytes."""
    low, high = float(grey.min()), float(grey.max())
    limit = 65535.0 if grey.dtype.kind != "f" else 1.0 if high <= 1 else 255.0
    if not 0 <= low <= high <= limit:  # also false for NaN
        raise Refused(f"grey values from {low:g} to {high:g}; expected 0 to {limit:g}")
    scaled = np.rint(np.multiply(grey, 255 / limit, dtype=np.float32))
    return np.asarray(scaled, dtype=np.uint8)
