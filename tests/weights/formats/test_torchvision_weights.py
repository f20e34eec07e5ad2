"""Weights of torchvision's VisionTransformer are read from their shapes alone."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import models
from torchvision.models import ViT_B_16_Weights, ViT_H_14_Weights, vision_transformer
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

from tests.weights.parity import parity_error
from vit.errors import WeightsError
from vit.weights.formats.torchvision_weights import looks_like_torchvision, read_torchvision

SMALL = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 12}
SMALL |= {"hidden_dim": 768, "mlp_dim": 96, "num_classes": 3}
# dim, heads, inner width, patch; as in torchvision's builders
WIDTHS = {"b_16": (768, 12, 3072, 16), "b_32": (768, 12, 3072, 32)}
WIDTHS |= {"l_16": (1024, 16, 4096, 16), "l_32": (1024, 16, 4096, 32), "h_14": (1280, 16, 5120, 14)}


def randomised_state(model: nn.Module, randomise) -> dict[str, Tensor]:
    """Random weights, also in `model`, which may be on the meta device."""
    state = randomise(model.state_dict())
    model.load_state_dict(state, assign=True)
    return state


@pytest.mark.slow
def test_full_size_equals_torchvision(randomise):
    with torch.device("meta"):
        theirs = vision_transformer.vit_b_32()
    found = read_torchvision(randomised_state(theirs, randomise), "vit.pth")
    assert parity_error(found, theirs) < 1e-4
    assert found.classes == tuple(ViT_B_16_Weights.IMAGENET1K_V1.meta["categories"])
    assert found.classes[0] == "tench"
    assert found.license is None
    assert [note for note in found.notes if "ImageNet" in note]


@pytest.mark.parametrize("name", WIDTHS)
def test_sizes_follow_from_shapes(name):
    dim, heads, inner, patch = WIDTHS[name]
    with torch.device("meta"):
        theirs = VisionTransformer(7 * patch, patch, 2, heads, dim, inner)
        own = getattr(vision_transformer, f"vit_{name}")()
    shapes, mine = (
        {key: t.shape for key, t in model.state_dict().items() if key != "encoder.pos_embedding"}
        for model in (own, theirs)
    )
    assert mine.items() <= shapes.items(), "not of the sizes of torchvision's own"
    assert own.encoder.layers[0].num_heads == heads

    blank = {key: torch.zeros(()).expand(t.shape) for key, t in theirs.state_dict().items()}
    config = read_torchvision(blank, "vit.pth").config
    assert (config.dim, config.depth, config.num_heads) == (dim, 2, heads)
    assert (config.patch_size, config.image_size) == (patch, 7 * patch)
    assert config.feedforward_dim == inner
    assert config.norm_eps == 1e-6


@pytest.mark.parametrize("name", WIDTHS)
def test_images_are_prepared_as_for_torchvisions_own_weights(name):
    dim, heads, inner, patch = WIDTHS[name]
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (600, 701, 3), dtype=np.uint8))
    own = getattr(models, f"ViT_{name.upper()}_Weights")
    # SWAG_LINEAR has the same shapes as V1 where both exist
    chosen = [one for one in own if own is ViT_H_14_Weights or "LINEAR" not in one.name]
    assert chosen
    for weights in chosen:
        size = weights.meta["min_size"][0]
        with torch.device("meta"):
            theirs = VisionTransformer(size, patch, 1, heads, dim, inner)
        blank = {key: torch.zeros(()).expand(t.shape) for key, t in theirs.state_dict().items()}
        found = read_torchvision(blank, "vit.pth")
        ours = found.preprocessing.normalise(found.preprocessing(image)[None])[0]
        torch.testing.assert_close(ours, weights.transforms()(image), rtol=0, atol=1e-5)
        assert any("assumed" in note and f"middle {size} px" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["own", "linear", "sequential", "none"])
def test_replaced_heads_are_read(kind, randomise):
    theirs = VisionTransformer(**SMALL)
    linear = nn.Linear(768, 3)
    heads = {"linear": linear, "sequential": nn.Sequential(linear), "none": nn.Identity()}
    theirs.heads = heads.get(kind, theirs.heads)
    found = read_torchvision(randomised_state(theirs, randomise), "vit.pth")
    assert parity_error(found, theirs) < 1e-4
    assert found.config.num_classes == (0 if kind == "none" else 3)
    assert found.classes is None


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_older_names_and_half_precision_are_read(precision, randomise):
    theirs = VisionTransformer(**SMALL)
    older = {
        name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): tensor.to(precision)
        for name, tensor in randomised_state(theirs, randomise).items()
    }
    found = read_torchvision(older, "vit.pth")
    assert {tensor.dtype for tensor in found.state.values()} == {torch.float32}
    assert parity_error(found, theirs) < (1e-4 if precision == torch.float32 else 0.02)


def test_it_is_known_by_its_names():
    state = VisionTransformer(**SMALL).state_dict()
    assert looks_like_torchvision(state)
    assert not looks_like_torchvision({"cls_token": torch.zeros(1)})


STEM = [ConvStemConfig(8, 3, 2), ConvStemConfig(16, 3, 2), ConvStemConfig(32, 3, 2)]


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"representation_size": 8}, {}, "heads.pre_logits"),
        ({"conv_stem_configs": STEM}, {}, "convolutional stem"),
        ({"hidden_dim": 192}, {}, "how many heads.*width 192"),
        ({}, {"conv_proj.weight": torch.zeros(768, 3, 8, 4)}, "square patches"),
        ({}, {"conv_proj.weight": torch.zeros(768)}, "square patches"),
        ({}, {"encoder.pos_embedding": torch.zeros(1, 12, 768)}, "12 rows, which is no square"),
        ({}, {"encoder.pos_embedding": torch.zeros(1, 0, 768)}, "0 rows, which is no square"),
        ({}, {"encoder.pos_embedding": torch.zeros(768)}, "is no table of positions"),
        ({}, {"encoder.ln.weight": torch.zeros(7)}, r"norm.weight \(7,\) instead of \(768,\)"),
        ({}, {"encoder.ln.weight": torch.full((768,), float("nan"))}, "not finite: norm.weight"),
        ({}, {"heads.head.weight": torch.zeros(3, 768).int()}, "torch.int32, expected floats"),
        ({}, {"heads.extra.weight": torch.zeros(1)}, "has no heads.extra.weight"),
        ({}, {"module.class_token": torch.zeros(1)}, r"has no module\.class_token"),
    ],
)
def test_unsupported_torchvision_networks_raise(settings, change, message):
    with torch.random.fork_rng():
        state = VisionTransformer(**{**SMALL, **settings}).state_dict()
    with pytest.raises(WeightsError, match=rf"^a\\x1bb: .*{message}"):
        read_torchvision({**state, **change}, "a\x1bb")


def test_a_missing_tensor_is_named():
    state = VisionTransformer(**SMALL).state_dict()
    del state["encoder.layers.encoder_layer_1.ln_2.bias"]
    with pytest.raises(WeightsError, match=r"missing: blocks.1.norm2.bias"):
        read_torchvision(state, "vit.pth")
