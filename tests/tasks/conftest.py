"""Images without labels, and tiny runs that were pretrained on them."""

import numpy as np
import pytest

from vit.config.setting_layers import make_config
from vit.config.settings import PRETRAINING_TASKS
from vit.data.image_objects import to_rgb_image
from vit.training.train import train

TINY = {"image_size": 16, "dim": 16, "num_heads": 2, "warmup_epochs": 0.5, "precision": "fp32"}
TINY |= {"device": "cpu", "workers": 0}
ENCODER = {"patch_size": 4, "depth": 2, "pooling": "mean", "class_token": False}
ENCODER |= {"position": "sinusoidal_2d"}
PROJECTOR = {"projector_dim": 8, "projector_hidden_dim": 16}
OWN = {
    "simclr": PROJECTOR,
    "lejepa": {**PROJECTOR, "sigreg_projections": 16, "local_views": 4},
    "dino": {**PROJECTOR, "prototypes": 32, "local_views": 4},
    "mae": {},
}


@pytest.fixture(scope="session")
def config_of(tiny_pretraining_data):
    def build(method, **changes):
        run = {"task": method, "data": str(tiny_pretraining_data), "epochs": 2, "batch_size": 12}
        run |= {"lr": 3e-3, "val_share": 0.3}
        return make_config({**TINY, **ENCODER, **OWN[method], **run, **changes})

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
