"""A model for Triton is what its public schema, and its rules about shapes and names, ask for."""

import dataclasses
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from google.protobuf import text_format

from tests.exported.test_onnx_classifier import NAMES, written
from tests.inference.captioners import save_captioner
from vit.commands.main import main
from vit.config.inference_config import ExportOptions
from vit.errors import ConfigError, RunError
from vit.export import export_formats, export_triton
from vit.export.export_formats import export_model
from vit.export.export_options import Exported
from vit.export.export_triton import check_repository_folder, model_config
from vit.exported.onnx_session import OnnxSession
from vit.weights.saved_model import load_run


@pytest.fixture(scope="module")
def schema():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its generated code may be older than protobuf
        return pytest.importorskip("tritonclient.grpc.model_config_pb2")


def parsed(schema, text):
    return text_format.Parse(text, schema.ModelConfig())


def check_repository(schema, folder, outputs):
    """The files of a model agree with each other and with the rules of Triton."""
    assert sorted(path.name for path in folder.rglob("*")) == [
        *("1", "config.pbtxt", "labels.txt", "model.onnx"),
    ]
    session = OnnxSession(folder / "1" / "model.onnx")
    classes = (folder / "labels.txt").read_text(encoding="utf-8").splitlines()
    config = parsed(schema, (folder / "config.pbtxt").read_text(encoding="utf-8"))
    assert (config.name, config.backend) == (folder.name, "onnxruntime")
    (images,) = config.input
    assert (images.name, images.data_type) == ("images", schema.TYPE_UINT8)
    assert [*images.dims] == [-1, -1, 3]
    assert [one.name for one in config.output] == session.outputs == outputs
    assert {one.data_type for one in config.output} == {schema.TYPE_FP32}
    assert [*config.output[0].dims] == [len(classes)]
    assert config.output[0].label_filename == "labels.txt"
    assert config.HasField("dynamic_batching")
    ((name, blank),) = config.model_warmup[0].inputs.items()
    assert (name, blank.data_type) == ("images", schema.TYPE_UINT8)
    assert blank.zero_data
    # Triton puts images of one size into a batch of up to max_batch_size
    batch = np.zeros((config.max_batch_size, *blank.dims), np.uint8)
    assert session({"images": batch})[0].shape == (len(batch), len(classes))
    return config, classes


def test_a_repository_has_the_graph_its_tensors_and_the_labels(
    schema, tiny_run, tmp_path, monkeypatch
):
    @contextmanager
    def file_of_fruit(job):
        yield written(job.path.with_name("staged.onnx")), Exported((), 0.0)

    monkeypatch.setattr(export_triton, "classifier_file", file_of_fruit)
    run = dataclasses.replace(load_run(tiny_run), classes=(*NAMES[:3], "two\nlines"))
    monkeypatch.setattr(export_formats, "load_model", lambda *_, **__: run)
    folder = tmp_path / "new" / "repository" / "fruit-2.1"
    exported = export_formats.export(tiny_run, folder, to="triton")
    assert [(path, path.stat().st_size) for path, _ in exported.files] == [*exported.files]
    assert exported.files[0][0] == folder / "1" / "model.onnx"
    _, classes = check_repository(schema, folder, ["probabilities", "embedding"])
    assert classes == [*NAMES[:3], "two\\nlines"]


@pytest.mark.slow
def test_an_exported_repository_agrees_with_its_run(schema, distance_run, tmp_path, traced_once):
    folder = tmp_path / "distances"
    report = export_model(distance_run, folder, to="triton", notify=None)
    assert report.agrees
    assert report.verification.images > 0
    config, classes = check_repository(schema, folder, ["probabilities", "distance"])
    assert classes == [*load_run(distance_run).classes]
    distance = config.output[1]
    assert [*distance.dims] == [1]
    assert distance.HasField("reshape")
    assert not distance.reshape.shape


# inputs and outputs of a graph with tokens
WITH_TOKENS = SimpleNamespace(
    inputs=("images",),
    outputs=("probabilities", "tokens", "attention"),
    signature={
        "images": ("tensor(uint8)", ("batch", "height", "width", 3)),
        "probabilities": ("tensor(float)", ("batch", 3)),
        "tokens": ("tensor(float)", ("batch", "tokens", 32)),
        "attention": ("tensor(float)", ("batch", 2, 17)),
    },
)


def test_axes_without_a_fixed_size_are_minus_one(schema):
    config = parsed(schema, model_config("a", WITH_TOKENS, (16, 20)))
    assert [[*one.dims] for one in config.output] == [[3], [-1, 32], [2, 17]]
    assert [*config.model_warmup[0].inputs["images"].dims] == [16, 20, 3]


@pytest.mark.parametrize("name", ["photos.onnx", "a b", "a/", "..", "ä", "a\n", "-"])
def test_a_folder_that_is_no_name_of_a_model_is_refused(tmp_path, name):
    if name == "a/":
        check_repository_folder(tmp_path / name, ExportOptions(), False)
        return
    with pytest.raises(ConfigError, match="REPOSITORY/NAME"):
        check_repository_folder(tmp_path / name, ExportOptions(), False)


def test_other_folders_are_not_overwritten(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.pbtxt").write_text("")
    for name, words in {"file": "no folder", "other": "other files"}.items():
        with pytest.raises(RunError, match=words):
            check_repository_folder(tmp_path / name, ExportOptions(), True)
    with pytest.raises(RunError, match="--overwrite"):
        check_repository_folder(tmp_path / "model", ExportOptions(), False)
    check_repository_folder(tmp_path / "model", ExportOptions(), True)


def test_a_refused_export_leaves_no_folder(tiny_run, tiny_data, tmp_path, capsys):
    words = ["export", str(tiny_run), "--to", "triton", "--out", str(tmp_path / "new" / "m")]
    captioner = save_captioner(tmp_path / "captioner")
    assert main(["export", str(captioner), *words[2:]]) == 2
    assert "writes captions, and becomes onnx alone" in capsys.readouterr().err
    assert main([*words, "--validation", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "new").exists()
