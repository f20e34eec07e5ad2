"""A run that an earlier version began is resumed by this one to the same tensors.

old_run/ was made by the code of commit 439d724 from `write_images` and `SETTINGS`:

    started/    its run folder, stopped after the first of three epochs
    finished/   what the same code reached from there: model.safetensors, and the last checkpoint
    made_on.json  the machine, on which the tensors must be equal to the bit
"""

import dataclasses
import json
import platform
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.training.runs import SHORT
from vit.config.setting_layers import make_config, read_settings
from vit.config.stored_config import stored_config
from vit.errors import ConfigError
from vit.training.train import train
from vit.weights.safetensors_io import read_tensors

OLD_RUN = Path(__file__).parent / "old_run"
LAST_CHECKPOINT = "step-00000012.safetensors"
SETTINGS = {
    "data": "images",
    "image_size": 16,
    "patch_size": 4,
    "dim": 16,
    "depth": 1,
    "num_heads": 2,
    "qkv_bias": False,  # the gradient of a key's bias is rounding alone, which AdamW normalises
    "dropout": 0.1,
    "epochs": 3,
    "batch_size": 6,
    "accumulate": 1,
    "lr": 3e-3,
    "warmup_epochs": 1,
    "mixup": 0.2,
    "cutmix": 1.0,
    "ema": 0.9,
    "precision": "fp32",
    "device": "cpu",
    "workers": 0,
}


def write_images(root: Path) -> None:
    """train/ and val/ with two classes of 16 x 16 pixels: dark or bright, plus fixed noise."""
    random = np.random.RandomState(0)  # whose numbers NumPy never changes
    for split, count in (("train", 12), ("val", 6)):
        for name, level in (("bright", 150), ("dark", 100)):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = level + random.randint(-90, 90, size=(16, 16, 3))
                path = root / split / name / f"{number}.png"
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)


def machine() -> dict[str, str | int]:
    """What the last bit of a float32 sum depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = ("cpu family", "model\t", "model name")
    return {
        "processor": ", ".join(sorted({line for line in lines if line.startswith(names)}))
        or platform.processor(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


def test_a_run_of_an_earlier_version_resumes_to_the_same_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images")
    shutil.copytree(OLD_RUN / "started", tmp_path / "run")
    result = train(make_config(SETTINGS), "run", resume=True, report=False)
    assert result.epoch == 3  # model.safetensors is one that the resumed epochs made

    tolerance = 0.0 if json.loads((OLD_RUN / "made_on.json").read_text()) == machine() else 1e-6
    for found, expected in (
        (tmp_path / "run/model.safetensors", OLD_RUN / "finished/model.safetensors"),
        (tmp_path / "run/checkpoints" / LAST_CHECKPOINT, OLD_RUN / "finished" / LAST_CHECKPOINT),
    ):
        tensors, _ = read_tensors(found)
        kept, _ = read_tensors(expected)
        assert tensors.keys() == kept.keys()
        assert kept
        for name, tensor in kept.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=tolerance, atol=tolerance)


def test_a_run_of_a_version_that_accepted_settings_without_effect_is_read(tmp_path):
    file = tmp_path / "config.yaml"
    unread = {"mix_probability": 0.5, "randaugment_layers": 3, "crop_ratio": 2.0, "min_crop": 1.0}
    file.write_text("".join(f"{name}: {value}\n" for name, value in unread.items()))
    assert stored_config(tmp_path) == make_config({"min_crop": 1.0})
    with file.open("a") as lines:
        lines.write("mixup: 0.2\nauto_augment: randaugment\n")
    read = stored_config(tmp_path).augment
    assert (read.mix_probability, read.randaugment_layers, read.crop_ratio) == (0.5, 3, 4 / 3)


def test_a_run_of_a_version_with_other_defaults_is_read_and_resumed(tiny_config, tmp_path):
    """config.yaml has settings of all tasks; a version may change those that a run never read."""
    folder = tmp_path / "run"
    config = tiny_config(**SHORT)
    train(config, folder, report=False)
    file = folder / "config.yaml"
    text = file.read_text()
    others = {"local_views": 4, "mask_ratio": 0.6, "decoder_depth": 3, "balance_loss": 0.02}
    for name, value in others.items():
        text, count = re.subn(rf"^{name}: .*$", f"{name}: {value}", text, flags=re.MULTILINE)
        assert count == 1
    file.write_text(text)
    with pytest.raises(ConfigError, match="does not read it"):
        make_config(read_settings(file))  # which somebody may have chosen
    assert stored_config(folder) == dataclasses.replace(config, model=stored_config(folder).model)
    assert train(out=folder, resume=True, report=False).epoch == 1
    # what the run did read is not the default
    file.write_text(re.sub(r"^lr: .*$", "lr: 0.123", text, flags=re.MULTILINE))
    assert stored_config(folder).training.lr == 0.123
