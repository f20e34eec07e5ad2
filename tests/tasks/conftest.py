"""Images without labels, and tiny runs that were pretrained on them."""

import numpy as np
import pytest

from vit.config.setting_layers import make_config
from vit.config.settings import PRETRAINING_TASKS
from vit.data.image_objects import to_rgb_image
from vit.training.train import train


@pytest.fixture(scope="session")
def config_of(tiny_pretraining_data):
    def build(method, **changes):
        settings = {
            "task": method,
            "data": str(tiny_pretraining_data),
            "image_size": 16,
            "patch_size": 4,
            "dim": 16,
            "depth": 2,
            "num_heads": 2,
            "pooling": "mean",
            "class_token": False,
            "position": "sinusoidal_2d",
            "epochs": 2,
            "warmup_epochs": 0.5,
            "batch_size": 12,
            "lr": 3e-3,
            "val_share": 0.3,
            "precision": "fp32",
            "device": "cpu",
            "workers": 0,
        }
        if method in ("simclr", "lejepa", "dino"):
            settings |= {"projector_dim": 8, "projector_hidden_dim": 16}
        if method == "lejepa":
            settings |= {"sigreg_projections": 16, "local_views": 4}
        if method == "dino":
            settings |= {"prototypes": 32, "local_views": 4}
        return make_config({**settings, **changes})

    return build


@pytest.fixture(scope="session")
def tiny_pretraining_data(tmp_path_factory):
    """Noisy images of three colours, straight in one folder."""
    root, random = tmp_path_factory.mktemp("unlabelled"), np.random.default_rng(0)
    for number in range(36):
        colour = np.eye(3)[number % 3] * 150 + 50
        pixels = np.clip(colour + random.integers(-50, 50, size=(18, 20, 3)), 0, 255)
        to_rgb_image(pixels.astype(np.uint8), "x").save(root / f"{number:02}.png")
    return root


@pytest.fixture(scope="session")
def pretrained(config_of, tmp_path_factory):
    """The run folder of each method."""
    root = tmp_path_factory.mktemp("pretrained")
    return {name: train(config_of(name), root / name).folder for name in PRETRAINING_TASKS}


@pytest.fixture(scope="session")
def colour_classes(tmp_path_factory):
    """Images of two classes."""
    root, random = tmp_path_factory.mktemp("classes"), np.random.default_rng(1)
    for name, colour in (("red", (200, 50, 50)), ("blue", (50, 50, 200))):
        (root / name).mkdir()
        for number in range(8):
            pixels = np.clip(np.array(colour) + random.integers(-40, 40, (18, 18, 3)), 0, 255)
            to_rgb_image(pixels.astype(np.uint8), "x").save(root / name / f"{number}.png")
    return root
