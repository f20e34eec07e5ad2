"""Tables and config name the same options, and every option honours the same contract."""

from itertools import combinations, product
from typing import get_args, get_type_hints

import pytest
import timm
import torch
from torch import nn
from torch.func import functional_call

from tests.slow_cases import mostly_slow
from vit.config import Config, ModelConfig
from vit.config.presets import PRESETS
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError
from vit.model import layers, normalization
from vit.model.build import build_classifier, create_model
from vit.weights.saved_model import load_run, save_model

TABLES = {
    "norm": normalization.NORMS,
    "feedforward": layers.FEEDFORWARDS,
    "position": layers.POSITIONS,
    "norm_order": layers.BLOCKS,
    "pooling": layers.POOLINGS,
    "activation": layers.ACTIVATIONS,
    "stem": layers.STEMS,
    "stem_norm": layers.STEM_NORMS,
}
SMALL = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
MOE = {"feedforward": "moe", "num_experts": 4}
# pooling=none is for networks without a head: those of captions (test_decoder.py)
CHOICES = [
    (field, name)
    for field, table in TABLES.items()
    for name in table
    if (field, name) != ("pooling", "none") and field != "stem_norm"
    # the default network once
    if name != getattr(ModelConfig(), field) or field == "norm"
]
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
    {"position": "relative", "registers": 2, "qk_norm": True},
    {"position": "relative", "registers": 2, "class_token": False, "pooling": "mean"},
    {"position": "relative", "class_token": False, "pooling": "attention", "num_kv_heads": 2},
    {"pooling": "attention", "class_token": False, "activation": "gelu_tanh"},
    {"pooling": "class_token_mean", "final_norm": "pooled"},
    {"num_kv_heads": 1},
    {"num_kv_heads": 2, "qk_norm": True, "position": "rotary"},
    {"parallel_blocks": True, "layer_scale": 0.1},
    {"repeat_blocks": 2},
    {"dropout": 0.2, "attention_dropout": 0.2, "drop_path": 0.2},
    {"patch_dropout": 0.5, "position": "rotary"},
    {"patch_sizes": (4, 16)},
    {"stem": "conv", "stem_norm": "layernorm", "stem_depth": 2, "stem_width": 12},
    {"stem": "conv", "stem_depth": 4, "position": "rotary", "channels": 4},
    {"feedforward": "moe", "moe_every": 1, "capacity_factor": 0.8, "router_priority": "score"},
    {"feedforward": "moe", "moe_every": 1, "top_k": 1, "shared_expert": True, "num_experts": 3},
]
OPTIONS = [{field: name} for field, name in CHOICES] + EXTRAS
# These have fewer tokens in their last block than in their first.
SHORTER = [
    {"merge_tokens": 1, "position": "rotary", "pooling": "mean"},
    {"merge_tokens": 1, "position": "learned_rotary", "pooling": "mean", "layer_scale": 0.1},
]


@pytest.mark.parametrize("field", TABLES)
def test_the_option_tables_have_the_names_of_the_config(field):
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
def test_the_last_norm_is_before_or_after_pooling(order, pooling, final, stands):
    settings = {"norm_order": order, "pooling": pooling, "final_norm": final}
    model = build_classifier(ModelConfig(**{**SMALL, **settings}))
    found = [name for name in ("norm", "fc_norm") if list(getattr(model, name).parameters())]
    assert found == ([stands] if stands else [])


@pytest.mark.parametrize("options", mostly_slow(OPTIONS + SHORTER), ids=str)
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


@pytest.mark.parametrize("options", mostly_slow(OPTIONS), ids=str)
def test_every_option_accepts_other_image_sizes_and_has_attention_maps(options):
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


@pytest.mark.parametrize("name", mostly_slow(PRESETS))
def test_every_preset_has_the_parameters_of_timm(name):
    with torch.device("meta"):
        ours, theirs = create_model(name), timm.create_model(name, num_classes=1000)
    shapes = {key: p.numel() for key, p in ours.named_parameters()}
    assert shapes == {key: p.numel() for key, p in theirs.named_parameters()}


def test_create_model_accepts_settings():
    model = create_model("vit_tiny_patch16_224", num_classes=7, depth=1, img_size=32)
    assert model.num_classes == 7
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vit_tinny_patch16_224", {}, "vit_tiny_patch16_224"),
        ("vit_tiny_patch16_224", {"depht": 3}, "depht is not a model setting; did you mean depth"),
        ("vit_tiny_patch16_224", {"decoder_depth": 1}, "decoder_depth is not a model setting"),
        ("vit_tiny_patch16_224", {"pretrained": True}, "vit.from_pretrained.* opens pretrained"),
        ("vit_tiny_patch16_224", {"img_size": 32, "image_size": 32}, "image_size is given twice"),
        (5, {}, "name=5: give a preset"),
    ],
)
def test_create_model_refuses_unknown_names_and_settings(name, settings, message):
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
        ({"repeat_blocks": 2, "feedforward": "moe"}, "repeat_blocks=2: routers would learn"),
        ({"patch_sizes": (4, 10)}, "10 does not divide image_size=16; give patch_sizes that do"),
        ({"patch_sizes": (0,)}, "0 does not divide"),
        ({"patch_sizes": (8,)}, "is patch_size alone"),
        ({**MOE, "top_k": 5}, "top_k=5: there are num_experts=4"),
        ({**MOE, "moe_every": 3}, "moe_every=3: no block of depth=2 has experts"),
        ({**MOE, "top_k": 1, "router_weights": "renormalised"}, "with top_k=1 it is always 1"),
        ({"merge_tokens": 2, "norm_order": "post"}, "merge_tokens=2: .* not norm_order=post"),
        ({"merge_tokens": 2, "parallel_blocks": True}, "merge_tokens=2: .* not parallel_blocks"),
        ({"position": "relative", "merge_tokens": 2}, "merge_tokens.* needs the whole grid"),
        ({"position": "relative", "patch_dropout": 0.5}, "patch_dropout.* needs the whole grid"),
        ({"position": "rotary", "dim": 24}, "multiple of 4 in each head"),
        ({"stem_depth": 2}, "stem_depth=2: stem=linear does not read it; stem=conv does"),
        (
            {"stem": "conv", "patch_size": 12, "image_size": 48},
            "patch_size=12: stem=conv halves the image; choose a power of two, such as 8 or 16",
        ),
        (
            {"stem": "conv", "patch_size": 32, "image_size": 32},
            "patch_size=32 needs stem_depth=4 or more",
        ),
        ({"stem": "conv", "stem_depth": 1}, "stem_depth=1: stem=conv with patch_size=8 needs"),
        ({"stem": "conv", "stem_stride": 3}, "stem_stride=3: the first convolution takes every"),
        ({"stem": "conv", "patch_size": 1, "stem_stride": 2}, "stem_stride=2: patch_size=1 has no"),
        ({"stem": "conv", "stem_width": 64}, "stem_width=64: the last convolution has dim=32"),
    ],
)
def test_contradicting_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{**SMALL, **settings})


def test_the_mlp_of_attention_pooling_has_the_activation_beside_swiglu():
    options = {"feedforward": "swiglu", "activation": "relu", "pooling": "attention"}
    model = build_classifier(ModelConfig(**{**SMALL, **options}))
    assert isinstance(model.attn_pool.mlp.act, nn.ReLU)


def test_reset_classifier_initialises_the_head_to_zeros():
    model = create_model("vit_tiny_patch16_224", depth=1, image_size=32).bfloat16()
    model.reset_classifier(5)
    assert model.num_classes == 5
    assert model.head.weight.dtype == torch.bfloat16
    assert not model.head.weight.any()
    model.reset_classifier(0)
    assert model.num_classes == 0
    assert model(torch.zeros(1, 3, 32, 32).bfloat16()).shape == (1, 192)


@pytest.mark.parametrize("options", mostly_slow(OPTIONS + SHORTER), ids=str)
def test_gradients_of_every_option_equal_finite_differences(options):
    """Along random directions of images and all parameters, against differences in float64."""
    model = random_network(options).double().eval()
    parameters = dict(model.named_parameters())
    images = torch.randn(2, channels(options), 16, 16, dtype=torch.float64, requires_grad=True)
    point = {**parameters, "images": images}
    weights = torch.randn(2, 3, dtype=torch.float64)

    def value(point: dict[str, torch.Tensor]) -> torch.Tensor:
        state = {name: point[name] for name in parameters}
        return (functional_call(model, state, point["images"]) * weights).sum()

    gradients = torch.autograd.grad(value(point), point.values())
    for step in (1e-6, 2e-6):
        ways = [torch.randn_like(tensor) for tensor in point.values()]
        slope = sum((a * b).sum() for a, b in zip(gradients, ways, strict=True))
        ahead, behind = (
            {
                name: tensor.detach() + by * way
                for (name, tensor), way in zip(point.items(), ways, strict=True)
            }
            for by in (step, -step)
        )
        torch.testing.assert_close(
            (value(ahead) - value(behind)) / (2 * step), slope, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("options", mostly_slow(OPTIONS + SHORTER), ids=str)
def test_every_option_is_saved_and_loaded(options, tmp_path):
    model = random_network(options).eval()
    run = Config(model=ModelConfig(**{**SMALL, **options}))
    preprocessing = Preprocessing.from_config(run.data, run.model.image_size)
    save_model(tmp_path, model, config=run, classes=["a", "b", "c"], preprocessing=preprocessing)
    images = torch.randn(2, channels(options), 16, 16)
    assert torch.equal(load_run(tmp_path).model(images), model(images))


def random_network(options):
    """The network of `options`, no part of which is zero."""
    torch.manual_seed(0)
    model = build_classifier(ModelConfig(**{**SMALL, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if "running_" in name:
                buffer.add_(torch.rand_like(buffer))
    return model


def channels(options) -> int:
    return options.get("channels", 3)


# Networks with many options each, which together have all of OPTIONS: to compile or export one
# takes seconds.
MIXTURES = [
    {"registers": 2, "qk_norm": True, "norm": "rmsnorm", "feedforward": "swiglu"},
    {"position": "rotary", "pooling": "mean", "norm_order": "sandwich", "num_kv_heads": 2},
    {"position": "sinusoidal_2d", "pooling": "attention", "parallel_blocks": True}
    | {"feedforward": "swiglu_packed", "layer_scale": 0.1},
    {"position": "relative", "feedforward": "moe", "moe_every": 1, "norm_order": "post"},
    {"merge_tokens": 1, "position": "learned_rotary", "pooling": "mean", "layer_scale": 0.1}
    | {"prefix_positions": "none"},
    {"stem": "conv", "pooling": "mean", "class_token": False, "position": "sinusoidal_2d"},
    {"stem": "conv", "stem_norm": "layernorm", "stem_depth": 4, "registers": 2},
    {"norm_order": "sub", "feedforward": "swiglu", "pooling": "attention_all"}
    | {"position": "learned_rotary", "rotary_grid": "index_1"},
    {"norm_order": "sub_mlp", "position": "rotary", "rotary_grid": "mixed"}
    | {"pooling": "class_token_registers", "registers": 1},
    {"norm_order": "res_post", "stem": "linear_norm"},
]
MORE_MIXTURES = [
    {"class_token": False, "pooling": "mean", "registers": 2, "position": "sinusoidal_2d"}
    | {"feedforward": "moe", "moe_every": 1, "top_k": 1, "shared_expert": True, "num_experts": 3},
    {"position": "rotary", "rotary_grid": "centred", "registers": 2, "qk_norm": True}
    | {"stem": "conv", "stem_norm": "layernorm", "stem_depth": 2, "stem_width": 12},
    {"position": "rotary", "rotary_reference": 7, "class_token": False, "pooling": "mean"}
    | {"feedforward": "moe", "moe_every": 1, "capacity_factor": 0.8, "router_priority": "score"}
    | {"activation": "quick_gelu"},
    {"position": "relative", "registers": 2, "class_token": False, "pooling": "mean"}
    | {"qk_norm": True, "norm": "rmsnorm", "layer_scale": 0.1, "activation": "relu"}
    | {"num_kv_heads": 1},
    {"position": "relative", "class_token": False, "pooling": "attention", "num_kv_heads": 2}
    | {"norm_pre": True, "patch_bias": False, "norm_eps": 1e-5, "repeat_blocks": 2}
    | {"patch_sizes": (4, 16)},
    {"norm_order": "post", "pooling": "mean", "layer_scale": 0.1, "feedforward": "swiglu"}
    | {"qkv_bias": False, "proj_bias": False, "position": "none"},
    {"pooling": "attention", "class_token": False, "activation": "gelu_tanh", "registers": 2}
    | {"position": "sinusoidal_1d", "prefix_positions": "all"}
    | {"dropout": 0.2, "attention_dropout": 0.2, "drop_path": 0.2},
    {"position": "rotary", "num_kv_heads": 2, "qk_norm": True, "patch_dropout": 0.5}
    | {"merge_tokens": 1, "pooling": "mean"},
    {"registers": 2, "prefix_positions": "class_token", "pooling": "class_token_mean"}
    | {"final_norm": "pooled", "feedforward": "moe"},
    {"stem": "conv", "stem_depth": 4, "position": "rotary", "channels": 4, "hidden_dim": 40}
    | {"parallel_blocks": True, "layer_scale": 0.1},
]


def test_the_mixtures_have_every_option():
    networks = [vars(ModelConfig(**SMALL | options)) for options in MIXTURES + MORE_MIXTURES]
    for options in OPTIONS + SHORTER:
        assert any(options.items() <= network.items() for network in networks), options


@pytest.mark.parametrize(
    "options",
    [
        {"position": "relative", "registers": 2},
        {**MOE, "capacity_factor": 0.8, "router_priority": "score", "shared_expert": True},
    ],
    ids=str,
)
def test_exports_with_any_batch(options):
    model, batch = random_network(options).eval(), torch.export.Dim("batch", min=1, max=64)
    example = (torch.randn(3, 3, 16, 16),)
    program = torch.export.export(model, example, dynamic_shapes=({0: batch},))
    assert not any("vit::" in str(node.target) for node in program.graph.nodes)
    for count in (1, 5):
        images = torch.randn(count, 3, 16, 16)
        torch.testing.assert_close(program.module()(images), model(images))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "backend"),
    [(MIXTURES[0], "aot_eager"), *((one, "eager") for one in MIXTURES + MORE_MIXTURES)],
    ids=str,
)
def test_compiles_as_one_graph(options, backend):
    """With one block, unless blocks differ; eager: without the graph of the gradients."""
    depth = 2 if {"drop_path", "feedforward"} & options.keys() else 1
    model = random_network({**options, "depth": depth}).eval()
    images = torch.randn(2, channels(options), 16, 16)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(images), model(images))
    model.train()
    compiled(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def pairwise(factors: dict[str, list]) -> list[dict[str, object]]:
    """Few combinations in which each two values of different factors meet."""
    open_pairs = {
        ((one, a), (two, b))
        for one, two in combinations(factors, 2)
        for a in factors[one]
        for b in factors[two]
    }
    everything = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    chosen = []
    while open_pairs:
        best = max(everything, key=lambda row: len(open_pairs & {*combinations(row.items(), 2)}))
        open_pairs -= {*combinations(best.items(), 2)}
        chosen.append(best)
    return chosen


GRID = ("position", "norm", "norm_order", "feedforward", "pooling")
PAIRS = pairwise({f: [name for field, name in CHOICES if field == f] for f in GRID})


@pytest.mark.parametrize(
    "options", mostly_slow(PAIRS), ids=lambda options: "-".join(options.values())
)
def test_every_pair_of_options_can_be_trained(options):
    torch.manual_seed(0)
    if options["feedforward"] == "moe" and options["norm_order"].startswith("sub"):
        options = {**options, "feedforward": "mlp"}  # experts have no norm inside
    model = build_classifier(ModelConfig(**{**SMALL, **options}))
    torch.nn.init.normal_(model.head.weight, std=0.1)
    images, labels = torch.randn(8, 3, 16, 16), torch.randint(3, (8,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
