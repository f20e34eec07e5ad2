"""--engine: what computes which model, and what is refused by name."""

import pytest

from vit.errors import ConfigError
from vit.exported.engine import select_engine
from vit.inference.predictor import model_files
from vit.paths import sha256_of_files


@pytest.mark.parametrize(
    ("model", "asked", "engine"),
    [
        ("runs/a", None, "torch"),
        ("timm/vit_tiny_patch16_224", None, "torch"),
        ("a.safetensors", "torch", "torch"),
        ("a.onnx", None, "onnx"),
        ("a.ONNX", "openvino", "openvino"),
        ("a.xml", None, "openvino"),
        ("runs/a", "ray", "ray"),
        ("a.onnx", "ray", "ray"),
    ],
)
def test_the_ending_decides_where_nobody_does(model, asked, engine):
    assert select_engine(model, asked) == engine


@pytest.mark.parametrize(
    ("model", "asked", "reason"),
    [
        ("runs/a b", "onnx", r"vit export 'runs/a b' --out model\.onnx"),
        ("runs/a", "openvino", r"vit export runs/a --out model\.xml"),
        ("a.onnx", "torch", "take --engine onnx or openvino or ray, or give the run"),
        ("a.xml", "onnx", "take --engine openvino or ray, or give the run"),
    ],
)
def test_what_an_engine_cannot_compute_has_a_remedy(model, asked, reason):
    with pytest.raises(ConfigError, match=reason):
        select_engine(model, asked)


def test_a_model_is_told_by_all_of_its_files(tiny_run, tmp_path):
    names = {path.name for path in model_files(str(tiny_run))}
    assert names == {"config.json", "model.safetensors"}
    for name in ("a.onnx", "a.onnx.data", "a.decoder.onnx", "b.onnx", "c.xml", "c.bin"):
        (tmp_path / name).write_text(name)
    exported = model_files(str(tmp_path / "a.onnx"))
    assert [path.name for path in exported] == ["a.decoder.onnx", "a.onnx", "a.onnx.data"]
    exported_of_openvino = model_files(str(tmp_path / "c.xml"))
    assert [path.name for path in exported_of_openvino] == ["c.bin", "c.xml"]
    before = sha256_of_files(exported)
    (tmp_path / "a.onnx.data").write_text("other")
    assert sha256_of_files(exported) != before
