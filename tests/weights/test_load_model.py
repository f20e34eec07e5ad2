"""`vit.from_pretrained(SOURCE)` and `load_model` for every kind of source."""

import shutil
from pathlib import Path

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torchvision.models import VisionTransformer as TorchvisionViT
from transformers import ViTConfig, ViTForImageClassification

import vit
from vit.errors import VitError, WeightsError
from vit.inference.predictor import Predictor
from vit.weights.convert import convert
from vit.weights.load_model import describe_source, load_model, open_pretrained

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 1}
NAMES = ["ant", "bee", "cat"]
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def theirs(randomise) -> torch.nn.Module:
    """A small network of timm with three classes."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **SIZES)
    model.load_state_dict(randomise(model.state_dict()))
    return model.eval()


@pytest.fixture
def timm_folder(theirs, tmp_path) -> Path:
    """The same as timm's own function saves it."""
    known = {"license": "cc-by-4.0", "num_classes": 3, "input_size": (3, 32, 32)}
    theirs.pretrained_cfg = {**theirs.pretrained_cfg, **known}
    about = {"model_config": {"label_names": NAMES}, "model_args": {**SIZES, "num_classes": 3}}
    save_for_hf(theirs, tmp_path / "timm", **about, safe_serialization=True)
    return tmp_path / "timm"


@torch.no_grad()
def assert_equal_outputs(ours, other, images=IMAGES) -> None:
    mine, reference = ours(images), other(images)
    reference = getattr(reference, "logits", reference)
    assert reference.std() > 0.1
    torch.testing.assert_close(mine, reference, atol=1e-4, rtol=0)


def test_a_folder_of_timm(theirs, timm_folder, capsys):
    assert_equal_outputs(vit.from_pretrained(timm_folder), theirs)
    said = capsys.readouterr().err
    assert "license: cc-by-4.0" in said
    assert load_model(timm_folder, notify=None).license == "cc-by-4.0"
    assert open_pretrained(timm_folder).classes == tuple(NAMES)


def test_assumptions_for_a_bare_file_are_printed(theirs, tmp_path, capsys):
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    assert_equal_outputs(vit.from_pretrained(tmp_path / "weights.pth"), theirs)
    assert "num_heads=1" in capsys.readouterr().err


def test_the_network_that_a_checkpoint_names_is_that_of_its_weights(theirs, tmp_path):
    network = timm.create_model("test_vit", num_classes=2).eval()
    checkpoint = {"epoch": 3, "arch": "test_vit", "state_dict": network.state_dict()}
    torch.save(checkpoint, tmp_path / "last.pth.tar")
    found = open_pretrained(tmp_path / "last.pth.tar")
    assert found.config.num_heads == network.blocks[0].attn.num_heads == 2
    assert not any("assumed" in note for note in found.notes)
    torch.save({**checkpoint, "state_dict": theirs.state_dict()}, tmp_path / "last.pth.tar")
    other = open_pretrained(tmp_path / "last.pth.tar")
    assert any("arch=test_vit of the file is not used" in note for note in other.notes)
    assert_equal_outputs(vit.from_pretrained(tmp_path / "last.pth.tar"), theirs)


def test_a_folder_of_hugging_face(randomise, tmp_path):
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, id2label=dict(enumerate(NAMES)),
    )  # fmt: skip
    theirs = ViTForImageClassification(config).eval()
    theirs.load_state_dict(randomise(theirs.state_dict()))
    theirs.save_pretrained(tmp_path)
    assert_equal_outputs(vit.from_pretrained(tmp_path), theirs)
    assert open_pretrained(tmp_path).classes == tuple(NAMES)


@pytest.fixture(params=["Dinov2", "Dinov2WithRegisters"])
def larger(request, randomise, tmp_path):
    """A classifier of transformers with positions for 64 pixels, whose images have 32."""
    settings = {
        "image_size": 64, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "id2label": dict(enumerate(NAMES)),
    }  # fmt: skip
    config = getattr(transformers, f"{request.param}Config")(**settings)
    model = getattr(transformers, f"{request.param}ForImageClassification")(config).eval()
    model.load_state_dict(randomise(model.state_dict()))
    model.save_pretrained(tmp_path / "hf")
    sizes = {"size": {"shortest_edge": 37}, "crop_size": {"height": 32, "width": 32}}
    transformers.BitImageProcessor(**sizes).save_pretrained(tmp_path / "hf")
    return model, tmp_path / "hf"


def test_positions_are_those_of_transformers_at_the_size_of_the_images(larger):
    theirs, folder = larger
    lines = []
    loaded = load_model(folder, notify=lines.append)
    assert loaded.config.image_size == 32
    assert_equal_outputs(loaded.model, theirs)
    assert "note: resized, to be of 32 pixels: pos_embed 8x8 -> 4x4" in lines


def test_they_are_converted_at_this_size(larger, tmp_path):
    theirs, folder = larger
    convert(folder, "huggingface", tmp_path / "new")
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "new")
    assert model.config.image_size == 32
    assert_equal_outputs(lambda x: model.eval()(x).logits, theirs)
    theirs.classifier.weight.data *= 3
    theirs.classifier.weight.data[:, 48:] = 0  # no network of timm pools both
    theirs.save_pretrained(folder)
    convert(folder, "timm", tmp_path / "timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    assert_equal_outputs(model.eval(), theirs)


def test_a_file_of_torchvision(randomise, tmp_path):
    theirs = TorchvisionViT(
        image_size=32, patch_size=16, num_layers=1, num_heads=12, hidden_dim=768, mlp_dim=64,
        num_classes=3,
    ).eval()  # fmt: skip
    theirs.load_state_dict(randomise(theirs.state_dict()))
    torch.save(theirs.state_dict(), tmp_path / "tv.pth")
    assert_equal_outputs(vit.from_pretrained(tmp_path / "tv.pth"), theirs)


def test_a_run_folder(tiny_run):
    ours = vit.from_pretrained(tiny_run, notify=None)
    images = torch.randn(2, 3, 16, 16)
    assert_equal_outputs(ours, load_model(tiny_run).model, images)


def test_another_head_keeps_the_rows_of_classes_with_the_same_name(timm_folder, theirs, capsys):
    model = vit.from_pretrained(timm_folder, classes=["cat", "dog", "ant"])
    assert "2 of 3 classes kept by name; new: dog" in capsys.readouterr().err
    with torch.no_grad():
        ours, reference = model(IMAGES), theirs(IMAGES)
    torch.testing.assert_close(ours[:, [0, 2]], reference[:, [2, 0]], atol=1e-4, rtol=0)
    # a new class has the mean of all rows
    torch.testing.assert_close(ours[:, 1], reference.mean(1), atol=1e-4, rtol=0)
    for count, width in ((7, 7), (0, 64)):
        other = vit.from_pretrained(timm_folder, num_classes=count, notify=None)
        assert other(IMAGES).shape == (2, width)
        assert count == 0 or not other.head.weight.any()


def test_any_source_with_a_head_answers_for_images(timm_folder, tiny_data, theirs, capsys):
    image = next((tiny_data / "val/apple").iterdir())
    predictor = Predictor(timm_folder, device="cpu", precision="fp32")
    [found] = predictor([image], top_k=3)
    assert {label for label, _ in found.predictions} == set(NAMES)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    from PIL import Image

    with torch.no_grad():
        logits = theirs(transform(Image.open(image).convert("RGB")).unsqueeze(0))
    scores = dict(zip(NAMES, logits.softmax(1)[0].tolist(), strict=True))
    assert dict(found.predictions) == pytest.approx(scores, abs=1e-4)


def test_a_source_without_a_head_cannot_answer(timm_folder, tmp_path):
    state = load_file(timm_folder / "model.safetensors")
    body = {name: tensor for name, tensor in state.items() if not name.startswith("head")}
    save_file(body, tmp_path / "body.safetensors")
    with pytest.raises(WeightsError, match="has no head, so it names no classes: fine-tune it"):
        load_model(tmp_path / "body.safetensors")
    assert vit.from_pretrained(tmp_path / "body.safetensors", notify=None)(IMAGES).shape == (2, 64)


def test_one_output_is_no_class_but_can_be_fine_tuned(randomise, tmp_path):
    settings = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "intermediate_size": 64, "num_labels": 1}
    theirs = ViTForImageClassification(ViTConfig(**settings))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r"has one output, .*: fine-tune it first"):
        load_model(tmp_path)
    assert load_model(tmp_path, headless=True, notify=None).config.num_classes == 1
    assert vit.from_pretrained(tmp_path, num_classes=3, notify=None)(IMAGES).shape == (2, 3)
    theirs.config.problem_type = "multi_label_classification"
    theirs.save_pretrained(tmp_path)
    assert load_model(tmp_path, notify=None).thresholds == (0.5,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_sise": 48}, "image_sise is not a model setting; did you mean image_size"),
        ({"image_size": 30}, "not a multiple of patch_size=8"),
        ({"depth": 3}, "depth"),
        ({"num_classes": 2, "classes": ["a"]}, "num_classes=2, but there are 1 names"),
    ],
)
def test_settings_that_cannot_be_are_refused(timm_folder, settings, message):
    with pytest.raises(VitError, match=message) as caught:
        vit.from_pretrained(timm_folder, **settings)
    assert "\n" not in str(caught.value)


def test_weights_of_another_network_are_refused(tmp_path):
    save_file({"conv1.weight": torch.ones(3, 3)}, tmp_path / "resnet.safetensors")
    with pytest.raises(WeightsError, match="no known Vision Transformer"):
        vit.from_pretrained(tmp_path / "resnet.safetensors")


@pytest.mark.parametrize(
    ("weights", "line"),
    [("null", "(run {})"), ("timm/x", "(run {}), license: unknown; ask the authors")],
)
def test_a_run_that_began_with_random_weights_has_no_terms_of_others(
    tiny_run, tmp_path, weights, line
):
    folder = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    (folder / "config.yaml").write_text(f"weights: {weights}\n")
    (found,) = describe_source("mine", open_pretrained(folder))
    assert found == "weights: mine " + line.format(folder)
