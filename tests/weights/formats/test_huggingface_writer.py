"""Our network written for transformers gives the same logits and predictions there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForImageClassification

from tests.slow_cases import mostly_slow
from tests.weights.parity import build
from vit.config import ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import WeightsError
from vit.model.build import meta_model
from vit.weights.formats.huggingface_weights import read_huggingface
from vit.weights.formats.huggingface_writer import huggingface_incompatibility, write_huggingface

SMALL = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 2, "num_heads": 4, "num_classes": 3}
CLASSES = ("apple", "class10", "class2")
PLAIN = Preprocessing(image_size=(32, 32), resize="squash", crop_share=1.0)
DINO = {"layer_scale": 1e-5, "pooling": "class_token_mean"}
CLIP = {"norm_pre": True, "patch_bias": False, "norm_eps": 1e-5, "activation": "quick_gelu"}
SIGLIP = {"class_token": False, "final_norm": "tokens", "activation": "gelu_tanh"}
CENTRED = {"position": "rotary", "rotary_grid": "centred", "rotary_temperature": 30.0}
BARE = {"num_classes": 0}

# our settings -> the family of transformers; these come back as they were
SAME = {
    "plain": ({}, "ViT"),
    "tanh": ({"activation": "gelu_tanh", "qkv_bias": False}, "ViT"),
    "narrow": ({"hidden_dim": 80, "norm_eps": 1e-3}, "ViT"),
    "four channels": ({"channels": 4, "activation": "relu"}, "ViT"),
    "distilled": ({"registers": 1, "prefix_positions": "all"}, "DeiT"),
    "scaled": ({**DINO}, "Dinov2"),
    "scaled token": ({"layer_scale": 0.1}, "Dinov2"),
    "scaled mean": ({"layer_scale": 0.1, "pooling": "mean", "final_norm": "tokens"}, "Dinov2"),
    "gated": ({**DINO, "feedforward": "swiglu", "hidden_dim": 128}, "Dinov2"),
    "registers": ({**DINO, "registers": 2}, "Dinov2WithRegisters"),
    "bare dino": ({**BARE, "layer_scale": 1.0}, "Dinov2"),
    "bare registers": ({**BARE, "layer_scale": 1.0, "registers": 3}, "Dinov2WithRegisters"),
    "rotary": ({**BARE, **CENTRED, "layer_scale": 0.5, "registers": 2}, "DINOv3ViT"),
    "rotary gated": (
        {
            **BARE,
            **CENTRED,
            "layer_scale": 0.5,
            "feedforward": "swiglu",
            "qkv_bias": False,
            "proj_bias": False,
        },
        "DINOv3ViT",
    ),
    "clip": ({**CLIP, "pooling": "mean", "final_norm": "none"}, "CLIP"),
    "bare clip": ({**BARE, **CLIP}, "CLIPVision"),
    "siglip": ({**SIGLIP, "pooling": "mean"}, "Siglip"),
    "one patch": ({**BARE, **SIGLIP, "pooling": "attention", "patch_size": 32}, "SiglipVision"),
    "bare siglip": ({**BARE, **SIGLIP, "pooling": "attention"}, "SiglipVision"),
}
# these come back as another network of the same function
EQUAL = {
    "no biases": ({"patch_bias": False, "proj_bias": False}, "ViT"),
    "sinusoidal": ({"position": "sinusoidal_2d"}, "ViT"),
    "no positions": ({"position": "none"}, "ViT"),
    "token without a place": ({"prefix_positions": "none"}, "ViT"),
    "unscaled registers": ({"registers": 4}, "Dinov2WithRegisters"),
    "registers with places": ({"registers": 2, "prefix_positions": "all"}, "Dinov2WithRegisters"),
    "mean": ({"pooling": "mean"}, "Beit"),
    "mean, scaled, without biases": (
        {"pooling": "mean", "layer_scale": 0.1, "qkv_bias": False, "position": "sinusoidal_2d"},
        "Beit",
    ),
    "relative": ({"pooling": "mean", "position": "relative"}, "Beit"),
    "bare relative": ({**BARE, "pooling": "mean", "position": "relative"}, "Beit"),
    "bare mean": ({**BARE, "pooling": "mean"}, "Beit"),
    "clip without biases": (
        {**CLIP, "pooling": "mean", "final_norm": "none", "qkv_bias": False, "proj_bias": False},
        "CLIP",
    ),
    "bare rotary, unscaled": ({**BARE, **CENTRED}, "DINOv3ViT"),
}


def written(folder: Path, state: dict[str, Tensor], config: ModelConfig) -> tuple:
    """What `write_huggingface` gives, also as files in `folder`."""
    classes = CLASSES if config.num_classes else None
    settings, processor, tensors = write_huggingface(state, config, classes, PLAIN)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return settings, processor, tensors


def answers(folder: Path, config: ModelConfig, images: Tensor) -> Tensor:
    """What transformers' own class says of `images`, with nothing missing and nothing left over."""
    kind = AutoModelForImageClassification if config.num_classes else AutoModel
    theirs, loading = kind.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    output = theirs.eval()(images)
    return output.logits if config.num_classes else output.pooler_output


@pytest.mark.parametrize("name", mostly_slow([*SAME, *EQUAL]))
@torch.no_grad()
def test_transformers_opens_what_is_written(name, randomise, tmp_path):
    changes, family = {**SAME, **EQUAL}[name]
    config = ModelConfig(**{**SMALL, **changes})
    state = randomise(meta_model(config).state_dict())
    assert huggingface_incompatibility(config) is None
    settings, processor, tensors = written(tmp_path, state, config)
    kind = "ForImageClassification" if config.num_classes else "Model"
    assert settings["architectures"] == [family + kind]

    images = torch.randn(3, config.channels, 32, 32)
    mine, theirs = build(state, config)(images), answers(tmp_path, config, images)
    assert mine.std(dim=0).mean() > 0.01 * mine.abs().max()
    assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()

    found = read_huggingface(settings, processor, tensors, "a folder")
    again = build(found.state, found.config)(images)
    assert (mine - again).abs().max() < 1e-4 * mine.abs().max()
    assert found.classes == (CLASSES if config.num_classes else None)
    assert found.preprocessing == PLAIN
    if name in SAME:
        assert found.state.keys() == state.keys()
        assert all(torch.equal(found.state[key], state[key]) for key in state)
        assert found.config.pooling == config.pooling
        assert found.config.last_norm == config.last_norm


REFUSED = [
    ({"norm": "rmsnorm"}, "norm=layernorm, not rmsnorm"),
    ({"norm_order": "post"}, "norm_order=pre, not post"),
    ({"norm_order": "sandwich"}, "norm_order=pre, not sandwich"),
    ({"parallel_blocks": True}, "none has parallel_blocks=True"),
    ({"merge_tokens": 2}, "none has merge_tokens=2"),
    ({"num_kv_heads": 2}, "none has num_kv_heads=2"),
    ({"feedforward": "moe"}, "none has feedforward=moe"),
    ({"feedforward": "swiglu_packed"}, "feedforward=mlp, not swiglu_packed"),
    ({"qk_norm": True}, "qk_norm=False, not True"),
    ({"position": "rotary"}, "not rotary (index)"),
    ({"position": "learned_rotary"}, "not learned and rotary"),
    ({**BARE, "layer_scale": 1e-5, "hidden_dim": 100}, "not hidden_dim=100"),
    ({**CENTRED, "layer_scale": 0.1}, "not rotary (centred)"),
    ({"norm_pre": True}, "norm_pre=False, not True"),
    ({"pooling": "attention"}, "not attention"),
    ({"pooling": "mean", "final_norm": "none"}, "not none"),
    ({"class_token": False, "pooling": "mean"}, "class_token=True, not False"),
    ({**DINO, "hidden_dim": 100}, "whole multiple of dim, not hidden_dim=100"),
    ({"num_classes": 1}, "single output"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=str)
def test_unsupported_networks_raise(changes, reason):
    config = ModelConfig(**{**SMALL, **changes})
    refusal = huggingface_incompatibility(config)
    assert refusal is not None
    assert reason in refusal
    assert "\n" not in refusal
    with pytest.raises(WeightsError, match="transformers cannot express"):
        write_huggingface({}, config, CLASSES, PLAIN)


def test_images_of_another_size_raise():
    with pytest.raises(WeightsError, match="images of 64 x 32 for a network of 32 x 32"):
        preprocessing = Preprocessing(image_size=(64, 32))
        write_huggingface({}, ModelConfig(**SMALL), CLASSES, preprocessing)
