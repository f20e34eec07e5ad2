"""The examples of docs/examples give the answers of the runner."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from vit.data.preprocessing import Preprocessing
from vit.inference.predictor import Predictor

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
NAMES = ("apple", "pear", "猫", "plum", "fig", "sloe")
PACKAGES = os.environ.get("VIT_NODE_MODULES", "")
"""A folder with node_modules of onnxruntime-node and sharp, for the test in JavaScript."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The contract with the smallest network: the mean colour, a matrix, softmax."""
    matrix = np.random.default_rng(0).normal(size=(3, len(NAMES))).astype(np.float32) / 40
    constants = {"sides": np.array([1, 2]), "matrix": matrix}
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats", "sides"], ["means"], keepdims=0),
        helper.make_node("MatMul", ["means", "matrix"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    value, shape = helper.make_tensor_value_info, ["batch", "height", "width", 3]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("images", TensorProto.UINT8, shape)],
        [value("probabilities", TensorProto.FLOAT, ["batch", len(NAMES)])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    about = {
        "graph": "classifier",
        "classes": json.dumps(NAMES, ensure_ascii=False),
        "preprocessing": json.dumps(Preprocessing(image_size=(16, 16)).to_dict()),
        "precision": "fp32",
    }
    helper.set_model_props(model, about)
    path = tmp_path_factory.mktemp("model") / "fruit.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(1)
    paths = []
    for number, mode in enumerate(["RGB", "L", "RGBA", "P", "RGB", "LA"]):
        pixels = random.integers(0, 256, (9 + number, 14, 4), dtype=np.uint8) // (1 + number)
        exif = Image.Exif()
        exif[0x0112] = 1 + number
        paths.append(str(folder / f"{number}.png"))
        Image.fromarray(pixels).convert(mode).save(paths[-1], exif=exif)
    return paths


def agree(said, file, images, tolerance=1e-6):
    rows = [json.loads(line) for line in said.splitlines()]
    for row, answer in zip(rows, Predictor(file)(images, top_k=5), strict=True):
        assert row["image"] == answer.image
        assert [one["label"] for one in row["predictions"]] == [x for x, _ in answer.predictions]
        scores = [one["score"] for one in row["predictions"]]
        assert scores == pytest.approx([score for _, score in answer.predictions], abs=tolerance)


def test_python_without_vit(file, images, tmp_path):
    example = EXAMPLES / "predict_onnx.py"
    assert len(example.read_text().splitlines()) <= 40
    assert "vit." not in example.read_text().replace("of vit.", "")
    words = [sys.executable, "-W", "error", "-I", str(example), str(file), *images]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    agree(said.stdout, file, images)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_javascript_is_javascript():
    words = ["node", "--check", str(EXAMPLES / "predict_onnx.mjs")]
    assert subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.skipif(
    shutil.which("node") is None or not os.path.isdir(PACKAGES),
    reason="VIT_NODE_MODULES names no folder with onnxruntime-node and sharp",
)
def test_javascript_gives_the_same_answers_and_names_what_it_cannot_read(file, images, tmp_path):
    damaged = tmp_path / "damaged.jpg"
    damaged.write_bytes(b"no JPEG")
    example = Path(PACKAGES) / "predict_onnx_test.mjs"  # modules are found from where a file is
    shutil.copy(EXAMPLES / "predict_onnx.mjs", example)
    try:
        words = ["node", str(example), str(file), str(damaged), *images]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    finally:
        example.unlink()
    assert said.returncode == 1
    assert said.stderr.startswith(f"{damaged}: ")
    assert len(said.stderr.splitlines()) == 1
    # sharp rounds otherwise where it lays transparent pixels over white
    agree(said.stdout, file, images, tolerance=2e-3)
