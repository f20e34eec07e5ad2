"""Settings of training: length, optimiser, learning rate, regularisation."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from vit.config.config_section import Section, setting
from vit.config.pretraining_config import PRETRAINING_TASKS

DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([smh])")
SECONDS = {"s": 1, "m": 60, "h": 3600}
TASKS: dict[str, str] = {
    "classify": "vit.tasks.classification:Classification",
    "multilabel": "vit.tasks.multilabel:MultiLabel",
    "caption": "vit.tasks.captioning:Captioning",
    "classify,caption": "vit.tasks.captioning:CaptioningWithClasses",
    "simclr": "vit.tasks.simclr:SimCLR",
    "dino": "vit.tasks.dino:DINO",
    "lejepa": "vit.tasks.lejepa:LeJEPA",
    "mae": "vit.tasks.masked_autoencoder:MaskedAutoencoding",
}
"""Value of the setting `task` -> module and class that implements it."""
# settings that `time` decides
TIME_DECIDES = (
    *("epochs", "steps", "epoch_steps", "warmup_epochs", "growth_epochs"),
    *("cooldown_epochs", "cooldown_shares", "cooldown_steps"),
)


def implied_task(*, multilabel: bool, captions: bool, classes: bool) -> str:
    """The name of the task of a network that does not store one."""
    if captions:
        return "classify,caption" if classes else "caption"
    return "multilabel" if multilabel else "classify"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """Task, length, optimiser and regularisation of training."""

    task: Annotated[str, TASKS] = "classify"
    """Task: one class per image, any number, captions, classes and captions; or no labels."""
    model: str = "vit_tiny_patch16_224"
    """Preset of the model settings; settings given otherwise win. `vit models` lists them."""
    epochs: int = 30
    """Passes over the training images, or multiples of epoch_steps; each ends in a validation."""
    epoch_steps: int | None = None
    """Optimiser steps per epoch; one pass over the training images when left empty."""
    steps: int | None = None
    """Optimiser steps of the training, instead of epochs; the last epoch may be shorter."""
    time: str | None = None
    """Duration of the training, such as 90s, 30m or 2h; the number of steps is chosen to fit."""
    lr: float = 1e-3
    """Peak learning rate, for the whole batch."""
    encoder_lr: float | None = None
    """Captions: peak learning rate of the encoder; lr when left empty."""
    schedule: Literal["cosine", "wsd"] = setting("cosine", "--sched")
    """Learning rate after the warm-up: cosine, or constant with a cooldown (arXiv:2404.06395)."""
    cooldown_epochs: float | None = None
    """wsd: epochs of the linear cooldown; 0.7 of all when left empty."""
    cooldown_shares: tuple[float, ...] = ()
    """wsd: fractions of lr during the cooldown, between which it is linear; set by a run with a
    time."""
    cooldown_steps: tuple[int, ...] = ()
    """wsd: steps of the cooldown after which lr has these fractions; its epochs when left empty."""
    fallback_lr: float | None = None
    """Muon: peak learning rate of all but the blocks' matrices; lr when left empty."""
    min_lr: float = 1e-6
    """Learning rate at the end."""
    warmup_epochs: float | None = None
    """Epochs of linear warm-up; a tenth of all, at most 5, when left empty."""
    optimizer: str = setting("adamw", "--opt")
    """adamw, muon, or the name of any optimiser in timm's factory."""
    weight_decay: float = 0.05
    """Weight decay of matrices; biases, norms, position embeddings and tokens have none."""
    betas: tuple[float, float] | None = setting(None, "--opt-betas")
    """Betas of the optimiser (of Muon: its AdamW); the optimiser's defaults when left empty."""
    layer_decay: float = 1.0
    """Layer-wise learning rate decay, from each block to the one before it; 1 is off."""
    clip_grad: float = 1.0
    """Maximum norm of the gradient of all parameters; 0 is off."""
    smoothing: float = 0.1
    """Label smoothing: share of a label that is spread over all classes."""
    balance: Literal["none", "loss", "sampler", "logit-adjust"] = "none"
    """Class imbalance: weighted loss, oversampled rare classes, or logits shifted by frequency."""
    balance_loss: float = 0.01
    """MoE: weight of the load balancing loss (Switch, arXiv:2101.03961)."""
    router_z_loss: float = 0.001
    """MoE: weight of the router z-loss (ST-MoE, arXiv:2202.08906)."""
    ema: float = setting(0.0, "--model-ema-decay")
    """Decay per step of the moving average of the weights; 0 keeps none (DINO: 0.95)."""
    start_image_size: int | None = None
    """Progressive resizing: image side in the first epochs; image_size when left empty."""
    growth_epochs: float | None = None
    """Progressive resizing: epochs until image_size; three quarters of all when left empty."""
    seed: int = 0
    """Seed of initial weights, data order, augmentation, dropout and train-validation split."""
    patience: int | None = None
    """Early stopping: epochs without an improvement; off when left empty."""
    soup: bool = False
    """Model soup: average the keep_best epochs that improve the average (arXiv:2203.05482)."""

    caption_samples: int = 2000
    """Captions: validation images captioned after each epoch, for BLEU and CIDEr."""

    def __post_init__(self) -> None:
        self.check_at_least(1, "epochs", "caption_samples")
        self.check_above(0, "lr", "layer_decay")
        if self.encoder_lr is not None:
            self.check_above(0, "encoder_lr")
        if self.fallback_lr is not None:
            self.check_above(0, "fallback_lr")
            if self.optimizer != "muon":
                self.refuse("fallback_lr", f"only muon has one, not optimizer={self.optimizer}")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            self.refuse("betas", "each must be at least 0 and less than 1")
        self.check_at_least(0, "min_lr", "weight_decay", "clip_grad", "seed")
        self.check_at_least(0, "balance_loss", "router_z_loss")
        self.check_fraction("smoothing", "ema")
        if self.patience is not None:
            self.check_at_least(1, "patience")
        if self.time is not None and not DURATION.fullmatch(self.time):
            self.refuse("time", "write a number and s, m or h, such as 90s, 30m or 1.5h")
        if self.seconds == 0:
            self.refuse("time", "no time is left to train in: give more")
        if self.min_lr > self.lr:
            self.refuse("min_lr", f"is more than lr={self.lr}")
        for name in ("epoch_steps", "steps"):
            if getattr(self, name) is not None:
                self.check_at_least(1, name)
        if self.steps is not None and self.time is not None:
            self.refuse("steps", f"time={self.time} chooses the number of steps; give one of them")
        if self.cooldown_epochs is not None:
            self.check_at_least(0, "cooldown_epochs")
            if self.schedule != "wsd":
                self.refuse("cooldown_epochs", f"schedule={self.schedule} has none; use wsd")
        shares, at = len(self.cooldown_shares), self.cooldown_steps
        if not at and shares > (self.cooldown_epochs or 0):
            self.refuse("cooldown_shares", f"are more than cooldown_epochs={self.cooldown_epochs}")
        if at and (len(at) != shares or any(low >= high for low, high in pairwise((0, *at)))):
            self.refuse("cooldown_steps", f"must be {shares} increasing steps, as cooldown_shares")
        if self.growth_epochs is not None:
            self.check_above(0, "growth_epochs")
            if self.start_image_size is None:
                self.refuse("growth_epochs", "nothing grows: give start_image_size")
        if self.warmup_epochs is not None:
            self.check_at_least(0, "warmup_epochs")
            if self.time is None and self.warmup_epochs >= self.epochs:
                remedy = "lower it, such as --warmup-epochs 0, or train longer"
                self.refuse("warmup_epochs", f"must be less than epochs={self.epochs}; {remedy}")

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks in `task`."""
        return tuple(self.task.split(","))

    @property
    def captions(self) -> bool:
        """Whether the network learns to write captions."""
        return "caption" in self.tasks

    @property
    def classifies(self) -> bool:
        """Whether the network learns classes."""
        return self.multilabel or "classify" in self.tasks

    @property
    def single_label(self) -> bool:
        """Whether the network learns exactly one class an image, and nothing else."""
        return self.task == "classify"

    @property
    def multilabel(self) -> bool:
        """Whether an image may have several classes, or none."""
        return self.task == "multilabel"

    @property
    def pretrains(self) -> bool:
        """Whether the network learns without labels."""
        return self.task in PRETRAINING_TASKS

    @property
    def seconds(self) -> float | None:
        """`time` in seconds; None if it is not set."""
        found = DURATION.fullmatch(self.time or "")
        return float(found[1]) * SECONDS[found[2]] if found else None

    @property
    def warmup(self) -> float:
        """Epochs of linear warm-up."""
        return min(self.epochs / 10, 5) if self.warmup_epochs is None else self.warmup_epochs
