"""Test-time augmentation: mean logits over mirrored and corner-cropped views of each image."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Views = Literal["flip", "crops"]


def augmented_views(images: Sequence[Tensor], tta: Views | None) -> list[Sequence[Tensor]]:
    """Views to average over, each of all images; the one without augmentation first."""
    if tta is None:
        return [images]
    views = [images]
    if tta == "crops":
        views = [[image[crop] for image in images] for crop in range(5)]
    return [*views, *([image.flip(-1) for image in view] for view in views)]


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """Mean of tensors of one shape; a single one is returned unchanged."""
    return tensors[0] if len(tensors) == 1 else torch.stack([*tensors]).mean(dim=0)
