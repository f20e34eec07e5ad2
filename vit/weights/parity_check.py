"""Compares the outputs of a converted model in timm or transformers with ours, on one image.

image -> our preprocessing, our network      image -> the library's, as loaded from the folder
"""

import importlib.util
import os
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from vit.data.image_io import read_image
from vit.errors import WeightsError, printable
from vit.weights.formats.pretrained import Pretrained
from vit.weights.load_model import build_from_state, preprocessing_or_default

# Same weights and pixels differ by rounding only; another resizing changes scores further.
OUTPUT_TOLERANCE = 1e-3
SCORE_TOLERANCE = 0.01


def check_parity(
    pretrained: Pretrained, folder: Path, to: str, pil_image: str | os.PathLike[str]
) -> list[str]:
    """Compare the outputs of the converted folder with ours, and return lines for the user.

    Args:
        pretrained: Converted weights.
        folder: Folder of the converted model.
        to: Library, "timm" or "huggingface".
        pil_image: Path of an image.

    Raises:
        WeightsError: The library cannot open the folder, or its outputs differ.
        BadImage: The image cannot be read.
    """
    if to == "huggingface" and importlib.util.find_spec("transformers") is None:
        return ["note: transformers is not installed here, so its answers were not compared"]
    if pretrained.config.channels != 3:
        return ["note: images are read as RGB, so answers were not compared"]
    image = read_image(os.fspath(pil_image))
    preprocessing, _ = preprocessing_or_default(pretrained)
    ours = preprocessing.normalise(preprocessing(image).unsqueeze(0))
    network = build_from_state(pretrained.config, pretrained.state)
    compare = _timm if to == "timm" else _huggingface
    with torch.inference_mode():
        mine = network(ours)
        try:
            same, other = compare(folder, ours, image, bool(pretrained.config.num_classes))
        except Exception as error:  # whatever another library raises
            reason = printable(" ".join(str(error).split()))[:160]
            raise WeightsError(
                f"{printable(folder)} was written, but {to} cannot open it: {reason}"
            ) from None
    spread = float(mine.abs().max()) or 1.0
    difference = float((mine - same).abs().max()) / spread
    if not difference < OUTPUT_TOLERANCE:
        raise WeightsError(
            f"{printable(folder)} was written, but {to} answers otherwise: outputs differ by "
            f"{difference:.2g} of the largest; please report it"
        )
    line = f"parity on {printable(pil_image)}: outputs differ by {difference:.1g} of the largest"
    if not pretrained.config.num_classes:
        return [line]
    scores, others = mine.softmax(1)[0], other.softmax(1)[0]
    gap = float((scores - others).abs().max())
    top = "the same top-1" if scores.argmax() == others.argmax() else "another top-1"
    lines = [f"{line}; with {to}'s own preprocessing {top}, scores differ by at most {gap:.2g}"]
    if gap > SCORE_TOLERANCE or scores.argmax() != others.argmax():
        lines.append(f"note: {to} resizes images otherwise; compare on your own with --image")
    return lines


def _timm(folder: Path, pixels: Tensor, image: Image.Image, _head: bool) -> tuple[Tensor, Tensor]:
    """timm's outputs for our preprocessed pixels, and for its own preprocessing."""
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return model(pixels), model(transform(image).unsqueeze(0))


def _huggingface(
    folder: Path, pixels: Tensor, image: Image.Image, head: bool
) -> tuple[Tensor, Tensor]:
    """transformers' outputs for our preprocessed pixels, and for its own preprocessing."""
    from transformers import (
        AutoImageProcessor,
        AutoModel,
        AutoModelForImageClassification,
    )

    processor = AutoImageProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]
    own = processor(images=image, return_tensors="pt")["pixel_values"]
    if not head:
        model = AutoModel.from_pretrained(folder).eval()
        return model(pixels).pooler_output, model(own).pooler_output
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    return model(pixels).logits, model(own).logits
