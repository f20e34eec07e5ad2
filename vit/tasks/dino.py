"""DINO: a network predicts what its moving average, the teacher, says of another view of an image.

    p_nv = Sinkhorn-Knopp(teacher(view v of image n) / teacher temperature)
    q_nw = softmax(student(view w of image n) / student temperature)
    loss = mean over images n, global views v and other views w of -sum_k p_nvk log q_nwk

    teacher and student: encoder, projector, and cosines with prototypes k

Design. The teacher is the moving average of the weights (`ema`), which is validated and kept as
well, in evaluation mode. Sinkhorn-Knopp, DINOv2's centring, lets the images of a step use all
prototypes alike; with the moving centre of the first paper, networks learned less or collapsed
(docs/lab-notebook.md). It is over the images of all processes; with micro-batches over those of
one.

Source: Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", section 3.1,
arXiv:2104.14294; Oquab et al., "DINOv2", section 4, arXiv:2304.07193; Caron et al., "SwAV",
section 3.1, arXiv:2006.09882.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from vit.config import Config
from vit.config.setting_layers import with_settings
from vit.data.dataset import Batch
from vit.errors import ConfigError
from vit.tasks.pretraining import (
    JointEmbeddingPretraining,
    embed_views,
    fixed_views,
    random_views,
    view_layout,
)
from vit.tasks.task import TrainingRun

MOMENTUM = 0.95
"""Weight of the old teacher in each step, if none is given."""
STUDENT_TEMPERATURE = 0.1
ITERATIONS = 3


class DINO(JointEmbeddingPretraining):
    """DINO."""

    title = "DINO"
    compares_prototypes = True
    planned_settings: ClassVar[Mapping[str, Any]] = {
        "ema": MOMENTUM,
        "drop_path": 0.0,
        "local_views": 2,
        "min_crop": 0.35,
        "auto_augment": "three",
        "color_jitter": 0.4,
    }
    planned_batch = 128
    pass_cost = 3.5  # two views, the teacher's passes over them, and two small views
    # supposed, not measured: as those of SimCLR, after which its accuracy comes
    passes_factor, tiny_passes_factor = 12.0, 2.0
    remedy = "lower --lr or --teacher-temperature"
    why_several = "lets the images beside each other share the prototypes"
    why_no_repeats = "count copies of an image as others"

    def complete(self, config: Config) -> Config:
        """The teacher's momentum."""
        if not config.training.ema:
            if config.chosen("ema"):
                raise ConfigError("ema=0: task=dino has the average as its teacher; leave it out")
            config = with_settings(config, ema=MOMENTUM)
        return super().complete(config)

    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        layout = view_layout(run.config, images.shape[-1])
        with torch.no_grad(), run.teaching():
            answers = embed_views(run, images, lambda shown: layout.split(shown)[:1])
            targets = sinkhorn_knopp(run, answers / run.config.pretraining.teacher_temperature)
        return distillation_losses(targets, random_views(run, images)).sum().view(1)

    def validation_loss(self, run: TrainingRun, batch: Batch, images: Tensor) -> tuple[Tensor, ...]:
        """How well the network says of fixed views what it says of the whole image."""
        views = fixed_views(run, images)
        targets = (views[:2] / run.config.pretraining.teacher_temperature).softmax(dim=-1)
        return (distillation_losses(targets, views),)


def sinkhorn_knopp(run: TrainingRun, logits: Tensor) -> Tensor:
    """Probabilities of prototypes, (views, images, prototypes), of which the images of all
    processes use each alike.

    Columns and rows of the softmax are divided by their sums, in turn. All processes must make this
    call, also without images.
    """
    shares = logits.softmax(dim=-1)
    for _ in range(ITERATIONS):
        used = run.sum_over_processes(shares.sum(dim=(0, 1)))
        shares = shares / used.clamp(min=torch.finfo(used.dtype).tiny)
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares


def distillation_losses(targets: Tensor, views: Tensor) -> Tensor:
    """Cross-entropy of each image's views, (views, images, prototypes) logits with global views
    first, with the answers to its other views, (images,)."""
    logs = (views / STUDENT_TEMPERATURE).log_softmax(dim=-1)
    pairs = -torch.einsum("v n k, w n k -> v w n", targets, logs)
    same = torch.eye(*pairs.shape[:2], dtype=torch.bool, device=pairs.device)
    others = pairs.masked_fill(same.unsqueeze(-1), 0.0)
    return others.sum(dim=(0, 1)) / (len(targets) * (len(views) - 1))
