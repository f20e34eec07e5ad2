"""Label images with a file of `vit export`: onnxruntime, numpy, Pillow, and nothing of vit.

python predict_onnx.py model.onnx cat.jpg dog.png
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def pixels(path: str, low: float, high: float) -> np.ndarray:
    """The image, upright and RGB over white, as it is: uint8 (1, height, width, 3)."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode in ("I", "F") or image.mode.startswith("I;"):  # 16 bits or more, grey
        scaled = np.rint((np.asarray(image, np.float64) - low) * (255 / (high - low)))
        image = Image.fromarray(scaled.clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))[None]


def main(model: str, *paths: str) -> None:
    options = onnxruntime.SessionOptions()
    # int8 files: else products overflow on x86 CPUs without VNNI
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    classes = json.loads(about["classes"])
    # of 16-bit images, the values that are black and white
    low, high = json.loads(about["preprocessing"]).get("intensity_range", (0, 65535))
    for path in paths:
        (probabilities,) = session.run(["probabilities"], {"images": pixels(path, low, high)})[0]
        best = probabilities.argsort()[::-1][:5]
        answers = [{"label": classes[i], "score": float(probabilities[i])} for i in best]
        print(json.dumps({"image": path, "predictions": answers}, ensure_ascii=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
