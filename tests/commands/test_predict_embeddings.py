"""--embeddings: the vectors that the predictor gives, in a file that survives a kill."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from vit.data.image_io import read_image
from vit.output.resumable_output import FileLock
from vit.weights.saved_model import load_run

pytestmark = pytest.mark.auto_precision

DIM = 32


@torch.no_grad()
def vector_of(run, image):
    """What the head reads of one image, by hand."""
    loaded = load_run(run)
    pixels = loaded.preprocessing(read_image(image))[None]
    return loaded.model.eval().features(loaded.preprocessing.normalise(pixels))[0].numpy()


@pytest.fixture
def inputs(input_images, bad_images):
    return [bad_images[0], *input_images, *bad_images[1:]]


def test_vectors_survive_a_kill(predict, interrupted, tiny_run, inputs, tmp_path):
    words = (*inputs, "-b", 4, "--format", "csv", "--precision", "fp32")
    whole, cut = (tmp_path / name for name in ("whole", "cut"))
    for folder in (whole, cut):
        folder.mkdir()
    out = ("--out", whole / "a.csv", "--embeddings", whole / "a.npy")
    assert predict(*words, *out)[0] == 1
    out = ("--out", cut / "a.csv", "--embeddings", cut / "a.npy")
    interrupted(*words, *out, block=3)
    assert os.listdir(cut) == ["a.csv.partial"]
    assert predict(*words, *out, "--resume")[0] == 1
    for name in ("a.csv", "a.npy"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(os.listdir(cut)) == ["a.csv", "a.csv.done", "a.npy"]
    expected = [None if "/bad/" in image else vector_of(tiny_run, image) for image in inputs]
    found = np.load(cut / "a.npy")
    assert (found.shape, found.dtype) == ((len(inputs), DIM), np.float32)
    for row, vector in zip(found, expected, strict=True):
        wanted = np.full(DIM, np.nan) if vector is None else vector
        np.testing.assert_allclose(row, wanted, atol=1e-5)


def test_other_vectors_are_replaced_only_when_asked(
    predict, refusal, tiny_run, input_images, tmp_path
):
    (tmp_path / "a.npy").write_text("precious")
    words = (*input_images, "--out", tmp_path / "a.csv", "--embeddings", tmp_path / "a.npy")
    assert "a.npy exists" in refusal("predict", tiny_run, *words)
    assert (tmp_path / "a.npy").read_text() == "precious"
    assert predict(*words, "--overwrite")[0] == 0
    assert np.load(tmp_path / "a.npy").shape == (27, DIM)


def test_several_views_are_averaged(predict, input_images):
    words = (*input_images, "--format", "csv")
    plain, averaged = predict(*words), predict(*words, "--tta", "flip")
    assert plain[0] == averaged[0] == 0
    assert plain[1] != averaged[1]


def test_a_kill_between_the_two_renames_loses_nothing(predict, input_images, tmp_path, monkeypatch):
    files = ("--out", tmp_path / "a.csv", "--embeddings", tmp_path / "a.npy")
    words = (*input_images, "-b", 4, *files)
    replace = Path.replace

    def killed(path, target):
        if target.name == "a.csv":
            raise OSError(5, "killed")
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        assert predict(*words)[0] == 2
    whole = (tmp_path / "a.npy").read_bytes()
    code, _, err = predict(*words, "--resume")
    assert code == 0
    assert "resuming after 27 of 27 images" in err[0]
    assert (tmp_path / "a.npy").read_bytes() == whole
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "a.csv.done", "a.npy"]
    complete = f"vit predict: {tmp_path / 'a.csv'} is complete"
    assert predict(*words, "--resume") == (0, [], [complete])


def test_two_jobs_do_not_write_the_same_vectors(refusal, tiny_run, input_images, tmp_path):
    words = (*input_images, "--out", tmp_path / "b.csv", "--embeddings", tmp_path / "a.npy")
    with FileLock([tmp_path / "a.npy"]) as claim:
        claim.acquire()
        said = refusal("predict", tiny_run, *words)
    assert "a.npy.partial is being written by another process" in said
    assert os.listdir(tmp_path) == []
