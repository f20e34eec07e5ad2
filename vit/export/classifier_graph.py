"""Classifier as one ONNX graph: bytes of images of any size in, probabilities out.

    probabilities                                 = file(images)
    probabilities, tokens, embedding, attention   = file(images)        with tokens

torch exports the network, which takes resized images; onnx_preprocessing.py adds resize and crop.
"""

import json
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError
from vit.export.onnx_preprocessing import FITTED, preprocessing_nodes
from vit.export.onnx_tracing import Part, decomposed_attention, difference, libraries
from vit.exported.exported_classifier import DISTANCE, INPUT, SCORE_CALIBRATION
from vit.exported.onnx_session import Array, OnnxSession
from vit.model.attention import AttentionContext, AttentionFunction, AttentionRecorder
from vit.model.feature_distance import FeatureDistance, encode_with_features
from vit.model.tiled_classifier import TiledClassifier
from vit.model.vision_transformer import VisionTransformer
from vit.tasks.task import calibrated_activation, get_task
from vit.version import __version__
from vit.weights.saved_model import LoadedRun

IMAGES = ((1, 40, 61), (2, 333, 500), (5, 97, 31))
"""Batch size, height and width of random images that a file is compared with torch on."""
BATCHES = (3, 1, 2, 5)
"""Batch sizes of further ones in the network's own size; the first one is traced."""


class Classifier(nn.Module):
    """Resized images to probabilities."""

    def __init__(
        self,
        model: VisionTransformer,
        preprocessing: Preprocessing,
        activation: nn.Module,
        distance: FeatureDistance | None = None,
    ) -> None:
        super().__init__()
        self.model, self.preprocessing = model, preprocessing
        self.activation, self.distance = activation, distance

    def encode(
        self, images: Tensor, attention_fn: AttentionFunction
    ) -> tuple[Tensor, AttentionContext, tuple[Tensor, ...]]:
        """Tokens after the last norm, their context, and the distances, (batch,), if any."""
        floats = self.floats(images)
        if self.distance is None:
            return (*self.model.encode(floats, attention_fn=attention_fn), ())
        tokens, context, features = encode_with_features(
            self.model, floats, attention_fn=attention_fn
        )
        return tokens, context, (self.distance(features),)

    def floats(self, images: Tensor) -> Tensor:
        """Bytes (batch, height, width, 3) -> normalised, (batch, 3, height, width)"""
        return self.preprocessing.normalise(images.permute(0, 3, 1, 2))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Bytes (batch, height, width, 3) -> probabilities (batch, classes), and distances"""
        tokens, context, distances = self.encode(images, decomposed_attention)
        return (self.activation(self.model.forward_head(tokens, context)), *distances)


class BagClassifier(Classifier):
    """Resized tiles of one image to its probabilities."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Bytes (tiles, height, width, 3) -> probabilities (1, classes)"""
        features = self.model.pool(*self.encode(images, decomposed_attention)[:2])[None]
        assert isinstance(self.model, TiledClassifier)
        return (self.activation(self.model.head(self.model.tile_pool(features))),)


class ClassifierWithTokens(Classifier):
    """Resized images to probabilities, tokens, embedding and attention."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Bytes (batch, height, width, 3) -> probabilities (batch, classes) and internals.

        Returns:
            Also the tokens after the last norm (batch, tokens, dim); the pooled vector
            (batch, pooled_dim); and attention (batch, blocks, tokens): from the class token of
            each block to all tokens, mean over the heads; without one, mean over the patches.
        """
        model, recorder = self.model, AttentionRecorder()
        tokens, context, distances = self.encode(images, recorder)
        # distances pool the tokens too, and attention pooling then has the last map
        blocks = len(model.blocks) * model.repeats
        maps = [weights.mean(dim=1) for weights in recorder.maps[:blocks]]
        embedding = model.pool(tokens, context)
        prefix = model.num_prefix_tokens
        rows = [
            weights[:, prefix:].mean(dim=1) if model.cls_token is None else weights[:, 0]
            for weights in maps
        ]
        probabilities = self.activation(model.head(embedding))
        return probabilities, tokens, embedding, torch.stack(rows, dim=1), *distances


def part_of(run: LoadedRun, *, tokens: bool = False) -> Part:
    """The module that torch exports of a classifier."""
    if tokens and run.config.merge_tokens:
        raise ConfigError(
            f"merge_tokens={run.config.merge_tokens}: tokens differ from block to block and from "
            "image to image; export without tokens"
        )
    preprocessing, batch = run.preprocessing, {0: "batch"}
    if tokens and preprocessing.native:
        raise ConfigError("resize=native: the number of tokens varies; export without tokens")
    axes = {**batch, 1: "height", 2: "width"} if preprocessing.native else batch
    outputs = {"probabilities": batch}
    if tokens:
        outputs |= {"tokens": batch, "embedding": batch, "attention": batch}
    if run.distance is not None:
        outputs[DISTANCE] = batch
    kind = ClassifierWithTokens if tokens else Classifier
    if run.preprocessing.tiles is not None:
        kind, batch, outputs = BagClassifier, {0: "tiles"}, {"probabilities": {}}
    activation = calibrated_activation(run)
    return Part(
        name="classifier",
        module=kind(run.model, preprocessing, activation, run.distance).eval(),
        inputs={FITTED if preprocessing.in_graph else INPUT: axes},
        outputs=outputs,
        examples=[(torch.from_numpy(images),) for images in random_inputs(preprocessing)],
        multiple=preprocessing.patch_size or 1,
    )


def prepend_preprocessing(proto: Any, preprocessing: Preprocessing) -> None:
    """Add resize and crop to an onnx.ModelProto that takes resized images of RGB."""
    if not preprocessing.in_graph:
        return
    onnx, front = libraries(), preprocessing_nodes(preprocessing)
    network = [*proto.graph.node]
    del proto.graph.node[:], proto.graph.input[:]
    proto.graph.node.extend([*front.nodes, *network])
    proto.graph.initializer.extend(front.constants.values())
    axes = ["batch", "height", "width", 3]
    proto.graph.input.append(
        onnx.helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, axes)
    )


def metadata_of(run: LoadedRun, source: str, *, precision: str, opset: int) -> dict[str, str]:
    """Metadata of the file; quantization sets `calibration`."""
    known = {} if run.license is None else {"license": run.license}
    if run.stored_task:
        known["task"] = run.stored_task
    if run.thresholds is not None:
        known["thresholds"] = json.dumps(run.thresholds)
    if run.calibration is not None:
        known[SCORE_CALIBRATION] = json.dumps(run.calibration.to_dict())
    if run.answers is not None:
        known["answers"] = run.answers.to_json()
    return {
        **known,
        "graph": "classifier",
        "activation": get_task(run.task_name).activation_name,
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
    """Largest difference of a file to torch and Pillow on random images of several sizes."""
    largest = 0.0
    batches = random_inputs(preprocessing)
    if preprocessing.in_graph:
        batches += [preprocessing.random_input(count, count, *size) for count, *size in IMAGES]
    for images in batches:
        resized = images
        if preprocessing.in_graph:
            fitted = [preprocessing.resize_and_crop(Image.fromarray(image)) for image in images]
            resized = np.stack([np.asarray(image) for image in fitted])
        with torch.inference_mode():
            expected = part.module(torch.from_numpy(resized))
        found = session({"images": images})
        largest = max(largest, difference(part, expected, found, tolerance))
    return largest


def random_inputs(preprocessing: Preprocessing) -> list[Array]:
    """Random resized images, (batch, height, width, channels) with each of BATCHES, of native of
    several shapes."""
    side, usual = preprocessing.patch_size, preprocessing.image_size
    sizes = [usual] * len(BATCHES)
    if side is not None:
        sizes = [(2 * side, 3 * side), usual, (side, 4 * side), (3 * side, side)]
    pairs = zip(BATCHES, sizes, strict=True)
    return [preprocessing.random_input(count, count, *size) for count, size in pairs]
