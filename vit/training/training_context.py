"""What a training step reads and updates: network, optimiser, settings and counters."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from vit.config import Config
from vit.data.captions.tokenizer import Tokenizer
from vit.data.device_cache import DeviceCache
from vit.data.image_cache import ImageCache
from vit.data.preprocessing import Preprocessing
from vit.data.transforms import TileFeatures
from vit.errors import BadImage
from vit.model.tiled_classifier import TiledClassifier
from vit.model.vision_transformer import VisionTransformer
from vit.stop_signals import Interruption
from vit.tasks.classification import Classification
from vit.tasks.task import Task
from vit.training.distributed.collectives import gather_lists, on_main
from vit.training.ema import ExponentialMovingAverage, swapped_weights
from vit.training.sync_batch_norm import (
    frozen_running_stats,
    running_stats,
    sum_over_processes,
)

T = TypeVar("T")


@dataclass(kw_only=True)
class TrainingContext:
    """Everything a training step reads or updates."""

    config: Config
    accelerator: Accelerator
    network: VisionTransformer
    """The network without wrappers; its parameter names are those of the files."""
    model: nn.Module
    """The same network as accelerate prepared it: distributed, in mixed precision."""
    optimizer: Optimizer
    average: ExponentialMovingAverage | None
    preprocessing: Preprocessing
    lr_at: Callable[[int], float]
    task: Task = field(default_factory=Classification)
    tokenizer: Tokenizer | None = None
    """Tokenizer of the captions; None without a captioning task."""
    cache: ImageCache | DeviceCache | None = None
    """Cache of decoded training images, if any."""
    tile_features: TileFeatures | None = None
    """Features of the tiles of all images, if the encoder is frozen."""
    workers: int | None = None
    """Measured number of loader processes; None if the setting `workers` is given."""
    frozen_steps: int = 0
    """First steps, in which only the head is trained."""
    step: int = 0
    skipped: int = 0
    """Steps whose gradient was not finite, in this process."""
    skipped_in_row: int = 0
    """Those of them directly before this step."""
    failed: dict[str, str] = field(default_factory=dict)
    """Images that were left out, with the reason."""
    interruption: Interruption = field(default_factory=Interruption)
    """Records a signal sent to this process."""
    alone: bool = False
    """Whether a step is tried on this process alone, without the others."""

    @property
    def processes(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of images, weights and losses."""
        return torch.float64 if self.config.run.precision == "fp64" else torch.float32

    @cached_property
    def constants(self) -> tuple[Tensor, ...]:
        """What normalises images, on the device: a step does not copy it."""
        return self.preprocessing.constants(self.accelerator.device, self.dtype)

    def normalise(self, images: Tensor) -> Tensor:
        """Bytes on the device, (batch, 3, height, width) -> normalised floats; not of features."""
        if self.tile_features is not None:
            return images
        return self.preprocessing.normalise(images, dtype=self.dtype, constants=self.constants)

    def encode_tiles(self, images: Tensor) -> Tensor:
        """As `normalise`; bags of tiles, (batch, tiles, 3, height, width) -> their features."""
        if not isinstance(self.network, TiledClassifier) or self.tile_features is not None:
            return self.normalise(images)
        with self.autocast():
            return self.network.encode_tiles(images, self.normalise)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Compute in the precision of the training."""
        context: contextlib.AbstractContextManager[None] = self.accelerator.autocast()
        return context

    def frozen_running_stats(self) -> contextlib.AbstractContextManager[None]:
        """Keep the network's running statistics as they are."""
        return frozen_running_stats(self.network)

    @cached_property
    def running_stats(self) -> tuple[Tensor, ...]:
        """The network's running statistics, which every forward pass of a training changes."""
        return tuple(running_stats(self.network).values())

    @contextlib.contextmanager
    def teaching(self) -> Iterator[None]:
        """Compute as in evaluation, with the moving average of the weights, which there must be."""
        assert self.average is not None
        training = self.network.training
        with swapped_weights(self.network, self.average.state_dict()):
            self.network.eval()
            try:
                yield
            finally:
                self.network.train(training)

    def gather(self, mine: list[T]) -> list[T]:
        """Concatenate the lists of all processes."""
        return gather_lists(mine)

    def on_main(self, act: Callable[[], T]) -> T:
        """Call `act` on the main process, and return its result on all."""
        return on_main(self.accelerator, act)

    def sum_over_processes(self, mine: Tensor) -> Tensor:
        """Differentiable sum of `mine`, (n,), over all processes, which must all make this call."""
        return mine if self.processes == 1 or self.alone else sum_over_processes(mine)

    def exclude_unreadable(self, failed: list[BadImage]) -> None:
        """Record the images that could not be read, of all processes, in `failed`."""
        found = gather_lists(failed)
        if self.config.data.on_bad_image == "stop":
            self.optimizer.zero_grad()
            raise BadImage(found[0].path, found[0].reason)
        self.failed.update((bad.path, bad.reason) for bad in found)


class Step(NamedTuple):
    """Results of one optimiser step, equal on all processes."""

    loss: float
    """Mean loss of the images, without the routers' losses."""
    images: int
    """Images, over all processes."""
    grad_norm: float
    """Norm of the gradient of all parameters, before clipping."""
    lr: float
    """Learning rate of the step."""
    signal: int
    """Number of the signal that stops the run, or 0."""
    due: bool
    """Whether a process requests a checkpoint."""
    routers: tuple[float, float] = (0.0, 0.0)
    """Balance loss and z loss, summed over layers and before weighting; zeros without routers."""
