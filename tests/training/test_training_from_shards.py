"""Training from tar shards gives the bytes that training from a folder gives, resumed or not."""

import os
import signal

import pytest

from vit.commands.main import main
from vit.stop_signals import Interrupted
from vit.training import training_loop
from vit.training.finetune.feature_extraction import content_key
from vit.training.train import train


def test_training_from_shards_equals_training_from_their_folder(
    tiny_config, colour_data, tmp_path, monkeypatch
):
    shards = str(tmp_path / "shards")
    assert main(["data", str(colour_data), "--to", "shards", "--out", shards]) == 0
    train(tiny_config(), tmp_path / "folder")
    whole = (tmp_path / "folder/model.safetensors").read_bytes()
    steps = []

    real = training_loop.set_lr

    def interrupting(optimizer, lr):
        steps.append(lr)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        real(optimizer, lr)

    monkeypatch.setattr("vit.training.training_loop.set_lr", interrupting)
    with pytest.raises(Interrupted):
        train(tiny_config(data=shards), tmp_path / "parts")
    train(tiny_config(data=shards, workers=2), tmp_path / "parts", resume=True)
    assert (tmp_path / "parts/model.safetensors").read_bytes() == whole


def test_features_of_an_archived_image_equal_those_of_its_file(colour_data, tmp_path):
    shards = tmp_path / "shards"
    assert main(["data", str(colour_data), "--to", "shards", "--out", str(shards)]) == 0
    key = content_key(f"{shards}/val-000000.tar/red/3.png")
    assert key == content_key(str(colour_data / "val/red/3.png"))
    assert isinstance(key, bytes)
    assert "no such member" in str(content_key(f"{shards}/val-000000.tar/red/none.png"))
