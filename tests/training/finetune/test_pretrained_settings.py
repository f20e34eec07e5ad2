"""Settings chosen beside pretrained weights are judged with those of the weights, not before."""

import dataclasses

import pytest
import timm
import torch
from accelerate import Accelerator

import vit
from tests.training.runs import ON_CPU, SIZES
from vit.config import Config, FinetuneConfig, ModelConfig, PartialModelConfig
from vit.config.setting_layers import flatten, make_config
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, VitError
from vit.model.build import build_classifier
from vit.model.moe import MixtureOfExperts
from vit.training.finetune.finetune_settings import complete_for_weights
from vit.training.train import load_source, train
from vit.weights.adapt_weights import adapt_weights
from vit.weights.formats.pretrained import Pretrained
from vit.weights.saved_model import load_run, read_model_config, save_model

EXPERTS = {**SIZES, "feedforward": "moe", "num_experts": 4}


def source(**settings) -> Pretrained:
    config = ModelConfig(**settings, num_classes=3)
    return Pretrained(
        state=build_classifier(config).state_dict(),
        config=config,
        classes=None,
        preprocessing=None,
        license=None,
        origin="run r",
    )


def completed(weights: Pretrained, /, **chosen) -> Config:
    """What `vit train DATA --weights r` makes of flags."""
    given = {"weights": "r", "method": "full", **chosen}
    return complete_for_weights(make_config(given), weights)


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        (EXPERTS, {"capacity_factor": 2.0}),
        (EXPERTS, {"capacity_factor": 1.0, "router_priority": "score"}),
        ({**EXPERTS, "capacity_factor": 1.0}, {"router_priority": "score"}),
        (EXPERTS, {"router_jitter": 0.1}),
        (EXPERTS, {"top_k": 3}),
        (EXPERTS, {"balance_loss": 0.1, "router_z_loss": 0.0}),
        (SIZES, {"image_size": 24}),
        (SIZES, {"start_image_size": 8}),
        ({**SIZES, "position": "rotary"}, {"drop_path": 0.2, "image_size": 40}),
    ],
    ids=str,
)
def test_settings_that_fit_the_weights_are_accepted(settings, chosen):
    weights = source(**settings)
    config = completed(weights, **chosen)
    assert {name: flatten(config)[name] for name in chosen} == chosen
    assert type(config.model) is ModelConfig
    adapt_weights(weights, config.model)


@pytest.mark.parametrize(
    ("settings", "chosen", "message"),
    [
        (SIZES, {"capacity_factor": 2.0}, "capacity_factor=2.0: feedforward=mlp does not read it"),
        (SIZES, {"balance_loss": 0.1}, "balance_loss=0.1: feedforward=mlp does not read"),
        (SIZES, {"image_size": 20}, "image_size=20: not a multiple of patch_size=8"),
        (
            SIZES,
            {"start_image_size": 12},
            "start_image_size=12: must be a multiple of patch_si",
        ),
        ({**SIZES, "depth": 1}, {"drop_path": 0.1}, r"drop_path=0\.1: depth=1 does not read it"),
        (EXPERTS, {"top_k": 5}, "top_k=5: there are num_experts=4"),
        (EXPERTS, {"router_priority": "score"}, "router_priority='score': capacity_factor=0.0"),
    ],
    ids=str,
)
def test_settings_that_contradict_the_weights_are_refused(settings, chosen, message):
    with pytest.raises(ConfigError, match=message) as caught:
        completed(source(**settings), **chosen)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("capacity_factor", -1.0), ("router_jitter", 1.5), ("top_k", 0), ("rotary_reference", 0)],
)
def test_invalid_values_are_refused_before_weights_are_read(name, value):
    with pytest.raises(ConfigError, match=f"^{name}={value}: must be"):
        make_config({"weights": "nowhere", name: value})


@pytest.mark.parametrize(
    ("mark", "given", "mean", "said"),
    [
        ("other", [], 0.5, "mean and std 0.5; --mean, --std and --crop-share set those"),
        ("other", ["mean", "std"], 0.5, None),
        ("mask_token", [], 0.485, "mean and std are ImageNet's"),
    ],
)
def test_assumed_colours_are_printed(mark, given, mean, said, colour_data, tmp_path):
    state = timm.create_model(
        "vit_tiny_patch16_224", embed_dim=64, depth=2, num_heads=1, img_size=32, num_classes=0
    ).state_dict()
    state |= {mark: torch.zeros(1, 1, 64)} if mark != "other" else {}
    torch.save(state, tmp_path / "w.pth")
    chosen = {"data": str(colour_data), "weights": str(tmp_path / "w.pth")}
    config, lines = make_config({**chosen, **dict.fromkeys(given, [0.5] * 3)}), []
    found = load_source(config, Accelerator(cpu=True), lines.append)
    assert complete_for_weights(config, found).data.mean[0] == mean
    about = [line for line in lines if "how images are prepared" in line]
    assert [said in line for line in about] == ([True] if said else [])


@pytest.mark.parametrize("origins", [None, {"drop_path": "data"}])
@pytest.mark.parametrize("given", [{}, {"drop_path": 0.0}])
def test_a_default_that_does_not_suit_the_weights_is_left_out(given, origins):
    """Stochastic depth, a default of fine-tuning, needs two blocks."""
    chosen = {"data": "photos", "weights": "r", **given}
    weights, notes = source(**{**SIZES, "depth": 1}), []
    config = make_config(chosen)
    config = dataclasses.replace(config, origins=(origins or {}) | config.origins)
    found = complete_for_weights(config, weights, notes.append)
    assert (found.model.drop_path, found.training.layer_decay) == (0.0, 0.75)
    assert len(notes) == (not given)
    assert all("without the default drop_path=0.1: " in note for note in notes)


def test_without_weights_settings_are_checked_at_once():
    message = "capacity_factor=2.0: feedforward=mlp does not read it"
    with pytest.raises(ConfigError, match=message):
        make_config({"capacity_factor": 2.0})
    asked = make_config({"capacity_factor": 2.0, "weights": "x"})
    assert isinstance(asked.model, PartialModelConfig)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(asked, finetune=FinetuneConfig())


@pytest.mark.slow
def test_experts_of_a_run_are_in_the_given_blocks(colour_data, tmp_path):
    """Trained, cut to other places in a second run, and resumed with the same flags."""
    words = {"data": str(colour_data), **ON_CPU, "epochs": 1}
    first = train(make_config({**words, **EXPERTS}), tmp_path / "first").folder
    words |= {"weights": str(first), "method": "full"}
    words |= {"capacity_factor": 0.5, "router_jitter": 0.1, "balance_loss": 0.1}
    second = train(make_config(words), tmp_path / "second").folder
    found = read_model_config(second)
    assert (found.capacity_factor, found.router_jitter, found.num_experts) == (0.5, 0.1, 4)
    again = train(make_config(words), tmp_path / "second", resume=True)
    assert again.folder == second
    model = vit.from_pretrained(second, capacity_factor=0, notify=None)
    images = [torch.randn(3, 16, 16), torch.randn(3, 16, 24)]
    with pytest.raises(ConfigError, match="cannot be packed with capacity_factor"):
        load_run(second).model.forward_packed(images)
    apart = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model.forward_packed(images), apart)


def test_without_a_capacity_a_priority_is_refused():
    weights = source(**EXPERTS, capacity_factor=0.5, router_priority="score")
    config = completed(weights, capacity_factor=0.0).model
    assert (config.capacity_factor, config.router_priority) == (0.0, "order")
    kept = completed(weights, router_jitter=0.1).model
    assert (kept.capacity_factor, kept.router_priority) == (0.5, "score")
    network = build_classifier(config)
    network.load_state_dict(adapt_weights(weights, config)[0])
    moe = next(part for part in network.modules() if isinstance(part, MixtureOfExperts))
    assert moe.capacity_fn is None


@pytest.mark.parametrize("name", ["balance_loss", "router_z_loss", "router_jitter"])
@pytest.mark.parametrize("method", ["probe", "linear", "lora"])
def test_router_losses_are_refused_if_routers_are_frozen(method, name):
    weights, chosen = source(**EXPERTS), {"method": method, name: 0.1}
    if method == "lora" or (method, name) == ("linear", "router_jitter"):
        assert flatten(completed(weights, **chosen))[name] == 0.1
        return
    others = "linear or lora" if name == "router_jitter" else "lora"
    message = f"^{name}=0.1: method={method} does not read it; method={others} or full does$"
    with pytest.raises(ConfigError, match=message):
        completed(weights, **chosen)


@pytest.mark.parametrize("method", ["probe", "linear"])
def test_the_stored_settings_of_a_method_are_accepted_again(method):
    """Those that the weights brought were not chosen, though they are without effect."""
    settings = {"dropout": 0.1, "patch_sizes": (4, 16), "router_jitter": 0.1}
    weights = source(**EXPERTS, **settings)
    first = completed(weights, method=method)
    assert first.model.router_jitter == 0.1
    assert completed(weights, **flatten(first)) == first


@pytest.mark.parametrize(
    ("sizes", "patch_size", "drawn"),
    [((4, 16), 4, (4, 8, 16)), ((4,), 4, (4, 8)), ((4, 16), 16, (4, 8, 16)), ((), 4, (4,))],
)
def test_all_patch_sizes_are_trained(sizes, patch_size, drawn, tmp_path):
    """Whichever is the usual size, and by whichever door."""
    weights = source(**SIZES, patch_sizes=sizes)
    config = completed(weights, patch_size=patch_size).model
    assert config.training_patch_sizes == drawn
    alone = completed(weights, patch_size=patch_size, patch_sizes=[2]).model
    assert alone.training_patch_sizes == (2, patch_size)
    assert completed(weights, drop_path=0.2).model.patch_sizes == sizes
    if sizes == (4, 16):  # and the remedy for sizes of the weights is one that the flags have
        with pytest.raises(ConfigError, match="16 does not divide image_size=24; give patch_sizes"):
            completed(weights, image_size=24)
        assert completed(weights, image_size=24, patch_sizes=[4]).model.patch_sizes == (4,)
    save_model(
        tmp_path,
        build_classifier(weights.config),
        config=Config(model=weights.config),
        classes=tuple("abc"),
        preprocessing=Preprocessing(image_size=(16, 16)),
    )
    patches = vit.from_pretrained(tmp_path, patch_size=patch_size, notify=None).patch_embed
    assert tuple(getattr(patches, "sides", drawn)) == drawn


def test_a_change_of_router_weights_changes_the_network():
    for settings, chosen, message in (
        ({}, {"top_k": 1}, "top_k=1: run r has top_k=2; leave it out"),
        ({}, {"router_weights": "softmax"}, "router_weights=softmax: run r has router_weights=a"),
        ({"top_k": 1}, {"top_k": 2}, "top_k=2: run r has top_k=1"),
    ):
        weights = source(**EXPERTS, **settings)
        with pytest.raises(VitError, match=message):
            adapt_weights(weights, completed(weights, **chosen).model)
    weights = source(**EXPERTS, top_k=1)
    adapt_weights(weights, completed(weights, top_k=2, router_weights="softmax").model)
    weights = source(**EXPERTS)
    adapt_weights(weights, completed(weights, top_k=3, router_weights="renormalised").model)
