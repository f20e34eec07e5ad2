"""`--show-batch FILE`: writes the first training micro-batch as an image, without training.

The images come from the loader and the mixing of the run: crops, flips, colours, MixUp and CutMix,
in the image size of the first epoch.
"""

import dataclasses
import time
from functools import partial
from pathlib import Path

from torch import Tensor

from vit.atomic_files import atomic_file
from vit.config import Config, DistillationConfig
from vit.config.setting_layers import Settings, with_settings
from vit.data.contact_sheet import MAX_IMAGES, check_sheet_name, contact_sheet
from vit.data.dataset_types import Splits
from vit.errors import BadImage, ConfigError, DataError
from vit.model.sequence_packing import cut_images
from vit.text import plural, printable
from vit.training.distributed.collectives import on_main
from vit.training.distributed.devices import make_accelerator
from vit.training.logging.training_progress import notifier
from vit.training.plan import with_chosen_weights
from vit.training.train import resolve, resolve_plan
from vit.training.training_context import TrainingContext
from vit.training.training_loaders import training_loader
from vit.training.trial_training import dry_run


def show_batch(config: Config | Settings, path: str | Path) -> None:
    """Write the first micro-batch of a training, with classes or captions, to an image file."""
    check_sheet_name(path)
    config, listing = resolve_plan(config)
    accelerator = make_accelerator(config.run)
    config, planned = with_chosen_weights(config, accelerator)
    if config.data.labels is not None and config.distillation.teacher is not None:
        notifier(accelerator)(
            "note: only images with a label are shown; the teacher adds the others to the training"
        )
    # the time budget and the teacher do not change the first epoch's images
    config = dataclasses.replace(config, distillation=DistillationConfig())
    config = with_settings(config, time=None, workers=0)
    listing = listing if planned is None else planned.listing
    resolved = resolve(config, accelerator, began=time.monotonic(), listing=listing)
    config, splits = resolved.config, resolved.splits
    if config.finetune.method == "probe":
        raise ConfigError(
            "method=probe: a probe sees images as validation does, none is varied or mixed; "
            "leave one of it and --show-batch out"
        )

    def draw(run: TrainingContext) -> str:
        images, texts = first_batch(run, splits)
        sheet = contact_sheet(images, texts)
        with atomic_file(Path(path)) as beside:
            sheet.save(beside, "PNG")
        shown = min(len(images), MAX_IMAGES)
        of = "" if shown == len(images) else f" of {len(images)}"
        size = "x".join(map(str, images.shape[:1:-1]))
        return f"{plural(shown, 'image')}{of} of the first batch, {size} pixels"

    # all processes must build the network; the main process writes the file
    summary = dry_run(
        config, accelerator, lambda run: on_main(accelerator, partial(draw, run)), splits
    )
    notifier(accelerator)(f"{printable(path)}: {summary}; nothing was trained")


def first_batch(run: TrainingContext, splits: Splits) -> tuple[Tensor, list[list[str]]]:
    """The first micro-batch of this process: uint8 (images, 3, height, width), and their texts."""
    loader = training_loader(run, splits.train)
    try:
        batch = next(loader.epoch(0))
    finally:
        loader.close()
    batch = batch._replace(images=batch.images.cpu())
    if batch.failed and run.config.data.on_bad_image == "stop":
        raise BadImage(batch.failed[0].path, batch.failed[0].reason)
    if not len(batch.images):
        raise DataError("not one image of the first batch can be read")
    images = run.preprocessing.normalise(batch.images)
    images, texts = run.task.preview(run, batch, images, splits.classes)
    if batch.sizes is not None:  # of several sizes, in the middle colour
        cut, most = cut_images(images, batch.sizes), map(max, zip(*batch.sizes, strict=True))
        images = images.new_zeros(len(cut), images.shape[1], *most)
        for place, image in zip(images, cut, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = image
    if images.ndim == 5:
        texts = [lines for lines in texts for _ in range(images.shape[1])]
        images = images.flatten(0, 1)
    return run.preprocessing.to_pixels(images), texts
