"""Model soup: the mean of the weights of several networks with the same parameters.

    soup = 1/K sum_k weights_k

Source: Wortsman et al., arXiv:2203.05482.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from vit.config.collect_settings import SOUP_FOLDER
from vit.config.stored_config import COPY, LISTS, PATHS_FILE
from vit.data.sources.split_file import SPLIT_FILE
from vit.errors import WeightsError
from vit.weights.saved_model import CONFIG_FILE, WEIGHTS_FILE

SOUP_FILES = (WEIGHTS_FILE, CONFIG_FILE, "config.yaml", PATHS_FILE, SPLIT_FILE)
"""Files of the network of all folds; split.json, which identifies it, is the last to be deleted."""


def average_weights(weights: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of each tensor over `weights`, computed in float64 on the CPU and cast to its dtype."""
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for count, each in enumerate(weights, 1):
        numbers = {name: tensor.detach().cpu().double() for name, tensor in each.items()}
        if count == 1:
            sums = {name: tensor.clone() for name, tensor in numbers.items()}
            dtypes = {name: tensor.dtype for name, tensor in each.items()}
            continue
        if shapes_of(numbers) != shapes_of(sums):
            raise WeightsError("networks with other parameters have no mean")
        for name, tensor in numbers.items():
            sums[name] += tensor
    return {name: (total / count).to(dtypes[name]) for name, total in sums.items()}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def is_fold_soup(folder: Path) -> bool:
    """Whether `folder` has the network of all folds of a cross-validation."""
    try:
        record = json.loads((folder / SPLIT_FILE).read_text(encoding="utf-8"))
        return record["folds"] is not None and record["fold"] is None
    except (OSError, ValueError, KeyError, TypeError):
        return False


def delete_fold_soup(folds: Path) -> None:
    """Delete the network of all folds in `folds`, if there is one, and nothing else."""
    folder = folds / SOUP_FOLDER
    if not is_fold_soup(folder):
        return
    for path in (*folder.glob(f"{LISTS}/{COPY}*"), *(folder / name for name in SOUP_FILES)):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # missing, or with files of somebody else
        (folder / LISTS).rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()
