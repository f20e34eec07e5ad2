"""Captioning with exported ONNX files: onnxruntime, numpy, Pillow and tokenizers, without torch.

Images are decoded and resized by the code that training used. Decoding is greedy.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit.data.captions.tokenizer import Tokenizer
from vit.data.image_io import IntensityRange
from vit.data.image_objects import ImageInput, NamedImage, named_images
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage, ConfigError, WeightsError, error_text
from vit.exported.image_prefetch import PathLike, prefetch_images, resolve_batch_and_workers
from vit.exported.onnx_classifier import top_k_classes
from vit.exported.onnx_session import Array, OnnxSession
from vit.generation.generation_config import Caption
from vit.output.prediction_results import Prediction, check_top_k
from vit.text import Notify, print_to_stderr, printable

INTEGER_METADATA = ("begin", "end", "max_tokens")
CaptionAndClasses = tuple[Caption, tuple[tuple[str, float], ...]]
"""The caption of an image, and its most probable classes with their probabilities."""


class ExportedCaptioner:
    """Generates captions of images with the two ONNX files of an exported captioner.

    Args:
        batch_size: Images per forward pass.
        workers: Threads that decode images; default: one per core, at most 8.
        threads: Compute threads; default: one per core.

    Attributes:
        classes: Class names; empty if the model has no classification head.
        block_size: A list gives the same results when it is continued at a multiple of this.
        metadata: Metadata of the decoder file.
    """

    device = "cpu"
    precision = "fp32"
    thresholds = None
    n_best = 1
    """Captions per image."""
    shares = True
    """Scores of classes are probabilities."""

    def __init__(
        self,
        path: PathLike,
        decoder: PathLike | None = None,
        providers: Sequence[str] | None = None,
        *,
        batch_size: int | None = None,
        workers: int | None = None,
        min_tokens: int = 1,
        max_tokens: int | None = None,
        threads: int | None = None,
        intensity_range: IntensityRange | None = None,
        notify: Notify = print_to_stderr,
    ) -> None:
        self.notify = notify
        self.batch_size, self.workers = resolve_batch_and_workers(batch_size, workers)
        self.block_size = self.batch_size
        self._encoder = _open_graph(path, "encoder", providers, threads)
        if decoder is None:
            decoder = Path(path).with_suffix(f".decoder{Path(path).suffix}")
            if not decoder.exists():
                raise WeightsError(
                    f"{printable(decoder)} is missing, where the decoder of {printable(path)} is; "
                    "copy both files"
                )
        self._decoder = _open_graph(decoder, "decoder", providers, threads)
        self.metadata = metadata = self._decoder.metadata
        if metadata.get("pair") != self._encoder.metadata.get("pair"):
            raise WeightsError(
                f"{printable(path)} and {printable(decoder)} are of two exports; give the two "
                "files of one"
            )
        try:
            self.preprocessing = Preprocessing.from_dict(json.loads(metadata["preprocessing"]))
            self.classes: tuple[str, ...] = tuple(json.loads(metadata["classes"]))
            self.tokenizer = Tokenizer.from_json(metadata["tokenizer"])
            self.begin, self.end, longest = (int(metadata[name]) for name in INTEGER_METADATA)
        except (KeyError, ValueError, TypeError) as error:
            raise WeightsError(
                f"{printable(decoder)}: its metadata are damaged ({printable(error)}); export it "
                "again"
            ) from None
        if intensity_range is not None:
            self.preprocessing = replace(self.preprocessing, intensity_range=intensity_range)
        self.min_tokens, self.max_tokens = min_tokens, longest if max_tokens is None else max_tokens
        if not 1 <= self.max_tokens <= longest:
            raise ConfigError(f"max_tokens={max_tokens}: this decoder writes 1 to {longest}")
        if not 1 <= min_tokens <= self.max_tokens:
            raise ConfigError(f"min_tokens={min_tokens}: must be from 1 to {self.max_tokens}")

    def __call__(self, images: Iterable[ImageInput], *, top_k: int = 5) -> list[Prediction]:
        """Return one prediction per image of `images`, in their order; see `stream`."""
        return list(self.stream(images, top_k=top_k))

    def stream(self, images: Iterable[ImageInput], *, top_k: int = 5) -> Iterator[Prediction]:
        """Yield predictions in the order of `images`, in bounded memory.

        An image on which a network fails is an error of its own: its batch is computed again image
        by image.
        """
        check_top_k(top_k)
        return self._stream(named_images(images), top_k)

    def _stream(self, paths: Iterator[NamedImage], top_k: int) -> Iterator[Prediction]:
        batches = prefetch_images(
            paths,
            self.preprocessing.resize_and_crop,
            workers=self.workers,
            window_size=self.batch_size,
            intensity_range=self.preprocessing.intensity_range,
            notify=self.notify,
        )
        for batch in batches:
            decoded = [image for _, image in batch if not isinstance(image, BadImage)]
            results = iter(self._caption_or_explain(decoded, top_k))
            for path, image in batch:
                if isinstance(image, BadImage):
                    yield Prediction(path, error=image.reason)
                    continue
                result = next(results)
                if isinstance(result, Exception):
                    yield Prediction(path, error=error_text(result))
                else:
                    caption, classes = result
                    yield Prediction(path, classes, captions=(caption,))

    def _caption_or_explain(
        self, images: Sequence[Array], top_k: int
    ) -> list[CaptionAndClasses | WeightsError | MemoryError]:
        """As `caption`, with the error of each image on which a network fails."""
        try:
            return list(self.caption(images, top_k))
        except (WeightsError, MemoryError) as error:
            if len(images) == 1:
                return [error]
        # one image failed: one by one, so that the others have their captions
        return [result for one in images for result in self._caption_or_explain([one], top_k)]

    def caption(self, images: Sequence[Array], top_k: int) -> Iterator[CaptionAndClasses]:
        """Yield the caption and the top classes of each preprocessed image."""
        if not images:
            return
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
        probabilities = heads[0] if heads else [None] * len(images)
        for sequence, row in zip(sequences, probabilities, strict=True):
            text = self.tokenizer.decode(sequence.ids)
            classes = () if row is None else top_k_classes(self.classes, row, top_k)
            yield Caption(text, sequence.score, sequence.ids, sequence.ended), classes


def _open_graph(
    path: PathLike, kind: str, providers: Sequence[str] | None, threads: int | None
) -> OnnxSession:
    """Open `path`, which must be the captioner's `kind`: encoder or decoder."""
    session = OnnxSession(path, providers, threads=threads)
    found = session.metadata.get("graph")
    if found == "classifier":
        raise WeightsError(f"{printable(path)} is a classifier; open it with ExportedClassifier")
    if found != kind:
        problem = f"is the {printable(found)} of a captioner"
        if found is None:
            problem = "was not written by vit export"
        raise WeightsError(f"{printable(path)} {problem}; give its {kind} here")
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
    """Greedy decoding with a KV cache, as vit/generation does it in torch.

    Of equal logits the lower id is taken. Finished sequences leave the batch.

    Args:
        memory_key, memory_value: Cross-attention keys and values of the images,
            (layers, batch, kv_heads, tokens, head_dim).

    Returns:
        One sequence per image.
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
