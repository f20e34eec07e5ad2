"""The engine of run folders and other weights: torch. Images in, outputs by name.

Handles test-time augmentation, packed sequences of images in their own aspect ratio, captions,
torch.compile and, for float32 on a CPU, oneDNN prepacking: torch adds the bias before each product
and activates after it, each in a pass of its own over memory, where oneDNN fuses both into the
product and reads a matrix that was reordered once. The operators are those that torch's compiler
emits (torch.ops.mkldnn).
"""

import copy
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit.config import ModelConfig
from vit.config.inference_config import InferenceConfig
from vit.data.image_objects import ImageInput
from vit.data.image_tiles import TiledImage
from vit.errors import BadImage, ConfigError, explain_full_memory, is_out_of_memory
from vit.exported.engine import SHARES
from vit.exported.image_prefetch import ImageReader
from vit.generation.generate import CaptionGenerator, check_length
from vit.generation.generation_config import Search
from vit.inference.precision_autotune import PrecisionAutotuner
from vit.model.captioner import Captioner, use_column_major_weights
from vit.model.feature_distance import DistanceFeatures, encode_with_features, features_of_sizes
from vit.model.mlp import MLP
from vit.model.pooling import NoPooling
from vit.model.sequence_packing import check_packable
from vit.model.tiled_classifier import TiledClassifier
from vit.model.vision_transformer import VisionTransformer
from vit.precision import (
    Precision,
    autocast,
    has_onednn,
    resolve_device,
    resolve_precision,
    should_benchmark_bf16,
)
from vit.process_resources import usable_cores
from vit.tasks.task import calibrated_activation, get_task
from vit.text import Notify, printable
from vit.weights.adapt_weights import change_patches
from vit.weights.load_model import load_model
from vit.weights.saved_model import LoadedRun

Activation = Callable[[Tensor], Tensor]
GPU_BATCH_SIZE, CAPTION_BATCH_SIZE = 64, 16
CPU_TOKENS = 2304
"""Tokens of a batch on a CPU: more overflow its caches, fewer are dominated by call overhead."""
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


class TorchEngine:
    """A network in torch; an Engine.

    On one machine the same list gives the same numbers, to the last digit: an unreadable image is
    replaced by a blank one, and the last batch is padded with blank images to a power of two, so
    that few shapes occur. (Rounding of a matrix product depends on its number of rows.) Finished
    captions leave the batch, so the last digits of a caption's score depend on its batch.
    """

    exported = whole_images = False
    remedy = "try precision fp32"

    def __init__(
        self, source: str | os.PathLike[str] | LoadedRun, config: InferenceConfig, notify: Notify
    ) -> None:
        self.device = resolve_device(config.device)
        self.precision = resolve_precision(config.precision, self.device)
        if isinstance(source, LoadedRun):
            loaded = source
        else:
            loaded = load_model(source, notify=notify, headless=config.embeddings)
        if config.no_calibration:
            loaded = loaded.without_calibration()
        if config.merge_tokens is not None or config.patch_size is not None:
            measured = loaded.calibration
            loaded = change_patches(
                loaded, merge_tokens=config.merge_tokens, patch_size=config.patch_size
            )
            if measured is not None and measured.set_levels and loaded.calibration != measured:
                changed = "patch_size" if config.merge_tokens is None else "merge_tokens"
                notify(
                    f"note: {changed} changes the network that was calibrated, so it has no reject "
                    "and no sets; leave it out for them"
                )
        self.classes, self.preprocessing = tuple(loaded.classes), loaded.preprocessing
        if config.intensity_range is not None:
            self.preprocessing = self.preprocessing.with_range(config.intensity_range)
        with explain_full_memory():
            self.model = loaded.model.eval().to(self.device)
        captions, on_cpu = isinstance(self.model, Captioner), self.device.type == "cpu"
        self.caption_generator: CaptionGenerator | None = None
        if isinstance(loaded.model, Captioner) and loaded.tokenizer is not None:
            decoder, search = loaded.model.decoder, config.search or Search()
            check_length(search, decoder)
            self.caption_generator = CaptionGenerator(decoder, loaded.tokenizer, search)
            if on_cpu and source is not loaded:  # not in a network that the caller may save
                use_column_major_weights(decoder)
        elif config.search is not None:
            raise ConfigError(
                f"{config.search}: this network names classes and writes no captions; leave it out"
            )
        self.task_name, self.thresholds = loaded.task_name, loaded.thresholds
        self.shares = get_task(loaded.task_name).activation_name in SHARES
        self.calibration, self.activation = loaded.calibration, calibrated_activation(loaded)
        self.distance, self.returns_distances = loaded.distance, False
        self.keep_aspect = config.keep_aspect and not self.preprocessing.native
        self.answers = loaded.answers
        if self.answers is not None and self.keep_aspect:  # intervals are those of square crops
            self.answers = replace(self.answers, half_widths={})
        self.native, self.tta = config.keep_aspect or self.preprocessing.native, config.tta
        if self.native:
            patch_size = loaded.model.patch_embed.patch_size
            self.preprocessing = self.preprocessing.to_native(patch_size)
        self.embeddings, self.compiled = config.embeddings, config.compile
        self.check_settings()
        by_tiles = self.preprocessing.tiles is not None
        self.batch_size = config.batch_size or (
            1 if by_tiles else default_batch_size(loaded.config, self.device, captions=captions)
        )
        self.block_size = self.batch_size
        self.workers = config.workers or default_num_threads(self.device)
        self.reads_and_computes = on_cpu
        self.constants = self.preprocessing.constants(self.device, torch.float32)
        self.forward: Callable[[Tensor], Any] = self._forward
        if self.compiled:
            self.forward = torch.compile(self._forward, dynamic=False)
        can = not self.compiled and can_prepack(self.model)
        self.prepacked = prepack(self.model) if can else None
        """The same network for float32 on a CPU, where that is faster."""
        self.precision_autotuner: PrecisionAutotuner | None = None
        tries = config.precision == "auto" and should_benchmark_bf16(self.device)
        if tries and self.classes and not captions and not by_tiles:
            usage = {"keep_aspect": self.native, "compiled": self.compiled}
            self.precision_autotuner = PrecisionAutotuner(
                loaded.config, usage, usual=self.precision, notify=notify
            )
            self.precision = self.precision_autotuner.precision

    def check_settings(self) -> None:
        """Raise if settings contradict each other or the model."""
        captions = isinstance(self.model, Captioner)
        if self.native:
            check_packable(self.model)
        if self.tta is not None and captions:
            raise ConfigError(
                f"tta={self.tta}: probabilities are averaged, not captions; leave it out"
            )
        if self.preprocessing.tiles is not None:
            for name in ("native", "tta", "compiled"):
                if getattr(self, name):
                    name = {"native": "keep_aspect", "compiled": "compile"}.get(name, name)
                    raise ConfigError(f"{name}: images are read by tiles of one size; leave it out")
        if self.compiled and (captions or self.native):
            what = "captions" if captions else "images in their own shape"
            raise ConfigError(f"compile: {what} come in too many shapes to compile; leave it out")
        if self.embeddings and isinstance(self.model.attn_pool, NoPooling):
            raise ConfigError(
                "this network has no embeddings: it pools its tokens to no vector (pooling=none); "
                "give a classifier, or a run of vit pretrain"
            )
        if self.embeddings and captions and self.native:
            raise ConfigError(
                "embeddings: not available for captioners with keep_aspect; leave one of them out"
            )

    @property
    def n_best(self) -> int:
        return 0 if self.caption_generator is None else self.caption_generator.search.n_best

    @property
    def prepare(self) -> Callable[[Any], Any]:
        """Image -> (channels, height, width), uint8 for RGB; tiles are read when they are used."""
        if self.preprocessing.tiles is not None:
            return lambda image: image
        return self.preprocessing

    def pool(self) -> Executor:
        """Threads that read; on a CPU each computes, with its share of the cores.

        Threads inside one matrix product would wait for each other at every layer
        (benchmarks/results/prediction_xeon_2026-11-21.md).
        """
        if not self.reads_and_computes:
            pool = ThreadPoolExecutor(self.workers, "read-image")
        else:
            pool = make_thread_pool(self.workers)
        if self.compiled:
            pool.submit(self.warm_up).result()
        return pool

    def autotune_precision(self, images: Sequence[ImageInput], read: ImageReader) -> None:
        """Choose the precision for a list now, where `auto` leaves it to a trial."""
        if self.precision_autotuner is None:
            return
        choose = partial(self.precision_autotuner.choose, read=read, run=self.compute)
        with make_thread_pool(self.workers) as pool:  # as many threads a product as later
            self.precision = pool.submit(choose, images, self.batch_size).result()

    def groups(self, images: Sequence[Any]) -> list[list[int]]:
        return [list(range(len(images)))]

    def largest_batch(self, _shape: Sequence[int]) -> int:
        return self.batch_size

    def random_image(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        blank = self.blank_image()
        return torch.randint(0, 256, blank.shape, generator=generator).to(blank.dtype)

    def run(
        self,
        images: Sequence[Tensor | BadImage],
        *,
        first: int = 0,
        rows: int | None = None,
    ) -> dict[str, Any]:
        """As in Engine; a batch is padded to a power of two by default."""
        count, blank = len(images), self.blank_image()
        batch = [blank if isinstance(image, BadImage) else image for image in images]
        if rows is None:
            rows = count if self.native else min(self.batch_size, 1 << (count - 1).bit_length())
            rows = self.batch_size if self.compiled else rows
        batch += [blank] * (rows - count)
        output = self.compute(batch, self.precision)
        outputs: dict[str, Any] = {
            "probabilities": output.probabilities.numpy(),
            "memory": output.memories,
            "pixels": batch,
        }
        if output.embeddings is not None:
            outputs["embedding"] = output.embeddings
        if output.distances is not None:
            outputs["distance"] = output.distances.tolist()
        if self.caption_generator is not None:
            finite = output.probabilities.isfinite().all(dim=1).tolist()
            good = [n for n in range(count) if finite[n] and not isinstance(images[n], BadImage)]
            memories = [memory for n in good if (memory := output.memories[n]) is not None]
            with torch.inference_mode(), autocast(self.precision, self.device):
                found = self.caption_generator.generate(memories, [first + n for n in good])
            captions = dict(zip(good, found, strict=True))
            outputs["captions"] = [captions.get(n, ()) for n in range(count)]
        return outputs

    @torch.inference_mode()
    def compute(self, images: Sequence[Tensor], precision: Precision) -> BatchOutput:
        """Output for prepared images, averaged over the views of `tta`."""
        views: list[Sequence[Tensor]] = [images]
        if self.tta is not None:
            views.append([image.flip(-1) for image in images])
        probabilities: list[Tensor] = []
        embeddings: list[Tensor] = []
        distances: list[Tensor] = []
        memories: Sequence[Tensor | None] = []
        for view in views:
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

    def warm_up(self) -> None:
        """Compile for whole batches."""
        try:
            self.compute([self.blank_image()] * self.batch_size, self.precision)
        except RuntimeError as error:  # a missing compiler, an old Python, an unsupported network
            if is_out_of_memory(error):
                raise
            first = printable(str(error).strip().splitlines()[0][:200])
            raise ConfigError(
                f"compile: torch cannot compile here ({first}); leave it out"
            ) from None

    def blank_image(self) -> Tensor:
        """A black image, which replaces one that cannot be read."""
        return self.preprocessing.blank()

    def _forward_images(
        self, images: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None], DistanceFeatures | None]:
        """Logits, pooled tokens if requested, memories, and features of the distance if requested,
        of one view of uint8 images."""
        no_memories = [None] * len(images)
        if self.preprocessing.tiles is not None:
            assert isinstance(self.model, TiledClassifier)
            bags = [self.tile_features(image)[1][None] for image in images]
            pooled = torch.cat([self.model.tile_pool(bag) for bag in bags])
            return self.model.head(pooled), pooled if self.embeddings else None, no_memories, None
        # on a CPU an image that is normalised by itself stays in the cache
        one_by_one = self.native or self.device.type == "cpu"
        floats = [self._normalise(image) for image in images] if one_by_one else []
        if self.native and isinstance(self.model, Captioner):
            logits, memories = self.model.encode_images_packed(floats)
            return logits, None, memories, None
        if self.native:
            features = None
            if self.returns_distances and self.distance is not None:
                features = features_of_sizes(self.model, floats)
            pooled = self.model.features_packed(floats) if features is None else features.pooled
            embedding = pooled if self.embeddings else None
            return self.model.head(pooled), embedding, no_memories, features
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

    def tile_features(self, image: Tensor | TiledImage) -> tuple[list[int], Tensor]:
        """Numbers and features, (tiles, dim), of the tiles of an image that are no background."""
        half = torch.is_autocast_enabled(self.device.type)
        model = self.model if half or self.prepacked is None else self.prepacked
        if isinstance(image, Tensor):  # in place of one that cannot be read
            return [0], model.features(self._normalise(image))
        numbers, parts = list[int](), []
        for some, chunk in self.preprocessing.tile_chunks(image):
            numbers += some
            parts.append(model.features(self._normalise(chunk)))
        return numbers, torch.cat(parts)

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


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """Mean of tensors of one shape; a single one is returned unchanged."""
    return tensors[0] if len(tensors) == 1 else torch.stack([*tensors]).mean(dim=0)


def default_batch_size(config: ModelConfig, device: torch.device, *, captions: bool) -> int:
    """Images of a batch: on a CPU a power of two by the tokens of the network."""
    if device.type != "cpu":
        return GPU_BATCH_SIZE
    if captions:
        return CAPTION_BATCH_SIZE
    images = CPU_TOKENS // (config.image_size // config.patch_size) ** 2
    return 1 << (min(max(images, 4), 64).bit_length() - 1)


def default_num_threads(device: torch.device) -> int:
    """One thread a core, on a CPU one a thread of torch; at most 8."""
    return min(8, torch.get_num_threads() if device.type == "cpu" else usable_cores())


def make_thread_pool(count: int) -> ThreadPoolExecutor:
    """`count` threads that divide torch's intra-op threads; other threads keep theirs.

    torch keeps a number of threads for each thread, and one for threads still to be started.
    """
    usual = torch.get_num_threads()
    share, ready = max(1, usual // count), threading.Barrier(count + 1)

    def initialize() -> None:
        torch.get_num_threads()  # takes the default number now, which torch else does later
        torch.set_num_threads(share)
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="inference", initializer=initialize)
    try:
        for _ in range(count):
            pool.submit(int)  # starts a thread each time, since none is idle yet
    except RuntimeError:
        ready.abort()
        raise
    ready.wait()
    torch.set_num_threads(usual)
    return pool


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
