"""Weights adapted to another size, patch, channel count or set of classes equal timm's."""

import dataclasses

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed, resample_patch_embed, resize_rel_pos_bias_table
from timm.models import adapt_input_conv
from torch import Tensor, nn

from tests.slow_cases import mostly_slow
from tests.weights.parity import build
from vit.config import ModelConfig
from vit.errors import WeightsError
from vit.model.build import build_classifier, meta_model
from vit.model.patch_embed import resize_patch_embed
from vit.weights.adapt_weights import (
    AdaptationReport,
    adapt_weights,
    change_channels,
    geometric_interpolation,
    resize_offsets_geometric,
)
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.state_dict_names import PATCH_WEIGHT, flatten_patches

TOLERANCE = 1e-3
SMALL = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}
NAMES = ("ant", "bee", "cat", "dog", "eel")


@pytest.fixture
def pretrained(randomise):
    """A function that makes a trained network of given settings, and names of its classes."""

    def make(classes=NAMES, **options) -> Pretrained:
        config = ModelConfig(**{**SMALL, **options})
        state = randomise(meta_model(config).state_dict())
        if config.position.startswith("sinusoidal"):
            state["pos_embed"] = build_classifier(config).pos_embed
        return Pretrained(state=state, config=config, classes=classes, origin="timm vit_small")

    return make


def changed(pretrained: Pretrained, **settings) -> ModelConfig:
    return dataclasses.replace(pretrained.config, **settings)


def test_matching_tensors_are_reused(pretrained):
    source = pretrained()
    state, report = adapt_weights(
        source, changed(source, drop_path=0.2, patch_dropout=0.5, merge_tokens=1)
    )
    assert state.keys() == source.state.keys()
    assert all(state[name] is tensor for name, tensor in source.state.items())
    head = "all 5 classes kept"
    assert report == AdaptationReport(
        reused=len(state), resized=(), initialised=(), left_out=(), head=head
    )
    assert report.lines() == [f"{len(state)} tensors reused", "head: all 5 classes kept"]


@pytest.mark.parametrize(
    ("options", "prefix"),
    [
        ({}, 1),
        ({"registers": 2}, 0),
        ({"prefix_positions": "none"}, 0),
        ({"registers": 2, "prefix_positions": "all"}, 3),
        ({"registers": 2, "prefix_positions": "class_token"}, 1),
        ({"class_token": False, "pooling": "mean"}, 0),
        ({"position": "learned_rotary", "registers": 1, "prefix_positions": "all"}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [16, 24, 56])
def test_positions_equal_timms(pretrained, size, options, prefix):
    source = pretrained(**options)
    state, report = adapt_weights(source, changed(source, image_size=size))
    table, side = source.state["pos_embed"], size // 8
    expected = resample_abs_pos_embed(table, [side, side], num_prefix_tokens=prefix)
    assert torch.equal(state["pos_embed"], expected)
    assert report.resized == (f"pos_embed 4x4 -> {side}x{side}",)
    assert report.reused == len(state) - 1


def test_sinusoidal_positions_are_computed_again(pretrained):
    source = pretrained(position="sinusoidal_2d")
    config = changed(source, image_size=48)
    state, _ = adapt_weights(source, config)
    assert torch.equal(state["pos_embed"], build_classifier(config).pos_embed)


@pytest.mark.parametrize("size", [16, 48])
def test_an_adapted_network_answers_as_the_source_does_at_that_size(pretrained, size):
    source = pretrained()
    config = changed(source, image_size=size)
    images = torch.randn(2, 3, size, size)
    adapted = build(adapt_weights(source, config)[0], config)
    assert torch.equal(adapted(images), build(source.state, source.config)(images))


@pytest.mark.parametrize(("old", "new"), [(8, 16), (16, 8), (14, 16), (16, 14), (16, 15), (8, 1)])
def test_patches_equal_timms(old, new):
    kernels = torch.randn(6, 3, old, old) / old
    ours = resize_patch_embed(kernels.flatten(1), old=old, new=new)
    theirs = resample_patch_embed(kernels, [new, new]).flatten(1)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_grown_patches_give_the_tokens_of_the_old_ones():
    kernels, patches = torch.randn(6, 3 * 64), torch.randn(10, 3, 8, 8)
    grown = nn.functional.interpolate(patches, size=(14, 14), mode="bicubic", antialias=True)
    tokens = grown.flatten(1) @ resize_patch_embed(kernels, old=8, new=14).T
    torch.testing.assert_close(tokens, patches.flatten(1) @ kernels.T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("new", [1, 2, 4, 6, 12])
def test_channels_equal_timms(new):
    kernels = torch.randn(6, 3, 8, 8)
    ours = change_channels(kernels.flatten(1), old=3, new=new)
    torch.testing.assert_close(ours, adapt_input_conv(new, kernels).flatten(1))


@pytest.mark.parametrize("stem", [{}, {"stem": "conv", "stem_norm": "layernorm"}])
@pytest.mark.parametrize(
    "names", [("nir", "Red", "blue", "swir", "green"), ("blue", "green", "red")]
)
def test_named_colours_keep_their_kernels_wherever_they_stand(pretrained, stem, names):
    source = pretrained(**stem)
    config = changed(source, channels=len(names))
    state, report = adapt_weights(source, config, channel_names=names)
    assert "(red, green and blue keep their kernels, others begin at zero)" in report.resized[0]
    images = torch.randn(2, len(names), 32, 32)
    order = [[name.lower() for name in names].index(name) for name in ("red", "green", "blue")]
    networks = [build_classifier(one).eval() for one in (source.config, config)]
    networks[0].load_state_dict(source.state)
    networks[1].load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(
            networks[1](images), networks[0](images[:, order]), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("names", [("red", "green", "nir", "swir"), ()])
def test_channels_without_the_three_colours_follow_timms_rule(pretrained, names):
    source = pretrained()
    config = changed(source, channels=4)
    state, report = adapt_weights(source, config, channel_names=names)
    expected, plain = adapt_weights(source, config)
    assert report == plain
    assert torch.equal(state[PATCH_WEIGHT], expected[PATCH_WEIGHT])


def test_one_channel_becomes_three():
    kernels, images = torch.randn(6, 1, 8, 8), torch.randn(10, 3, 8, 8)
    colours = change_channels(kernels.flatten(1), old=1, new=3)
    tokens = images.flatten(1) @ colours.T
    grey = images.mean(dim=1).flatten(1) @ kernels.flatten(1).T
    torch.testing.assert_close(tokens, grey, atol=1e-5, rtol=0)
    back = change_channels(colours, old=3, new=1)
    torch.testing.assert_close(back, kernels.flatten(1), atol=1e-6, rtol=0)


def timm_model(image_size: int, patch_size: int, channels: int = 3, file: object = None, **options):
    """A timm model of the small sizes, with timm's own loading of the weights in `file`."""
    cfg = {"file": str(file), "num_classes": 5} if file else None
    return timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=file is not None,
        pretrained_cfg_overlay=cfg,
        img_size=image_size,
        patch_size=patch_size,
        embed_dim=48,
        depth=2,
        num_heads=4,
        num_classes=5,
        in_chans=channels,
        **options,
    ).eval()


@pytest.mark.parametrize(
    "change",
    mostly_slow(
        [
            {"image_size": 16},
            {"image_size": 56},
            {"patch_size": 4},
            {"patch_size": 16},
            {"image_size": 60, "patch_size": 10},
            {"image_size": 28, "patch_size": 7},
            {"channels": 1},
            {"channels": 4, "image_size": 40},
            {"channels": 12, "patch_size": 16},
        ]
    ),
    ids=str,
)
@pytest.mark.parametrize(
    ("registers", "prefix_positions"), [(0, "auto"), (0, "none"), (2, "auto"), (2, "all")]
)
@torch.no_grad()
def test_whole_models_equal_timms_own_loading(
    tmp_path, randomise, change, registers, prefix_positions
):
    placed = prefix_positions == "all" or (prefix_positions == "auto" and not registers)
    options = {"reg_tokens": registers, "no_embed_class": not placed}
    weights = randomise(timm_model(32, 8, **options).state_dict())
    save_file(weights, tmp_path / "model.safetensors")
    settings = {"image_size": 32, "patch_size": 8, "channels": 3, **change}
    theirs = timm_model(**settings, file=tmp_path / "model.safetensors", **options)
    config = ModelConfig(**SMALL, registers=registers, prefix_positions=prefix_positions)
    source = Pretrained(state=flatten_patches(weights), config=config, origin="timm vit_small")
    config = changed(source, **change)
    side = settings["image_size"]
    images = torch.randn(3, settings["channels"], side, side)
    expected = theirs(images)
    assert expected.std() > 0.1, "logits without any spread show nothing"
    adapted = build(adapt_weights(source, config)[0], config)
    torch.testing.assert_close(adapted(images), expected, atol=TOLERANCE, rtol=0)


def rows(state: dict[str, Tensor], source: Pretrained, places: list[int | None]) -> bool:
    """Whether the head is made of these rows of the source's, and of their mean or of zeros."""
    for name in ("head.weight", "head.bias"):
        old = source.state[name]
        new = old.mean(0) if any(row is not None for row in places) else torch.zeros_like(old[0])
        made = [new if row is None else old[row] for row in places]
        if not torch.equal(state[name], torch.stack(made)):
            return False
    return True


@pytest.mark.parametrize(
    ("known", "classes", "places", "told"),
    [
        (NAMES, NAMES, [0, 1, 2, 3, 4], ["all 5 classes kept by name"]),
        (NAMES, NAMES[::-1], [4, 3, 2, 1, 0], ["all 5 classes kept by name"]),
        (NAMES, ("eel", "ant"), [4, 0], ["left out: head (3 of 5 classes)", "all 2 classes kept"]),
        (
            NAMES,
            ("eel", "new\x1b", "ant"),
            [4, None, 0],
            ["left out: head (3 of 5 classes)", r"head: 2 of 3 classes kept by name; new: new\x1b"],
        ),
        (
            NAMES,
            ("dog", *"stuvwxyz"),
            [3, *[None] * 8],
            ["head: 1 of 9 classes kept by name; new: s, t, u, v, w and 3 more"],
        ),
        (
            NAMES,
            ("x", "y"),
            [None, None],
            ["new: head (2 classes, zeros); left out: head (5 classes, none of these)"],
        ),
        (None, ("x", "y"), [None, None], ["left out: head (5 classes, names unknown)"]),
        (None, NAMES, [None] * 5, ["new: head (5 classes, zeros)"]),
        # two classes of the source have the same name
        (("ant", "ant", "cat", "dog", "eel"), ("cat", "ant"), [2, None], ["1 of 2", "new: ant"]),
        (("ant", "ant", "cat", "dog", "eel"), ("ant", "ant", "cat", "dog", "eel"), [*range(5)], []),
        # without names, by number
        (NAMES, None, [0, 1, 2, 3, 4], ["head: all 5 classes kept"]),
        (None, None, [0, 1, 2, 3, 4], ["head: all 5 classes kept"]),
    ],
)
def test_head_rows_are_kept_by_class_name(pretrained, known, classes, places, told):
    source = pretrained(classes=known)
    config = changed(source, num_classes=len(places))
    state, report = adapt_weights(source, config, classes=classes)
    assert rows(state, source, places)
    for words in told:
        assert words in "\n".join(report.lines())
    if places == list(range(5)):
        assert report.reused == len(state)


BARE = {"num_classes": 0, "classes": None}
CHANGED = "resized: {0} 3 -> 1 channels, {0} 8x8 -> 16x16 pixels".format("patch_embed.proj.weight")


@pytest.mark.parametrize(
    ("options", "change", "fresh", "line"),
    [
        ({}, {"num_classes": 4}, 2, "; new: head (4 classes, zeros); left out: head (5 classes)"),
        ({}, {"num_classes": 0}, 0, "; left out: head (5 classes)"),
        (BARE, {}, 0, ""),
        (
            {**BARE, "pooling": "class_token_mean"},
            {"num_classes": 2},
            2,
            "; new: head (2 classes, zeros)",
        ),
        (
            {},
            {"image_size": 64, "patch_size": 16, "channels": 1, "num_classes": 10},
            3,
            f"; {CHANGED}; new: head (10 classes, zeros); left out: head (5 classes)",
        ),
        # without a table nothing is resized
        ({"position": "none"}, {"image_size": 48}, 0, "\nhead: all 5 classes kept"),
        ({"position": "rotary"}, {"image_size": 48}, 0, "\nhead: all 5 classes kept"),
        # other words for the same network
        (
            {},
            {"hidden_dim": 192, "final_norm": "tokens", "prefix_positions": "class_token"},
            0,
            "\nhead: all 5 classes kept",
        ),
    ],
    ids=str,
)
def test_report_lists_every_change(pretrained, options, change, fresh, line):
    source = pretrained(**options)
    config = changed(source, **change)
    state, report = adapt_weights(source, config)
    build(state, config)
    assert "\n".join(report.lines()) == f"{len(state) - fresh} tensors reused{line}"
    if "num_classes" in change:
        assert not any(state[name].any() for name in state if name.startswith("head."))


def test_patches_and_positions_are_resized_together(pretrained):
    source = pretrained()
    _, report = adapt_weights(source, changed(source, image_size=96, patch_size=16))
    assert report.resized[1] == "pos_embed 4x4 -> 6x6"


def test_new_zeros_are_not_shared(pretrained):
    source = pretrained()
    before = {name: tensor.clone() for name, tensor in source.state.items()}
    state, _ = adapt_weights(
        source, changed(source, image_size=48, channels=1), classes=NAMES[::-1]
    )
    for name in ("head.weight", "head.bias", "pos_embed", PATCH_WEIGHT):
        state[name].zero_()
    assert all(torch.equal(source.state[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 3}, "depth=3: timm vit_small has depth=2; leave it out, or start without its"),
        ({"dim": 32, "norm": "rmsnorm"}, "dim=32: timm vit_small has dim=48; leave it out, or"),
        ({"hidden_dim": 100}, "hidden_dim=100: timm vit_small has hidden_dim=192;"),
        ({"registers": 1}, "registers=1: timm vit_small has registers=0"),
        ({"pooling": "mean"}, "pooling=mean: timm vit_small has pooling=class_token"),
        ({"position": "sinusoidal_2d"}, "position=sinusoidal_2d: timm vit_small has position=lear"),
        ({"layer_scale": 0.1}, "layer_scale=0.1: timm vit_small has layer_scale=0.0"),
        ({"norm_eps": 1e-5}, "norm_eps=1e-05: timm vit_small has norm_eps=1e-06"),
        ({"final_norm": "pooled"}, "final_norm=pooled: timm vit_small has final_norm=auto"),
        ({"prefix_positions": "none"}, "prefix_positions=none: timm vit_small has prefix_po"),
        (
            {"position": "rotary", "rotary_reference": 7},
            "position=rotary: timm vit_small has position=learned",
        ),
    ],
    ids=str,
)
def test_incompatible_settings_raise(pretrained, change, message):
    source = pretrained()
    with pytest.raises(WeightsError, match=message) as error:
        adapt_weights(source, changed(source, **change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("a", "b"), "2 class names for num_classes=3: give one for each class"),
        (("a", "a\x1b", "a\x1b"), r"two classes have the same name, a\\x1b: rename one"),
    ],
)
def test_invalid_class_names_raise(pretrained, classes, message):
    source = pretrained()
    with pytest.raises(WeightsError, match=message):
        adapt_weights(source, changed(source, num_classes=3), classes=classes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("norm.bias"), "missing: norm.bias"),
        (lambda s: s.update(extra=torch.zeros(1)), "unknown: extra"),
        (lambda s: s.update(pos_embed=torch.zeros(1, 16, 48)), r"pos_embed \(1, 16, 48\) instead"),
        (lambda s: s["pos_embed"].fill_(torch.nan), "not finite: pos_embed"),
    ],
)
def test_weights_that_do_not_match_their_settings_raise(pretrained, change, message):
    source = pretrained()
    change(source.state)
    with pytest.raises(WeightsError, match=message):
        adapt_weights(source, changed(source, image_size=48))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("new", [(12, 12), (6, 6), (12, 6), (20, 9)])
def test_spread_offsets_equal_timms(new):
    table = torch.randn(13 * 13 + 3, 4)
    shape = ((2 * new[0] - 1) * (2 * new[1] - 1) + 3, 4)
    expected = resize_rel_pos_bias_table(table, new, shape)
    spread = resize_offsets_geometric(table, (7, 7), new, num_prefix_rows=3)
    torch.testing.assert_close(spread, expected, atol=1e-3, rtol=0)  # its search stops at 1e-6


@pytest.mark.parametrize(("old", "new"), [(1, 4), (2, 5), (3, 20), (5, 3)])
def test_near_offsets_are_unchanged_and_far_ones_reach_the_border(old, new):
    line = torch.arange(1 - old, old, dtype=torch.float64)
    spread = geometric_interpolation(old, new) @ line
    assert spread.shape == (2 * new - 1,)
    torch.testing.assert_close(spread, -spread.flip(0))
    assert (spread.diff() >= 0).all()
    near = torch.arange(-1, 2) * (old > 1)
    torch.testing.assert_close(spread[new - 2 : new + 1], near.double())
    if new >= old:
        torch.testing.assert_close(spread[-1], line[-1])
