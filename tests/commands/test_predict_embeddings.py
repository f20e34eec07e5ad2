"""--embeddings: the vectors that the predictor gives, in a file that survives a kill."""

import dataclasses
import os

import numpy as np
import pytest

from tests.commands.predicting import end_at
from vit.commands import predict as module
from vit.inference.predictor import Predictor

DIM = 32


def vector_of(image):
    """Some numbers of a name."""
    return np.frombuffer(image.encode()[-DIM:].rjust(DIM), np.uint8).astype(np.float32)


class WithVectors(Predictor):
    """A predictor that gives vectors we know."""

    def stream(self, images, **settings):
        for prediction in super().stream(images, **settings):
            vector = None if prediction.error else vector_of(prediction.image)
            yield dataclasses.replace(prediction, embedding=vector)


@pytest.fixture
def inputs(pictures, bad_pictures):
    return [bad_pictures[0], *pictures, *bad_pictures[1:]]


@pytest.fixture
def known(monkeypatch, tiny_run):
    monkeypatch.setattr(
        module, "opened", lambda args, *_: WithVectors(tiny_run, batch_size=args.batch_size)
    )


@pytest.mark.parametrize("ending", ["npy", "parquet"])
def test_vectors_survive_a_kill(predict, known, inputs, tmp_path, monkeypatch, ending):
    words = (*inputs, "-b", 4, "--format", "csv")
    whole, cut = (tmp_path / name for name in ("whole", "cut"))
    for folder in (whole, cut):
        folder.mkdir()
    out = ("--out", whole / "a.csv", "--embeddings", whole / f"a.{ending}")
    assert predict(*words, *out)[0] == 1
    out = ("--out", cut / "a.csv", "--embeddings", cut / f"a.{ending}")
    with monkeypatch.context() as patch:
        end_at(3, "fail", patch.setattr)
        assert predict(*words, *out)[0] == 2
    assert f"a.{ending}.partial" in os.listdir(cut)
    assert predict(*words, *out, "--resume")[0] == 1
    for name in ("a.csv", f"a.{ending}"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(os.listdir(cut)) == sorted(["a.csv", f"a.{ending}"])
    expected = [None if "/bad/" in image else vector_of(image) for image in inputs]
    if ending == "npy":
        found = np.load(cut / "a.npy")
        assert (found.shape, found.dtype) == ((len(inputs), DIM), np.float32)
        for row, vector in zip(found, expected, strict=True):
            np.testing.assert_array_equal(row, np.full(DIM, np.nan) if vector is None else vector)
    else:
        table = pytest.importorskip("pyarrow.parquet").read_table(cut / "a.parquet").to_pylist()
        assert [row["image"] for row in table] == inputs
        for row, vector in zip(table, expected, strict=True):
            assert row["embedding"] == (None if vector is None else vector.tolist())
            assert (row["error"] is None) == (vector is not None)


def test_other_vectors_are_replaced_only_when_asked(predict, known, pictures, tmp_path):
    (tmp_path / "a.npy").write_text("precious")
    words = (*pictures, "--out", tmp_path / "a.csv", "--embeddings", tmp_path / "a.npy")
    code, _, err = predict(*words)
    assert (code, len(err)) == (2, 1)
    assert "a.npy exists" in err[0]
    assert (tmp_path / "a.npy").read_text() == "precious"
    assert predict(*words, "--overwrite")[0] == 0
    assert np.load(tmp_path / "a.npy").shape == (27, DIM)
