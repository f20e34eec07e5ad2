"""Vectors come back from the libraries that read the formats, in order, with the failures."""

import os

import numpy as np
import pytest

from vit.errors import ConfigError, WeightsError
from vit.output import embeddings_file
from vit.output.resumable_output import Block

SIZE, DIM = 3, 4


@pytest.fixture
def vectors():
    random = np.random.default_rng(0)
    found = [random.normal(size=DIM).astype(np.float32) for _ in range(8)]
    found[0] = found[5] = None
    return found


@pytest.fixture
def blocks(vectors):
    errors = {0: [(0, "empty")], 3: [(2, "cut")]}
    return [
        Block(
            first,
            len(vectors[first : first + SIZE]),
            b"",
            embeddings_file.encode_vectors(vectors[first : first + SIZE], DIM),
            errors.get(first, []),
        )
        for first in range(0, len(vectors), SIZE)
    ]


def test_npy_is_what_numpy_writes(tmp_path, vectors, blocks):
    embeddings_file.write_embeddings(tmp_path / "x.npy", blocks, ["image"] * 8, DIM)
    expected = np.stack([np.full(4, np.nan, np.float32) if v is None else v for v in vectors])
    np.save(tmp_path / "expected.npy", expected)
    assert (tmp_path / "x.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy", mmap_mode="r"), expected)


@pytest.mark.parametrize("group", [16, 80, 1 << 20])
def test_parquet_has_image_embedding_and_error(tmp_path, vectors, blocks, monkeypatch, group):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(embeddings_file, "GROUP_BYTES", group)
    path = tmp_path / "x.parquet"
    images = [f"{number}.jpg" for number in range(7)] + [os.fsdecode(b"\xff.jpg")]
    embeddings_file.write_embeddings(path, blocks, images, DIM)
    table = parquet.read_table(path)
    assert table.column_names == ["image", "embedding", "error"]
    assert table["image"].to_pylist() == [*images[:7], "\\udcff.jpg"]
    assert table["error"].to_pylist() == ["empty", None, None, None, None, "cut", None, None]
    for found, vector in zip(table["embedding"].to_pylist(), vectors, strict=True):
        assert found == (None if vector is None else vector.tolist())
    assert os.listdir(tmp_path) == ["x.parquet"]


def test_a_vector_of_another_width_is_refused():
    with pytest.raises(WeightsError, match="shape"):
        embeddings_file.encode_vectors([np.zeros(3)], DIM)


def test_the_name_says_the_format():
    embeddings_file.check_embeddings("x.npy")
    with pytest.raises(ConfigError, match=r"\.npy or \.parquet"):
        embeddings_file.check_embeddings("x.csv")
