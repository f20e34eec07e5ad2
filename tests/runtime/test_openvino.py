"""OpenVINO behind the same door as onnxruntime, in the precision that was asked for."""

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vit.errors import ConfigError, WeightsError
from vit.exported import openvino_session
from vit.exported.onnx_session import Session


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


def test_it_is_onnxruntimes_session(content, path):
    theirs = Session(content)
    for source in (content, path, str(path)):
        ours = openvino_session.Session(source, threads=1)
        assert (ours.inputs, ours.outputs) == (theirs.inputs, theirs.outputs)
        assert ours.metadata == theirs.metadata
        for rows in (3, 1, 8):
            images = np.random.default_rng(rows).integers(0, 256, (rows, 6), dtype=np.uint8)
            answers = zip(ours({"images": images}), theirs({"images": images}), strict=True)
            for found, wanted in answers:
                np.testing.assert_allclose(found, wanted, rtol=1e-5)
                assert found.dtype == wanted.dtype
    assert ours.declared == {
        "images": ("tensor(uint8)", (None, 6)),
        "probabilities": ("tensor(float)", (None, 4)),
        "best": ("tensor(float)", (None,)),
    }


def test_an_answer_stays_when_the_next_one_is_computed(content):
    session = openvino_session.Session(content)
    first, _ = session({"images": np.full((2, 6), 7, np.uint8)})
    kept = first.copy()
    session({"images": np.eye(2, 6, dtype=np.uint8) * 200})
    np.testing.assert_array_equal(first, kept)


def test_bf16_is_taken_when_told_and_never_else(content):
    """OpenVINO itself takes bf16 where the CPU knows it."""
    import openvino as library

    def hint(**settings):
        compiled = openvino_session.Session(content, **settings)._request.get_compiled_model()
        return compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()

    assert hint() == "f32"
    if "BF16" in library.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        assert hint(precision="bf16") == "bf16"
    else:
        with pytest.raises(ConfigError, match=r"^precision='bf16': CPU has no bf16 here"):
            hint(precision="bf16")


def test_what_cannot_be_opened_is_refused(content, tmp_path):
    with pytest.raises(ConfigError, match=r"^precision='int4': choose one of fp32, bf16$"):
        openvino_session.Session(content, precision="int4")
    with pytest.raises(ConfigError, match=r"^threads=0: must be at least 1$"):
        openvino_session.Session(content, threads=0)
    with pytest.raises(ConfigError, match=r"^provider='TPU': OpenVINO has .*CPU.* here"):
        openvino_session.Session(content, ["TPU"])
    with pytest.raises(WeightsError, match=r"no\.onnx is missing"):
        openvino_session.Session(tmp_path / "no.onnx")
    (tmp_path / "noise.bin").write_bytes(b"noise")
    for name in ("noise.onnx", "noise.xml"):
        (tmp_path / name).write_bytes(b"\x00\x01 noise" * 99)
        with pytest.raises(WeightsError, match=name):
            openvino_session.Session(tmp_path / name)
    with pytest.raises(WeightsError, match=r"^OpenVINO cannot compute it"):
        openvino_session.Session(content)({"images": np.zeros((2, 5), np.uint8)})


def test_only_files_of_vit_export_are_opened(content, path, tmp_path):
    import openvino as library

    library.save_model(library.Core().read_model(path), tmp_path / "net.xml")
    with pytest.raises(WeightsError, match=r"is not of vit export"):
        openvino_session.Session(tmp_path / "net.xml")


def test_torch_is_not_loaded(path):
    code = (
        "import sys; from vit.exported.openvino_session import Session; Session(sys.argv[1]);"
        "sys.exit(bool({'torch', 'onnx', 'onnxruntime'} & set(sys.modules)))"
    )
    words = [sys.executable, "-W", "error", "-c", code, str(path)]
    places = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    said = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": places}
    )
    assert (said.returncode, said.stderr) == (0, "")
