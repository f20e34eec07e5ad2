"""Sparse upcycling: a network with copied experts gives the outputs of the dense one."""

import dataclasses

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import vit
from tests.slow_cases import mostly_slow
from tests.weights.parity import build
from vit.config import Config, ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import WeightsError
from vit.model.build import build_classifier, meta_model
from vit.model.moe import MixtureOfExperts
from vit.model.vision_transformer import VisionTransformer
from vit.weights.adapt_weights import adapt_weights
from vit.weights.formats.pretrained import Pretrained
from vit.weights.saved_model import load_run, save_model

DENSE = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture
def pretrained(randomise):
    """A function that makes a trained network of given settings."""

    def make(**options) -> Pretrained:
        config = ModelConfig(**{**DENSE, **options})
        state = randomise(meta_model(config).state_dict())
        return Pretrained(state=state, config=config, origin="run dense")

    return make


def experts(source: Pretrained, **settings) -> ModelConfig:
    return dataclasses.replace(source.config, feedforward="moe", **settings)


@torch.no_grad()
def difference(source: Pretrained, config: ModelConfig, dtype: torch.dtype) -> float:
    """Largest difference of logits between the source and what it was upcycled to."""
    images = torch.randn(4, 3, config.image_size, config.image_size, dtype=dtype)
    expected = build(dict(source.state), source.config).to(dtype)(images)
    found = build(adapt_weights(source, config)[0], config).to(dtype)(images)
    assert expected.std() > 0.1, "logits without any spread show nothing"
    return (found - expected).abs().max().item()


SHAPES = [
    {"num_experts": 1, "top_k": 1},
    {"num_experts": 2, "top_k": 2, "router_weights": "softmax"},  # of all, so they sum to one
    {"num_experts": 4},
    {"num_experts": 4, "top_k": 3, "shared_expert": True},
    {"num_experts": 8, "capacity_factor": 4.0},  # as many places as tokens
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("moe_every", [1, 2, 3])
@pytest.mark.parametrize("shape", mostly_slow(SHAPES), ids=str)
def test_answers_as_the_dense_network(pretrained, shape, moe_every, dtype):
    source = pretrained()
    config = experts(source, moe_every=moe_every, **shape)
    assert difference(source, config, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "options",
    [
        {"proj_bias": False, "activation": "relu", "hidden_dim": 40},
        {"norm_order": "post", "norm": "rmsnorm", "class_token": False, "pooling": "mean"},
        {"parallel_blocks": True, "layer_scale": 0.1, "num_kv_heads": 2},
        {"pooling": "attention", "registers": 2, "position": "rotary"},
    ],
    ids=str,
)
def test_answers_as_other_dense_networks(pretrained, options):
    source = pretrained(**options)
    config = experts(source, num_experts=4, shared_expert=True)
    assert difference(source, config, torch.float64) < TOLERANCE[torch.float64]


def test_the_router_reaches_different_experts(pretrained):
    """What makes the equality above worth something: with one expert changed, answers change."""
    source = pretrained()
    config = experts(source, num_experts=4, moe_every=1)
    torch.manual_seed(0)
    state, _ = adapt_weights(source, config)
    images = torch.randn(16, 3, 16, 16)
    before = build(state, config)(images)
    name = "blocks.0.mlp.experts.fc2_weight"
    for number in range(4):
        changed = state[name].clone()
        changed[number] = 0.0
        assert not torch.allclose(build({**state, name: changed}, config)(images), before)


def test_tensors_are_copies_and_routers_are_fresh(pretrained):
    source = pretrained()
    config = experts(source, num_experts=4, moe_every=1, shared_expert=True)
    torch.manual_seed(7)
    state, report = adapt_weights(source, config)
    torch.manual_seed(7)
    for block in range(3):
        part = f"blocks.{block}.mlp"
        drawn = nn.init.normal_(torch.empty(4, 32), std=0.02)
        assert torch.equal(state[f"{part}.router.weight"], drawn)
        for layer in ("fc1", "fc2"):
            for kind in ("weight", "bias"):
                dense = source.state[f"{part}.{layer}.{kind}"]
                stack = state[f"{part}.experts.{layer}_{kind}"]
                assert all(torch.equal(one, dense) for one in stack)
                shared = state[f"{part}.shared.{layer}.{kind}"]
                assert torch.equal(shared, dense if layer == "fc1" else torch.zeros_like(dense))
                assert shared.data_ptr() != dense.data_ptr()
    assert f"{part}.fc1.weight" not in state
    assert f"{part}.fc1.weight" in source.state
    assert report.reused == len(source.state) - 3 * 4
    assert not state[f"{part}.router.weight"].requires_grad


def test_the_rest_is_adapted_too(pretrained):
    source = pretrained()
    change = {"image_size": 32, "channels": 1, "num_classes": 2}
    wanted = dataclasses.replace(source.config, **change)
    state, dense = adapt_weights(source, wanted)
    both, report = adapt_weights(source, experts(source, num_experts=4, **change))
    assert all(torch.equal(both[name], state[name]) for name in both.keys() & state.keys())
    assert report.resized == dense.resized
    assert report.initialised == ("1 router", "head (2 classes, zeros)")


FEWER = "tokens beyond capacity_factor=0.5 are dropped, and are not answered as before"


@pytest.mark.parametrize(
    ("settings", "first", "line"),
    [
        ({}, "40 tensors reused; new: 1 router", "block 2 into 8 equal experts"),
        (
            {"moe_every": 1, "num_experts": 4, "shared_expert": True},
            "32 tensors reused; new: 3 routers",
            "each of blocks 1, 2, 3 into 4 equal experts, and a shared one that adds nothing yet",
        ),
        (
            {"capacity_factor": 0.5},
            "40 tensors reused; new: 1 router",
            f"block 2 into 8 equal experts; {FEWER}",
        ),
    ],
    ids=str,
)
def test_the_report_says_which_blocks(pretrained, settings, first, line):
    source = pretrained()
    lines = adapt_weights(source, experts(source, **settings))[1].lines()
    assert lines == [first, f"upcycled: the mlp of {line}", "head: all 5 classes kept"]
    drops = difference(source, experts(source, **settings), torch.float64) > 1e-3
    assert drops == (FEWER in line)


LESS = "sum to less than one, so copies of the mlp of run dense would answer less than it does; use"


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({}, {"top_k": 1}, f"softmax with top_k=1 of num_experts=8: .* {LESS} top_k=2$"),
        (
            {},
            {"top_k": 1, "router_weights": "softmax"},
            f"{LESS} top_k=2 with router_weights=auto$",
        ),
        ({}, {"router_weights": "softmax"}, f"top_k=2 of .* {LESS} router_weights=auto$"),
        ({}, {"hidden_dim": 64}, "hidden_dim=64: run dense has hidden_dim=128; leave it out, or"),
        ({}, {"activation": "relu"}, "^activation=relu: run dense has activation=gelu; leave it"),
        ({}, {"depth": 4, "moe_every": 4}, "^depth=4: run dense has depth=3; leave it out, or"),
        (
            {"feedforward": "swiglu"},
            {},
            "^feedforward=moe: run dense has feedforward=swiglu, and experts are made of an mlp "
            "alone; leave it out, or start without its weights$",
        ),
        ({"feedforward": "swiglu_packed"}, {}, "has feedforward=swiglu_packed, and experts are"),
        (
            {"feedforward": "moe"},
            {"num_experts": 4},
            "^num_experts=4: run dense has num_experts=8; leave it out, or",
        ),
        ({"feedforward": "moe"}, {"moe_every": 1}, "^moe_every=1: run dense has moe_every=2;"),
    ],
    ids=str,
)
def test_router_weights_below_one_raise(pretrained, options, settings, message):
    source = pretrained(**options)
    with pytest.raises(WeightsError, match=message) as error:
        adapt_weights(source, experts(source, **settings))
    assert "\n" not in str(error.value)


def write(folder, model: VisionTransformer, config: ModelConfig) -> None:
    folder.mkdir(exist_ok=True)
    run = {"config": Config(model=config), "preprocessing": Preprocessing(image_size=(16, 16))}
    save_model(folder, model, classes=tuple("abcde"), **run)


def save(folder, **options) -> VisionTransformer:
    """A run folder of a network that answers differently for different images."""
    config = ModelConfig(**{**DENSE, **options})
    model = build_classifier(config).eval()
    nn.init.normal_(model.head.weight)
    write(folder, model, config)
    return model


@pytest.mark.parametrize("wanted", ["mlp", "swiglu"])
def test_experts_cannot_become_mlps(tmp_path, wanted):
    save(tmp_path, feedforward="moe", num_experts=4)
    message = f"feedforward={wanted}: run .* has feedforward=moe, and one part cannot do what many"
    with pytest.raises(WeightsError, match=message) as error:
        vit.from_pretrained(tmp_path, feedforward=wanted)
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_from_pretrained_and_back_from_a_run_folder(tmp_path, capsys):
    dense, images = save(tmp_path), torch.randn(3, 3, 16, 16)
    torch.manual_seed(0)
    chosen = {"feedforward": "moe", "num_experts": 4, "moe_every": 1}
    model = vit.from_pretrained(tmp_path, **chosen)
    said = capsys.readouterr().err
    assert "upcycled: the mlp of each of blocks 1, 2, 3 into 4 equal experts" in said
    torch.testing.assert_close(model(images), dense(images), atol=1e-5, rtol=0)
    assert all(isinstance(block.mlp, MixtureOfExperts) for block in model.blocks)
    torch.manual_seed(0)
    again = vit.from_pretrained(tmp_path, **chosen, notify=None)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    # a network with experts is taken as it is
    config = ModelConfig(**DENSE, **chosen)
    write(tmp_path / "moe", model, config)
    kept = vit.from_pretrained(tmp_path / "moe")
    assert "upcycled" not in capsys.readouterr().err
    assert torch.equal(kept(images), model(images))
    assert load_run(tmp_path / "moe").config == config


@torch.no_grad()
def test_from_a_network_of_timm(tmp_path, randomise):
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=4, num_classes=5, patch_size=8
    ).eval()
    theirs.load_state_dict(randomise(theirs.state_dict()))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    images = torch.randn(3, 3, 32, 32)
    ours = vit.from_pretrained(
        tmp_path / "model.safetensors", feedforward="moe", shared_expert=True, notify=None
    )
    expected = theirs(images)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(images), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        ours.double()(images.double()), theirs.double()(images.double()), atol=1e-10, rtol=0
    )


def test_experts_diverge_in_training(pretrained):
    """The first step leaves the router where it is: equal answers give its choices no gradient."""
    source = pretrained()
    config = experts(source, num_experts=4, moe_every=1)
    torch.manual_seed(0)
    model = build(adapt_weights(source, config)[0], config).train().double()
    moe, images = model.blocks[0].mlp, torch.randn(8, 3, 16, 16, dtype=torch.float64)
    optimizer, labels = torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(8) % 5
    gradients = []
    for _ in range(2):
        nn.functional.cross_entropy(model(images), labels).backward()
        gradients.append(moe.router.weight.grad.abs().max().item())
        optimizer.step()
        optimizer.zero_grad()
    assert gradients[0] < 1e-12
    assert gradients[1] > 1e-6
    first, *others = moe.experts.fc1_weight
    assert all((first - other).abs().max() > 1e-6 for other in others)
