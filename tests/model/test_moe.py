"""Mixture of experts: a naive oracle, Mixtral and Switch of transformers, losses, export."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vit.config import Config, ModelConfig
from vit.config.training_config import PretrainingConfig
from vit.model import grouped_linear
from vit.model.build import build_classifier, build_joint_embedding
from vit.model.mlp import MLP
from vit.model.moe import (
    Experts,
    MixtureOfExperts,
    Routing,
    balance_loss,
    collect_routing,
    drop_over_capacity,
    renormalised_weights,
    score_order,
    softmax_weights,
    token_order,
    z_loss,
)
from vit.training.activation_checkpointing import recompute_blocks
from vit.training.optimizers import make_optimizer, parameter_groups

DIM, HIDDEN, EXPERTS, TOKENS = 16, 24, 4, 9
SMALL = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
MOE = {**SMALL, "feedforward": "moe", "num_experts": 4}
# of torch 2.8 about itself, when it compiles
OLDER = ("ignore:The .grad attribute", "ignore:.*should not be instantiated:DeprecationWarning")
ORDERS = {"order": token_order, "score": score_order}
WAYS = {
    "plain": {"top_k": 2},
    "one": {"top_k": 1},
    "three of softmax": {"top_k": 3, "weight_fn": softmax_weights},
    "shared": {"top_k": 2, "shared": True},
    "without bias": {"top_k": 2, "bias": False},
    "order": {"top_k": 2, "order": "order", "factor": 0.7},
    "score": {"top_k": 2, "order": "score", "factor": 0.7},
    "score of one": {"top_k": 1, "order": "score", "factor": 0.5},
}


def looped(moe: MixtureOfExperts) -> MixtureOfExperts:
    """The same layer, whose experts come one after the other."""
    other = copy.deepcopy(moe)
    other.experts.sort_by_expert = other.experts.loop_over_experts
    return other


def capacity(num_experts: int, factor: float, order):
    return partial(drop_over_capacity, num_experts=num_experts, factor=factor, order=order)


def layer(
    *, order=None, factor=0.0, shared=False, activation=None, bias=True, dropout=0.0, **options
):
    """A layer in float64 whose router has clear opinions."""
    weight_fn = renormalised_weights if options["top_k"] > 1 else softmax_weights
    experts = Experts(DIM, HIDDEN, EXPERTS, activation=activation, bias=bias, dropout=dropout)
    moe = MixtureOfExperts(
        experts,
        capacity_fn=capacity(EXPERTS, factor, ORDERS[order]) if order else None,
        shared=MLP(DIM, HIDDEN) if shared else None,
        **{"weight_fn": weight_fn, **options},
    )
    nn.init.normal_(moe.router.weight, std=0.5)
    return moe.double()


def tokens(batch: int = 3) -> Tensor:
    return torch.randn(batch, TOKENS, DIM, dtype=torch.float64)


def mlp(moe: MixtureOfExperts, expert: int, token: Tensor) -> Tensor:
    """One expert on one token, by the formula."""
    part, bias = moe.experts, moe.experts.fc1_bias is not None
    inside = part.fc1_weight[expert] @ token + (part.fc1_bias[expert] if bias else 0)
    return part.fc2_weight[expert] @ F.gelu(inside) + (part.fc2_bias[expert] if bias else 0)


def oracle(moe: MixtureOfExperts, x: Tensor, options: dict) -> tuple[Tensor, list[int], int]:
    """Token by token: answers, chosen experts, number of dropped assignments."""
    top_k, outputs, chosen, dropped = options["top_k"], [], [], 0
    context = math.inf
    if "factor" in options:
        context = math.ceil(top_k * TOKENS / EXPERTS * options["factor"])
    for image in x:
        scores = [torch.softmax(moe.router.weight @ token, 0) for token in image]
        best = [sorted(range(EXPERTS), key=lambda e: -p[e].item())[:top_k] for p in scores]
        answers = [moe.shared(token) if options.get("shared") else 0 * token for token in image]
        turns = list(range(TOKENS))
        if options.get("order") == "score":
            turns.sort(key=lambda t: -scores[t].max().item())
        free = dict.fromkeys(range(EXPERTS), context)
        for choice in range(top_k):
            for t in turns:
                expert = best[t][choice]
                free[expert] -= 1
                if free[expert] < 0:
                    dropped += 1
                    continue
                weight = scores[t][expert]
                if top_k > 1 and options.get("weight_fn") is not softmax_weights:
                    weight = weight / scores[t][best[t]].sum()
                answers[t] = answers[t] + weight * mlp(moe, expert, image[t])
        outputs.append(torch.stack(answers))
        chosen += [expert for token in best for expert in token]
    return torch.stack(outputs), chosen, dropped


@pytest.mark.parametrize("way", WAYS)
def test_moe_equals_a_plain_reference_in_values_gradients_and_routing(way):
    options = WAYS[way]
    moe, x = layer(**options), tokens().requires_grad_()
    expected, chosen, dropped = oracle(moe, x, options)
    found = moe(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(looped(moe)(x), expected)
    seed = torch.randn_like(x)
    inputs = [x, *moe.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, seed), torch.autograd.grad(expected, inputs, seed)
    )
    assert moe.routing.counts.tolist() == [chosen.count(e) for e in range(EXPERTS)]
    assert (moe.routing.tokens, moe.routing.dropped) == (3 * TOKENS, dropped)
    assert (dropped > 0) == ("factor" in options)
    logits = x @ moe.router.weight.T
    p = logits.softmax(-1)
    torch.testing.assert_close(moe.routing.probabilities, p.sum((0, 1)))
    torch.testing.assert_close(moe.routing.z, logits.exp().sum(-1).log().square().sum())
    torch.testing.assert_close(moe.routing.entropy, -(p * p.log()).sum().detach())


@pytest.mark.parametrize("way", WAYS)
def test_moe_gradients_equal_finite_differences(way):
    moe, x = layer(**WAYS[way]), tokens(1).requires_grad_()

    def answer_and_losses(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        answer, (counts, probabilities, count, z, _, _) = moe(x), moe.routing
        return answer, balance_loss(counts, probabilities, count, moe.top_k), z_loss(z, count)

    inputs = (x, moe.router.weight, moe.experts.fc1_weight, moe.experts.fc2_weight)
    assert torch.autograd.gradcheck(answer_and_losses, inputs, fast_mode=True)


def test_assignments_over_capacity_are_dropped_by_order_or_score():
    """Of three tokens of expert 0, whose capacity is two, the last or least probable is dropped."""
    probabilities = torch.tensor([[[0.5], [0.9], [0.8], [0.6]]])
    experts = torch.tensor([[[0], [0], [0], [1]]])
    for order, expected in (("order", [0, 0, 2, 1]), ("score", [2, 0, 0, 1])):
        drop = capacity(2, 1.0, ORDERS[order])
        assert drop(probabilities, experts).flatten().tolist() == expected


def test_capacity_has_no_rounding_errors():
    """200 tokens * 1.1 / 4 experts is 55, which floating point makes 55.00000000000001."""
    experts = torch.zeros(1, 200, 1, dtype=torch.int64)
    kept = capacity(4, 1.1, token_order)(torch.ones(1, 200, 1), experts)
    assert (kept == 0).sum() == 55


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped product")
def test_a_dropped_assignment_has_no_effect_whatever_its_output(monkeypatch):
    """The fused product gives rows that belong to no group to the last expert."""
    x, bound = tokens(), layer(top_k=2, order="order", factor=0.5)
    expected = bound(x)
    assert bound.routing.dropped > 0
    monkeypatch.setattr(grouped_linear, "_is_fused", lambda *_: True)
    torch.testing.assert_close(bound.float()(x.float()).to(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_moe_exports_in_bfloat16():
    model, x = layer(top_k=2).eval().bfloat16(), tokens().bfloat16()
    program = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(program(x), model(x), rtol=0.05, atol=0.05)


def groups(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight = torch.randn(20, 16, dtype=dtype), torch.randn(4, 8, 16, dtype=dtype)
    bias = torch.randn(4, 8, dtype=dtype)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    return *leaves, torch.tensor([7, 0, 9, 4])


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped product")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_implementations_of_grouped_linear_agree(with_bias, device):
    x, weight, bias, counts = (t.detach().to(device) for t in groups())
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
    leaves, bias = (leaves, leaves[2]) if with_bias else (leaves[:2], None)
    seed, results = torch.randn(20, 8, device=device, dtype=dtype), []
    for way in (grouped_linear.looped_linear, grouped_linear.fused_linear):
        y = way(leaves[0], leaves[1], bias, counts)
        results.append((y, torch.autograd.grad(y, leaves, seed)))
    near = {"rtol": 0.02, "atol": 2e-3} if device == "cuda" else {}  # of a sum of 16 in bf16
    torch.testing.assert_close(results[0], results[1], **near)


@pytest.mark.slow
def test_looped_linear_equals_a_linear_layer_for_each_group():
    x, weight, bias, counts = groups(torch.float64)
    parts = zip(x.split(counts.tolist()), weight, bias, strict=True)
    expected = torch.cat([F.linear(*part) for part in parts])
    torch.testing.assert_close(grouped_linear.looped_linear(x, weight, bias, counts), expected)
    assert torch.autograd.gradcheck(grouped_linear.looped_linear, (x, weight, bias, counts))
    fewer = counts - torch.tensor([0, 0, 0, 4])
    cut = grouped_linear.looped_linear(x, weight, bias, fewer)
    torch.testing.assert_close(cut[:16], expected[:16])
    assert not cut[16:].any()
    assert torch.autograd.gradcheck(grouped_linear.looped_linear, (x, weight, bias, fewer))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's own
def test_custom_operators_pass_torch_s_opcheck():
    x, weight, bias, counts = groups()
    for arguments in ((x, weight, bias, counts), (x, weight, None, counts)):
        outcomes = torch.library.opcheck(grouped_linear.looped_linear, arguments)
        assert set(outcomes.values()) == {"SUCCESS"}


def test_flops_are_counted_on_the_meta_device():
    with torch.device("meta"):
        experts = layer(top_k=2)
        with FlopCounterMode(display=False) as counter:
            experts(tokens(1)).sum().backward()
    forward_and_backward = 3 * 2 * TOKENS * (EXPERTS * DIM + 2 * 2 * DIM * HIDDEN)
    router_input = 2 * TOKENS * EXPERTS * DIM  # tokens here need no gradient, nor the first product
    first_input = 2 * TOKENS * 2 * DIM * HIDDEN
    counted = counter.get_total_flops()
    assert forward_and_backward - router_input - first_input <= counted <= forward_and_backward


def test_permute_rows_equals_indexing_in_values_and_gradients():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    index = torch.randperm(10)
    inverse = index.argsort()
    rows = grouped_linear.permute_rows(x, index, inverse, 2)
    assert torch.equal(rows[inverse], x.repeat_interleave(2, 0))
    assert torch.autograd.gradcheck(grouped_linear.permute_rows, (x, index, inverse, 2))


def test_moe_equals_mixtral():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import (
        MixtralSparseMoeBlock,
        load_balancing_loss_func,
    )

    config = MixtralConfig(
        hidden_size=DIM, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    theirs = MixtralSparseMoeBlock(config).double().eval()
    ours = layer(top_k=2, bias=False, activation=nn.SiLU())
    # Their experts are gated. A constant input makes each gate a constant: gate and value in one.
    state = theirs.state_dict()
    x = torch.cat([tokens()[..., :-1], torch.ones(3, TOKENS, 1, dtype=torch.float64)], -1)
    gate_up = torch.randn(EXPERTS, 2 * HIDDEN, DIM, dtype=torch.float64)
    gate_up[:, HIDDEN:] = 0.0
    gate_up[:, HIDDEN:, -1] = 1.0
    state["experts.gate_up_proj"] = gate_up
    state["experts.down_proj"] = ours.experts.fc2_weight.detach()
    state["gate.weight"] = ours.router.weight.detach()
    theirs.load_state_dict(state)
    ours.experts.fc1_weight.data = gate_up[:, :HIDDEN]
    expected = theirs(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    # their router is in float32
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-6, check_dtype=False)
    logits = (F.linear(x, ours.router.weight).flatten(0, 1),)
    routing = ours.routing
    balance = balance_loss(routing.counts, routing.probabilities, routing.tokens, 2)
    # theirs counts assignments a token, not a share of all: top_k times as much
    torch.testing.assert_close(balance * 2, load_balancing_loss_func(logits, EXPERTS, 2).double())


def test_router_and_losses_equal_switch_transformers():
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers import modeling_switch_transformers as switch

    config = SwitchTransformersConfig(d_model=DIM, num_experts=EXPERTS, expert_capacity=TOKENS)
    router = switch.SwitchTransformersTop1Router(config).eval()
    ours = layer(top_k=1).float()
    router.classifier.weight.data = ours.router.weight.data
    x = tokens(1).float()  # their loss is a mean over images of each one's own
    ours(x)
    logits = ours.router_logits(x)
    p = logits.softmax(-1)
    counts, probabilities, count, z, _, _ = ours.routing
    theirs = switch.load_balancing_loss_func(p, p.argmax(-1))
    torch.testing.assert_close(balance_loss(counts, probabilities, count, 1), theirs)
    torch.testing.assert_close(z_loss(z, count), switch.router_z_loss_func(logits))
    assert router.classifier(x).allclose(logits)


def test_router_jitter_acts_only_in_training():
    moe, x = layer(top_k=2, jitter=0.5), tokens()
    assert not torch.equal(moe.router_logits(x), moe.router_logits(x))
    moe.eval()
    assert torch.equal(moe.router_logits(x), F.linear(x, moe.router.weight))
    ratio = moe.train().jitter(torch.ones(1000))
    assert 0.5 <= ratio.min() < 0.55
    assert 1.45 < ratio.max() <= 1.5


def network(**options) -> nn.Module:
    model = build_classifier(ModelConfig(**{**MOE, **options}))
    nn.init.normal_(model.head.weight)
    return model


def test_every_second_block_has_experts():
    model = network(depth=4)
    kinds = [type(block.mlp).__name__ for block in model.blocks]
    assert kinds == ["MLP", "MixtureOfExperts"] * 2
    shapes = {name: tuple(p.shape) for name, p in model.blocks[1].mlp.named_parameters()}
    assert shapes == {
        "router.weight": (4, 32),
        "experts.fc1_weight": (4, 128, 32),
        "experts.fc1_bias": (4, 128),
        "experts.fc2_weight": (4, 32, 128),
        "experts.fc2_bias": (4, 32),
    }
    assert collect_routing(model) == []
    model(torch.randn(2, 3, 16, 16))
    assert [routing.tokens.item() for routing in collect_routing(model)] == [10, 10]


def test_routing_of_views_of_two_sizes_adds_up():
    config = ModelConfig(**{**MOE, "num_classes": 0})
    model = build_joint_embedding(config, PretrainingConfig(projector_dim=4))
    large, small = torch.randn(4, 3, 16, 16), torch.randn(6, 3, 8, 8)
    apart = []
    for views in (large, small):
        model([views])
        apart += collect_routing(model)
    model([large, small])
    (both,) = collect_routing(model)
    assert both.tokens == 4 * 5 + 6 * 2
    for name, total in both._asdict().items():
        torch.testing.assert_close(total, sum(getattr(one, name) for one in apart))
    (with_gradient,) = torch.autograd.grad(both.z, model.blocks[1].mlp.router.weight)
    parts = [torch.autograd.grad(one.z, model.blocks[1].mlp.router.weight)[0] for one in apart]
    torch.testing.assert_close(with_gradient, sum(parts))


def test_experts_are_initialised_like_an_mlp():
    model = network(dim=128, num_experts=3, shared_expert=True)
    moe = model.blocks[1].mlp
    for weight in (*moe.experts.fc1_weight, *moe.experts.fc2_weight, moe.shared.fc1.weight):
        assert weight.std().item() == pytest.approx(math.sqrt(2 / (128 + 512)), rel=0.05)
    assert moe.router.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert moe.experts.fc1_bias.std().item() == pytest.approx(1e-6, rel=0.2)


def test_a_model_can_be_deep_copied_after_a_forward_pass():
    model = network()
    model(torch.randn(2, 3, 16, 16))
    again = copy.deepcopy(model)
    ours, theirs = collect_routing(model)[0], collect_routing(again)[0]
    assert ours.z.requires_grad
    assert not theirs.z.requires_grad
    torch.testing.assert_close(theirs, Routing(*(t.detach() for t in ours)))


def test_under_autocast_the_router_is_float32_and_outputs_are_close():
    moe, x = layer(top_k=2, shared=True).float(), tokens().float()
    expected = moe(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = moe(x)
        assert moe.router_logits(x).dtype == torch.float32
    assert found.dtype == torch.bfloat16
    assert moe.routing.z.dtype == torch.float32
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.02)
    found.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.parameters())


def losses(model: nn.Module, images: Tensor) -> Tensor:
    logits = model(images)
    (routing,) = collect_routing(model)
    counts, probabilities, count, z, _, _ = routing
    balance = balance_loss(counts, probabilities, count, 2)
    return logits.square().mean() + balance + z_loss(z, count)


def gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(losses(model, images), list(model.parameters())))


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.8, "router_priority": "score"}])
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings(*OLDER)
def test_activation_checkpointing_gives_the_same_losses_gradients_and_routing(options, backend):
    model, images = network(router_jitter=0.1, **options), torch.randn(4, 3, 16, 16)
    again = copy.deepcopy(model)
    recompute_blocks(again)
    compiled = again
    if backend:
        name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
        fullgraph = hasattr(torch._dynamo.config, name)
        compiled = torch.compile(again, backend=backend, fullgraph=fullgraph)
    torch.manual_seed(1)
    expected = gradients(model, images)
    torch.manual_seed(1)
    loss = losses(compiled, images)
    routing = collect_routing(again)[0]
    found = list(torch.autograd.grad(loss, list(again.parameters())))
    torch.testing.assert_close(found, expected)
    assert collect_routing(again)[0] is routing


DROPPING = {"capacity_factor": 0.8, "router_priority": "score", "shared_expert": True}


@pytest.mark.slow
@pytest.mark.filterwarnings(*OLDER)
@pytest.mark.parametrize(
    ("options", "backend"), [({}, "aot_eager"), (DROPPING, "aot_eager"), ({}, "inductor")], ids=str
)
def test_compiles_as_one_graph_with_its_gradients(options, backend):
    model, images = network(**options), torch.randn(4, 3, 16, 16)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        torch.testing.assert_close(
            gradients(compiled, images), gradients(model, images), rtol=1e-4, atol=1e-5
        )
    if backend != "inductor":  # rounds elsewhere in bf16, which may send a token elsewhere
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(gradients(compiled, images), gradients(model, images))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + (backend != "inductor")
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(images), model(images))


def test_expert_biases_have_no_weight_decay_and_muon_skips_stacked_weights():
    model = network()
    groups = parameter_groups(model, depth=2, weight_decay=0.1, layer_decay=1.0)
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    part = "blocks.1.mlp.experts."
    assert (decays[part + "fc1_bias"], decays[part + "fc1_weight"]) == (0, 0.1)
    config = Config().training
    object.__setattr__(config, "optimizer", "muon")
    optimizer = make_optimizer(model, config, depth=2)
    fallback = {n: g["use_fallback"] for g in optimizer.param_groups for n in g["names"]}
    assert all(fallback[name] for name in fallback if name.startswith(part))
    assert not fallback["blocks.0.mlp.fc1.weight"]
    losses(model, torch.randn(2, 3, 16, 16)).backward()
    before = model.blocks[1].mlp.experts.fc1_weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.blocks[1].mlp.experts.fc1_weight)
