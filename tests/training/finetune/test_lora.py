"""LoRA and freezing: what learns, what stays, and that the merged network computes the same."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import ModelConfig
from vit.errors import ConfigError
from vit.model.build import build_classifier, check_fit, meta_model
from vit.model.vision_transformer import VisionTransformer
from vit.training.ema import ExponentialMovingAverage
from vit.training.finetune.lora import (
    LoRALinear,
    add_lora,
    freeze_backbone,
    merge_lora,
    trainable_line,
)
from vit.training.optimizers import layer_of, parameter_groups

SMALL = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
LORA = {"rank": 4, "alpha": 16.0}
OPTIONS = {
    "plain": ({}, ["qkv", "proj"]),
    "qk_norm": ({"qk_norm": True, "layer_scale": 0.1}, ["qkv", "fc1", "fc2"]),
    "swiglu": ({"feedforward": "swiglu"}, ["qkv", "proj", "fc1_g", "fc1_x", "fc2"]),
    "no_bias": ({"qkv_bias": False, "proj_bias": False, "num_classes": 5}, ["qkv", "proj", "fc2"]),
    "rotary": ({"position": "rotary", "pooling": "attention", "norm_pre": True}, ["qkv", "fc1"]),
    "post": ({"norm_order": "post", "pooling": "mean", "norm": "rmsnorm"}, ["proj"]),
}
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def build(seed: int = 0, **options) -> VisionTransformer:
    torch.manual_seed(seed)
    network = build_classifier(ModelConfig(**{**SMALL, **options}))
    torch.nn.init.normal_(network.head.weight, std=0.5)
    return network


def with_lora(targets=("qkv", "proj"), *, trained: bool = True, **options) -> VisionTransformer:
    """A network with LoRA; `trained` moves its differences away from zero."""
    network = build(**options)
    add_lora(network, **LORA, targets=targets)
    if trained:
        for module in network.modules():
            if isinstance(module, LoRALinear):
                torch.nn.init.normal_(module.lora_b, std=0.1)
    return network


def step(network: VisionTransformer, *, bf16: bool = False) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        logits = network(IMAGES)
    loss = F.cross_entropy(logits.float(), torch.tensor([0, 1, 2]))
    loss.backward()
    return loss.detach()


def learners(network: VisionTransformer) -> set[str]:
    return {name for name, p in network.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("options", OPTIONS)
def test_merged_computes_the_same(options):
    settings, targets = OPTIONS[options]
    network = with_lora(targets, **settings).eval()
    before = build(**settings).eval()(IMAGES)
    state = merge_lora(network.state_dict(), **LORA)
    plain = meta_model(ModelConfig(**{**SMALL, **settings}))
    check_fit(state, plain)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    plain.load_state_dict(state, assign=True)
    after = network(IMAGES)
    torch.testing.assert_close(plain.eval()(IMAGES), after, atol=1e-5, rtol=0)
    assert (after - before).abs().max() > 1e-2, "the differences changed nothing"


def test_starts_as_the_network_that_it_was_given():
    assert torch.equal(build().eval()(IMAGES), with_lora(trained=False).eval()(IMAGES))


def test_a_projection_is_the_formula():
    linear = torch.nn.Linear(6, 5)
    lora = LoRALinear(linear, rank=2, alpha=3.0)
    torch.nn.init.normal_(lora.lora_b)
    x = torch.randn(4, 7, 6)
    expected = linear(x) + 3 / 2 * x @ lora.lora_a.T @ lora.lora_b.T
    torch.testing.assert_close(lora(x), expected)
    assert lora.weight is linear.weight
    assert lora.bias is linear.bias
    assert [name for name, p in lora.named_parameters() if p.requires_grad] == ["lora_a", "lora_b"]
    weight = merge_lora(lora.state_dict(prefix="x."), rank=2, alpha=3.0)["x.weight"]
    exact = linear.weight.double() + 3 / 2 * lora.lora_b.double() @ lora.lora_a.double()
    assert torch.equal(weight, exact.float())
    assert lora.lora_a.abs().max() <= 1 / math.sqrt(6)
    assert "rank=2, alpha=3.0" in repr(lora)


@pytest.mark.parametrize("options", OPTIONS)
def test_only_the_differences_and_the_head_learn(options):
    settings, targets = OPTIONS[options]
    network = with_lora(targets, **settings)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    place = {"qkv": "attn", "proj": "attn"}
    expected = {
        f"blocks.{block}.{place.get(target, 'mlp')}.{target}.{part}"
        for block in range(2)
        for target in targets
        for part in ("lora_a", "lora_b")
    }
    assert learners(network) == expected | {"head.weight", "head.bias"}
    optimizer = torch.optim.AdamW((p for p in network.parameters() if p.requires_grad), lr=1e-2)
    step(network)
    optimizer.step()
    changed = {
        n for n, tensor in network.state_dict().items() if not torch.equal(tensor, before[n])
    }
    assert changed == learners(network)


def test_merging_leaves_an_ordinary_network_as_it_is():
    plain = build().state_dict()
    once = merge_lora(with_lora().state_dict(), **LORA)
    for state in (plain, once):
        again = merge_lora(state, **LORA)
        assert again.keys() == state.keys()
        assert all(again[name] is state[name] for name in state)


def test_copies_and_state_dicts_come_back():
    network = with_lora().eval()
    copied = copy.deepcopy(network)
    other = with_lora(seed=1).eval()
    other.load_state_dict(network.state_dict())
    with torch.device("meta"):
        empty = build_classifier(ModelConfig(**SMALL))
        add_lora(empty, **LORA, targets=["qkv", "proj"])
    empty.load_state_dict(network.state_dict(), assign=True)
    for again in (copied, other, empty.eval()):
        assert torch.equal(again(IMAGES), network(IMAGES))
        assert learners(again) == learners(network)


def test_works_in_bf16():
    network, other = with_lora(), with_lora()
    exact, rough = step(network), step(other, bf16=True)
    assert rough.item() == pytest.approx(exact.item(), abs=0.03)
    grads = [p.grad for p in other.parameters() if p.requires_grad]
    assert all(grad is not None and grad.dtype == torch.float32 for grad in grads)


@pytest.mark.slow
def test_compiles_whole():
    network = with_lora(["qkv", "proj", "fc1", "fc2"])
    compiled = torch.compile(copy.deepcopy(network), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IMAGES), network(IMAGES), atol=1e-5, rtol=0)
    F.cross_entropy(compiled(IMAGES), torch.tensor([0, 1, 2])).backward()
    step(network)
    for ours, theirs in zip(compiled.parameters(), network.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": ["qkv", "fc1_g"]}, "LoRA has no fc1_g here; choose from qkv, proj, fc1, fc2"),
        ({"targets": []}, "LoRA needs a projection here; choose from qkv"),
        ({"rank": 32}, "rank=32: choose one from 1 to 31"),
    ],
)
def test_refuses_what_cannot_be_added(change, message):
    network = build()
    with pytest.raises(ConfigError, match=message):
        add_lora(network, **{**LORA, "targets": ["qkv"], **change})
    assert network.state_dict().keys() == build().state_dict().keys()
    assert all(p.requires_grad for p in network.parameters())


def test_differences_decay_and_learn_like_their_block():
    assert layer_of("blocks.1.attn.qkv.lora_a", 2) == 2
    groups = parameter_groups(with_lora(), depth=2, weight_decay=0.1, layer_decay=0.5)
    found = {name: (g["weight_decay"], g["lr_scale"]) for g in groups for name in g["names"]}
    assert found.keys() == learners(with_lora())
    assert found["blocks.0.attn.qkv.lora_b"] == (0.1, 0.25)
    assert found["blocks.1.attn.proj.lora_a"] == (0.1, 0.5)
    assert found["head.bias"] == (0.0, 1.0)


def test_the_average_is_of_what_learns():
    network = with_lora()
    average = ExponentialMovingAverage(network, 0.9)
    assert average.state_dict().keys() == learners(network)


def test_the_head_alone_learns():
    network = build()
    freeze_backbone(network)
    assert learners(network) == {"head.weight", "head.bias"}
    step(network)
    assert {n for n, p in network.named_parameters() if p.grad is not None} == learners(network)
    everything = sum(p.numel() for p in network.parameters())
    line = f"the head: 99 of {everything:,} parameters learn ({9900 / everything:.2g} %)"
    assert trainable_line("the head", network) == line


def test_a_network_without_a_head_cannot_freeze_its_backbone():
    network = build_classifier(ModelConfig(**{**SMALL, "num_classes": 0}))
    with pytest.raises(ConfigError, match="num_classes=0: there is no head"):
        freeze_backbone(network)
