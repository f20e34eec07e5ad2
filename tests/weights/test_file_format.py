"""Files of other formats are named, whatever their names are."""

import os
import zipfile
from pathlib import Path

import pytest

from tests.weights.test_state_dict_readers import refusal
from vit.errors import WeightsError
from vit.weights.state_dict_readers import read_npz, read_state

ONNX = b"\x08\x08\x12\x07pytorch\x1a\x052.8.0:\x04\x0a\x02\x12\x00"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 346284714\n"


@pytest.mark.parametrize("name", ["w.pth", "model.safetensors", "w.npz"])
@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(20), "an image"),
        (b"\xff\xd8\xff\xe0" + bytes(20), "an image"),
        (ONNX, "ONNX"),
        (LFS, "git lfs pull"),
        (b"<!DOCTYPE html>\n<html><title>403</title>", "web page"),
        (b'{"error": "Repository not found"}', "JSON"),
        ("Erreur: réseau\n".encode() * 100, "text"),
        (b"\x89HDF\r\n\x1a\n" + bytes(20), "HDF5"),
        (b"GGUF" + bytes(20), "GGUF"),
        (b"\x1f\x8b\x08" + bytes(20), "gzip"),
        (bytes(257) + b"ustar" + bytes(100), "tar archive"),
    ],
)
def test_foreign_file_formats_are_named(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    assert word in refusal(tmp_path / name)


def test_random_bytes_are_an_unknown_format(tmp_path):
    (tmp_path / "w.pth").write_bytes(bytes((i * 73 + 11) % 256 for i in range(4096)))
    assert "nothing known here (4,096 bytes)" in refusal(tmp_path / "w.pth")


def test_another_zip_is_no_weights(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        archive.writestr("cats/1.jpg", b"x")
    assert "zip archive" in refusal(tmp_path / "w.zip")
    refusal(tmp_path / "w.zip", read_npz)


def test_a_path_that_is_no_file(tmp_path):
    assert "is a folder" in refusal(tmp_path)
    assert "is missing" in refusal(tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_state(Path("a\0b"))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.pth")  # opening it would wait for ever
        assert "no regular file" in refusal(tmp_path / "pipe.pth")
