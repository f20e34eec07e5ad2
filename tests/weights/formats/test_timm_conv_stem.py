"""timm and transformers open networks with a convolutional stem, once they are registered."""

import json

import pytest
import timm
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

import vit
import vit.weights.formats.huggingface_classes
import vit.weights.formats.timm_conv_stem
from tests.model.test_build import random_network
from tests.slow_cases import mostly_slow
from vit.config import Config, ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import WeightsError
from vit.weights.adapt_weights import change_patches
from vit.weights.convert import check_parity, convert
from vit.weights.load_model import open_pretrained
from vit.weights.saved_model import load_run, save_model

SMALL = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
CASES = [
    {},
    {"stem_norm": "layernorm", "norm": "rmsnorm", "registers": 2},
    {"stem_depth": 4, "stem_width": 12, "pooling": "mean", "class_token": False, "norm_pre": True},
    {"stem_norm": "layernorm", "norm_eps": 1e-5, "patch_size": 4, "position": "sinusoidal_2d"},
    {"patch_size": 1, "stem_depth": 1, "image_size": 8, "position": "relative", "norm_eps": 1e-6},
    {"feedforward": "swiglu", "channels": 4},
    {"stem_depth": 4, "stem_width": 8, "stem_stride": 1, "hidden_dim": 64},
]


def network(tmp_path, **options):
    """A run folder with random weights, and its network."""
    settings = {**SMALL, "stem": "conv", **options}
    model, config = random_network(settings).eval(), ModelConfig(**settings)
    side, run = config.image_size, tmp_path / "run"
    run.mkdir()
    about = {"classes": ["a", "b", "c"], "preprocessing": Preprocessing(image_size=(side, side))}
    save_model(run, model, config=Config(model=config), **about)
    return run, model, torch.randn(2, config.channels, side, side)


@pytest.mark.parametrize("options", mostly_slow(CASES), ids=str)
@torch.no_grad()
def test_timm_opens_a_run(tmp_path, options):
    run, model, images = network(tmp_path, **options)
    theirs = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    torch.testing.assert_close(theirs(images), model(images), atol=1e-5, rtol=0)
    features = theirs.forward_features(images)
    torch.testing.assert_close(features, model.forward_features(images), atol=1e-4, rtol=1e-4)
    convert(run, "timm", tmp_path / "timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert torch.equal(again(images), theirs(images))
    read = open_pretrained(tmp_path / "timm")
    expected = model.state_dict()
    assert read.state.keys() == expected.keys()
    assert all(torch.equal(read.state[name], tensor) for name, tensor in expected.items())


@torch.no_grad()
def test_timm_adapts_the_image_size_and_head(tmp_path):
    run, model, images = network(tmp_path)
    source = f"local-dir:{run}"
    other = timm.create_model(source, pretrained=True, num_classes=5, in_chans=1).eval()
    assert other(images[:, :1]).shape == (2, 5)
    dynamic = timm.create_model(source, pretrained=True, dynamic_img_size=True).eval()
    torch.testing.assert_close(dynamic(images), model(images), atol=1e-5, rtol=0)
    assert dynamic(torch.randn(1, 3, 64, 32)).shape == (1, 3)
    dynamic.set_input_size((64, 64))
    maps = timm.create_model(source, pretrained=True, features_only=True, out_indices=2)(images)
    assert [part.shape for part in maps] == [(2, 32, 4, 4)] * 2
    with pytest.raises(ValueError, match="keeps its patches of 8 pixels"):
        dynamic.set_input_size(patch_size=16)
    with pytest.raises(RuntimeError, match="has no weights of its own; give local-dir:FOLDER"):
        timm.create_model("vit_conv_stem", pretrained=True)


@pytest.mark.parametrize(
    "options", mostly_slow([*CASES[:5], {"position": "rotary", "qk_norm": True}]), ids=str
)
@torch.no_grad()
def test_transformers_opens_what_was_converted(tmp_path, options):
    run, model, images = network(tmp_path, **options)
    _, lines = convert(run, "huggingface", tmp_path / "theirs")
    assert any("after `import vit.weights.formats.huggingface_classes`" in line for line in lines)
    theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "theirs").eval()
    torch.testing.assert_close(theirs(images).logits, model(images), atol=1e-5, rtol=0)
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert torch.isfinite(theirs(images, labels=torch.tensor([0, 2])).loss)
    AutoImageProcessor.from_pretrained(tmp_path / "theirs")
    theirs.save_pretrained(tmp_path / "again")
    read = open_pretrained(tmp_path / "again")
    assert read.classes == ("a", "b", "c")
    assert all(torch.equal(read.state[name], t) for name, t in model.state_dict().items())


@torch.no_grad()
def test_transformers_opens_a_run_through_timm(tmp_path):
    run, model, images = network(tmp_path)
    theirs = AutoModelForImageClassification.from_pretrained(run).eval()
    torch.testing.assert_close(theirs(images).logits, model(images), atol=1e-5, rtol=0)


@torch.no_grad()
def test_transformers_opens_an_encoder(tmp_path):
    torch.manual_seed(0)
    run, model, images = network(tmp_path)
    pretrained = vit.from_pretrained(run, num_classes=0)
    assert torch.equal(pretrained(images), model.features(images))
    convert(run, "huggingface", tmp_path / "theirs")
    theirs = AutoModel.from_pretrained(tmp_path / "theirs").eval()
    pooled = theirs(images).pooler_output
    torch.testing.assert_close(pooled, model.features(images), atol=1e-5, rtol=0)


@torch.no_grad()
def test_weights_are_adapted_to_other_images(tmp_path):
    run, model, _ = network(tmp_path)
    larger = vit.from_pretrained(run, image_size=64)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(larger(images), model(images))
    grey, image = vit.from_pretrained(run, channels=1), torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(grey(image), model(image.expand(2, 3, 32, 32)))
    with pytest.raises(
        WeightsError, match=r"patch_size=16: the convolutions of .* patch_size=8 al"
    ):
        vit.from_pretrained(run, patch_size=16)
    with pytest.raises(WeightsError, match="make tokens of patch_size=8 alone; leave it out"):
        change_patches(load_run(run), patch_size=4)
    with pytest.raises(WeightsError, match=r"stem_depth=4: .* has stem_depth=3; leave it out"):
        vit.from_pretrained(run, stem_depth=4)


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_convert_compares_the_answers(tmp_path, to):
    run, _, _ = network(tmp_path)
    pretrained, _ = convert(run, to, tmp_path / "out")
    pil_image = tmp_path / "noise.png"
    Image.effect_noise((40, 40), 90).convert("RGB").save(pil_image)
    assert "outputs differ by" in check_parity(pretrained, tmp_path / "out", to, pil_image)[0]
    assert "import vit.weights.formats." in (tmp_path / "out/README.md").read_text()


def test_timm_has_no_rotary_network_with_a_stem(tmp_path):
    run, model, images = network(tmp_path, position="rotary")
    with pytest.raises(WeightsError, match=r"timm cannot express.*stem=conv with position=rotary"):
        convert(run, "timm", tmp_path / "out")
    assert json.loads((run / "config.json").read_text())["architecture"] == "vit_toolkit"
    assert torch.equal(load_run(run).model(images), model(images))
