"""Forward passes for prediction: preprocessed images in, probabilities, embeddings and memory out.

Handles test-time augmentation, packed sequences of images in their own aspect ratio, torch.compile
and, for float32 on a CPU, oneDNN prepacking: torch adds the bias before each product and activates
after it, each in a pass of its own over memory, where oneDNN fuses both into the product and reads
a matrix that was reordered once. The operators are those that torch's compiler emits
(torch.ops.mkldnn).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, is_out_of_memory
from vit.inference.tta import Views, augmented_views, mean
from vit.model.captioner import Captioner
from vit.model.feature_distance import DistanceFeatures, FeatureDistance, encode_with_features
from vit.model.mlp import MLP
from vit.model.pooling import NoPooling
from vit.model.sequence_packing import check_packable
from vit.model.vision_transformer import VisionTransformer
from vit.precision import Precision, autocast, has_onednn
from vit.text import printable

Activation = Callable[[Tensor], Tensor]
ONEDNN_GELU = {"none": "none", "tanh": "tanh"}
"""GELU approximations of torch under oneDNN's names."""
NOT_PREPACKED = ("router",)
"""Linear layers whose weight other modules read."""
PREPACK_ROWS = 1576
"""Rows that matrices are reordered for: eight images of 197 tokens."""


class BatchOutput(NamedTuple):
    """Model output for a batch."""

    probabilities: Tensor
    """(batch, classes), float64 on the CPU; (batch, 0) without a head."""
    embeddings: Tensor | None
    """Input of the head, (batch, dim), float32 on the CPU, if requested."""
    memories: Sequence[Tensor | None]
    """Of a captioner the image tokens of each image, (tokens, dim) on the device."""
    distances: Tensor | None = None
    """Distance from the training images, (batch,) float64 on the CPU, if requested."""


class ModelRunner:
    """Runs a network in the chosen way; the precision is chosen by each call."""

    def __init__(
        self,
        model: VisionTransformer,
        preprocessing: Preprocessing,
        device: torch.device,
        *,
        keep_aspect: bool = False,
        tta: Views | None = None,
        embeddings: bool = False,
        compiled: bool = False,
        activation: Activation,
        distance: FeatureDistance | None = None,
    ) -> None:
        self.model, self.preprocessing, self.device = model, preprocessing, device
        self.keep_aspect, self.tta = keep_aspect, tta
        self.embeddings, self.compiled, self.activation = embeddings, compiled, activation
        self.distance, self.returns_distances = distance, False
        self.constants = preprocessing.constants(device, torch.float32)
        check_settings(self)
        self.forward: Callable[[Tensor], Any] = self._forward
        if compiled:
            self.forward = torch.compile(self._forward, dynamic=False)
        self.prepacked = prepack(model) if not compiled and can_prepack(model) else None
        """The same network for float32 on a CPU, where that is faster."""

    @torch.inference_mode()
    def run(self, images: Sequence[Tensor], precision: Precision) -> BatchOutput:
        """Output for uint8 images as an ImageReader returns them, averaged over the views."""
        probabilities: list[Tensor] = []
        embeddings: list[Tensor] = []
        distances: list[Tensor] = []
        memories: Sequence[Tensor | None] = []
        for view in augmented_views(images, self.tta):
            with autocast(precision, self.device):
                logits, pooled, memories, features = self._forward_images(view)
            probabilities.append(to_probabilities(logits, self.activation))
            if pooled is not None:
                embeddings.append(pooled.float().cpu())
            if features is not None and self.distance is not None:
                distances.append(self.distance(features.float_cpu()).double())
        return BatchOutput(
            mean(probabilities),
            mean(embeddings) if embeddings else None,
            memories,
            mean(distances) if distances else None,
        )

    def warm_up(self, batch_size: int, precision: Precision) -> None:
        """Compile for batches of `batch_size` images."""
        try:
            self.run([self.blank_image()] * batch_size, precision)
        except RuntimeError as error:  # a missing compiler, an old Python, an unsupported network
            if is_out_of_memory(error):
                raise
            first = printable(str(error).strip().splitlines()[0][:200])
            raise ConfigError(
                f"compile: torch cannot compile here ({first}); leave it out"
            ) from None

    def blank_image(self) -> Tensor:
        """A black image, which replaces one that cannot be read."""
        size = (3, *self.preprocessing.image_size)
        return torch.zeros((5, *size) if self.tta == "crops" else size, dtype=torch.uint8)

    def _forward_images(
        self, images: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None], DistanceFeatures | None]:
        """Logits, pooled tokens if requested, memories, and features of the distance if requested,
        of one view of uint8 images."""
        no_memories = [None] * len(images)
        # on a CPU an image that is normalised by itself stays in the cache
        one_by_one = self.keep_aspect or self.device.type == "cpu"
        floats = [self._normalise(image) for image in images] if one_by_one else []
        if self.keep_aspect and isinstance(self.model, Captioner):
            logits, memories = self.model.encode_images_packed(floats)
            return logits, None, memories, None
        if self.keep_aspect:
            pooled = self.model.features_packed(floats)
            return self.model.head(pooled), pooled if self.embeddings else None, no_memories, None
        batch = torch.stack(floats) if floats else self._normalise(self._stack(images))
        logits, embedding, memory, features = self.forward(batch)
        return logits, embedding, no_memories if memory is None else [*memory], features

    def _forward(
        self, batch: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, DistanceFeatures | None]:
        """Logits, pooled tokens if requested, memory of a captioner, and features of the distance
        if requested, of floats of one size."""
        half = torch.is_autocast_enabled(self.device.type)
        model = self.model if half or self.prepacked is None else self.prepacked
        if isinstance(model, Captioner):
            tokens, context = model.encode(batch)
            pooled = model.pool(tokens, context) if self.embeddings else None
            return model.forward_head(tokens, context), pooled, tokens, None
        if self.returns_distances and self.distance is not None:
            _, _, features = encode_with_features(model, batch)
            pooled = features.pooled
            return model.head(pooled), pooled if self.embeddings else None, None, features
        if not self.embeddings:
            return model(batch), None, None, None
        pooled = model.features(batch)
        if not self.model.num_classes:
            return pooled.new_zeros(len(pooled), 0), pooled, None, None
        return model.head(pooled), pooled, None, None

    def _stack(self, images: Sequence[Tensor]) -> Tensor:
        """One batch of images; for a GPU in page-locked memory, which it copies without a wait."""
        pinned = self.device.type == "cuda"
        size = (len(images), *images[0].shape)
        batch = torch.empty(size, dtype=images[0].dtype, pin_memory=pinned)
        return torch.stack([*images], out=batch)

    def _normalise(self, images: Tensor) -> Tensor:
        """uint8 (..., channels, height, width) -> normalised floats on the device"""
        on_device = images.to(self.device, non_blocking=images.is_pinned())
        return self.preprocessing.normalise(on_device, constants=self.constants)


def to_probabilities(logits: Tensor, activation: Activation) -> Tensor:
    """`activation` in float64 on the CPU: (batch, classes) -> the same

    Row by row: vector instructions and the code for what they leave over round powers and
    exponentials differently, so the last digits would depend on the place in the batch.
    """
    values = logits.float().cpu().double()
    return torch.cat([activation(row) for row in torch.split(values, 1)])


def check_settings(runner: ModelRunner) -> None:
    """Raise if settings contradict each other or the model."""
    model, tta = runner.model, runner.tta
    captions = isinstance(model, Captioner)
    if runner.keep_aspect:
        check_packable(model)
    if tta is not None and tta not in get_args(Views):
        raise ConfigError(f"tta={printable(tta)!r}: choose flip or crops, or leave it out")
    if tta is not None and captions:
        raise ConfigError(f"tta={tta}: probabilities are averaged, not captions; leave it out")
    if tta == "crops" and runner.keep_aspect:
        raise ConfigError("tta=crops: keep_aspect shows whole images; use tta=flip")
    if tta == "crops" and not runner.preprocessing.crops_borders:
        raise ConfigError(
            "tta=crops: images are squashed to the size of this network and nothing is cut off, "
            "so all crops are equal; use tta=flip"
        )
    if runner.compiled and (captions or runner.keep_aspect):
        what = "captions" if captions else "keep_aspect"
        raise ConfigError(f"compile: {what} come in too many shapes to compile; leave it out")
    if runner.embeddings and isinstance(model.attn_pool, NoPooling):
        raise ConfigError(
            "this network has no embeddings: it pools its tokens to no vector (pooling=none); "
            "give a classifier, or a run of vit pretrain"
        )
    if runner.embeddings and captions and runner.keep_aspect:
        raise ConfigError(
            "embeddings: not available for captioners with keep_aspect; leave one of them out"
        )


def can_prepack(model: nn.Module) -> bool:
    """Whether oneDNN prepacking works, and pays, for `model` on its device."""
    first = next(model.parameters())
    return (
        first.device.type == "cpu"
        and first.dtype == torch.float32
        and has_onednn()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def prepack(model: VisionTransformer) -> VisionTransformer:
    """A copy of `model` with prepacked linear layers in its blocks; it shares all other tensors.

    The weights of the blocks are in memory twice from then on. The head of the copy gives an image
    alone the digits that it has among others.
    """
    shared: dict[int, object] = {id(one): one for one in model.parameters()}
    shared |= {id(one): one for one in model.buffers()}
    clone = copy.deepcopy(model, shared)
    for module in clone.blocks.modules():
        for name, child in module.named_children():
            if type(child) is nn.Linear and name not in NOT_PREPACKED:
                setattr(module, name, PrepackedLinear(child))
        if type(module) is MLP and type(module.act) is nn.GELU:
            assert isinstance(module.fc1, PrepackedLinear)
            module.fc1.gelu = ONEDNN_GELU[module.act.approximate]
            module.act = nn.Identity()
    if type(clone.head) is nn.Linear:
        clone.head = PairedLinear(clone.head)
    return clone


class PairedLinear(nn.Linear):
    """A linear layer that computes one row as two.

    A matrix by a vector is a kernel of its own, which rounds differently from that of a matrix by a
    matrix, so an image alone would have other digits than among others.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in) -> (batch, out)"""
        return super().forward(x.expand(2, -1) if len(x) == 1 else x)[: len(x)]


class PrepackedLinear(nn.Module):
    """y = x Wᵀ + b, or GELU of that, in float32 and without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.matrix = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PREPACK_ROWS)
        self.bias = linear.bias
        self.gelu = ""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.matrix, self.bias, "gelu" if self.gelu else "none", [], self.gelu
        )
        return y
