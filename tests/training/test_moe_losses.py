"""Experts in a training: losses of routers, how experts are used, and what is refused."""

import math

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tests.training.runs import events
from vit.config import DecoderConfig
from vit.model.build import build_captioner, build_classifier
from vit.training.moe_losses import expert_imbalance, moe_layers, router_losses, track_expert_usage
from vit.training.train import train

MOE = {"feedforward": "moe", "num_experts": 4, "moe_every": 1}


def network(tiny_config, **settings):
    torch.manual_seed(0)
    return build_classifier(tiny_config(**MOE, num_classes=3, **settings).model)


def test_losses_are_the_papers_formulas_times_the_images(tiny_config):
    model = network(tiny_config).train()
    seen = []
    for layer in moe_layers(model).values():
        layer.register_forward_pre_hook(lambda layer, given: seen.append((layer, given[0])))
    model(torch.randn(5, 3, 16, 16))
    found = router_losses(Accelerator(cpu=True), model, images=5)
    balance = z = 0.0
    assert len(seen) == 2
    for layer, tokens in seen:
        logits = (tokens.flatten(0, 1) @ layer.router.weight.T).detach().double()
        shares = logits.softmax(1)
        chosen = shares.topk(2, dim=1).indices.flatten().bincount(minlength=4) / (2 * len(logits))
        balance += 4 * float((chosen * shares.mean(0)).sum())
        z += float(logits.exp().sum(1).log().square().mean())
    assert found.tolist() == pytest.approx([5 * balance, 5 * z], rel=1e-5)


def test_losses_of_a_decoder_do_not_depend_on_padding(tiny_config):
    torch.manual_seed(0)
    encoder = tiny_config(**MOE, num_classes=0).model
    decoder = DecoderConfig(
        decoder_depth=1, decoder_feedforward="moe", vocab_size=9, caption_tokens=8
    )
    model = build_captioner(encoder, decoder).eval()
    words = torch.tensor([[1, 4, 2, 0, 0, 0], [1, 5, 6, 7, 8, 2], [1, 7, 2, 0, 0, 0]])
    images = torch.randn(3, 3, 16, 16)

    def statistics(chosen, length):
        ids = words[chosen, :length]
        with track_expert_usage(model) as usage:
            model(images[chosen], ids[:, :-1], ids[:, 1:] != 0)
            routing = model.decoder.blocks[0].mlp.routing
            losses = router_losses(None, model, images=len(ids))
            usage.add(len(ids))
        return routing, losses, usage.sums

    whole, _, rows = statistics([0, 1, 2], 6)
    parts = [statistics([0, 2], 3), statistics([1], 6)]
    assert whole.tokens == 2 + 5 + 2
    for name, total in whole._asdict().items():
        torch.testing.assert_close(total, sum(getattr(one[0], name) for one in parts))
    torch.testing.assert_close(rows, sum(one[2] for one in parts))
    _, padded, _ = statistics([0, 2], 6)
    torch.testing.assert_close(padded, parts[0][1])


def test_a_pass_for_company_teaches_nothing(tiny_config):
    model = network(tiny_config).train()
    model(torch.zeros(1, 3, 16, 16))
    losses = router_losses(None, model, images=0)
    losses.sum().backward()
    assert losses.tolist() == [0, 0]
    assert not any(layer.router.weight.grad.any() for layer in moe_layers(model).values())


def test_usage_counts_each_pass_and_leaves_nothing_behind(tiny_config):
    model = network(tiny_config).eval()
    with torch.no_grad(), track_expert_usage(model) as usage:
        for count in (3, 2):
            model(torch.randn(count, 3, 16, 16))
            usage.add(count)
        model(torch.randn(1, 3, 16, 16))
        usage.add(0)
        first, second = usage.describe(Accelerator(cpu=True))
    assert (first["block"], second["block"]) == (1, 2)
    for layer in (first, second):
        assert sum(layer["load"]) == pytest.approx(1, abs=1e-4)
        assert 0 < layer["entropy"] <= 1
        assert layer["dropped"] == 0
    model(torch.randn(1, 3, 16, 16))
    assert all(layer.routing is None for layer in moe_layers(model).values())
    with track_expert_usage(nn.Linear(1, 1)) as none:
        assert none is None


def test_usage_starts_with_a_batch_of_no_image_that_is_not_passed(tiny_config):
    model = network(tiny_config).eval()
    with torch.no_grad(), track_expert_usage(model) as usage:
        usage.add(0)
        model(torch.randn(2, 3, 16, 16))
        usage.add(2)
        assert usage.sums[:, 0].tolist() == [2 * 5] * 2
        first, _ = usage.describe(Accelerator(cpu=True))
    assert sum(first["load"]) == pytest.approx(1, abs=1e-4)


def test_a_run_tells_how_its_experts_are_used(tiny_config, tmp_path):
    best = train(tiny_config(**MOE, capacity_factor=0.5, epochs=2), tmp_path / "run").epoch
    steps, epochs = events(tmp_path / "run", "step"), events(tmp_path / "run")
    assert len(steps) == 6
    assert len(epochs) == 2
    for event in steps:
        assert 1.9 < event["balance_loss"] <= 8  # of two layers: 1 where even, 4 where one has all
        assert math.isfinite(event["router_z_loss"])
    for event in epochs:
        assert [layer["block"] for layer in event["routers"]] == [1, 2]
        assert all(layer["dropped"] > 0.1 for layer in event["routers"])
    report = (tmp_path / "run/report.html").read_text()
    assert "How the experts are used" in report
    assert f"{epochs[best - 1]['routers'][0]['dropped']:.1%}" in report


def layer(load, dropped=0.0, block=2):
    return {"block": block, "load": load, "entropy": 0.9, "dropped": dropped}


def test_uneven_experts_have_one_note_with_the_remedies():
    assert expert_imbalance(()) is None
    assert expert_imbalance([layer([0.25] * 4, 0.1), layer([0.025, 0.375, 0.3, 0.3])]) is None
    even, poor = layer([0.25] * 4), layer([0.02, 0.38, 0.3, 0.3], block=4)
    assert expert_imbalance([even, poor]) == (
        "note: the experts are used unevenly: an expert of block 4 got 2.0% of the choices, an "
        "equal share is 25.0% (raise --balance-loss)"
    )
    full = layer([0.25] * 4, 0.23, block=6)
    note = expert_imbalance([poor, full, layer([0.25] * 4, 0.12)])
    assert "block 6 dropped 23% of its choices (raise --capacity-factor); an expert of" in note


def test_a_run_ends_with_the_note(tiny_config, tmp_path, capsys):
    settings = {**MOE, "capacity_factor": 0.4, "top_k": 1, "epochs": 1, "warmup_epochs": 0}
    train(tiny_config(**settings), tmp_path / "run")
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "used unevenly" in line]
    assert len(lines) == 1
    assert "--capacity-factor" in lines[0]
