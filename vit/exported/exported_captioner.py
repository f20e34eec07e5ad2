"""The engine of exported captioners: onnxruntime, numpy, Pillow and tokenizers, without torch.

Images are decoded and resized by the code that training used. Decoding is greedy.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit.config.inference_config import InferenceConfig
from vit.data.captions.tokenizer import Tokenizer
from vit.data.preprocessing import AnyImage
from vit.errors import ConfigError, WeightsError
from vit.exported.exported_classifier import ExportedEngine
from vit.exported.onnx_metadata import PathLike
from vit.exported.onnx_session import Array, OnnxSession
from vit.generation.generation_config import Caption
from vit.text import printable

INTEGER_METADATA = ("begin", "end", "max_tokens")


class OnnxCaptioner(ExportedEngine):
    """The two ONNX files of a captioner of `vit export`; an Engine."""

    precision, thresholds, calibration = "fp32", None, None
    shares, whole_images, n_best = True, False, 1

    def __init__(self, path: PathLike, config: InferenceConfig, threads: int | None) -> None:
        super().__init__(config)
        limits = {} if config.search is None else config.search.changes()
        for name, value in limits.items():
            if name not in ("min_tokens", "max_tokens"):
                raise ConfigError(
                    f"{name}={value!r}: an exported network decodes greedily only; give the run"
                )
        self._encoder = _open_graph(path, "encoder", threads)
        decoder = Path(path).with_suffix(f".decoder{Path(path).suffix}")
        if not decoder.exists():
            raise WeightsError(
                f"{decoder} is missing, where the decoder of {path} is; copy both files"
            )
        self._decoder = _open_graph(decoder, "decoder", threads)
        self.metadata = metadata = self._decoder.metadata
        if metadata.get("pair") != self._encoder.metadata.get("pair"):
            raise WeightsError(
                f"{path} and {decoder} are of two exports; give the two files of one"
            )
        try:
            self.set_preprocessing(metadata["preprocessing"], config)
            self.classes: tuple[str, ...] = tuple(json.loads(metadata["classes"]))
            self.tokenizer = Tokenizer.from_json(metadata["tokenizer"])
            self.begin, self.end, longest = (int(metadata[name]) for name in INTEGER_METADATA)
        except (KeyError, ValueError, TypeError) as error:
            raise WeightsError(
                f"{decoder}: its metadata are damaged ({error}); export it again"
            ) from None
        self.min_tokens = limits.get("min_tokens", 1)
        self.max_tokens = limits.get("max_tokens", longest)
        if not 1 <= self.max_tokens <= longest:
            raise ConfigError(f"max_tokens={self.max_tokens}: this decoder writes 1 to {longest}")
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens}: must be from 1 to {self.max_tokens}")

    def prepare(self, image: AnyImage) -> Array:
        return np.asarray(self.preprocessing.resize_and_crop(image))

    def run(
        self, images: Sequence[Array], *, first: int = 0, rows: int | None = None
    ) -> dict[str, Any]:
        """Captions and probabilities of prepared images."""
        del first, rows
        key, value, *heads = self._encoder({"images": np.stack(images)})
        sequences = greedy_decode(
            self._decoder,
            key,
            value,
            begin=self.begin,
            end=self.end,
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
        )
        captions = [
            (Caption(self.tokenizer.decode(one.ids), one.score, one.ids, one.ended),)
            for one in sequences
        ]
        probabilities = heads[0].astype(np.float64) if heads else np.zeros((len(images), 0))
        return {"probabilities": probabilities, "captions": captions}


def _open_graph(path: PathLike, kind: str, threads: int | None) -> OnnxSession:
    """Open `path`, which must be the captioner's `kind`: encoder or decoder."""
    session = OnnxSession(path, threads=threads)
    found = session.metadata.get("graph")
    if found != kind:
        problem = f"is the {printable(found)} of a captioner"
        if found is None:
            problem = "was not written by vit export"
        raise WeightsError(f"{path} {problem}; give its {kind} here")
    return session


class GeneratedSequence(NamedTuple):
    """One generated caption as token ids."""

    ids: tuple[int, ...]
    """Without the begin and end tokens."""
    score: float
    """Sum of the tokens' log probabilities, including the end token's if it was generated."""
    ended: bool
    """Whether the end token was generated before `max_tokens`."""


DecoderStep = Callable[[dict[str, Array]], list[Array]]


def greedy_decode(
    step: DecoderStep,
    memory_key: Array,
    memory_value: Array,
    *,
    begin: int,
    end: int,
    min_tokens: int,
    max_tokens: int,
) -> list[GeneratedSequence]:
    """Greedy decoding with a KV cache, as vit/generation does it in torch, one sequence an image.

    Of equal logits the lower id is taken. Finished sequences leave the batch. The keys and values
    of the images are (layers, batch, kv_heads, tokens, head_dim).
    """
    active = np.arange(memory_key.shape[1])
    tokens: list[list[int]] = [[] for _ in active]
    scores: list[list[float]] = [[] for _ in active]
    memory = {"memory_key": memory_key, "memory_value": memory_value}
    past = {"past_key": memory_key[..., :0, :], "past_value": memory_value[..., :0, :]}
    ids = np.full((len(active), 1), begin, dtype=np.int64)
    for index in range(max_tokens):
        logits, *present = step({"ids": ids, **past, **memory})
        allowed = logits.copy()
        if index < min_tokens:
            allowed[:, end] = -np.inf
        ids = allowed.argmax(axis=1)[:, None]
        log_probabilities = _log_probabilities(logits, ids)
        for row, token, score in zip(active, ids[:, 0], log_probabilities, strict=True):
            scores[row].append(float(score))
            if token != end:
                tokens[row].append(int(token))
        unfinished = np.flatnonzero(ids[:, 0] != end)
        if not len(unfinished):
            break
        active, ids = active[unfinished], ids[unfinished]
        past = {name: x[:, unfinished] for name, x in zip(past, present, strict=True)}
        memory = {name: x[:, unfinished] for name, x in memory.items()}
    return [_sequence(*pair) for pair in zip(tokens, scores, strict=True)]


def _log_probabilities(logits: Array, ids: Array) -> Array:
    """Log softmax of one id per row in float64, (rows, vocab), (rows, 1) -> (rows,)."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(shifted, ids, axis=1)[:, 0]
    result: Array = chosen - np.log(np.exp(shifted).sum(axis=1))
    return result


def _sequence(tokens: list[int], scores: list[float]) -> GeneratedSequence:
    score = math.fsum(scores)
    if not math.isfinite(score):
        raise WeightsError(
            f"a caption has the log probability {score}: the network's logits are not finite; "
            "check the weights that were exported"
        )
    return GeneratedSequence(tuple(tokens), score, len(scores) > len(tokens))
