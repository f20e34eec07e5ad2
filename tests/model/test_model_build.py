"""Tables and config name the same options, and every option honours the same contract."""

from typing import get_args, get_type_hints

import pytest
import timm
import torch

from vit.config import ModelConfig
from vit.errors import ConfigError
from vit.model import build
from vit.model.build import build_classifier, create_model
from vit.presets import PRESETS

TABLES = {
    "norm": build.NORMS,
    "feedforward": build.FEEDFORWARDS,
    "position": build.POSITIONS,
    "norm_order": build.BLOCKS,
    "pooling": build.POOLINGS,
    "activation": build.ACTIVATIONS,
}
SMALL = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
CHOICES = [(field, name) for field, table in TABLES.items() for name in table]
EXTRAS = [
    {"class_token": False, "pooling": "mean"},
    {"registers": 2},
    {"registers": 2, "class_token": False, "pooling": "mean", "position": "sinusoidal_2d"},
    {"qk_norm": True, "norm": "rmsnorm", "layer_scale": 0.1},
    {"norm_order": "post", "pooling": "mean", "layer_scale": 0.1},
    {"hidden_dim": 40, "channels": 4},
    {"norm_pre": True, "patch_bias": False, "norm_eps": 1e-5},
    {"qkv_bias": False, "proj_bias": False},
    {"qkv_bias": False, "proj_bias": False, "feedforward": "swiglu"},
    {"registers": 2, "prefix_positions": "class_token"},
    {"registers": 2, "prefix_positions": "all"},
    {"prefix_positions": "none"},
    {"position": "rotary", "rotary_grid": "centred", "registers": 2, "qk_norm": True},
    {"position": "rotary", "rotary_reference": 7, "class_token": False, "pooling": "mean"},
    {"pooling": "attention", "class_token": False, "activation": "gelu_tanh"},
    {"pooling": "class_token_mean", "final_norm": "pooled"},
    {"num_kv_heads": 1},
    {"num_kv_heads": 2, "qk_norm": True, "position": "rotary"},
    {"parallel_blocks": True, "layer_scale": 0.1},
    {"repeat_blocks": 2},
    {"dropout": 0.2, "attention_dropout": 0.2, "drop_path": 0.2},
]
OPTIONS = [{field: name} for field, name in CHOICES] + EXTRAS


@pytest.mark.parametrize("field", TABLES)
def test_names_agree_with_the_config(field):
    assert set(TABLES[field]) == set(get_args(get_type_hints(ModelConfig)[field]))


@pytest.mark.parametrize(
    ("order", "pooling", "final", "stands"),
    [
        ("pre", "class_token", "auto", "norm"),
        ("pre", "mean", "auto", "fc_norm"),
        ("pre", "attention", "auto", "norm"),
        ("pre", "class_token_mean", "auto", "norm"),
        ("post", "class_token", "auto", None),
        ("post", "mean", "auto", None),
        ("pre", "mean", "tokens", "norm"),
        ("pre", "class_token", "pooled", "fc_norm"),
        ("pre", "mean", "none", None),
    ],
)
def test_where_the_last_norm_stands(order, pooling, final, stands):
    settings = {"norm_order": order, "pooling": pooling, "final_norm": final}
    model = build_classifier(ModelConfig(**{**SMALL, **settings}))
    found = [name for name in ("norm", "fc_norm") if list(getattr(model, name).parameters())]
    assert found == ([stands] if stands else [])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_trains_every_parameter(options):
    torch.manual_seed(0)
    config = ModelConfig(**{**SMALL, **options})
    model = build_classifier(config)
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(8, config.channels, 16, 16)
    for autocast in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(images)
        assert logits.shape == (8, 3)
        logits.float().square().mean().backward()
        stuck = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert stuck == []


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_takes_other_image_sizes_and_shows_its_attention(options):
    config = ModelConfig(**{**SMALL, **options})
    model = build_classifier(config).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, config.channels, 24, 32)
    tokens = config.num_prefix_tokens + 12
    assert model(images).shape == (2, 3)
    assert model.forward_features(images).shape == (2, tokens, 32)
    maps = model.attention_maps(images)
    assert [m.shape for m in maps] == [(2, 4, tokens, tokens)] * 2 * config.repeat_blocks
    for weights in maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, tokens))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_timm_s_parameters(name):
    with torch.device("meta"):
        ours, theirs = create_model(name), timm.create_model(name, num_classes=1000)
    shapes = {key: p.numel() for key, p in ours.named_parameters()}
    assert shapes == {key: p.numel() for key, p in theirs.named_parameters()}


def test_create_model_takes_settings():
    model = create_model("vit_tiny_patch16_224", num_classes=7, depth=1, image_size=32)
    assert model.num_classes == 7
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vit_tinny_patch16_224", {}, "vit_tiny_patch16_224"),
        ("vit_tiny_patch16_224", {"depht": 3}, "depht is not a model setting; did you mean depth"),
        ("vit_tiny_patch16_224", {"zzz": 3}, "zzz is not a model setting; choose from image_size"),
        ("vit_tiny_patch16_224", {"lr": 1.0}, "lr is not a model setting"),
        ("vit_tiny_patch16_224", {"num_heads": 5}, "does not split"),
        ("vit_tiny_patch16_224", {"image_size": 225}, "not a multiple of patch_size=16"),
    ],
)
def test_create_model_refuses_what_it_does_not_know(name, settings, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **settings)


def test_drop_path_grows_with_depth():
    model = build_classifier(ModelConfig(**{**SMALL, "depth": 3, "drop_path": 0.4}))
    rates = [getattr(block.drop_path, "rate", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.2, 0.4])


def test_repeated_blocks_equal_a_deeper_network_with_their_weights():
    shared = build_classifier(ModelConfig(**SMALL, repeat_blocks=2)).eval()
    torch.nn.init.normal_(shared.head.weight)
    deep = build_classifier(ModelConfig(**{**SMALL, "depth": 4})).eval()
    state = shared.state_dict()
    for name in [name for name in state if name.startswith("blocks.")]:
        _, index, rest = name.split(".", 2)
        state[f"blocks.{int(index) + 2}.{rest}"] = state[name]
    deep.load_state_dict(state)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(shared(images), deep(images))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3: does not divide num_heads=4"),
        ({"parallel_blocks": True, "norm_order": "post"}, "norm_order='post': parallel_blocks"),
        ({"repeat_blocks": 0}, "repeat_blocks=0: must be at least 1"),
        ({"rotary_grid": "centred"}, "rotary_grid='centred': position=learned does not read it"),
        (
            {"feedforward": "swiglu", "activation": "relu"},
            "activation='relu': feedforward=swiglu does not read it; feedforward=mlp does",
        ),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{**SMALL, **settings})


def test_reset_classifier_starts_from_zeros():
    model = create_model("vit_tiny_patch16_224", depth=1, image_size=32).bfloat16()
    model.reset_classifier(5)
    assert model.num_classes == 5
    assert model.head.weight.dtype == torch.bfloat16
    assert not model.head.weight.any()


@pytest.mark.parametrize(
    "options", [{}, {"registers": 2, "qk_norm": True, "norm": "rmsnorm", "feedforward": "swiglu"}]
)
def test_exports_with_any_batch(options):
    model = build_classifier(ModelConfig(**{**SMALL, **options})).eval()
    torch.nn.init.normal_(model.head.weight)
    batch = torch.export.Dim("batch", min=1, max=64)
    example = (torch.randn(3, 3, 16, 16),)
    program = torch.export.export(model, example, dynamic_shapes=({0: batch},)).module()
    for count in (1, 5):
        images = torch.randn(count, 3, 16, 16)
        torch.testing.assert_close(program(images), model(images))


def test_compiles_as_one_graph():
    model = build_classifier(ModelConfig(**{**SMALL, "depth": 1, "drop_path": 0.1}))
    torch.nn.init.normal_(model.head.weight)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    images = torch.randn(2, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(images), model(images))
