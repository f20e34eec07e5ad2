"""Prepacked linear layers give the outputs of the plain network."""

import pytest
import torch

import vit
from vit.inference.model_runner import PrepackedLinear, can_prepack, prepack

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)
SMALL = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


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
    torch.manual_seed(0)
    model = vit.create_model("vit_tiny_patch16_224", **SMALL, **options).eval()
    torch.nn.init.normal_(model.head.weight)
    assert can_prepack(model)
    twin = prepack(model)
    assert any(isinstance(module, PrepackedLinear) for module in twin.modules())
    assert not any(isinstance(module, PrepackedLinear) for module in model.modules())
    images = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(twin(images), model(images), atol=2e-5, rtol=1e-5)


def test_all_tensors_but_the_matrices_are_shared():
    model = vit.create_model("vit_tiny_patch16_224", **SMALL).eval()
    twin = prepack(model)
    assert twin.head.weight is model.head.weight
    assert twin.blocks[0].mlp.fc1.bias is model.blocks[0].mlp.fc1.bias


def test_only_float32_on_a_cpu_is_prepacked():
    model = vit.create_model("vit_tiny_patch16_224", **SMALL).eval()
    assert not can_prepack(model.double())
    assert not can_prepack(model.bfloat16())
