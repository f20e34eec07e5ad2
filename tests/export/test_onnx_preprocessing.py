"""The front of an exported graph gives the bytes that Pillow gives."""

import numpy as np
import onnx
import pytest
from PIL import Image

from tests.slow_cases import mostly_slow
from vit.data.preprocessing import Preprocessing
from vit.export import onnx_preprocessing
from vit.export.onnx_preprocessing import FITTED, preprocessing_nodes
from vit.exported.onnx_session import OnnxSession

WAYS = [
    {"image_size": (24, 24)},
    {"image_size": (16, 16), "interpolation": "bilinear", "crop_share": 1.0},
    {"image_size": (20, 12), "crop_share": 0.8},
    {"image_size": (12, 20), "resize": "squash", "interpolation": "bilinear"},
    {"image_size": (20, 12), "resize": "pad", "crop_share": 1.0, "mean": (0.2, 0.5, 0.7)},
    {"image_size": (15, 15), "resize": "pad", "crop_share": 0.8, "interpolation": "bilinear"},
]
SIZES = [(1, 1), (1, 3), (2, 90), (20, 31), (24, 24), (16, 13), (75, 50), (37, 36), (301, 457)]
TALL = [(90, 2), (120, 33), (457, 130)]


def session(preprocessing):
    """The front alone."""
    nodes, value = preprocessing_nodes(preprocessing), onnx.helper.make_tensor_value_info
    kind, rows, cols = onnx.TensorProto.UINT8, *preprocessing.image_size
    graph = onnx.helper.make_graph(
        nodes.nodes,
        "front",
        [value("images", kind, ["batch", "height", "width", 3])],
        [value(FITTED, kind, ["batch", rows, cols, 3])],
        [*nodes.constants.values()],
    )
    opset = onnx.helper.make_opsetid("", 18)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return OnnxSession(model.SerializeToString())


def assert_same(front, preprocessing, height, width, count=2):
    random = np.random.default_rng(height * width)
    images = random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    images[0] = np.where(images[0] > 127, 255, 0)  # where the cubic overshoots
    expected = [
        np.asarray(preprocessing.resize_and_crop(Image.fromarray(image))) for image in images
    ]
    (found,) = front({"images": images})
    np.testing.assert_array_equal(found, np.stack(expected), f"{height} x {width}")


@pytest.mark.parametrize("sizes", [SIZES, TALL], ids=len)
@pytest.mark.parametrize("settings", mostly_slow(WAYS), ids=str)
def test_every_byte_equals_that_of_pillow(settings, sizes):
    preprocessing = Preprocessing(**settings)
    front = session(preprocessing)
    for height, width in sizes:
        assert_same(front, preprocessing, height, width)


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_only_the_crop_of_a_large_resized_image_is_computed(settings, monkeypatch):
    monkeypatch.setattr("vit.data.preprocessing.MAX_RESIZED_PIXELS", 900)
    monkeypatch.setattr(onnx_preprocessing, "MAX_RESIZED_PIXELS", 900)
    preprocessing = Preprocessing(**settings)
    front = session(preprocessing)
    for height, width in [*SIZES, *TALL, (1, 300)]:
        assert_same(front, preprocessing, height, width)


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_photographs_of_usual_sizes_equal_those_of_pillow(interpolation):
    preprocessing = Preprocessing(image_size=(224, 224), interpolation=interpolation)
    front = session(preprocessing)
    for size in [(375, 500), (1, 3000), (3000, 1), (2000, 300), (20, 20), (3000, 4000)]:
        assert_same(front, preprocessing, *size, count=1)
