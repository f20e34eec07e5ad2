"""Our network written for transformers gives the same logits and predictions there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForImageClassification

from vit.config import ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import WeightsError
from vit.model.build import assemble_model, meta_model
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

# our settings -> the class of transformers; these come back as they were
SAME = {
    "plain": ({}, "ViTForImageClassification"),
    "tanh": ({"activation": "gelu_tanh", "qkv_bias": False}, "ViTForImageClassification"),
    "narrow": ({"hidden_dim": 80, "norm_eps": 1e-3}, "ViTForImageClassification"),
    "four channels": ({"channels": 4, "activation": "relu"}, "ViTForImageClassification"),
    "distilled": ({"registers": 1, "prefix_positions": "all"}, "DeiTForImageClassification"),
    "scaled": ({**DINO}, "Dinov2ForImageClassification"),
    "scaled token": ({"layer_scale": 0.1}, "Dinov2ForImageClassification"),
    "scaled mean": (
        {"layer_scale": 0.1, "pooling": "mean", "final_norm": "tokens"},
        "Dinov2ForImageClassification",
    ),
    "gated": (
        {**DINO, "feedforward": "swiglu", "hidden_dim": 128},
        "Dinov2ForImageClassification",
    ),
    "registers": ({**DINO, "registers": 2}, "Dinov2WithRegistersForImageClassification"),
    "bare dino": ({**BARE, "layer_scale": 1.0}, "Dinov2Model"),
    "bare registers": ({**BARE, "layer_scale": 1.0, "registers": 3}, "Dinov2WithRegistersModel"),
    "rotary": ({**BARE, **CENTRED, "layer_scale": 0.5, "registers": 2}, "DINOv3ViTModel"),
    "rotary gated": (
        {
            **BARE,
            **CENTRED,
            "layer_scale": 0.5,
            "feedforward": "swiglu",
            "qkv_bias": False,
            "proj_bias": False,
        },
        "DINOv3ViTModel",
    ),
    "clip": ({**CLIP, "pooling": "mean", "final_norm": "none"}, "CLIPForImageClassification"),
    "bare clip": ({**BARE, **CLIP}, "CLIPVisionModel"),
    "siglip": ({**SIGLIP, "pooling": "mean"}, "SiglipForImageClassification"),
    "one patch": (
        {**BARE, **SIGLIP, "pooling": "attention", "patch_size": 32},
        "SiglipVisionModel",
    ),
    "bare siglip": ({**BARE, **SIGLIP, "pooling": "attention"}, "SiglipVisionModel"),
}
# these come back as another network of the same function
EQUAL = {
    "no biases": ({"patch_bias": False, "proj_bias": False}, "ViTForImageClassification"),
    "sinusoidal": ({"position": "sinusoidal_2d"}, "ViTForImageClassification"),
    "no positions": ({"position": "none"}, "ViTForImageClassification"),
    "token without a place": ({"prefix_positions": "none"}, "ViTForImageClassification"),
    "unscaled registers": ({"registers": 4}, "Dinov2WithRegistersForImageClassification"),
    "registers with places": (
        {"registers": 2, "prefix_positions": "all"},
        "Dinov2WithRegistersForImageClassification",
    ),
    "mean": ({"pooling": "mean"}, "BeitForImageClassification"),
    "mean, scaled, without biases": (
        {"pooling": "mean", "layer_scale": 0.1, "qkv_bias": False, "position": "sinusoidal_2d"},
        "BeitForImageClassification",
    ),
    "relative": ({"pooling": "mean", "position": "relative"}, "BeitForImageClassification"),
    "bare relative": ({**BARE, "pooling": "mean", "position": "relative"}, "BeitModel"),
    "bare mean": ({**BARE, "pooling": "mean"}, "BeitModel"),
    "clip without biases": (
        {**CLIP, "pooling": "mean", "final_norm": "none", "qkv_bias": False, "proj_bias": False},
        "CLIPForImageClassification",
    ),
    "bare rotary, unscaled": ({**BARE, **CENTRED}, "DINOv3ViTModel"),
}


def written(folder: Path, state: dict[str, Tensor], config: ModelConfig, preprocessing=PLAIN):
    """What `write_huggingface` gives, as files in `folder`."""
    classes = CLASSES if config.num_classes else None
    settings, processor, tensors = write_huggingface(state, config, classes, preprocessing)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return settings


def read(folder: Path):
    """The inverse of `written`."""
    settings, processor = (
        json.loads((folder / name).read_text())
        for name in ("config.json", "preprocessor_config.json")
    )
    return read_huggingface(
        settings, processor, load_file(folder / "model.safetensors"), "a folder"
    )


def network(state: dict[str, Tensor], config: ModelConfig):
    with torch.device("meta"):
        model = assemble_model(config)
    model.load_state_dict(state, assign=True)
    return model.eval()


def answers(folder: Path, config: ModelConfig, images: Tensor) -> Tensor:
    """What transformers' own class says of `images`, with nothing missing and nothing left over."""
    kind = AutoModelForImageClassification if config.num_classes else AutoModel
    theirs, loading = kind.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    output = theirs.eval()(images)
    return output.logits if config.num_classes else output.pooler_output


@pytest.mark.parametrize("name", [*SAME, *EQUAL])
@torch.no_grad()
def test_transformers_opens_what_is_written(name, randomise, tmp_path):
    changes, architecture = {**SAME, **EQUAL}[name]
    config = ModelConfig(**{**SMALL, **changes})
    state = randomise(meta_model(config).state_dict())
    assert huggingface_incompatibility(config) is None
    assert written(tmp_path, state, config)["architectures"] == [architecture]

    images = torch.randn(3, config.channels, 32, 32)
    mine, theirs = network(state, config)(images), answers(tmp_path, config, images)
    assert mine.std(dim=0).mean() > 0.01 * mine.abs().max()
    assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()

    found = read(tmp_path)
    again = network(found.state, found.config)(images)
    assert (mine - again).abs().max() < 1e-4 * mine.abs().max()
    assert found.classes == (CLASSES if config.num_classes else None)
    assert found.preprocessing == PLAIN
    if name in SAME:
        assert found.state.keys() == state.keys()
        assert all(torch.equal(found.state[key], state[key]) for key in state)
        assert found.config.pooling == config.pooling
        assert found.config.last_norm == config.last_norm


REFUSED = {
    "norm=layernorm, not rmsnorm": {"norm": "rmsnorm"},
    "norm_order=pre, not post": {"norm_order": "post"},
    "norm_order=pre, not sandwich": {"norm_order": "sandwich"},
    "none has parallel_blocks=True": {"parallel_blocks": True},
    "none has merge_tokens=2": {"merge_tokens": 2},
    "none has num_kv_heads=2": {"num_kv_heads": 2},
    "feedforward=mlp, not swiglu_packed": {"feedforward": "swiglu_packed"},
    "qk_norm=False, not True": {"qk_norm": True},
    "not rotary (index)": {"position": "rotary"},
    "not learned and rotary": {"position": "learned_rotary"},
    "not hidden_dim=100": {**BARE, **DINO, "pooling": "class_token", "hidden_dim": 100},
    "not rotary (centred)": {**CENTRED, "layer_scale": 0.1},
    "norm_pre=False, not True": {"norm_pre": True},
    "not attention": {"pooling": "attention"},
    "not none": {"pooling": "mean", "final_norm": "none"},
    "class_token=True, not False": {"class_token": False, "pooling": "mean"},
    "whole multiple of dim, not hidden_dim=100": {**DINO, "hidden_dim": 100},
    "single output": {"num_classes": 1},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_networks_raise(reason):
    config = ModelConfig(**{**SMALL, **REFUSED[reason]})
    refusal = huggingface_incompatibility(config)
    assert refusal is not None
    assert reason in refusal
    assert "\n" not in refusal
    with pytest.raises(WeightsError, match="transformers cannot express"):
        write_huggingface({}, config, CLASSES, PLAIN)


def test_mismatched_arguments_raise():
    config = ModelConfig(**SMALL)
    with pytest.raises(WeightsError, match="2 class names for 3 outputs"):
        write_huggingface({}, config, CLASSES[:2], PLAIN)
    with pytest.raises(WeightsError, match="missing: cls_token"):
        write_huggingface({}, config, CLASSES, PLAIN)
    with pytest.raises(WeightsError, match="images of 64 x 32 for a network of 32 x 32"):
        write_huggingface({}, config, CLASSES, Preprocessing(image_size=(64, 32)))
