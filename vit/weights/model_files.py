"""The files of a model and their digest, which tells versions of a model apart. Needs no torch for
exported models."""

import hashlib
import os
from pathlib import Path

from vit.errors import RunError
from vit.text import printable


def model_files(model: str, engine: str) -> list[Path]:
    """Files of the model, for its digest."""
    path = Path(model)
    if engine == "torch":
        from vit.weights.resolve_source import locate_weights

        found = locate_weights(model)
        shards = found.folder.glob("*-of-*") if found.weights.suffix == ".json" else ()
        names = ("tokenizer.json", "distance.safetensors")
        others = (found.config, found.processor, *(found.folder / name for name in names))
        files = [found.weights, *shards, *(one for one in others if one is not None)]
    else:
        decoder = path.with_suffix(f".decoder{path.suffix}")
        beside = path.with_suffix(".bin") if path.suffix == ".xml" else Path(f"{path}.data")
        files = [path, beside, decoder]
    return sorted(file for file in files if file.is_file())


def sha256_of_files(files: list[Path]) -> str:
    """SHA-256 over names, sizes and contents of files.

    Raises:
        RunError: A file cannot be read.
    """
    total = hashlib.sha256()
    path = Path()
    try:
        for path in files:
            with open(path, "rb") as file:
                total.update(os.fsencode(path.name) + b"\0%d\0" % os.path.getsize(path))
                while chunk := file.read(1 << 20):
                    total.update(chunk)
    except OSError as error:
        raise RunError(f"{printable(path)} cannot be read: {error.strerror}") from None
    return total.hexdigest()
