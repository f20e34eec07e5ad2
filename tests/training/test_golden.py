"""The losses of the smoke recipe's first ten steps, kept in the repository.

A refactoring must reproduce them. Where the recipe, the order of pictures, augmentation or
initialisation changed on purpose, write them anew: python -m tests.training.test_golden
"""

import json
from pathlib import Path

import pytest

from vit.settings import make_config, read_settings
from vit.training.loop import StepSums
from vit.training.session import Session
from vit.training.train import train

HERE = Path(__file__).parent
GOLDEN = HERE / "smoke_losses.json"
STEPS = 10


def first_losses(folder: Path) -> list[float]:
    """Mean loss of each of the first ten steps of configs/smoke.yaml."""
    losses: list[float] = []
    original = Session.after_step

    def after_step(self: Session, sums: StepSums) -> None:
        losses.append(sums.loss / sums.images)
        original(self, sums)

    settings = read_settings(HERE.parents[1] / "configs/smoke.yaml")
    config = make_config({**settings, "workers": 0, "device": "cpu"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "after_step", after_step)
        train(config, folder)
    return losses[:STEPS]


def test_the_smoke_recipe_has_its_losses(tmp_path):
    losses = first_losses(tmp_path / "run")
    assert len(losses) == STEPS
    assert losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-4)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        losses = first_losses(Path(temporary) / "run")
    GOLDEN.write_text(json.dumps([round(loss, 7) for loss in losses], indent=1) + "\n")
