"""Classifier as one ONNX graph: images as bytes, of any size, in; probabilities out.

    probabilities                                 = file(images)
    probabilities, tokens, embedding, attention   = file(images)        with tokens

Resize and crop come first (onnx_preprocessing.py); what torch exports takes the resized bytes.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError
from vit.export.onnx_graph import Part, decomposed_attention, difference, libraries
from vit.export.onnx_preprocessing import FITTED, fitting
from vit.exported.onnx_session import Array, OnnxSession
from vit.model.attention_maps import AttentionRecorder
from vit.model.vision_transformer import VisionTransformer
from vit.version import __version__
from vit.weights.saved_model import LoadedRun

Images = tuple[int, int, int]
"""How many images, and their height and width."""

IMAGES: tuple[Images, ...] = ((1, 40, 61), (2, 333, 500), (5, 97, 31))
"""Noise that a file is compared with torch on, besides images of the network's own size."""
BATCHES = (3, 1, 2, 5)  # of images as the network takes them, the traced one first


class Answer(nn.Module):
    """Bytes of fitted images in, probabilities out.

    Args:
        model: The network.
        preprocessing: Its normalisation.
        several: Whether an image may have several classes: sigmoids instead of one softmax.
    """

    def __init__(
        self, model: VisionTransformer, preprocessing: Preprocessing, *, multilabel: bool = False
    ) -> None:
        super().__init__()
        self.model, self.preprocessing = model, preprocessing
        self.activation = nn.Sigmoid() if multilabel else nn.Softmax(dim=1)

    def floats(self, images: Tensor) -> Tensor:
        """Bytes (batch, height, width, 3) -> normalised, (batch, 3, height, width)"""
        return self.preprocessing.normalise(images.permute(0, 3, 1, 2))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Bytes (batch, height, width, 3) -> probabilities (batch, classes)"""
        tokens, context = self.model.encode(self.floats(images), attention_fn=decomposed_attention)
        return (self.activation(self.model.forward_head(tokens, context)),)


class AnswerWithTokens(Answer):
    """Also the tokens, what the head reads, and where the network looked."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Bytes of fitted images -> what they are, and what the network made of them.

        Args:
            images: (batch, height, width, 3).

        Returns:
            Probabilities (batch, classes); tokens after the last norm (batch, tokens, dim); the
            pooled vector (batch, pooled_dim); and attention (batch, blocks, tokens), the mean over
            the heads of how the class token of each block looks at all tokens, or of how the
            patches do, on average, where there is none.
        """
        model, recorder = self.model, AttentionRecorder()
        tokens, context = model.encode(self.floats(images), attention_fn=recorder)
        maps = [weights.mean(dim=1) for weights in recorder.maps]
        embedding = model.pool(tokens, context)
        prefix = model.num_prefix_tokens
        rows = [
            weights[:, prefix:].mean(dim=1) if model.cls_token is None else weights[:, 0]
            for weights in maps
        ]
        probabilities = self.activation(model.head(embedding))
        return probabilities, tokens, embedding, torch.stack(rows, dim=1)


def part_of(run: LoadedRun, *, tokens: bool = False) -> Part:
    """What torch exports of a classifier.

    Raises:
        ConfigError: It cannot be exported; the message names the setting.
    """
    config = run.config
    if config.channels != 3:
        raise ConfigError(
            f"channels={config.channels}: an exported network takes RGB images, channels=3"
        )
    if tokens and config.merge_tokens:
        raise ConfigError(
            f"merge_tokens={config.merge_tokens}: tokens differ from block to block and from "
            "image to image; export without tokens"
        )
    batch = {0: "batch"}
    outputs = {"probabilities": batch}
    if tokens:
        outputs |= {"tokens": batch, "embedding": batch, "attention": batch}
    answer = AnswerWithTokens if tokens else Answer
    return Part(
        name="classifier",
        module=answer(run.model, run.preprocessing, multilabel=run.thresholds is not None).eval(),
        inputs={FITTED: batch},
        outputs=outputs,
        examples=[
            (torch.from_numpy(noise(count, *run.preprocessing.image_size)),) for count in BATCHES
        ],
    )


def with_pixels(proto: Any, preprocessing: Preprocessing) -> None:
    """Put what fits images in front of an onnx.ModelProto that takes fitted ones."""
    onnx, front = libraries(), fitting(preprocessing)
    behind = [*proto.graph.node]
    del proto.graph.node[:], proto.graph.input[:]
    proto.graph.node.extend([*front.nodes, *behind])
    proto.graph.initializer.extend(front.constants.values())
    axes = ["batch", "height", "width", 3]
    proto.graph.input.append(
        onnx.helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, axes)
    )


def metadata_of(run: LoadedRun, source: str, *, precision: str, opset: int) -> dict[str, str]:
    """What a file says of itself; `calibration` is filled in by what quantises."""
    multilabel = {"activation": "sigmoid", "thresholds": json.dumps(run.thresholds)}
    return {
        "graph": "classifier",
        **({"activation": "softmax"} if run.thresholds is None else multilabel),
        "classes": json.dumps(list(run.classes), ensure_ascii=False),
        "preprocessing": json.dumps(run.preprocessing.to_dict()),
        "vit_version": __version__,
        "source_run": source,
        "precision": precision,
        "opset": str(opset),
        "calibration": "null",
    }


def check_images(
    part: Part, session: OnnxSession, preprocessing: Preprocessing, tolerance: float
) -> float:
    """Largest difference of a file to torch and Pillow on noise of several sizes and batches.

    Raises:
        VitError: It is more than `tolerance`, or a shape differs.
    """
    largest = 0.0
    for images in images_of(preprocessing):
        with torch.inference_mode():
            expected = part.module(torch.from_numpy(fitted(images, preprocessing)))
        answer = session({"images": images})
        largest = max(largest, difference(part, expected, answer, tolerance))
    return largest


def images_of(preprocessing: Preprocessing) -> Iterator[Array]:
    """Batches of noise, uint8 (batch, height, width, 3)."""
    own = [(count, *preprocessing.image_size) for count in BATCHES]
    for count, height, width in (*own, *IMAGES):
        yield noise(count, height, width)


def fitted(images: Array, preprocessing: Preprocessing) -> Array:
    """Images of one size -> as the network takes them, by Pillow."""
    return np.stack(
        [np.asarray(preprocessing.resize_and_crop(Image.fromarray(image))) for image in images]
    )


def noise(count: int, height: int, width: int) -> Array:
    """Random bytes, (count, height, width, 3); the same at every call."""
    random = np.random.default_rng(count)
    return random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
