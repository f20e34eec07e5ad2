"""timm opens a run folder as it is, gives the same logits, and knows the class names."""

import pytest
import timm
import torch
from timm.data import resolve_model_data_config

from vit.config import Config, ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.model.build import build_classifier
from vit.weights.folder import save_model
from vit.weights.timm_config import mlp_ratio, timm_config

SMALL = {
    "image_size": 32,
    "patch_size": 8,
    "dim": 48,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 3,
}
CLASSES = ("cat", "dog", "a b/c")
PREPROCESSING = Preprocessing(
    image_size=(32, 32), crop_share=0.8, interpolation="bilinear", mean=(0.1, 0.2, 0.3)
)
OPENS = [
    {},
    {"hidden_dim": 101},
    {"channels": 1},
    {"pooling": "mean"},
    {"pooling": "mean", "class_token": False},
    {"registers": 2},
    {"registers": 2, "pooling": "mean", "class_token": False},
    {"position": "sinusoidal_2d"},
    {"position": "sinusoidal_1d", "registers": 3},
    {"position": "none"},
    {"norm": "rmsnorm"},
    {"qk_norm": True},
    {"qk_norm": True, "norm": "rmsnorm", "layer_scale": 1e-4},
    {"feedforward": "swiglu"},
    {"feedforward": "swiglu", "norm": "rmsnorm", "pooling": "mean", "layer_scale": 0.1},
    {"activation": "gelu_tanh"},
    {"activation": "quick_gelu"},
    {"activation": "relu"},
    {"dropout": 0.1, "attention_dropout": 0.1, "drop_path": 0.1},
    {"dim": 192, "num_heads": 3, "depth": 12, "patch_size": 16},
]


@pytest.mark.parametrize("options", OPENS, ids=str)
def test_timm_gives_the_same_logits(options, tmp_path, randomise):
    settings = ModelConfig(**{**SMALL, **options})
    ours = build_classifier(settings).eval()
    if settings.position == "learned":
        ours.load_state_dict(randomise(ours.state_dict()))
    else:  # the table is a formula, and stays one
        ours.load_state_dict({**randomise(ours.state_dict()), **positions(ours)})
    save_model(
        tmp_path,
        ours,
        config=Config(model=settings),
        classes=CLASSES,
        preprocessing=PREPROCESSING,
    )
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(2, settings.channels, 32, 32)
    with torch.no_grad():
        expected = ours(images)
        assert expected.std() > 0.1
        torch.testing.assert_close(theirs(images), expected, atol=1e-5, rtol=0)
    assert theirs.pretrained_cfg["label_names"] == list(CLASSES)
    assert theirs.num_classes == 3


def positions(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict().items() if name == "pos_embed"}


def test_timm_takes_our_preprocessing(tmp_path):
    settings = ModelConfig(**SMALL)
    save_model(
        tmp_path,
        build_classifier(settings),
        config=Config(model=settings),
        classes=CLASSES,
        preprocessing=PREPROCESSING,
    )
    found = resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path}", pretrained=True))
    assert found["input_size"] == (3, 32, 32)
    assert found["interpolation"] == "bilinear"
    assert found["crop_pct"] == 0.8
    assert found["crop_mode"] == "center"
    assert tuple(found["mean"]) == (0.1, 0.2, 0.3)
    assert tuple(found["std"]) == (0.5, 0.5, 0.5)


def test_timm_refuses_what_it_cannot_build(tmp_path):
    settings = ModelConfig(**SMALL, norm_order="post")
    save_model(
        tmp_path,
        build_classifier(settings),
        config=Config(model=settings),
        classes=CLASSES,
        preprocessing=PREPROCESSING,
    )
    with pytest.raises(RuntimeError, match="vit_toolkit"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


def test_a_preset_keeps_its_name():
    config = ModelConfig(dim=768, num_heads=12, patch_size=32, image_size=96, num_classes=3)
    assert timm_config(config, CLASSES, PREPROCESSING)["architecture"] == "vit_base_patch32_224"


def test_the_ratio_gives_back_every_hidden_dim():
    for dim in (17, 48, 49, 192, 1000):
        for hidden_dim in range(1, 4 * dim, 7):
            assert int(dim * mlp_ratio(dim, hidden_dim)) == hidden_dim
