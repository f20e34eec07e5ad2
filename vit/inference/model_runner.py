"""The network side of prediction: prepared images in, probabilities, tokens and vectors out."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, printable
from vit.inference.cpu_prepack import can_pack, packed
from vit.model.captioner import Captioner
from vit.model.pooling import NoPooling
from vit.model.sequence_packing import check_packable
from vit.model.vision_transformer import VisionTransformer
from vit.precision import Precision, autocast

Views = Literal["flip", "crops"]


class Seen(NamedTuple):
    """What the network says of a batch."""

    probabilities: Tensor
    """(batch, classes or 0), float64 on the CPU."""
    embeddings: Tensor | None
    """What the head reads, (batch, dim), float32 on the CPU, where it was asked for."""
    memories: Sequence[Tensor | None]
    """Of a captioner the tokens of each image, (tokens, dim) on the device."""


class Outputs(NamedTuple):
    """What one pass computes."""

    logits: Tensor
    pooled: Tensor | None
    memories: Sequence[Tensor | None]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network with the way it is run; its arithmetic is chosen by each call.

    Args:
        model: In evaluation mode, on the device.
        preprocessing: Its own.
        device: Where it is.
        keep_aspect: Images come in any sizes, whole patches.
        tta: The mean over which views of an image: it and its mirror image, or those of five
            crops, ten in all.
        embeddings: Whether what the head reads is wanted too.
        compiled: Whether torch.compile is used.
        several: Whether an image may have several classes: each has a probability of its own.

    Raises:
        ConfigError: It cannot be run so.
    """

    model: VisionTransformer
    preprocessing: Preprocessing
    device: torch.device
    keep_aspect: bool = False
    tta: Views | None = None
    embeddings: bool = False
    compiled: bool = False
    multilabel: bool = False
    run: Callable[[Tensor], Any] = dataclasses.field(init=False)
    quick: VisionTransformer | None = dataclasses.field(init=False)
    """The same network, faster, where it is computed in float32 on a CPU."""

    def __post_init__(self) -> None:
        check(self)
        run: Callable[[Tensor], Any] = self._pass
        if self.compiled:
            run = torch.compile(run, dynamic=False)
        object.__setattr__(self, "run", run)
        pays = not self.compiled and can_pack(self.model)
        object.__setattr__(self, "quick", packed(self.model) if pays else None)

    def blank(self) -> Tensor:
        """What stands in the place of an image that there is not."""
        size = (3, *self.preprocessing.image_size)
        return torch.zeros((5, *size) if self.tta == "crops" else size, dtype=torch.uint8)

    @torch.inference_mode()
    def see(self, images: Sequence[Tensor], precision: Precision) -> Seen:
        """All that there is to say of uint8 images, as a Reader makes them."""
        sums: list[Tensor] = []
        pooled: list[Tensor] = []
        memories: Sequence[Tensor | None] = []
        views = views_of(images, self.tta)
        for view in views:
            with autocast(precision, self.device):
                outputs = self._outputs(view)
            sums.append(probabilities(outputs.logits, multilabel=self.multilabel))
            if outputs.pooled is not None:
                pooled.append(outputs.pooled.float().cpu())
            memories = outputs.memories
        return Seen(mean(sums), mean(pooled) if pooled else None, memories)

    def warm_up(self, rows: int, precision: Precision) -> None:
        """Compile for batches of so many images.

        Raises:
            ConfigError: torch cannot compile here.
        """
        try:
            self.see([self.blank()] * rows, precision)
        except RuntimeError as error:  # of a missing compiler, an old Python, an odd network
            first = printable(str(error).strip().splitlines()[0][:200])
            raise ConfigError(
                f"compile: torch cannot compile here ({first}); leave it out"
            ) from None

    def _outputs(self, images: Sequence[Tensor]) -> Outputs:
        """One pass over uint8 images, each (channels, height, width)."""
        nothing = [None] * len(images)
        floats = [self._floats(image) for image in images] if self._one_by_one else []
        if self.keep_aspect and isinstance(self.model, Captioner):
            classes, memories = self.model.see_packed(floats)
            return Outputs(classes, None, memories)
        if self.keep_aspect:
            pooled = self.model.features_packed(floats)
            return Outputs(self.model.head(pooled), self._wanted(pooled), nothing)
        batch = torch.stack(floats) if floats else self._floats(torch.stack([*images]))
        logits, pooled, memory = self.run(batch)
        return Outputs(logits, pooled, nothing if memory is None else [*memory])

    @property
    def _one_by_one(self) -> bool:
        """Whether each image becomes floats by itself: on a CPU one stays in the cache."""
        return self.keep_aspect or self.device.type == "cpu"

    @property
    def _fitting(self) -> VisionTransformer:
        """The network for the arithmetic that is asked for."""
        half = torch.is_autocast_enabled(self.device.type)
        return self.model if half or self.quick is None else self.quick

    def _pass(self, batch: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits, what the head read if wanted, and the memory of floats of one size."""
        model = self._fitting
        if isinstance(model, Captioner):
            tokens, places = model.encode(batch)
            pooled = model.pool(tokens, places) if self.embeddings else None
            return model.name(tokens, places), pooled, tokens
        if not self.embeddings:
            return model(batch), None, None
        pooled = model.features(batch)
        return self._logits(pooled), pooled, None

    def _wanted(self, pooled: Tensor) -> Tensor | None:
        return pooled if self.embeddings else None

    def _logits(self, pooled: Tensor) -> Tensor:
        """(batch, classes), or (batch, 0) without a head"""
        if not self.model.num_classes:
            return pooled.new_zeros(len(pooled), 0)
        logits: Tensor = self.model.head(pooled)
        return logits

    def _floats(self, images: Tensor) -> Tensor:
        """uint8 (..., channels, height, width) -> normalised, on the device"""
        return self.preprocessing.normalise(images.to(self.device))


def probabilities(logits: Tensor, *, multilabel: bool) -> Tensor:
    """(batch, classes) -> float64 on the CPU; of classes apart where there are `multilabel`."""
    exact = logits.float().cpu().double()
    return exact.sigmoid() if multilabel else exact.softmax(dim=1)


def views_of(images: Sequence[Tensor], tta: Views | None) -> list[Sequence[Tensor]]:
    """The views that answers are averaged over, each with all images; the usual one first."""
    if tta is None:
        return [images]
    whole = [images]
    if tta == "crops":
        whole = [[image[place] for image in images] for place in range(5)]
    return [*whole, *([image.flip(-1) for image in view] for view in whole)]


def mean(parts: Sequence[Tensor]) -> Tensor:
    """The mean of tensors of one shape; one alone stays as it is."""
    return parts[0] if len(parts) == 1 else torch.stack([*parts]).mean(dim=0)


def check(network: Network) -> None:
    """Refuse what cannot be.

    Raises:
        ConfigError: The message says which settings do not go together.
    """
    model, tta = network.model, network.tta
    captions = isinstance(model, Captioner)
    if network.keep_aspect and isinstance(model, Captioner):
        model.check_packable()
    elif network.keep_aspect:
        check_packable(model)
    if tta is not None and tta not in get_args(Views):
        raise ConfigError(f"tta={printable(tta)!r}: choose flip or crops, or leave it out")
    if tta is not None and captions:
        raise ConfigError(f"tta={tta}: means are taken of classes, not of captions; leave it out")
    if tta == "crops" and network.keep_aspect:
        raise ConfigError("tta=crops: keep_aspect shows whole images; use tta=flip")
    if tta == "crops" and not network.preprocessing.cuts:
        raise ConfigError(
            "tta=crops: images are squashed to the size of this network and nothing is cut off, "
            "so all crops are alike; use tta=flip"
        )
    if network.compiled and (captions or network.keep_aspect):
        what = "captions" if captions else "keep_aspect"
        raise ConfigError(f"compile: {what} come in too many shapes to compile; leave it out")
    if network.embeddings and isinstance(model.attn_pool, NoPooling):
        raise ConfigError(
            "embeddings: this network pools its tokens to no vector (pooling=none); leave it out"
        )
    if network.embeddings and captions and network.keep_aspect:
        raise ConfigError("embeddings: not of captioners with keep_aspect; leave one of them out")
