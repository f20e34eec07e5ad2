"""The smallest exported classifier: the mean colour of an image, a matrix, softmax."""

import json

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from vit.data.preprocessing import Preprocessing

NAMES = ("apple", "pear", "plum", "=SUM(1)")
MATRIX = np.random.default_rng(0).normal(size=(3, len(NAMES))).astype(np.float32) / 40
METADATA = {
    "graph": "classifier",
    "classes": json.dumps(NAMES),
    "preprocessing": json.dumps(Preprocessing(image_size=(16, 16)).to_dict()),
    "vit_version": "0",
    "source_run": "runs/fruit",
    "precision": "fp32",
    "opset": "18",
    "calibration": "null",
}


def graph_of(kind=TensorProto.UINT8, image=("batch", "height", "width", 3), count=4):
    """The contract with the smallest network: the mean colour, a matrix, softmax."""
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats", "sides"], ["embedding"], keepdims=0),
        helper.make_node("MatMul", ["embedding", "matrix"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    outputs = [("probabilities", ["batch", count]), ("embedding", ["batch", 3])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("images", kind, image)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs],
        [
            numpy_helper.from_array(np.array([1, 2]), "sides"),
            numpy_helper.from_array(np.resize(MATRIX, (3, count)), "matrix"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def written(path, metadata=None, model=None):
    model = model or graph_of()
    helper.set_model_props(model, METADATA if metadata is None else metadata)
    onnx.save(model, path)
    return path
