"""The losses of the smoke recipe's first ten steps, kept in the repository.

A refactoring must reproduce them. Where the recipe, the order of images, augmentation or
initialisation changed on purpose, write them anew: python -m tests.training.test_golden
"""

import json
from pathlib import Path

import pytest
import torch

from tests.markers import DRAWS_AS_RECORDED, same_initial_weights
from tests.training.runs import events
from vit.config.setting_layers import make_config, read_settings
from vit.training.train import train

HERE = Path(__file__).parent
GOLDEN = HERE / "smoke_losses.json"
STEPS = 10


def first_losses(folder: Path) -> list[float]:
    """Mean loss of each of the first ten steps of configs/smoke.yaml."""
    settings = read_settings(HERE.parents[1] / "configs/smoke.yaml")
    train(make_config({**settings, "workers": 0, "device": "cpu"}), folder)
    return [event["loss"] for event in events(folder, "step")][:STEPS]


def test_golden_numbers_are_compared_where_torch_is_new():
    """Else all tests that are marked `same_initial_weights` would be skipped without notice."""
    assert DRAWS_AS_RECORDED or torch.__version__ < "2.14", "write what they compare with anew"


@same_initial_weights
def test_the_smoke_recipe_reproduces_its_golden_losses(tmp_path):
    losses = first_losses(tmp_path / "run")
    assert len(losses) == STEPS
    assert losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-4)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        losses = first_losses(Path(temporary) / "run")
    GOLDEN.write_text(json.dumps([round(loss, 7) for loss in losses], indent=1) + "\n")
