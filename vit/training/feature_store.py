"""Features on disk under the content of their pictures, in chunks that are written once.

    CACHE/<digest of weights, preprocessing, arithmetic>/<random name>.safetensors
        keys    (pictures, 32) uint8     SHA-256 of a picture's file
        values  (pictures, dim) float32

Two runs may write at the same time: no file is ever written twice.
"""

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor

from vit.errors import WeightsError, printable
from vit.weights.tensorfile import naming, read_tensors, write_tensors

KEY_BYTES = 32
STALE_SECONDS = 24 * 3600


class FeatureStore:
    """Features of one network, one preprocessing and one arithmetic.

    Args:
        cache: The folder of all stores.
        identity: Everything but the picture that a feature depends on, as JSON takes it.
        say: Told of damaged files.

    Raises:
        RunError: The folder cannot be written.
    """

    def __init__(
        self, cache: Path, identity: Mapping[str, object], say: Callable[[str], None]
    ) -> None:
        text = json.dumps(identity, sort_keys=True)
        self.folder = cache / hashlib.sha256(text.encode()).hexdigest()[:32]
        self.say = say
        with naming(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()

    def read(self, wanted: Set[bytes]) -> Iterator[tuple[list[bytes], Tensor]]:
        """What there is of `wanted`, chunk by chunk; a damaged chunk is told of and deleted.

        Returns:
            Keys, none of which comes twice, and their features (pictures, dim).
        """
        left = set(wanted)
        for path in sorted(self.folder.glob("[!.]*.safetensors")):
            try:
                keys, values = self._chunk(path)
            except WeightsError as error:
                self.say(f"note: {error}; its features are made again")
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            rows = [row for row, key in enumerate(keys) if key in left]
            if rows:
                left.difference_update(keys)
                yield [keys[row] for row in rows], values[rows]

    def write(self, keys: Sequence[bytes], values: Tensor) -> None:
        """Keep `values`, (pictures, dim) float32, under different `keys`.

        Raises:
            RunError: The disk is full, or the folder cannot be written.
        """
        flat = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8)
        path = self.folder / f"{uuid.uuid4().hex}.safetensors"
        write_tensors(path, {"keys": flat.view(-1, KEY_BYTES), "values": values}, {})

    def _chunk(self, path: Path) -> tuple[list[bytes], Tensor]:
        tensors, _ = read_tensors(path)
        keys, values = tensors.get("keys"), tensors.get("values")
        if (
            tensors.keys() != {"keys", "values"}
            or keys is None
            or values is None
            or (keys.dtype, values.dtype) != (torch.uint8, torch.float32)
            or (keys.ndim, values.ndim) != (2, 2)
            or keys.shape != (len(values), KEY_BYTES)
        ):
            raise WeightsError(f"{printable(path)} is damaged: it holds no features")
        flat = keys.numpy().tobytes()
        return [flat[at : at + KEY_BYTES] for at in range(0, len(flat), KEY_BYTES)], values

    def _clean(self) -> None:
        """Delete what writers that were killed have left; a living one is done within a day."""
        for path in self.folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
