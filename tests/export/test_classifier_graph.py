"""Exported classifiers say what torch says of images of any size, or are refused."""

import dataclasses
import json

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from tests.model.test_build import MIXTURES, MORE_MIXTURES, SMALL, random_network
from vit.config import Config, ModelConfig
from vit.config.inference_config import ExportOptions
from vit.config.settings import split_settings
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, VitError
from vit.export import classifier_graph, export_accuracy, onnx_tracing
from vit.export import export_onnx as onnx_export
from vit.export.export_formats import export_model, export_onnx
from vit.export.float16 import convert_to_float16
from vit.exported.onnx_session import OnnxSession
from vit.exported.openvino_session import OpenVINOSession
from vit.weights.saved_model import load_run, save_model

pytestmark = pytest.mark.usefixtures("traced_once")

CLASSES = ("apple", "pear", "plum")
STEM, OTHER_STEM = (options for options in MIXTURES if options.get("stem") == "conv")
QUICK = MIXTURES[:1]
EACH = QUICK + [
    pytest.param(options, marks=pytest.mark.slow, id=str(options))
    for options in MIXTURES + MORE_MIXTURES
    if "channels" not in options and options not in QUICK
]


def saved(folder, options, **preprocessing):
    """A run folder of a network no part of which is zero."""
    folder.mkdir()
    usual = {"image_size": (16, 16), "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25)}
    with torch.random.fork_rng():
        model = random_network(options).eval()
    save_model(
        folder,
        model,
        config=Config(model=ModelConfig(**{**SMALL, **options})),
        classes=CLASSES,
        preprocessing=Preprocessing(**{**usual, **preprocessing}),
    )
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("runs") / "run", MIXTURES[0])


@torch.no_grad()
def torch_says(run, images):
    """Probabilities by the network itself, of images that Pillow resizes."""
    loaded = load_run(run)
    fitted = torch.stack([loaded.preprocessing(Image.fromarray(image)) for image in images])
    return loaded.model(loaded.preprocessing.normalise(fitted)).softmax(1).numpy()


def noise(count, height, width):
    random = np.random.default_rng(count * height)
    return random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def assert_agrees(path, run, atol=1e-5):
    session = OnnxSession(path)
    assert session.inputs == ["images"]
    for size in [(1, 16, 16), (2, 25, 40), (5, 61, 33)]:
        images = noise(*size)
        found = session({"images": images})[0]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, torch_says(run, images), atol=atol)


@pytest.mark.parametrize("options", EACH, ids=str)
def test_every_network_gives_the_probabilities_of_torch(options, tmp_path):
    run = saved(tmp_path / "run", options)
    found = export_onnx(run, tmp_path / "a.onnx")
    assert found.difference < 1e-5
    assert [(path.name, size) for path, size in found.files] == [
        ("a.onnx", (tmp_path / "a.onnx").stat().st_size)
    ]
    assert_agrees(tmp_path / "a.onnx", run)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "a.onnx"}


def test_the_metadata_are_complete_and_have_no_local_path(run, tmp_path):
    out = tmp_path / "a.onnx"
    export_onnx(run, out)
    metadata = OnnxSession(out).metadata
    loaded = load_run(run)
    assert metadata["graph"] == "classifier"
    assert json.loads(metadata["classes"]) == list(CLASSES)
    assert json.loads(metadata["preprocessing"]) == loaded.preprocessing.to_dict()
    assert metadata["precision"] == "fp32"
    assert metadata["opset"] == "20"
    assert metadata["calibration"] == "null"
    assert metadata["source_run"] == str(run)
    assert "license" not in metadata  # trained from scratch
    licensed = dataclasses.replace(loaded, license="cc-by-4.0")
    about = classifier_graph.metadata_of(licensed, str(run), precision="fp32", opset=20)
    assert about == metadata | {"license": "cc-by-4.0"}
    proto = onnx.load(out)
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 20)]
    assert not any(node.doc_string or node.metadata_props for node in proto.graph.node)
    axes = [dim.dim_param or dim.dim_value for dim in shape_of(proto.graph.input[0])]
    assert axes == ["batch", "height", "width", 3]
    assert [d.dim_param or d.dim_value for d in shape_of(proto.graph.output[0])] == ["batch", 3]
    assert b"/vit/" not in out.read_bytes()


def shape_of(value):
    return value.type.tensor_type.shape.dim


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 21, 22, 23])
def test_other_opsets_give_the_same_outputs(run, tmp_path, opset):
    out = tmp_path / "a.onnx"
    export_onnx(run, out, opset=opset)
    assert [(x.domain, x.version) for x in onnx.load(out).opset_import] == [("", opset)]
    assert OnnxSession(out).metadata["opset"] == str(opset)
    assert_agrees(out, run)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"class_token": False, "pooling": "mean"}], ids=str)
def test_tokens_embedding_and_attention_equal_those_of_torch(settings, tmp_path):
    run = saved(tmp_path / "run", {"registers": 2, **settings})
    export_onnx(run, tmp_path / "a.onnx", tokens=True)
    session, images = OnnxSession(tmp_path / "a.onnx"), noise(2, 16, 16)
    assert session.outputs == ["probabilities", "tokens", "embedding", "attention"]
    probabilities, tokens, embedding, attention = session({"images": images})
    loaded = load_run(run)
    fitted = torch.stack([loaded.preprocessing(Image.fromarray(image)) for image in images])
    floats = loaded.preprocessing.normalise(fitted)
    with torch.no_grad():
        maps = torch.stack(loaded.model.attention_maps(floats), 1).mean(2)
        prefix = loaded.model.num_prefix_tokens
        looks = maps[:, :, prefix:].mean(2) if settings else maps[:, :, 0]
        np.testing.assert_allclose(tokens, loaded.model.forward_features(floats), atol=1e-4)
        np.testing.assert_allclose(embedding, loaded.model.features(floats), atol=1e-4)
        np.testing.assert_allclose(attention, looks, atol=1e-5)
    np.testing.assert_allclose(probabilities, torch_says(run, images), atol=1e-5)


def test_large_weights_are_external_data(run, tmp_path, monkeypatch):
    out, data = tmp_path / "a.onnx", tmp_path / "a.onnx.data"
    data.write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(onnx_export, "MAX_GRAPH_BYTES", 1000)
        with pytest.raises(VitError, match=r"a.onnx.data exists; choose another name"):
            export_onnx(run, out)
        found = export_onnx(run, out, overwrite=True)
    assert [path for path, _ in found.files] == [out, data]
    assert [size for _, size in found.files] == [out.stat().st_size, data.stat().st_size]
    (tmp_path / "moved").mkdir()
    for path in (out, data):
        path.rename(tmp_path / "moved" / path.name)
    assert_agrees(tmp_path / "moved" / out.name, run)
    found = export_onnx(run, tmp_path / "moved" / out.name, overwrite=True)
    assert {path.name for path in (tmp_path / "moved").iterdir()} == {"a.onnx"}


def test_fp16_is_close_to_torch_in_half_the_bytes(run, tmp_path, tiny_data):
    out = tmp_path / "a.onnx"
    whole = export_onnx(run, tmp_path / "whole.onnx")
    half = export_onnx(run, out, precision="fp16")
    assert half.files[0][1] < 0.7 * whole.files[0][1]
    assert 0 < half.difference < 0.01
    assert_agrees(out, run, atol=0.01)
    assert OnnxSession(out).metadata["precision"] == "fp16"


def test_weights_beyond_the_range_of_float16_are_refused(run):
    proto = onnx_export.trace_module(classifier_graph.part_of(load_run(run)), 20)
    weight = max(proto.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    large = onnx.numpy_helper.to_array(weight).copy()
    large.flat[3] = 1e5
    weight.CopyFrom(onnx.numpy_helper.from_array(large, weight.name))
    with pytest.raises(VitError, match=r"has the weight 100000, and float16 ends at 65504"):
        convert_to_float16(proto)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([[float("nan"), 0.5]], "overflows where torch does not: probabilities"),
        ([[0.4, 0.5]], r"differs from torch: probabilities by 0.1 of"),
        ([[0.5]], r"gives probabilities the shape \(1, 1\), torch \(1, 2\)"),
    ],
)
def test_outputs_that_differ_from_torch_are_refused(run, found, message):
    part = classifier_graph.part_of(load_run(run))
    expected = (torch.tensor([[0.5, 0.5]]),)
    assert onnx_tracing.difference(part, expected, [np.float32([[0.5, 0.51]])], 0.02) < 0.02
    with pytest.raises(VitError, match=message):
        onnx_tracing.difference(part, expected, [np.float32(found)], 0.02)


def test_a_graph_with_other_preprocessing_is_not_written(run, tmp_path, monkeypatch):
    other = dataclasses.replace(load_run(run).preprocessing, mean=(0.3, 0.3, 0.3), crop_share=0.5)
    front = classifier_graph.preprocessing_nodes
    monkeypatch.setattr(
        classifier_graph, "preprocessing_nodes", lambda _preprocessing: front(other)
    )
    with pytest.raises(VitError, match=r"differs from torch: probabilities by .* nothing was"):
        export_onnx(run, tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_top1_of_run_and_file_are_compared(tiny_run, tmp_path, tiny_data):
    heard = []
    found = export_onnx(
        tiny_run, tmp_path / "a.onnx", validation=str(tiny_data), notify=heard.append
    )
    assert found.accuracy.count == 27
    assert found.accuracy.before == found.accuracy.after
    assert found.accuracy.agreement == 1
    assert found.accuracy.difference < 1e-5
    assert heard[-1].startswith("top-1: run ")


def test_a_file_that_loses_too_much_is_not_written(tiny_run, tmp_path, tiny_data, monkeypatch):
    def worse(content, input_images, *, static):
        """The same network with a head that says one class alone."""
        assert len(input_images) == 0
        assert not static
        proto = onnx.load_from_string(content)
        place, last = next(
            (place, node)
            for place, node in enumerate(proto.graph.node)
            if node.output[0] == "probabilities"
        )
        proto.graph.node.insert(
            place, onnx.helper.make_node("Gemm", [last.input[0], "zeros", "row"], ["one_class"])
        )
        zeros, row = np.zeros((3, 3), np.float32), np.float32([[99, 0, 0]])
        for name, value in (("zeros", zeros), ("row", row)):
            proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        last.input[0] = "one_class"
        return proto.SerializeToString()

    monkeypatch.setattr(onnx_export, "quantize", worse)
    asked = {"precision": "int8", "dynamic": True, "validation": str(tiny_data)}
    monkeypatch.setattr(export_accuracy, "probabilities", right_answers(tiny_data))
    with pytest.raises(VitError, match=r"would lose 66.67% of top-1 \(100.00% to 33.33% on 27"):
        export_onnx(tiny_run, tmp_path / "a.onnx", **asked)
    assert not list(tmp_path.iterdir())
    found = export_onnx(tiny_run, tmp_path / "a.onnx", **asked, max_drop=0.7)
    assert found.accuracy.drop == pytest.approx(2 / 3)
    metadata = OnnxSession(tmp_path / "a.onnx").metadata
    assert metadata["precision"] == "int8"
    assert json.loads(metadata["calibration"]) == {"dynamic": True, "static": False}


def right_answers(_data):
    """A run that is always right: the images come by class, nine of each."""
    rows = iter(np.repeat(np.eye(3, dtype=np.float32), 9, axis=0).tolist() * 2)
    return lambda _run, images: np.array([next(rows) for _ in images], np.float32)


def test_int8_is_calibrated_with_images_that_are_not_measured(
    tiny_run, tmp_path, tiny_data, monkeypatch
):
    seen = []

    def same(content, input_images, *, static):
        assert static
        seen.extend(input_images)
        return content

    monkeypatch.setattr(onnx_export, "quantize", same)
    (data := tmp_path / "data").mkdir()
    (data / "train").symlink_to(tiny_data / "val")
    (data / "val").symlink_to(tiny_data / "val")
    asked = {"precision": "int8", "calibration": str(data), "static": True}
    export_onnx(tiny_run, tmp_path / "a.onnx", **asked, samples=5)
    assert len(seen) == 5
    assert all(pil_image.shape == (20, 24, 3) for pil_image in seen)
    calibration = json.loads(OnnxSession(tmp_path / "a.onnx").metadata["calibration"])
    assert calibration == {"data": str(data), "dynamic": False, "static": True, "samples": 5}
    with pytest.raises(VitError, match=r"27 images can be calibrated with, .* 28 are needed"):
        export_onnx(tiny_run, tmp_path / "b.onnx", **asked, samples=28)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8': choose one of fp32, fp16, int8"),
        ({"opset": 9}, "opset=9: must be at least 18 and at most 23"),
        (
            {"precision": "int8"},
            "precision='int8': it is calibrated with images: give --calibration",
        ),
        (
            {"calibration": "x"},
            "calibration='x': precision=fp32 does not read it; precision=int8 does",
        ),
        ({"precision": "int8", "dynamic": True, "samples": 3}, "samples=3: dynamic=true does not"),
        ({"precision": "int8", "static": True}, "static=True: needs calibration: its ranges are"),
        ({"precision": "int8", "static": True, "dynamic": True}, "static=True: needs calibration"),
        ({"static": True}, "static=True: precision=fp32 does not read it"),
        (
            {"precision": "int8", "static": True, "calibration": "x", "opset": 21},
            "opset=21: onnxruntime cannot open static int8 of it",
        ),
        ({"precision": "int8", "calibration": "x", "samples": 0}, "samples=0: must be at least 1"),
        ({"dynamic": True}, "dynamic=True: precision=fp32 does not read it"),
        ({"max_drop": 0.1}, "max_drop=0.1: nothing is measured without validation data"),
        ({"max_drop": 2.0, "validation": "x"}, "max_drop=2.0: must be at least 0 and at most 1"),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        split_settings(options, "an export", ExportOptions)


def test_networks_that_cannot_be_exported_are_refused(tmp_path):
    gray = saved(tmp_path / "gray", {"channels": 1})
    with pytest.raises(ConfigError, match="channels=1: weights without a run say nothing"):
        export_onnx(gray, tmp_path / "a.onnx")
    merging = saved(tmp_path / "merging", {"merge_tokens": 1, "pooling": "mean"})
    with pytest.raises(ConfigError, match="merge_tokens=1: tokens differ from block to block"):
        export_onnx(merging, tmp_path / "a.onnx", tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [STEM, OTHER_STEM], ids=str)
@pytest.mark.parametrize(
    ("name", "asked", "allowed"),
    [
        ("half.onnx", {"precision": "fp16"}, 0.02),
        ("bytes.onnx", {"precision": "int8", "dynamic": True}, 0.1),
        ("net.xml", {}, 1e-5),
        ("net.pt2", {}, 1e-5),
    ],
)
def test_a_convolutional_stem_is_exported_to_every_format(tmp_path, options, name, asked, allowed):
    run = saved(tmp_path / "run", options)
    assert export_model(run, tmp_path / name, **asked).exported.difference < allowed
    assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position": "rotary", "rotary_grid": "centred"},
        {"position": "rotary", "rotary_grid": "mixed"},
        {"position": "sinusoidal_2d", "stem": "conv", "class_token": False, "pooling": "mean"},
    ],
    ids=str,
)
def test_native_images_of_every_shape_have_the_positions_of_torch(options, tmp_path):
    native = {"resize": "native", "crop_share": 1.0, "patch_size": 8, "image_size": (64, 64)}
    run = saved(tmp_path / "run", {**options, "image_size": 64}, **native)
    export_onnx(run, tmp_path / "net.onnx", notify=None)
    session, loaded = OnnxSession(tmp_path / "net.onnx"), load_run(run)
    for size in [(40, 61), (300, 20), (9, 500), (64, 64)]:
        image = Image.fromarray(noise(1, *size)[0])
        (found,) = session({"images": loaded.preprocessing.to_graph_input(image)[None]})
        np.testing.assert_allclose(found, torch_says(run, np.asarray(image)[None]), atol=1e-5)


@pytest.mark.slow
def test_the_first_openvino_outputs_of_each_batch_size_are_right(tmp_path):
    """Those of OpenVINO 2026.4 alone are wrong for such networks."""
    stem = {"stem": "conv", "stem_depth": 3, "stem_width": 16}
    run = saved(tmp_path / "run", {**stem, "pooling": "mean", "class_token": False})
    assert export_model(run, tmp_path / "net.xml").exported.difference < 1e-3
    ours = OpenVINOSession(tmp_path / "net.xml")
    for count in (1, 4, 2):
        images = noise(count, 16, 16)
        (found,) = ours({"images": images})
        np.testing.assert_allclose(found, torch_says(run, images), atol=1e-4)


@pytest.mark.slow
def test_a_torch_export_program_gives_the_probabilities_of_torch(run, tmp_path):
    out = tmp_path / "a.pt2"
    report = export_model(run, out)
    assert report.to == "torch"
    assert report.verification is None
    assert report.exported.difference < 1e-5
    extra = {"preprocessing.json": "", "classes.json": ""}
    program = torch.export.load(out, extra_files=extra)
    loaded, images = load_run(run), noise(4, 16, 16)
    fitted = np.stack(
        [loaded.preprocessing.resize_and_crop(Image.fromarray(image)) for image in images]
    )
    (found,) = program.module()(torch.from_numpy(fitted))
    np.testing.assert_allclose(found.detach(), torch_says(run, images), atol=1e-5)
    assert Preprocessing.from_dict(json.loads(extra["preprocessing.json"])) == loaded.preprocessing
    assert json.loads(extra["classes.json"]) == list(CLASSES)
    with pytest.raises(ConfigError, match="opset=20: a program of torch has no such choice"):
        export_model(run, tmp_path / "b.pt2", to="torch", opset=20)
