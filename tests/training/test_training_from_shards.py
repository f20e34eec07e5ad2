"""Training from tar shards gives the bytes that training from a folder gives, resumed or not."""

import pytest

from tests.training.runs import equal_models, signalled_at
from vit.commands.main import main
from vit.training.finetune.feature_extraction import content_key
from vit.training.train import train


@pytest.mark.slow
def test_training_from_shards_equals_training_from_their_folder(tiny_config, colour_data, tmp_path):
    shards = str(tmp_path / "shards")
    assert main(["data", str(colour_data), "--to", "shards", "--out", shards]) == 0
    train(tiny_config(), tmp_path / "folder")
    with signalled_at(5):
        train(tiny_config(data=shards), tmp_path / "parts")
    train(tiny_config(data=shards, workers=2), tmp_path / "parts", resume=True)
    assert equal_models(tmp_path / "folder", tmp_path / "parts")


def test_features_of_an_archived_image_equal_those_of_its_file(colour_data, tmp_path):
    shards = tmp_path / "shards"
    assert main(["data", str(colour_data), "--to", "shards", "--out", str(shards)]) == 0
    key = content_key(f"{shards}/val-000000.tar/red/3.png")
    assert key == content_key(str(colour_data / "val/red/3.png"))
    assert isinstance(key, bytes)
    assert "no such member" in str(content_key(f"{shards}/val-000000.tar/red/none.png"))
