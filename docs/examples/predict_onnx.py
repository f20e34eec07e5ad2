"""Label images with a file of `vit export`: onnxruntime, numpy, Pillow, and nothing of vit.

python predict_onnx.py model.onnx cat.jpg dog.png
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def pixels(path: str, settings: dict) -> np.ndarray:
    """The image, upright and RGB over white, as it is: uint8 (1, height, width, 3)."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode[0] in "IF":  # 16 bits or more
        low, high = settings.get("intensity_range", (0, 65535))  # black and white
        scaled = (np.asarray(image, np.float64) - low) * (255 / (high - low))
        image = Image.fromarray(np.rint(scaled).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))[None]


def main(model: str, *paths: str) -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # int8 without VNNI
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    classes, settings = (json.loads(about[name]) for name in ("classes", "preprocessing"))
    for path in paths:
        (probabilities,) = session.run(["probabilities"], {"images": pixels(path, settings)})[0]
        best = probabilities.argsort()[::-1][:5]
        rows = [{"label": classes[i], "score": float(probabilities[i])} for i in best]
        print(json.dumps({"image": path, "predictions": rows}, ensure_ascii=False))


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 2 else sys.exit(__doc__)
