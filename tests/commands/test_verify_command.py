"""`vit verify` says whether a file is the network of its run, and answers with its exit code."""

import dataclasses
import json

import onnx
import pytest
from PIL import Image

from tests.inference.captioners import save_captioner
from vit.config import Config
from vit.export.export_formats import export_onnx
from vit.export.sample_images import scene
from vit.weights.saved_model import load_run, save_model


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    paths = [str(folder / f"{number}.png") for number in range(8)]
    for number, path in enumerate(paths):
        Image.fromarray(scene(*[(40, 31), (24, 50), (33, 33)][number % 3], number)).save(path)
    return paths


@pytest.fixture(scope="module")
def exported(tiny_run, tmp_path_factory, traced_once):
    """The tiny run as a file."""
    path = tmp_path_factory.mktemp("exported") / "fruit.onnx"
    export_onnx(tiny_run, path)
    return path


def test_a_run_and_its_exported_file_agree(vit, exported, images, tmp_path):
    code, out, err = vit("verify", exported, *images, "--json", tmp_path / "a.json")
    assert (code, err) == (0, [])
    assert out[0] == "images      8"
    assert out[1].startswith("by hand     the saved preprocessing and the network")
    assert out[3].startswith("fruit.onnx  same answer 100.00% (at least 99.5%), largest difference")
    assert out[-1] == "all agree"
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["images"], record["top1_agreement"], len(record["paths"])) == (8, 1.0, 3)
    assert record["max_probability_difference"] <= 0.02


def test_an_altered_file_gives_exit_code_1(vit, refusal, tiny_run, exported, images, tmp_path):
    """The file computes as the tiny run does, and has the metadata of another run."""
    other = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    loaded = load_run(tiny_run)
    wanted = dataclasses.replace(loaded.preprocessing, **other)
    config = Config(model=loaded.config)
    run = tmp_path / "run"
    run.mkdir()
    save_model(run, loaded.model, config=config, classes=loaded.classes, preprocessing=wanted)
    graph = onnx.load(exported)
    said = {"preprocessing": json.dumps(wanted.to_dict()), "source_run": "gone"}
    for entry in graph.metadata_props:
        entry.value = said.get(entry.key, entry.value)
    onnx.save(graph, tmp_path / "a.onnx")
    code, out, (first,) = vit("verify", tmp_path / "a.onnx", "--run", run, *images)
    assert (code, out[-1]) == (1, "they do not agree")
    assert first.startswith("vit verify: a.onnx is not the network of the run: another answer for")
    assert first.endswith(".png")
    said = refusal("verify", tmp_path / "a.onnx", *images)
    assert "was exported from gone, which is not here; give the run with --run RUN" in said


@pytest.mark.parametrize("name", ["tiny_run", "speaking"])
def test_a_run_without_a_file_is_compared_with_the_predictor(vit, request, images, name):
    code, out, err = vit("verify", request.getfixturevalue(name), *images)
    assert (code, len(out), err) == (0, 4, [])
    assert out[2].startswith("predictor  same answer 100.00%")


@pytest.mark.slow
def test_a_captioner_and_its_two_files_agree(vit, speaking, images, tmp_path):
    path = tmp_path / "pets.onnx"
    export_onnx(speaking, path)
    code, out, err = vit("verify", path, *images)
    assert (code, err) == (0, [])
    assert out[3].startswith("pets.onnx  same answer 100.00%")
    other = save_captioner(tmp_path / "other", classes=("apple", "class10", "class2"), depth=1)
    code, _, err = vit("verify", path, "--run", other, *images)
    assert code == 1
    assert "pets.onnx is not the network of the run" in err[0]


def test_unreadable_images_are_named_and_give_exit_code_1(
    vit, tiny_run, images, bad_images, tmp_path
):
    words = (tiny_run, *images, *bad_images[:2], "--json", tmp_path / "a.json")
    code, out, err = vit("verify", *words)
    assert (code, out[-1]) == (1, f"{len(images)} agree, and 2 could not be compared")
    assert err == [
        f"vit verify: {bad_images[0]}: an empty file (0 bytes)",
        f"vit verify: {bad_images[1]}: not a readable image (text)",
    ]
    assert len(json.loads((tmp_path / "a.json").read_text())["failed"]) == 2


def test_images_are_drawn_if_the_run_has_no_validation_images(vit, tiny_run, monkeypatch):
    monkeypatch.setattr("vit.export.sample_images.SIZES", ((20, 30), (40, 20)))
    code, out, (note,) = vit("verify", tiny_run)
    assert (code, out[0]) == (0, "images     2")
    assert note.endswith("drew 2 of many sizes")
