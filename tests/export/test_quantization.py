"""Graphs in 8-bit integers say nearly what those of float32 say, and are what they claim."""

import collections
import json
import sys

import numpy as np
import onnx
import pytest
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

from tests.markers import same_initial_weights
from vit.errors import DataError, VitError
from vit.export import quantization
from vit.export.export_request import OPSET
from vit.export.onnx_tracing import Graph
from vit.export.quantization import BLOCK, DAMPING, MIN_IMAGES, gptq, quantize, split_qkv
from vit.exported.onnx_session import OnnxSession

OPTIONS = [
    {},
    {"num_kv_heads": 2, "qkv_bias": False},
    {"position": "rotary", "qk_norm": True, "norm": "rmsnorm", "feedforward": "swiglu"},
    {"position": "relative", "pooling": "mean", "norm_order": "post"},
    {"repeat_blocks": 2, "parallel_blocks": True, "pooling": "attention"},
    {"feedforward": "moe", "moe_every": 1, "num_experts": 3, "merge_tokens": 1},
    {"activation": "relu", "opset": 18},
    {"norm": "rmsnorm", "opset": 23},
]


def answers(content, images):
    (found,) = OnnxSession(content)({"images": images})
    return found


def kinds(content):
    proto = onnx.load_from_string(content) if isinstance(content, bytes) else content
    return collections.Counter(node.op_type for node in proto.graph.node)


@pytest.fixture(scope="module")
def calibrated(graph, noise_of):
    return quantize(graph, list(noise_of(32)))


@pytest.fixture(scope="module")
def static(graph, noise_of):
    return quantize(graph, list(noise_of(32)), static=True)


@same_initial_weights
def test_int8_outputs_are_close_to_float32(graph, calibrated, static, noise_of):
    images = noise_of(64, seed=1)
    wanted, errors = answers(graph, images), []
    assert np.ptp(wanted[:, 0]) > 0.2  # or nothing would be said
    for content in (calibrated, quantize(graph, []), static):
        found = answers(content, images)
        assert (found.argmax(1) == wanted.argmax(1)).mean() > 0.95
        assert np.abs(found - wanted).max() < 0.02
        errors.append(np.abs(found - wanted).mean())
    assert 1e-6 < errors[0] < errors[1] < errors[2]


def test_outputs_of_gelu_have_all_256_values(graph, noise_of, monkeypatch):
    images, errors = noise_of(256, seed=1), []
    for _ in range(2):
        found = answers(quantize(graph, []), images)
        errors.append(np.abs(found - answers(graph, images)).mean())
        monkeypatch.setattr(quantization, "LOWEST", {})
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize("images", [0, MIN_IMAGES])
def test_an_answer_does_not_depend_on_the_other_images_of_a_batch(graph, noise_of, images):
    content, images = quantize(graph, list(noise_of(images))), noise_of(6, seed=1)
    images[1:] //= 8
    alone = [answers(content, images[i : i + 1]) for i in range(6)]
    np.testing.assert_allclose(answers(content, images), np.concatenate(alone), atol=1e-6)


def test_onnxruntime_is_configured_against_int8_overflow(static):
    """Without VNNI the tests here fail without the option; with VNNI they cannot."""
    options = OnnxSession(static)._session.get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == "1"


@pytest.mark.parametrize(
    ("form", "count"),
    [
        ("calibrated", 1 + 2 * 4),  # patches; packed queries, keys and values, and 3 more
        ("static", 1 + 2 * 8),  # patches; query, key, value, both of attention, 3 more
    ],
)
def test_every_product_with_weights_except_the_head_is_in_integers(form, count, request):
    proto = onnx.load_from_string(request.getfixturevalue(form))
    built_graph = {name: node for node in proto.graph.node for name in node.output}
    products = [node for node in proto.graph.node if node.op_type == "MatMul"]
    if form == "calibrated":  # attention is in float32
        products = [node for node in products if node.input[1].endswith("/weights")]
    assert len(products) == count
    for node in products:
        for name in node.input:
            while built_graph[name].op_type in ("Reshape", "Transpose"):
                name = built_graph[name].input[0]
            assert built_graph[name].op_type == "DequantizeLinear", f"{node.name}: {name}"
    matrices = [x for x in proto.graph.initializer if x.data_type == 1 and len(x.dims) == 2]
    assert len(matrices) == 1  # of the head
    assert kinds(proto)["Gemm"] == 1


def test_quantization_is_deterministic(graph, calibrated, static, noise_of):
    images = list(noise_of(32))
    assert quantize(graph, images) == calibrated
    assert quantize(graph, images, static=True) == static


def test_metadata_are_kept(graph, calibrated):
    before, after = OnnxSession(graph).metadata, OnnxSession(calibrated).metadata
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"precision", "calibration"}
    assert after["precision"] == "int8"
    assert json.loads(after["calibration"]) == {"static": False, "samples": 32}
    one, two = (onnx.load_from_string(content).graph for content in (graph, calibrated))
    assert one.input == two.input
    assert one.output == two.output


def test_int8_without_images_is_nearer_to_float32_than_onnxruntimes_dynamic(
    graph, noise_of, tmp_path
):
    ours = quantize(graph, [])
    (tmp_path / "float.onnx").write_bytes(graph)
    quantize_dynamic(
        tmp_path / "float.onnx",
        tmp_path / "theirs.onnx",
        per_channel=True,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul"],
        extra_options={"MatMulConstBOnly": True},
    )
    images = noise_of(16, seed=1)
    wanted, found = answers(graph, images), answers(ours, images)
    theirs = answers((tmp_path / "theirs.onnx").read_bytes(), images)
    assert np.abs(found - wanted).mean() < np.abs(theirs - wanted).mean() < 0.01
    assert kinds(ours)["QuantizeLinear"] == 1 + 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "plainly"),
    [
        (OPTIONS[0], False),
        (OPTIONS[1], False),
        (OPTIONS[2], True),
        (OPTIONS[2], False),
        (OPTIONS[3], True),
    ],
    ids=str,
)
def test_the_split_projection_gives_the_same_outputs(graph_of, noise_of, options, plainly):
    content, module = graph_of(plainly=plainly, depth=1, **options)
    apart = Graph(content)
    assert split_qkv(apart) == 1
    images = noise_of(5, seed=1)
    with torch.no_grad():
        (wanted,) = module(torch.from_numpy(images))
    np.testing.assert_allclose(answers(apart.finish({}), images), wanted.numpy(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_networks_with_other_options_are_quantized(graph_of, noise_of, options):
    content, module = graph_of(**options)
    images = noise_of(64, seed=1)
    for form in ("calibrated", "dynamic", "static"):
        if form == "static" and options.get("opset", OPSET) > OPSET:  # export_options refuses it
            content, module = graph_of(**{**options, "opset": OPSET})
        with torch.no_grad():
            (wanted,) = module(torch.from_numpy(images))
        calibration = [] if form == "dynamic" else list(noise_of(32))
        quantized = quantize(content, calibration, static=form == "static")
        found = answers(quantized, images)
        changed = Graph(quantized)
        routers = [changed.only_consumer(node.output[0]) for node in changed.nodes
                   if node.op_type == "MatMul" and changed.shape(node.input[1])]  # fmt: skip
        blocks = 2 if options.get("feedforward") == "moe" else 0
        assert [one.op_type for one in routers] == ["Softmax"] * blocks, form  # of tokens' experts
        assert np.abs(found - wanted.numpy()).mean() < 0.02, form
        assert (found.argmax(1) == wanted.argmax(1).numpy()).mean() > 0.9, form


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_smoothing_keeps_small_channels_beside_large_ones(graph_of, noise_of, monkeypatch, static):
    """A channel that is 60 times as large, and told so to the weights: the same network."""

    def enlarge(model):
        for block in model.blocks:
            for norm, after in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1)):
                norm.weight[5] *= 60
                norm.bias[5] *= 60
                after.weight[:, 5] /= 60

    content, _ = graph_of(enlarge, depth=1)
    images = noise_of(64, seed=1)
    wanted, errors = answers(content, images), []
    for _ in range(2):
        found = answers(quantize(content, list(noise_of(32)), static=static), images)
        errors.append(np.abs(found - wanted).mean())
        monkeypatch.setattr(quantization, "_smooth", lambda _, _spot, values: np.ones_like(values))
    assert errors[0] < 0.3 * errors[1]


def test_attention_weights_have_the_whole_range_in_each_row(graph, static, noise_of):
    changed = Graph(graph)
    quantization._divide_by_largest(changed)
    assert [one.op_type for one in changed.nodes].count("ReduceMax") == 2  # of two blocks
    images = noise_of(5, seed=1)
    wanted = answers(graph, images)
    np.testing.assert_allclose(answers(changed.finish({}), images), wanted, atol=1e-6)
    scales = [
        onnx.numpy_helper.to_array(one).item()
        for one in onnx.load_from_string(static).graph.initializer
        if one.name.endswith(f"{quantization.RELATIVE}/int8/scale")
    ]
    np.testing.assert_allclose(scales, [1 / 255] * 2, rtol=1e-6)


def test_too_few_images_are_refused(graph, noise_of):
    with pytest.raises(DataError, match=f"^{MIN_IMAGES - 1} images for calibration: at least"):
        quantize(graph, list(noise_of(MIN_IMAGES - 1)))
    with pytest.raises(DataError, match=r"^0 images for calibration: at least 16 .*; give more$"):
        quantize(graph, [], static=True)


def test_a_missing_library_is_named(graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(
        VitError, match=r"^onnx is not installed: pip install 'vit-toolkit\[onnx\]'"
    ):
        quantize(graph, [])


def problem(inputs=20, outputs=6, rows=300, seed=0):
    """Correlated inputs, weights, and their scales."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 5)) @ random.normal(size=(5, inputs))
    x += 0.3 * random.normal(size=x.shape)
    weights = random.normal(size=(inputs, outputs)).astype(np.float32)
    return x, weights, np.abs(weights).max(axis=0) / 127


def one_row_at_a_time(weights, scales, moments):
    """Optimal Brain Quantization, equations 2 and 3: the inverse of what is left at each step."""
    inputs = len(weights)
    hessian = moments + np.eye(inputs) * DAMPING * np.diag(moments).mean()
    rest, rounded = weights.astype(np.float64).copy(), np.zeros(weights.shape, np.int8)
    left = sorted(range(inputs), key=lambda row: -hessian[row, row])
    while left:
        inverse = np.linalg.inv(hessian[np.ix_(left, left)])
        row = left[0]
        rounded[row] = np.clip(np.round(rest[row] / scales), -127, 127)
        error = (rest[row] - rounded[row] * scales) / inverse[0, 0]
        rest[left] -= np.outer(inverse[0], error)
        left = left[1:]
    return rounded


@pytest.mark.parametrize("inputs", [1, 20, BLOCK + 9])
def test_gptq_equals_the_formula_of_its_paper(inputs):
    x, weights, scales = problem(inputs)
    moments = x.T @ x
    expected = one_row_at_a_time(weights, scales, moments)
    np.testing.assert_array_equal(gptq(weights, scales, moments), expected)


def test_gptq_halves_the_error_of_the_outputs():
    x, weights, scales = problem()
    wanted = x @ weights
    errors = [
        np.abs(x @ (whole * scales) - wanted).mean()
        for whole in (gptq(weights, scales, x.T @ x), np.round(weights / scales))
    ]
    assert errors[0] < 0.5 * errors[1]


def test_inputs_that_are_always_zero_are_rounded_to_the_nearest():
    x, weights, scales = problem()
    x[:, [3, 7]] = 0
    rounded = gptq(weights, scales, x.T @ x)
    np.testing.assert_array_equal(rounded[[3, 7]], np.round(weights / scales)[[3, 7]])
    nothing = gptq(weights, scales, np.zeros((20, 20), np.float32))
    np.testing.assert_array_equal(nothing, np.round(weights / scales))
