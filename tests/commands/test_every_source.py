"""Every command that takes a model takes every source of weights."""

import json
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from timm.models import save_for_hf
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from vit.commands.main import main

CLASSES = ("apple", "class10", "class2")
ARGS = {"img_size": 32, "patch_size": 16, "embed_dim": 64, "depth": 2, "num_heads": 1}
COMMIT = "0" * 40


@pytest.fixture(scope="module")
def sources(tiny_run, tmp_path_factory) -> dict[str, str]:
    """Weights with random values, as each library writes them, by kind."""
    root = tmp_path_factory.mktemp("sources")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = timm.create_model("vit_tiny_patch16_224", num_classes=3, **ARGS)
        torch.nn.init.normal_(theirs.head.weight)
        theirs.pretrained_cfg["input_size"] = (3, 32, 32)
        known = {"label_names": list(CLASSES)}
        save_for_hf(theirs, root / "timm", model_config=known, model_args=ARGS)
        names = dict(enumerate(CLASSES))
        config = ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=32,
            patch_size=16,
            layer_norm_eps=1e-6,  # timm has no other
            id2label=names,
            label2id={name: number for number, name in names.items()},
        )
        network = ViTForImageClassification(config)
        torch.nn.init.normal_(network.classifier.weight)
    save_file(theirs.state_dict(), root / "bare.safetensors")
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    snapshot = root / "hub" / "models--o--n" / "snapshots" / COMMIT
    for folder in (root / "hf", snapshot):
        network.save_pretrained(folder)
        processor.save_pretrained(folder)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    return {
        "run": str(tiny_run),
        "timm": str(root / "timm"),
        "huggingface": str(root / "hf"),
        "hub": "hf/o/n",
        "file": str(root / "bare.safetensors"),
        "cache": str(root / "hub"),
    }


COMMANDS = {
    "predict": ["predict", "MODEL", "IMAGE", "--format", "jsonl", "--precision", "fp32"],
    "evaluate": ["evaluate", "MODEL", "DATA", "--precision", "fp32"],
    "export": ["export", "MODEL", "--out", "OUT.onnx"],
    "verify": ["verify", "MODEL", "IMAGE"],
    "convert": ["convert", "MODEL", "--to", "timm", "--out", "OUT"],
    "summary": ["summary", "MODEL"],
    "train": ["train", "DATA", "--weights", "MODEL", "--out", "OUT", "--method", "probe"],
    "check": ["check", "DATA", "--weights", "MODEL", "--json", "OUT.json"],
}


# These take seconds, or a second each: two sources are enough for the next edit.
QUICK_SOURCES = {"export": (), "train": ("run", "timm"), "check": ("run", "timm")}
EVERY = [
    pytest.param(
        command,
        source,
        marks=[] if source in QUICK_SOURCES.get(command, (source,)) else [pytest.mark.slow],
        id=f"{command}-{source}",
    )
    for command in COMMANDS
    for source in ("run", "timm", "huggingface", "hub", "file")
    # a bare file has no names of classes to compare with those of the data
    if (command, source) != ("evaluate", "file")
]


@pytest.mark.auto_precision
@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("command", "source"), EVERY)
def test_every_command_accepts_every_source_of_weights(
    command, source, sources, tiny_data, tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", sources["cache"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    train = tmp_path / "data"
    train.mkdir()
    for split in ("train", "val"):
        (train / split).symlink_to(tiny_data / "val")
    words = {
        "MODEL": sources[source],
        "IMAGE": str(tiny_data / "val" / "apple" / "0.png"),
        "DATA": str(train if command in ("train", "check") else tiny_data),
    }
    given = [words.get(word, word) for word in COMMANDS[command]]
    code = main(given + (["--feature-cache", "features"] if command == "train" else []))
    said = capfd.readouterr()
    assert code == 0, said.err
    if command == "predict":
        assert len(json.loads(said.out)["predictions"]) == 3
    if command == "export":
        assert "all agree" in said.err
        assert main(["verify", "OUT.onnx", words["IMAGE"]]) == 0  # by the source that it names
        assert main(["verify", "OUT.onnx", words["IMAGE"], "--run", words["MODEL"]]) == 0
    if command == "check":
        # of networks that have learned nothing: their suspicions would mean nothing
        assert "weak_features" in json.loads(Path("OUT.json").read_text())["kinds"]
    if command == "convert":
        assert Path("OUT/model.safetensors").is_file()


def test_a_hub_name_is_not_taken_for_an_exported_file(capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["verify", "hf/o/nothing-of-this-name"]) == 2
    assert "exported" not in capsys.readouterr().err
