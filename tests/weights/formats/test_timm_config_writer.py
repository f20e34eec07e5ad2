"""timm opens a run folder as it is, gives the same logits, and knows the class names."""

from dataclasses import asdict
from pathlib import Path

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from torch import nn

from tests.slow_cases import mostly_slow
from tests.weights.parity import build
from vit.config import Config, ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.model.build import build_classifier, meta_model
from vit.weights.adapt_weights import SETTINGS_WITHOUT_TENSORS
from vit.weights.formats.timm_config_writer import mlp_ratio, timm_config, timm_incompatibility
from vit.weights.formats.timm_weights import read_timm
from vit.weights.saved_model import save_model, to_timm

SMALL = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 2, "num_heads": 4, "num_classes": 3}
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
    {"patch_dropout": 0.5, "patch_sizes": (4, 16)},
    {"dim": 192, "num_heads": 3, "depth": 12, "patch_size": 16},
    {"norm_eps": 1e-5},
    {"norm_eps": 1e-5, "registers": 1, "pooling": "mean", "final_norm": "tokens"},
    {"norm_eps": 1e-5, "norm": "rmsnorm", "feedforward": "swiglu", "proj_bias": False},
    {"norm_pre": True, "patch_bias": False},
    {"norm_pre": True, "patch_bias": False, "norm_eps": 1e-5, "activation": "quick_gelu"},
    {"qkv_bias": False},
    {"proj_bias": False},
    {"final_norm": "none"},
    {"final_norm": "pooled"},
    {"pooling": "mean", "final_norm": "tokens"},
    {"pooling": "attention"},
    {"pooling": "attention", "class_token": False, "activation": "gelu_tanh"},
    {"pooling": "attention", "registers": 2, "hidden_dim": 70, "qk_norm": True},
    {"pooling": "attention", "norm": "rmsnorm", "final_norm": "pooled"},
    {"prefix_positions": "none"},
    {"prefix_positions": "all", "registers": 2},
    {"prefix_positions": "all", "registers": 2, "class_token": False, "pooling": "mean"},
    {"position": "rotary"},
    {"position": "rotary", "rotary_grid": "centred", "registers": 2, "norm_eps": 1e-5},
    {"position": "rotary", "rotary_reference": 7, "rotary_temperature": 1e4, "layer_scale": 0.1},
    {"position": "rotary", "qkv_bias": False, "qk_norm": True, "pooling": "mean"},
    {"position": "rotary", "feedforward": "swiglu", "hidden_dim": 100, "final_norm": "none"},
    {"position": "rotary", "pooling": "attention", "class_token": False, "hidden_dim": 100},
    {"position": "rotary", "norm_pre": True, "patch_bias": False, "final_norm": "pooled"},
    {"position": "rotary", "norm_order": "sub_mlp"},
    {"position": "learned_rotary", "norm_order": "sub", "feedforward": "swiglu"},
    {
        "position": "learned_rotary",
        "rotary_grid": "index_1",
        "pooling": "attention_all",
        "norm_eps": 1e-5,
    },
    {"stem": "linear_norm", "norm": "rmsnorm", "norm_eps": 1e-5, "feedforward": "swiglu"},
    {"position": "relative"},
    {"position": "relative", "class_token": False, "pooling": "mean", "layer_scale": 0.1},
    {"position": "relative", "pooling": "mean", "qkv_bias": False, "qk_norm": True},
    {"position": "relative", "pooling": "mean", "final_norm": "tokens", "hidden_dim": 101},
    {"position": "learned_rotary", "norm_eps": 1e-5, "layer_scale": 1e-3},
    {"position": "learned_rotary", "prefix_positions": "none", "channels": 1},
    {"position": "learned_rotary", "prefix_positions": "all", "registers": 1},
]
# These come back as their equals: gate and value in matrices of their own.
UNPACKED = [
    {"feedforward": "swiglu_packed"},
    {"feedforward": "swiglu_packed", "norm": "rmsnorm", "layer_scale": 0.1, "registers": 2},
]
REFUSED = [
    ({"norm_order": "post"}, "norm_order=post"),
    ({"norm_order": "sandwich"}, "norm_order=sandwich"),
    ({"parallel_blocks": True}, "parallel_blocks=True"),
    ({"repeat_blocks": 2}, "repeat_blocks=2"),
    ({"feedforward": "moe"}, "feedforward=moe"),
    ({"num_kv_heads": 1}, "num_kv_heads=1"),
    ({"merge_tokens": 2}, "merge_tokens=2"),
    (
        {"position": "rotary", "feedforward": "swiglu_packed"},
        "feedforward=swiglu_packed with position=rotary",
    ),
    ({"position": "relative", "registers": 1}, "registers=1 with position=relative"),
    ({"position": "relative", "norm_eps": 1e-5}, "norm_eps=1e-05 with position=relative"),
    ({"position": "relative", "final_norm": "none"}, "final_norm=none with position=relative"),
    ({"pooling": "class_token_mean"}, "pooling=class_token_mean"),
    ({"pooling": "class_token_registers", "registers": 1}, "pooling=class_token_registers"),
    ({"pooling": "attention_all"}, "pooling=attention_all with position=learned"),
    ({"norm_order": "sub"}, "norm_order=sub"),
    ({"norm_order": "res_post"}, "norm_order=res_post"),
    ({"position": "rotary", "rotary_grid": "mixed"}, "rotary_grid=mixed"),
    (
        {"stem": "linear_norm"},
        "stem=linear_norm with norm=layernorm, norm_eps=1e-06, feedforward=mlp",
    ),
    ({"norm_eps": 1e-12}, "norm=layernorm with norm_eps=1e-12 and feedforward=mlp"),
    ({"norm_pre": True}, "patch_bias=True with norm_pre=True"),
    ({"patch_bias": False}, "patch_bias=False with norm_pre=False"),
    (
        {"registers": 1, "prefix_positions": "class_token"},
        "prefix_positions=class_token with registers=1",
    ),
    (
        {"pooling": "attention", "feedforward": "swiglu"},
        "pooling=attention with feedforward=swiglu",
    ),
    (
        {"position": "rotary", "norm": "rmsnorm"},
        "norm=rmsnorm with norm_eps=1e-06 and position=rotary",
    ),
    (
        {"position": "learned_rotary", "activation": "relu"},
        "activation=relu with position=learned_rotary",
    ),
    ({"position": "rotary", "proj_bias": False}, "proj_bias=False with position=rotary"),
    (
        {"position": "rotary", "pooling": "attention"},
        "pooling=attention with position=rotary and tokens before the patches",
    ),
]


def saved(folder: Path, config: ModelConfig, model: nn.Module) -> str:
    """The name by which timm opens a run folder of the network."""
    run = {"config": Config(model=config), "preprocessing": PREPROCESSING}
    save_model(folder, model, classes=CLASSES, **run)
    return f"local-dir:{folder}"


@pytest.mark.parametrize("options", mostly_slow(OPENS + UNPACKED), ids=str)
def test_timm_gives_the_same_logits_and_its_weights_are_read_back(options, tmp_path, randomise):
    torch.manual_seed(0)  # with few networks, the largest difference of random ones is above 1e-5
    settings = ModelConfig(**{**SMALL, **options})
    ours = build_classifier(settings).eval()
    state = randomise(ours.state_dict())
    if settings.position.startswith("sinusoidal"):
        state["pos_embed"] = ours.pos_embed  # a formula
    ours.load_state_dict(state)
    theirs = timm.create_model(saved(tmp_path, settings, ours), pretrained=True).eval()
    images = torch.randn(2, settings.channels, 32, 32)
    with torch.no_grad():
        expected = ours(images)
        assert expected.std() > 0.1
        torch.testing.assert_close(theirs(images), expected, atol=1e-5, rtol=0)
    assert theirs.pretrained_cfg["label_names"] == list(CLASSES)
    assert theirs.num_classes == 3

    assert timm_incompatibility(settings) is None
    written = timm_config(settings, CLASSES, PREPROCESSING)
    about = {name: written[name] for name in ("architecture", "model_args", "pretrained_cfg")}
    labels = written["label_names"]
    found = read_timm(to_timm(state, settings), **about, label_names=labels, where="x")
    assert found.classes == CLASSES
    assert found.preprocessing == PREPROCESSING
    if options not in UNPACKED:
        assert found.state.keys() == state.keys()
        assert all(torch.equal(found.state[name], state[name]) for name in state)
        assert plain(found.config) == plain(settings)


def test_timm_takes_our_preprocessing(tmp_path):
    settings = ModelConfig(**SMALL)
    source = saved(tmp_path, settings, build_classifier(settings))
    found = resolve_model_data_config(timm.create_model(source, pretrained=True))
    assert found["input_size"] == (3, 32, 32)
    assert (found["interpolation"], found["crop_pct"]) == ("bilinear", 0.8)
    assert found["crop_mode"] == "center"
    assert tuple(found["mean"]) == (0.1, 0.2, 0.3)
    assert tuple(found["std"]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=str)
def test_timm_refuses_what_it_cannot_build(options, reason, tmp_path):
    settings = ModelConfig(**{**SMALL, **options})
    assert timm_incompatibility(settings) == reason
    source = saved(tmp_path, settings, build_classifier(settings))
    with pytest.raises(RuntimeError, match="vit_toolkit"):
        timm.create_model(source, pretrained=True)


def test_a_network_without_a_head_goes_to_timm(randomise):
    settings = ModelConfig(**{**SMALL, "num_classes": 0})
    state = randomise(meta_model(settings).state_dict())
    written = timm_config(settings, (), PREPROCESSING)
    theirs = timm.create_model(
        written["architecture"], num_classes=written["num_classes"], **written["model_args"]
    ).eval()
    theirs.load_state_dict(to_timm(state, settings))
    ours = build(state, settings)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=0)


def plain(config: ModelConfig) -> dict[str, object]:
    """What `config` computes, whatever it is called."""
    named = asdict(config)
    for name in (*SETTINGS_WITHOUT_TENSORS, "prefix_positions", "final_norm"):
        del named[name]
    named["hidden_dim"] = config.feedforward_dim
    named["last_norm"] = config.last_norm
    if config.position != "none" and config.position != "rotary":
        named["placed"] = config.num_positioned_prefix_tokens
    if config.position.startswith("sinusoidal"):
        named["position"] = "learned"  # the formula's values are in the table
    if not config.is_rotary or config.rotary_grid == "centred":
        named["rotary_temperature"] = None
    if config.is_rotary and config.rotary_grid != "centred" and config.norm_eps != 1e-6:
        named["rotary_reference"] = config.rotary_reference or config.grid[0]
    return named


def test_a_preset_keeps_its_name():
    config = ModelConfig(dim=768, num_heads=12, patch_size=32, image_size=96, num_classes=3)
    assert timm_config(config, CLASSES, PREPROCESSING)["architecture"] == "vit_base_patch32_224"


def test_the_ratio_gives_back_every_hidden_dim():
    for dim in (17, 48, 49, 192, 1000):
        for hidden_dim in range(1, 4 * dim, 7):
            assert int(dim * mlp_ratio(dim, hidden_dim)) == hidden_dim
