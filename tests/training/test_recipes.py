"""Every recipe in configs/ takes its first steps, on a few random photographs."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit.config.setting_layers import make_config, read_settings
from vit.training.distributed.devices import make_accelerator
from vit.training.settings_from_data import prepare_data
from vit.training.setup import make_training
from vit.training.training_loaders import training_loader
from vit.training.training_loop import train_one_step
from vit.weights.saved_model import load_run

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
WEIGHTS = sorted(CONFIGS.glob("weights/*"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight random images in two classes, and two to validate on.

    No batch of four has as many of `b` as of `a`: with a head that begins at zero, the gradients of
    a balanced batch cancel in the biases behind the last norm, exactly so in bf16.
    """
    root, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, counts in (("train", {"a": 7, "b": 1}), ("val", {"a": 1, "b": 1})):
        for name, count in counts.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 255, size=(40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.jpg")
        named = (root / split).rglob("*.jpg")
        lines = [{"file_name": f"{p.parent.name}/{p.name}", "text": "a thing"} for p in named]
        (root / split / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


@pytest.mark.auto_precision
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_takes_its_first_steps(path, photos):
    small = {"data": str(photos), "batch_size": 4, "workers": 0, "device": "cpu"}
    if path.stem == "imagenet_small":
        small["image_size"] = 64  # at 224 pixels two steps in emulated bf16 take minutes
    config = make_config({**read_settings(path), **small})
    accelerator = make_accelerator(config.run)
    config, splits, _ = prepare_data(config, accelerator, print)
    run = make_training(config, accelerator, total_steps=100, splits=splits)
    before = {name: p.detach().clone() for name, p in run.network.named_parameters()}
    loader = training_loader(run, splits.train)
    losses = [train_one_step(run, [batch], epoch=0)[0] for batch in loader.epoch(0)]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    still = {n for n, p in run.network.named_parameters() if torch.equal(p, before[n])}
    assert not still, f"{path.name}: two steps left {sorted(still)} as they were"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_to_run_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert len(header) >= 4
    assert any(f"-c configs/{path.name}" in line for line in header)


@pytest.mark.parametrize("folder", WEIGHTS, ids=lambda folder: folder.name)
def test_weights_are_small_and_those_of_a_recipe(folder):
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert files.keys() == {"config.json", "model.safetensors", "README.md"}
    assert sum(files.values()) < 10_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    for words in ("license: apache-2.0", "linear probe", "nearest", "seed", "minutes", folder.name):
        assert words in card
    recipe = CONFIGS / re.search(r"-c configs/(\w+\.yaml)", card)[1]
    assert f"configs/weights/{folder.name}" in recipe.read_text(encoding="utf-8")
    made = make_config({**read_settings(recipe), "data": "x", "num_classes": 0})
    run = load_run(folder)
    assert run.task_name == made.training.task
    assert run.config == made.model
    labels = torch.tensor([[0.0], [1.0]])
    images = labels[:, :, None, None] * torch.ones(2, 3, run.config.image_size, 1)
    features = run.model.features(images.expand(-1, -1, -1, run.config.image_size))
    assert features.isfinite().all()
    assert (features[0] - features[1]).abs().max() > 0.1


def test_there_are_recipes_and_weights():
    assert len(RECIPES) >= 4
    assert len(WEIGHTS) == 2
