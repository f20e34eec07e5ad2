"""OpenVINOSession against OnnxSession, and its precision."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vit.errors import WeightsError
from vit.exported import openvino_session
from vit.exported.onnx_session import OnnxSession


@pytest.fixture(scope="module")
def content():
    """softmax(bytes W) and its greatest value, for any number of rows."""
    weights = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32) / 99
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["floats", "weights"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"]),
        helper.make_node("ReduceMax", ["probabilities", "axes"], ["best"], keepdims=0),
    ]
    axes = numpy_helper.from_array(np.array([1]), "axes")
    values = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("images", TensorProto.UINT8, ["batch", 6]),
            ("probabilities", TensorProto.FLOAT, ["batch", 4]),
            ("best", TensorProto.FLOAT, ["batch"]),
        )
    ]
    graph = helper.make_graph(
        nodes, "g", values[:1], values[1:], [numpy_helper.from_array(weights, "weights"), axes]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(proto, {"classes": '["plüm", "a\\nb", "<&>"]', "precision": "fp32"})
    onnx.checker.check_model(proto, full_check=True)
    return proto.SerializeToString()


@pytest.fixture(scope="module")
def path(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("openvino") / "net.onnx"
    path.write_bytes(content)
    return path


def test_outputs_and_metadata_equal_those_of_onnxruntime(content, path):
    theirs = OnnxSession(content)
    for source in (content, path, str(path)):
        ours = openvino_session.OpenVINOSession(source, threads=1)
        assert (ours.inputs, ours.outputs) == (theirs.inputs, theirs.outputs)
        assert ours.metadata == theirs.metadata
        for rows in (3, 1, 8):
            images = np.random.default_rng(rows).integers(0, 256, (rows, 6), dtype=np.uint8)
            answers = zip(ours({"images": images}), theirs({"images": images}), strict=True)
            for found, wanted in answers:
                np.testing.assert_allclose(found, wanted, rtol=1e-5)
                assert found.dtype == wanted.dtype


def test_outputs_are_copies_that_a_later_run_does_not_overwrite(content):
    session = openvino_session.OpenVINOSession(content)
    first, _ = session({"images": np.full((2, 6), 7, np.uint8)})
    kept = first.copy()
    session({"images": np.eye(2, 6, dtype=np.uint8) * 200})
    np.testing.assert_array_equal(first, kept)


def test_outputs_that_never_settle_are_an_error(content, monkeypatch):
    session = openvino_session.OpenVINOSession(content)
    random = np.random.default_rng(0)
    monkeypatch.setattr(session, "_infer", lambda _values: [random.random((2, 4))])
    with pytest.raises(WeightsError, match="other outputs each time"):
        session({"images": np.zeros((2, 6), np.uint8)})


def test_bf16_is_not_used(content):
    """OpenVINO alone would choose bf16 where the CPU supports it."""
    compiled = openvino_session.OpenVINOSession(content)._request.get_compiled_model()
    assert compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"


def test_invalid_files_are_refused(content, tmp_path):
    with pytest.raises(WeightsError, match=r"no\.onnx is missing"):
        openvino_session.OpenVINOSession(tmp_path / "no.onnx")
    (tmp_path / "noise.bin").write_bytes(b"noise")
    for name in ("noise.onnx", "noise.xml"):
        (tmp_path / name).write_bytes(b"\x00\x01 noise" * 99)
        with pytest.raises(WeightsError, match=name):
            openvino_session.OpenVINOSession(tmp_path / name)
    with pytest.raises(WeightsError, match=r"^OpenVINO cannot compute it"):
        openvino_session.OpenVINOSession(content)({"images": np.zeros((2, 5), np.uint8)})


def test_files_of_other_exporters_are_refused(content, path, tmp_path):
    import openvino as library

    library.save_model(library.Core().read_model(path), tmp_path / "net.xml")
    with pytest.raises(WeightsError, match=r"is not of vit export"):
        openvino_session.OpenVINOSession(tmp_path / "net.xml")
