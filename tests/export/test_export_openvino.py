"""OpenVINO's own files compute what the ONNX file does, say the same of themselves, or are not."""

import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from vit.errors import VitError, WeightsError
from vit.export import export_openvino as converting
from vit.export.export_openvino import convert
from vit.export.quantization import quantize
from vit.exported import openvino_session as runtime
from vit.exported.onnx_session import OnnxSession

CPUINFO = Path("/proc/cpuinfo")
OVERFLOWS = (
    platform.machine() == "x86_64" and CPUINFO.exists() and "vnni" not in CPUINFO.read_text()
)

pytestmark = pytest.mark.slow
"""Whether OpenVINO's int8 products overflow here: it has no way to widen them without VNNI."""
needs_vnni = pytest.mark.skipif(OVERFLOWS, reason="this CPU has no VNNI: OpenVINO's int8 overflows")


@pytest.fixture(scope="module")
def whole(graph, noise_of):
    return quantize(graph, list(noise_of(32)))


@pytest.mark.parametrize(
    ("precision", "allowed"), [("fp32", 1e-5), pytest.param("int8", 0.02, marks=needs_vnni)]
)
def test_openvino_and_onnxruntime_give_the_same_outputs(
    graph, whole, noise_of, tmp_path, precision, allowed
):
    content = graph if precision == "fp32" else whole
    (tmp_path / "given.onnx").write_bytes(content)
    out = tmp_path / "net.v1.xml"
    assert convert(tmp_path / "given.onnx", out, images=list(noise_of(8))) < allowed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "given.onnx",
        "net.v1.bin",
        "net.v1.xml",
    ]
    ours, theirs = runtime.OpenVINOSession(out, threads=1), OnnxSession(content)
    assert ours.metadata == theirs.metadata
    assert (ours.inputs, ours.outputs) == (theirs.inputs, theirs.outputs)
    for count in (1, 5, 2):
        images = noise_of(count, seed=count)
        (found,), (wanted,) = ours({"images": images}), theirs({"images": images})
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() < allowed
    if precision == "int8":
        assert out.with_suffix(".bin").stat().st_size < 0.4 * len(graph)


def test_a_graph_that_differs_in_openvino_is_not_written(graph, noise_of, tmp_path, monkeypatch):
    out, images = tmp_path / "net.xml", list(noise_of(2))
    convert(graph, out, images=images)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setitem(converting.TOLERANCES, "fp32", -1.0)
    with pytest.raises(VitError, match=r"^OpenVINO differs from onnxruntime: probabilities by ."):
        convert(graph, out, images=images)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@needs_vnni
def test_weights_of_another_export_are_refused(graph, whole, noise_of, tmp_path):
    for name, content in (("one", graph), ("two", whole)):
        convert(content, tmp_path / f"{name}.xml", images=list(noise_of(2)))
    weights = tmp_path / "one.bin"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(WeightsError, match=r"one\.bin does not belong to .*one\.xml; export both"):
        runtime.OpenVINOSession(tmp_path / "one.xml")
    (tmp_path / "two.bin").replace(weights)
    with pytest.raises(WeightsError, match=r"one\.xml"):
        runtime.OpenVINOSession(tmp_path / "one.xml")
    with pytest.raises(WeightsError, match=r"two\.bin is missing; export both again$"):
        runtime.OpenVINOSession(tmp_path / "two.xml")


def test_a_missing_library_is_named(graph, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(VitError, match=r"^openvino is not installed: pip install 'vit-toolkit\[op"):
        convert(graph, tmp_path / "net.xml")
    assert not [*tmp_path.iterdir()]
