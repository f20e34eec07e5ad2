"""Masked autoencoder: most patches of an image are hidden, and predicted from the others.

    loss = mean over images of the mean squared error over the hidden patches

Design. The encoder is the network that `vit train` would train; the light decoder (PixelDecoder) is
only used here. Which patches of an image are hidden follows from (seed, step, place in the batch),
so that any number of processes and a resumed run hide the same ones; in validation from (seed,
image). Patches are dropped before the blocks. A convolutional stem, which the plan chooses for
small images because it is worth ten points to a small network, embeds each kept patch as an image
of its own. Its norm is LayerNorm then: the running statistics of BatchNorm would be those of
patches without neighbours.

Source: He et al., "Masked Autoencoders Are Scalable Vision Learners", arXiv:2111.06377.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vit.config import Config
from vit.data.dataset import Batch
from vit.data.random_seed import random_seed
from vit.errors import ConfigError
from vit.model.build import build_masked_autoencoder
from vit.model.mae_network import (
    VARIANCE_EPS,
    MaskedAutoencoder,
    Reconstruction,
    choose_patches,
    hide_pixels,
    join_patches,
    pixel_targets,
    reconstruction_losses,
)
from vit.tasks.finished_run import FinishedRun
from vit.tasks.pretraining import Pretraining
from vit.tasks.task import TrainingRun, blank_if_empty
from vit.weights.safetensors_io import read_tensors
from vit.weights.saved_model import PRETRAINING_FILE, LoadedRun

SHOWN = 8
"""Validation images whose reconstruction the report shows."""

REFUSED: dict[str, tuple[Any, str]] = {
    "patch_sizes": ((), "predicts patches of one size"),
    "merge_tokens": (0, "puts each token back at its place"),
    "patch_dropout": (0.0, "hides patches by --mask-ratio"),
}
"""Settings of the network -> the only value that the method works with, and why."""


class MaskedAutoencoding(Pretraining):
    """MAE."""

    title = "MAE"
    planned_settings: ClassVar[Mapping[str, Any]] = {
        "final_norm": "tokens",
        "start_image_size": None,
        "drop_path": 0.0,
        "auto_augment": "none",
    }
    least_spread = 0.005  # features of patches that look alike are alike: 0.03 is ordinary
    remedy = "lower --lr, or raise --warmup-epochs"

    def complete(self, config: Config) -> Config:
        """Normalise tokens, which the decoder reads, not pooled features."""
        config = super().complete(config)
        model = config.model
        for name, (value, why) in REFUSED.items():
            if getattr(model, name) != value:
                raise ConfigError(f"{name}={getattr(model, name)}: task=mae {why}; leave it out")
        for name, side in (
            ("image_size", model.image_size),
            ("start_image_size", config.training.start_image_size or model.image_size),
        ):
            if side < 2 * model.patch_size:
                raise ConfigError(
                    f"{name}={side}: with patch_size={model.patch_size} an image is one patch, and "
                    f"task=mae predicts some from others; use {2 * model.patch_size} or more, or "
                    "smaller patches (--patch-size)"
                )
        if model.position == "relative":
            raise ConfigError(
                "position=relative: it needs the whole grid, and task=mae hides most of it; use "
                "another, such as sinusoidal_2d"
            )
        if model.pooling == "attention":
            raise ConfigError(
                "pooling=attention: task=mae trains no pooling; use --pooling mean, and attention "
                "with the labels"
            )
        if model.stem == "conv" and model.stem_norm == "batchnorm":
            if config.chosen("stem_norm"):
                raise ConfigError(
                    "stem_norm=batchnorm: its statistics would be those of single patches; use "
                    "--stem-norm layernorm"
                )
            model = replace(model, stem_norm="layernorm")
        if model.last_norm == "pooled":
            if config.chosen("final_norm"):
                raise ConfigError(
                    "final_norm=pooled: task=mae pools nothing, and would not train that norm; use "
                    "--final-norm tokens"
                )
            model = replace(model, final_norm="tokens")
        if config.finetune.weights is not None and model.stem_norm != config.model.stem_norm:
            raise ConfigError(
                f"weights={config.finetune.weights}: its stem has stem_norm=batchnorm, "
                "and task=mae needs layernorm; start without it"
            )
        return replace(config, model=model)

    def build_network(self, config: Config) -> MaskedAutoencoder:
        return build_masked_autoencoder(config.model, config.pretraining)

    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        seed, size = run.config.training.seed, run.config.data.batch_size
        noise = patch_noise(run.config, images, size, seed, "mask", run.step)
        return self.losses(run, images, noise[batch.positions]).sum().view(1)

    def validation_loss(self, run: TrainingRun, batch: Batch, images: Tensor) -> tuple[Tensor, ...]:
        """Loss of each image, with masks that are the same in every epoch."""
        noise = [
            patch_noise(run.config, images, 1, run.config.training.seed, "validation mask", index)
            for index in batch.indices.tolist()
        ]
        stacked = torch.cat(noise) if noise else patch_noise(run.config, images, 0, 0)
        return (self.losses(run, images, stacked),)

    def losses(self, run: TrainingRun, images: Tensor, noise: Tensor) -> Tensor:
        """Loss of each image, (batch,)."""
        patch_size = run.config.model.patch_size
        if len(noise):
            noise = noise.to(images.device, non_blocking=images.is_cuda)
        else:
            noise = images.new_zeros(1, noise.shape[1])
        with blank_if_empty(run, images) as shown:
            found: Reconstruction = run.model(shown, noise)
        normalise = run.config.pretraining.normalise_pixels
        targets = pixel_targets(shown, patch_size, normalise=normalise)
        return reconstruction_losses(found, targets)[: len(images)]

    def preview(
        self, run: TrainingRun, batch: Batch, images: Tensor, classes: Sequence[str]
    ) -> tuple[Tensor, list[list[str]]]:
        seed, size = run.config.training.seed, run.config.data.batch_size
        noise = patch_noise(run.config, images, size, seed, "mask", run.step)[batch.positions]
        _, _, hidden = choose_patches(noise, run.config.pretraining.mask_ratio)
        shown = hide_pixels(images, hidden, run.config.model.patch_size)
        return shown, [[] for _ in batch.indices]

    def reconstructions(self, run: FinishedRun) -> Sequence[tuple[Tensor, ...]]:
        """Some validation images: as they are, what the encoder sees, and with what it predicts."""
        config = run.config
        network = self.build_network(config)
        only, _ = read_tensors(run.folder / PRETRAINING_FILE)
        network.load_state_dict({**run.loaded.model.state_dict(), **only})
        network.to(run.device).eval()
        samples = run.splits.val[:: max(len(run.splits.val) // SHOWN, 1)][:SHOWN]
        rows: list[tuple[Tensor, ...]] = []
        for _, images in run.batches(samples, {}):
            noise = patch_noise(config, images, len(images), config.training.seed, "report")
            with torch.inference_mode(), run.autocast():
                found = network.reconstruct(images, noise.to(images.device))
            rows += zip(
                *(each.cpu() for each in shown_images(config, run.loaded, images, found)),
                strict=True,
            )
        return rows


def shown_images(
    config: Config, loaded: LoadedRun, images: Tensor, found: Reconstruction
) -> tuple[Tensor, Tensor, Tensor]:
    """Images, what the encoder sees of them, and with predicted patches where it sees nothing; each
    (batch, 3, height, width) in [0, 1].

    Normalised predictions get the mean and variance of the true patch, as in the paper's figures.
    """
    size = config.model.patch_size
    mean, std, *_ = loaded.preprocessing.constants(images.device, images.dtype)
    patches, predicted = pixel_targets(images, size, normalise=False), found.patches.to(images)
    if config.pretraining.normalise_pixels:
        variance, average = torch.var_mean(patches, dim=-1, keepdim=True)
        predicted = predicted * (variance + VARIANCE_EPS).sqrt() + average
    hidden = found.hidden.to(images).unsqueeze(-1)
    filled = patches * (1 - hidden) + predicted * hidden
    whole = join_patches(filled, images.shape[-2] // size, size)
    every = images, hide_pixels(images, found.hidden, size), whole
    original, seen, completed = ((each * std + mean).clamp(0, 1) for each in every)
    return original, seen, completed


def patch_noise(config: Config, images: Tensor, count: int, *counters: int | str) -> Tensor:
    """A random number for each patch of `count` images of this size, (count, patches)."""
    rows, cols = (side // config.model.patch_size for side in images.shape[-2:])
    generator = torch.Generator().manual_seed(random_seed(*counters))
    return torch.rand(count, rows * cols, generator=generator)
