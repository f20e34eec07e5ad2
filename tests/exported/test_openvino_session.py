"""OpenVINOSession against OnnxSession, and its precision."""

import numpy as np
import pytest

from tests.exported.graphs import METADATA, written
from vit.errors import WeightsError
from vit.exported import openvino_session
from vit.exported.onnx_session import OnnxSession


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    odd = {"classes": '["plüm", "a\\nb", "<&>", "d"]'}
    return written(tmp_path_factory.mktemp("openvino") / "net.onnx", METADATA | odd)


@pytest.fixture(scope="module")
def content(path):
    return path.read_bytes()


def pixels(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, 2, 3, 3), dtype=np.uint8)


def test_outputs_and_metadata_equal_those_of_onnxruntime(content, path):
    theirs = OnnxSession(content)
    for source in (content, path, str(path)):
        ours = openvino_session.OpenVINOSession(source, threads=1)
        assert (ours.inputs, ours.outputs) == (theirs.inputs, theirs.outputs)
        assert ours.metadata == theirs.metadata
        for rows in (3, 1, 8):
            images = {"images": pixels(rows)}
            for found, wanted in zip(ours(images), theirs(images), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5)
                assert found.dtype == wanted.dtype


def test_outputs_are_copies_that_a_later_run_does_not_overwrite(content):
    session = openvino_session.OpenVINOSession(content)
    first, _ = session({"images": pixels(2)})
    kept = first.copy()
    session({"images": pixels(2, seed=1)})
    np.testing.assert_array_equal(first, kept)


def test_outputs_that_never_settle_are_an_error(content, monkeypatch):
    session = openvino_session.OpenVINOSession(content)
    random = np.random.default_rng(0)
    monkeypatch.setattr(session, "_infer", lambda _values: [random.random((2, 4))])
    with pytest.raises(WeightsError, match="other outputs each time"):
        session({"images": pixels(2)})


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
