"""Tiny captioners with random weights that say different things of different images."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vit.config import Config, DecoderConfig, ModelConfig, TrainingConfig
from vit.data.captions.tokenizer import train_tokenizer
from vit.data.preprocessing import Preprocessing
from vit.model.build import build_captioner
from vit.weights.saved_model import save_model

SAID = ("a red cat", "a blue dog", "une tasse de café", "猫の写真", "a cat on a blue table")


def save_captioner(folder: Path, *, classes: Sequence[str] = (), **settings: Any) -> Path:
    """A run folder of an untrained captioner; with `classes`, it has a head for them."""
    head = {"num_classes": len(classes)} if classes else {"num_classes": 0, "pooling": "none"}
    small = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 2}
    model = ModelConfig(**{**small, **head, **settings})
    tokenizer = train_tokenizer(SAID * 2, vocab_size=None)
    decoder = DecoderConfig(decoder_depth=2, vocab_size=tokenizer.size, caption_tokens=10)
    with torch.random.fork_rng():
        network = build_captioner(model, decoder).eval()
        torch.manual_seed(2)  # after that: versions of torch draw other numbers for a new network
        for name, parameter in network.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.6 if "decoder" in name else 0.3)
        network.decoder.token_embed.weight.data[tokenizer.end] *= 2
    folder.mkdir(parents=True, exist_ok=True)
    save_model(
        folder,
        network,
        config=Config(
            training=TrainingConfig(task="classify,caption" if classes else "caption"),
            model=model,
            decoder=decoder,
        ),
        classes=classes,
        preprocessing=Preprocessing(image_size=(16, 16)),
        tokenizer=tokenizer,
    )
    return folder


def write_captions(data: Path, captions: dict[str, Sequence[str]]) -> None:
    """metadata.jsonl in the folder `data`, for images in it."""
    rows = [{"file_name": name, "captions": list(said)} for name, said in captions.items()]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (data / "metadata.jsonl").write_text(text, encoding="utf-8")
