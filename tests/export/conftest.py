"""A small trained-looking classifier as an ONNX graph, for what is done with such graphs."""

import json

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import vit
from vit.export.export_request import OPSET
from vit.export.onnx_tracing import Part, decomposed_attention, trace_module

SMALL = {"image_size": 16, "patch_size": 4, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
METADATA = {
    "graph": "classifier",
    "classes": json.dumps(["apple", "pear", "plüm"], ensure_ascii=False),
    "precision": "fp32",
    "calibration": "null",
}


class Answer(nn.Module):
    """Bytes (batch, 16, 16, 3) -> probabilities."""

    def __init__(self, model, *, plainly=True):
        super().__init__()
        self.model = model
        self.how = {"attention_fn": decomposed_attention} if plainly else {}

    def forward(self, images):
        floats = images.permute(0, 3, 1, 2).float() / 127.5 - 1
        encoded = self.model.encode(floats, **self.how)
        return (self.model.head(self.model.pool(*encoded)).softmax(dim=1),)


def make_graph(change=None, *, plainly=True, opset=OPSET, **settings):
    """The bytes of a graph of random weights, which `change` may change, and its module."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = vit.create_model("vit_tiny_patch16_224", **{**SMALL, **settings}).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    if change is not None:
        with torch.no_grad():
            change(model)
    module = Answer(model, plainly=plainly).eval()
    part = Part(
        name="classifier",
        module=module,
        inputs={"images": {0: "batch"}},
        outputs={"probabilities": {0: "batch"}},
        examples=[(torch.from_numpy(noise(2)),)],
    )
    proto = trace_module(part, opset)
    onnx.helper.set_model_props(proto, METADATA)
    return proto.SerializeToString(), module


def noise(count, seed=0):
    """Blurred noise: (count, 16, 16, 3), bytes."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return np.repeat(np.repeat(coarse, 4, axis=1), 4, axis=2)


@pytest.fixture(scope="session")
def graph():
    """The bytes of a float32 graph."""
    return make_graph()[0]


@pytest.fixture(scope="session")
def graph_of():
    return make_graph


@pytest.fixture(scope="session")
def noise_of():
    return noise
