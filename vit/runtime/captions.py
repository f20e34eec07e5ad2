"""Captions from the files of `vit export`, without torch: onnxruntime, numpy, Pillow, tokenizers.

A picture is read and resized by the code that training used; sentences are written by taking the
likeliest word each time.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.decoding import read_image
from vit.data.preprocessing import Preprocessing
from vit.data.tokenizer import Tokenizer
from vit.errors import BadImage, ConfigError, WeightsError, printable
from vit.generation.caption import Caption
from vit.runtime.greedy import Array, greedy
from vit.runtime.results import Prediction
from vit.runtime.session import Session

PathLike = str | os.PathLike[str]
NUMBERS = ("begin", "end", "max_tokens")


class CaptionRunner:
    """Says in words what is to be seen in pictures.

    Args:
        path: NAME.onnx, which sees.
        decoder: What writes; NAME.decoder.onnx when left out.
        providers: What computes both, by onnxruntime's names; the CPU when left out.
        batch_size: Pictures in one pass through the networks.
        workers: Threads that read pictures; one a core, at most 8, when left out.
        min_tokens: Tokens before a sentence may end.
        max_tokens: Tokens after which it stops, unended; as many as the network can write when
            left out.

    Raises:
        ConfigError: A setting is out of range, or cannot be used on this machine.
        WeightsError: A file is missing, damaged, of another export, or not of vit export.
        VitError: onnxruntime is not installed.
    """

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
    ) -> None:
        self.batch_size = 16 if batch_size is None else batch_size
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        for name in ("batch_size", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        beside = Path(path).with_suffix(f".decoder{Path(path).suffix}")
        self._see = _graph(path, "encoder", providers)
        self._step = _graph(decoder or beside, "decoder", providers)
        about = self._step.metadata
        if about.get("pair") != self._see.metadata.get("pair"):
            raise WeightsError(
                f"{printable(path)} and {printable(decoder or beside)} are of two exports; give "
                "the two files of one"
            )
        try:
            self.preprocessing = Preprocessing.from_dict(json.loads(about["preprocessing"]))
            self.classes: tuple[str, ...] = tuple(json.loads(about["classes"]))
            self.tokenizer = Tokenizer.from_json(about["tokenizer"])
            self.begin, self.end, most = (int(about[name]) for name in NUMBERS)
        except (KeyError, ValueError, TypeError) as error:
            raise WeightsError(
                f"{printable(decoder or beside)}: its metadata are damaged ({printable(error)}); "
                "export it again"
            ) from None
        self.min_tokens, self.max_tokens = min_tokens, most if max_tokens is None else max_tokens
        if not 1 <= self.max_tokens <= most:
            raise ConfigError(f"max_tokens={max_tokens}: this decoder writes 1 to {most}")
        if not 1 <= min_tokens <= self.max_tokens:
            raise ConfigError(f"min_tokens={min_tokens}: must be from 1 to {self.max_tokens}")

    n_best = 1
    """Captions of a picture."""

    def __call__(self, images: Iterable[PathLike], *, top_k: int = 5) -> list[Prediction]:
        """One answer for each path of `images`, in their order; see `stream`."""
        return list(self.stream(images, top_k=top_k))

    def stream(self, images: Iterable[PathLike], *, top_k: int = 5) -> Iterator[Prediction]:
        """Answers in the order of `images`, as they are made; memory does not grow.

        Args:
            images: Paths of pictures.
            top_k: Most probable classes to name, where the network has classes.

        Raises:
            ConfigError: `top_k` is less than 1, or `images` is one path instead of several.
            WeightsError: The networks answer with what is no number.
        """
        if top_k < 1:
            raise ConfigError(f"top_k={top_k}: must be at least 1")
        if isinstance(images, str | bytes | os.PathLike):
            raise ConfigError(f"images={images!r} is one path; give a list of paths")
        return self._stream((os.fspath(path) for path in images), top_k)

    def _stream(self, paths: Iterator[str], top_k: int) -> Iterator[Prediction]:
        with ThreadPoolExecutor(self.workers, thread_name_prefix="read-image") as pool:
            while chunk := list(islice(paths, self.batch_size)):
                read = list(pool.map(self._read, chunk))
                answers = self._answers(
                    [one for one in read if not isinstance(one, BadImage)], top_k
                )
                for path, one in zip(chunk, read, strict=True):
                    if isinstance(one, BadImage):
                        yield Prediction(path, error=one.reason)
                    else:
                        sentence, named = next(answers)
                        yield Prediction(path, named, captions=(sentence,))

    def _read(self, path: str) -> Array | BadImage:
        """One prepared picture, uint8 (height, width, 3), or why there is none."""
        try:
            return np.asarray(self.preprocessing.fit(read_image(path)))
        except BadImage as error:
            return error
        except (ValueError, OSError, MemoryError) as error:
            return BadImage(path, f"cannot be resized: {error}")

    def _answers(
        self, pixels: list[Array], top_k: int
    ) -> Iterator[tuple[Caption, tuple[tuple[str, float], ...]]]:
        """A sentence and the named classes of each prepared picture."""
        if not pixels:
            return
        key, value, *rest = self._see({"images": np.stack(pixels)})
        sentences = greedy(
            self._step,
            key,
            value,
            begin=self.begin,
            end=self.end,
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
        )
        named = [self._named(row, top_k) for row in rest[0]] if rest else [()] * len(pixels)
        for one, names in zip(sentences, named, strict=True):
            text = self.tokenizer.decode(one.ids)
            yield Caption(text, one.score, one.ids, one.ended), names

    def _named(self, probabilities: Array, top_k: int) -> tuple[tuple[str, float], ...]:
        """The most probable classes; of equal ones the first."""
        best = np.argsort(-probabilities, kind="stable")[:top_k]
        return tuple((self.classes[place], float(probabilities[place])) for place in best)


def _graph(path: PathLike, kind: str, providers: Sequence[str] | None) -> Session:
    """The file `path`, which must be the `kind` of a captioner."""
    session = Session(path, providers)
    found = session.metadata.get("graph")
    if found != kind:
        reason = f"is the {found} of a captioner" if found else "was not written by vit export"
        raise WeightsError(f"{printable(path)} {reason}; give its {kind} here")
    return session


def runner_like(
    path: PathLike,
    *,
    batch_size: int | None = None,
    workers: int | None = None,
    search: Any = None,
    **settings: Any,
) -> CaptionRunner:
    """A runner for `vit predict`, whose other settings an exported network does not have.

    Args:
        path: As for CaptionRunner.
        batch_size, workers: As for CaptionRunner.
        search: A vit.generation Search, or None; only its min_tokens and max_tokens can be set.
        settings: Others of the Predictor; each must be as it is when nobody sets it.

    Raises:
        ConfigError: A setting has no effect here; the message names it.
        WeightsError: As for CaptionRunner.
    """
    chosen = {} if search is None else asdict(search)
    limits = {name: chosen.pop(name) for name in ("min_tokens", "max_tokens") if chosen}
    for name, value in settings.items():
        if value not in (None, False, "auto", "fp32"):
            raise ConfigError(f"{name}={value!r}: is fixed in an exported network; give the run")
    for name, value in chosen.items():
        if value != getattr(type(search), name):
            raise ConfigError(
                f"{name}={value!r}: an exported network takes the likeliest word each time; give "
                "the run"
            )
    most = limits.get("max_tokens") or None
    return CaptionRunner(
        path,
        batch_size=batch_size,
        workers=workers,
        min_tokens=limits.get("min_tokens", 1),
        max_tokens=most,
    )
