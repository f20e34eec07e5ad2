"""ModelRunner: views, embeddings, threads, compilation and prepacking change no result."""

import dataclasses
import json
from unittest.mock import Mock

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import vit
from vit.data.image_io import read_image
from vit.errors import ConfigError, WeightsError
from vit.inference.predictor import Predictor
from vit.inference.torch_engine import PrepackedLinear, can_prepack, prepack, to_probabilities
from vit.tasks.task import ScaledLogits
from vit.weights.load_model import load_model
from vit.weights.saved_model import LoadedRun, load_run

pytestmark = pytest.mark.auto_precision
needs_onednn = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)
SMALL = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


@pytest.fixture
def run(tiny_run) -> LoadedRun:
    return load_run(tiny_run)


def answers(run, paths, **settings):
    predictor = Predictor(run, device="cpu", precision="fp32", **settings)
    return [answer for batch in predictor.batches(paths) for answer in batch]


@torch.inference_mode()
def by_hand(run: LoadedRun, view) -> torch.Tensor:
    return run.model(run.preprocessing.normalise(view)).double().softmax(dim=1)


def small_network(**options):
    torch.manual_seed(0)
    model = vit.create_model("vit_tiny_patch16_224", **SMALL, **options).eval()
    torch.nn.init.normal_(model.head.weight)
    return model


@pytest.mark.parametrize("keep_aspect", [False, True])
def test_flip_is_the_mean_of_an_image_and_its_mirror_image(run, input_images, keep_aspect):
    found = answers(run, input_images, tta="flip", keep_aspect=keep_aspect)
    for path, answer in zip(input_images, found, strict=True):
        image, prepare = read_image(path), run.preprocessing
        view = prepare.to_native(8)(image) if keep_aspect else prepare(image)
        views = torch.stack([view, view.flip(-1)])
        expected = by_hand(run, views).mean(dim=0).numpy()
        assert answer.probabilities == pytest.approx(expected, abs=1e-5)
        assert torch.equal(answer.pixels, view)


def test_an_image_and_its_mirror_image_have_equal_outputs_with_flip(run, input_images):
    square = read_image(input_images[0]).crop((0, 0, 20, 20)).resize((16, 16))
    pair = [square, square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    # of 17 pixels, the middle 16 are not those of the mirror image
    whole = dataclasses.replace(run.preprocessing, crop_share=1.0)
    run = dataclasses.replace(run, preprocessing=whole)
    one, other = answers(run, pair, tta="flip")
    torch.testing.assert_close(one.probabilities, other.probabilities)
    one, other = answers(run, pair)
    assert (one.probabilities != other.probabilities).any()


@pytest.mark.parametrize("settings", [{}, {"keep_aspect": True}, {"tta": "flip"}])
def test_embeddings_are_the_input_of_the_head(run, input_images, bad_images, settings):
    paths = [*input_images[:5], bad_images[0]]
    *found, bad = answers(run, paths, embeddings=True, **settings)
    assert bad.embedding is None
    for answer, other in zip(found, answers(run, paths[:5], **settings), strict=True):
        assert other.embedding is None
        assert answer.embedding.dtype == torch.float32
        assert answer.embedding.shape == (run.model.num_features,)
        torch.testing.assert_close(answer.probabilities, other.probabilities)
        if "tta" not in settings:
            with torch.inference_mode():
                expected = run.model.head(answer.embedding).double().softmax(0).numpy()
            assert answer.probabilities == pytest.approx(expected, abs=1e-5)


def test_a_network_without_a_head_returns_embeddings_only(tmp_path, input_images):
    small = {"img_size": 32, "depth": 1}
    theirs = timm.create_model("vit_tiny_patch16_224", **small, num_classes=0).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 0, "model_args": small}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="has no head"):
        load_model(tmp_path, notify=None)
    settings = {"device": "cpu", "precision": "fp32", "embeddings": True}
    predictor = Predictor(tmp_path, **settings, notify=lambda _: None)
    assert predictor.classes == ()
    (batch,) = predictor.batches(input_images[:2])
    inputs = torch.stack([predictor.preprocessing(read_image(path)) for path in input_images[:2]])
    with torch.inference_mode():
        expected = theirs(predictor.preprocessing.normalise(inputs))
    found = torch.stack([answer.embedding for answer in batch])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert [len(answer.probabilities) for answer in batch] == [0, 0]
    assert predictor(input_images[:2])[0].predictions == ()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_threads_changes_no_digit(run, input_images, workers):
    one = Predictor(run, device="cpu", batch_size=2, workers=workers)(input_images)
    assert one == Predictor(run, device="cpu", batch_size=2, workers=2)(input_images)


@pytest.mark.parametrize("classes", [3, 10, 37])
@pytest.mark.parametrize("activation", [torch.nn.Softmax(dim=1), torch.nn.Sigmoid()], ids=str)
def test_the_place_in_a_batch_changes_no_digit_of_calibrated_scores(classes, activation):
    """Vector instructions round powers differently from the code for the last elements."""
    logits = 3 * torch.randn(65, classes, generator=torch.Generator().manual_seed(0))
    calibrated = torch.nn.Sequential(ScaledLogits(0.9, 1.2), activation)
    whole = to_probabilities(logits, calibrated)
    torch.testing.assert_close(whole, calibrated(logits.double()), rtol=1e-12, atol=0)
    for start, size in ((0, 1), (64, 1), (7, 3), (33, 32)):
        part = to_probabilities(logits[start : start + size], calibrated)
        assert torch.equal(part, whole[start : start + size])


def test_a_list_continued_at_a_block_gives_the_same_digits(run, input_images):
    predictor = Predictor(run, device="cpu", batch_size=4)
    whole = predictor(input_images)
    for start in (4, 12, 24):
        assert list(predictor.stream(input_images[start:], first=start)) == whole[start:]


def test_compiled_batches_have_one_shape_and_a_failure_is_one_line(run, input_images, monkeypatch):
    compiled: list[Mock] = []

    def wrapped(function, **_):
        compiled.append(Mock(wraps=function))
        return compiled[-1]

    monkeypatch.setattr(torch, "compile", wrapped)
    found = Predictor(run, device="cpu", batch_size=4, compile=True)(input_images[:9])
    assert {call.args[0].shape[0] for mock in compiled for call in mock.mock_calls} == {4}
    for row, plain in zip(found, Predictor(run, device="cpu")(input_images[:9]), strict=True):
        assert dict(row.predictions) == pytest.approx(dict(plain.predictions), abs=1e-5)
    broken = Mock(side_effect=RuntimeError("no C++ compiler\nmore"))
    monkeypatch.setattr(torch, "compile", lambda _function, **_: broken)
    with pytest.raises(ConfigError, match=r"torch cannot compile here \(no C\+\+ compiler\)"):
        Predictor(run, device="cpu", compile=True)(input_images[:1])


@pytest.mark.slow
def test_a_compiled_network_gives_the_same_probabilities(run, input_images):
    plain = answers(run, input_images)
    for answer, other in zip(answers(run, input_images, compile=True), plain, strict=True):
        torch.testing.assert_close(answer.probabilities, other.probabilities, atol=1e-5, rtol=1e-5)


@needs_onednn
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "gelu_tanh"},
        {"activation": "relu"},
        {"feedforward": "swiglu"},
        {"feedforward": "moe", "num_experts": 4, "top_k": 2},
        {"parallel_blocks": True},
        {"norm_order": "post"},
        {"num_kv_heads": 1},
        {"position": "relative"},
        {"pooling": "attention"},
        {"repeat_blocks": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_a_prepacked_network_gives_the_same_logits(options):
    model = small_network(**options)
    assert can_prepack(model)
    twin = prepack(model)
    assert any(isinstance(module, PrepackedLinear) for module in twin.modules())
    assert not any(isinstance(module, PrepackedLinear) for module in model.modules())
    images = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(twin(images), model(images), atol=2e-5, rtol=1e-5)


@needs_onednn
def test_an_image_alone_has_the_digits_that_it_has_beside_another():
    twin = prepack(small_network())
    assert twin.num_classes == SMALL["num_classes"]
    features = torch.randn(8, SMALL["dim"])
    with torch.inference_mode():
        for number in range(8):
            two = twin.head(features[[number, 0]])
            assert torch.equal(twin.head(features[number : number + 1]), two[:1])


@needs_onednn
def test_only_float32_on_a_cpu_is_prepacked_and_only_its_matrices_are_copied():
    model = small_network()
    twin = prepack(model)
    assert twin.head.weight is model.head.weight
    assert twin.blocks[0].mlp.fc1.bias is model.blocks[0].mlp.fc1.bias
    assert not can_prepack(model.double())
    assert not can_prepack(model.bfloat16())
