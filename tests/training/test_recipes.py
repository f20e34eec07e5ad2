"""Every recipe in configs/ takes its first steps, on a few random photographs."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import vit
import vit.weights.formats.timm_conv_stem
from tests.slow_cases import mostly_slow
from vit.config.setting_layers import make_config, read_settings
from vit.tasks.task import get_task
from vit.training.distributed.devices import make_accelerator
from vit.training.settings_from_data import prepare_data
from vit.training.setup import make_training
from vit.training.training_loaders import training_loader
from vit.training.training_loop import train_one_step
from vit.weights.saved_model import load_run, read_model_config

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
@pytest.mark.parametrize("path", mostly_slow(RECIPES), ids=lambda path: path.stem)
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
    run = load_run(folder)
    made = make_config(
        {**read_settings(recipe), "data": "x", "num_classes": run.config.num_classes}
    )
    made = get_task(made.training.task).complete(made)
    assert run.task_name == made.training.task
    assert run.config == made.model
    assert 300_000 <= sum(one.numel() for one in run.model.parameters()) <= 3_000_000
    labels = torch.tensor([[0.0], [1.0]])
    images = labels[:, :, None, None] * torch.ones(2, 3, run.config.image_size, 1)
    features = run.model.features(images.expand(-1, -1, -1, run.config.image_size))
    assert features.isfinite().all()
    assert (features[0] - features[1]).abs().max() > 0.1


@pytest.mark.parametrize("folder", WEIGHTS, ids=lambda folder: folder.name)
def test_weights_are_read_here_and_by_timm(folder):
    model = vit.from_pretrained(folder, num_classes=0).eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0).eval()
    side = read_model_config(folder).image_size
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(images), atol=1e-5, rtol=1e-4)


def test_there_are_recipes_and_weights():
    """All weights together stay small in the repository, and cover the kinds of pretraining."""
    assert len(RECIPES) >= 4
    assert len(WEIGHTS) == 6
    assert sum(path.stat().st_size for path in CONFIGS.glob("weights/*/*")) < 10_000_000
    tasks = {load_run(folder).task_name for folder in WEIGHTS}
    assert tasks == {"classify", "dino", "mae", "simclr"}
