"""Vectors come back from the libraries that read the formats, in order, with the failures."""

import os

import numpy as np
import pytest

from vit.errors import ConfigError, WeightsError
from vit.output import embeddings_file


def written(path, vectors, dim):
    """The vectors as rows behind the head of `path`, in blocks of three."""
    with path.with_suffix(".raw").open("wb") as file:
        file.write(embeddings_file.npy_header(path, len(vectors), dim))
        for first in range(0, len(vectors), 3):
            file.write(embeddings_file.encode_rows(vectors[first : first + 3], dim))
    return path.with_suffix(".raw")


@pytest.fixture
def vectors():
    random = np.random.default_rng(0)
    found = [random.normal(size=4).astype(np.float32) for _ in range(8)]
    found[0] = found[5] = None
    return found


def test_npy_is_what_numpy_writes(tmp_path, vectors):
    raw = written(tmp_path / "x.npy", vectors, 4)
    expected = np.stack([np.full(4, np.nan, np.float32) if v is None else v for v in vectors])
    np.save(tmp_path / "expected.npy", expected)
    assert raw.read_bytes() == (tmp_path / "expected.npy").read_bytes()
    np.testing.assert_array_equal(np.load(raw, mmap_mode="r"), expected)


@pytest.mark.parametrize("group", [16, 48, 1 << 20])
def test_parquet_has_image_embedding_and_error(tmp_path, vectors, monkeypatch, group):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(embeddings_file, "GROUP_BYTES", group)
    path = tmp_path / "x.parquet"
    images = [f"{number}.jpg" for number in range(7)] + [os.fsdecode(b"\xff.jpg")]
    raw = written(path, vectors, 4)
    embeddings_file.write_parquet(raw, path, 4, images, iter([(0, "empty"), (5, "cut")]))
    table = parquet.read_table(path)
    assert table.column_names == ["image", "embedding", "error"]
    assert table["image"].to_pylist() == [*images[:7], "\\udcff.jpg"]
    assert table["error"].to_pylist() == ["empty", None, None, None, None, "cut", None, None]
    for found, vector in zip(table["embedding"].to_pylist(), vectors, strict=True):
        assert found == (None if vector is None else vector.tolist())
    assert sorted(os.listdir(tmp_path)) == ["x.parquet", "x.raw"]


def test_a_vector_of_another_width_is_refused():
    with pytest.raises(WeightsError, match="shape"):
        embeddings_file.encode_rows([np.zeros(3)], 4)


def test_the_name_says_the_format():
    embeddings_file.check_embeddings("x.npy")
    with pytest.raises(ConfigError, match=r"\.npy or \.parquet"):
        embeddings_file.check_embeddings("x.csv")
