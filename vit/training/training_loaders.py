"""Data loaders of a run: this process's share of the images, in the size of the epoch."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vit.config import Config
from vit.data.captions.caption_ids import CaptionIds
from vit.data.captions.tokenizer import Tokenizer
from vit.data.dataloader import EvaluationLoader, TrainingLoader
from vit.data.dataset import ConstantTransform
from vit.data.dataset_types import Sample
from vit.data.preprocessing import Preprocessing
from vit.data.sampler import MicroBatchSampler
from vit.data.transforms import Transform
from vit.tasks.task import get_task
from vit.training.lr_schedule import image_side
from vit.training.training_context import TrainingContext


@dataclass(frozen=True)
class TransformFor:
    """The training transform of an epoch; the image size may grow over the epochs."""

    config: Config
    preprocessing: Preprocessing

    def __call__(self, epoch: int) -> Transform:
        side = image_side(self.config, epoch, self.config.training.epochs)
        sized = dataclasses.replace(self.preprocessing, image_size=(side, side))
        return get_task(self.config.training.task).training_transform(self.config, sized)


def make_schedule(
    config: Config,
    count: int,
    *,
    rank: int = 0,
    processes: int = 1,
    samples: Sequence[Sample] | None = None,
) -> MicroBatchSampler:
    """The schedule of `count` samples over steps; `samples` are needed only to draw from it."""
    draws = samples is not None and config.training.balance == "sampler"
    balanced = torch.tensor([sample.label for sample in samples or ()]) if draws else None
    return MicroBatchSampler(
        count=count,
        seed=config.training.seed,
        batch_size=config.data.batch_size,
        accumulate=config.data.micro_batches,
        rank=rank,
        world_size=processes,
        repeats=config.augment.repeats,
        balanced=balanced,
        epoch_steps=config.training.epoch_steps,
    )


def training_loader(run: TrainingContext, samples: Sequence[Sample]) -> TrainingLoader:
    """Micro-batches for this process, augmented."""
    config, accelerator = run.config, run.accelerator
    rank, processes = accelerator.process_index, accelerator.num_processes
    features, count = run.tile_features, config.data.tile_count
    bags = None if features is None else dataclasses.replace(features, tile_count=count)
    return TrainingLoader(
        samples,
        ConstantTransform(bags) if bags else TransformFor(config, run.preprocessing),
        make_schedule(config, len(samples), rank=rank, processes=processes, samples=samples),
        epochs=config.training.epochs,
        workers=num_workers(run),
        pin_memory=accelerator.device.type == "cuda",
        caption_ids=caption_ids_of(run.config, run.tokenizer, samples),
        cache=run.cache,
        classes=run.task.label_width(run.config),
    )


def num_workers(run: TrainingContext) -> int | None:
    """Number of loader processes: the setting, or as measured; features are in this process."""
    chosen = run.workers if run.config.data.workers is None else run.config.data.workers
    return 0 if run.tile_features else chosen


def evaluation_loader(run: TrainingContext, samples: Sequence[Sample]) -> EvaluationLoader:
    """This process's share of the validation images."""
    accelerator = run.accelerator
    return EvaluationLoader(
        samples,
        run.tile_features or run.preprocessing,
        batch_size=validation_batch_size(run.config, run.processes),
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        workers=num_workers(run),
        pin_memory=accelerator.device.type == "cuda",
        caption_ids=caption_ids_of(run.config, run.tokenizer, samples),
        classes=run.task.label_width(run.config),
    )


def caption_ids_of(
    config: Config, tokenizer: Tokenizer | None, samples: Sequence[Sample]
) -> CaptionIds | None:
    """Token ids of the captions; None without a captioning task."""
    if tokenizer is None:
        return None
    most = config.decoder.caption_tokens
    assert most is not None, "the data completes it"
    return CaptionIds([sample.captions for sample in samples], tokenizer, most)


def micro_batch_size(config: Config, processes: int) -> int:
    """Images per device in one forward pass of training."""
    return max(config.data.batch_size // (processes * config.data.micro_batches), 1)


def validation_batch_size(config: Config, processes: int) -> int:
    """The same in validation, where an image by tiles has all of them, and is a batch by itself."""
    return 1 if config.data.tiles else micro_batch_size(config, processes)
