from vit.weights.model_files import model_files, sha256_of_files


def test_a_model_is_told_by_all_of_its_files(tiny_run, tmp_path):
    names = {path.name for path in model_files(str(tiny_run), "torch")}
    assert names == {"config.json", "model.safetensors"}
    for name in ("a.onnx", "a.onnx.data", "a.decoder.onnx", "b.onnx", "c.xml", "c.bin"):
        (tmp_path / name).write_text(name)
    exported = model_files(str(tmp_path / "a.onnx"), "onnx")
    assert [path.name for path in exported] == ["a.decoder.onnx", "a.onnx", "a.onnx.data"]
    exported_of_openvino = model_files(str(tmp_path / "c.xml"), "openvino")
    assert [path.name for path in exported_of_openvino] == ["c.bin", "c.xml"]
    before = sha256_of_files(exported)
    (tmp_path / "a.onnx.data").write_text("other")
    assert sha256_of_files(exported) != before
