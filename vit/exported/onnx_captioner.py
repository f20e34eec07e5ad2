"""Captions from the files of `vit export`, without torch: onnxruntime, numpy, Pillow, tokenizers.

An image is read and resized by the code that training used; sentences are written by taking the
likeliest word each time.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from vit.data.captions.tokenizer import Tokenizer
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage, ConfigError, WeightsError, printable
from vit.exported.greedy_numpy import Array, greedy
from vit.exported.onnx_session import Session
from vit.exported.read_ahead import PathLike, check_top_k, named, paths_of, sizes, windows
from vit.generation.caption import Caption
from vit.output.prediction_results import Prediction

NUMBERS = ("begin", "end", "max_tokens")


class CaptionRunner:
    """Says in words what is to be seen in images.

    Args:
        path: NAME.onnx, which sees.
        decoder: What writes; NAME.decoder.onnx when left out.
        providers: What computes both, by onnxruntime's names; the CPU when left out.
        batch_size: Images in one pass through the networks.
        workers: Threads that read images; one a core, at most 8, when left out.
        min_tokens: Tokens before a sentence may end.
        max_tokens: Tokens after which it stops, unended; as many as the network can write when
            left out.
        threads: That compute; one a core when left out.

    Attributes:
        classes: Names, by output of the network; none of a mere captioner.
        block: Images from the start of a list on whose answers depend on each other alone.
        metadata: All that the decoder says of itself.

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
        threads: int | None = None,
    ) -> None:
        self.batch_size, self.workers = sizes(batch_size, workers)
        self.block = self.batch_size
        beside = Path(path).with_suffix(f".decoder{Path(path).suffix}")
        self._see = _graph(path, "encoder", providers, threads)
        self._step = _graph(decoder or beside, "decoder", providers, threads)
        self.metadata = about = self._step.metadata
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
    """Captions of an image."""

    def __call__(self, images: Iterable[PathLike], *, top_k: int = 5) -> list[Prediction]:
        """One answer for each path of `images`, in their order; see `stream`."""
        return list(self.stream(images, top_k=top_k))

    def stream(self, images: Iterable[PathLike], *, top_k: int = 5) -> Iterator[Prediction]:
        """Answers in the order of `images`, as they are made; memory does not grow.

        Args:
            images: Paths of images.
            top_k: Most probable classes to name, where the network has classes.

        Raises:
            ConfigError: `top_k` is less than 1, or `images` is one path instead of several.
            WeightsError: The networks cannot be computed, or answer with what is no number.
        """
        check_top_k(top_k)
        return self._stream(paths_of(images), top_k)

    def _stream(self, paths: Iterator[str], top_k: int) -> Iterator[Prediction]:
        batches = windows(paths, self.preprocessing.fit, workers=self.workers, most=self.batch_size)
        for batch in batches:
            good = [image for _, image in batch if not isinstance(image, BadImage)]
            answers = self._answers(good, top_k)
            for path, image in batch:
                if isinstance(image, BadImage):
                    yield Prediction(path, error=image.reason)
                else:
                    sentence, classes = next(answers)
                    yield Prediction(path, classes, captions=(sentence,))

    def _answers(
        self, pixels: list[Array], top_k: int
    ) -> Iterator[tuple[Caption, tuple[tuple[str, float], ...]]]:
        """A sentence and the named classes of each prepared image."""
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
        rows = rest[0] if rest else [None] * len(pixels)
        for one, row in zip(sentences, rows, strict=True):
            text = self.tokenizer.decode(one.ids)
            classes = () if row is None else named(self.classes, row, top_k)
            yield Caption(text, one.score, one.ids, one.ended), classes


def _graph(
    path: PathLike, kind: str, providers: Sequence[str] | None, threads: int | None
) -> Session:
    """The file `path`, which must be the `kind` of a captioner."""
    session = Session(path, providers, threads=threads)
    found = session.metadata.get("graph")
    if found == "classifier":
        raise WeightsError(f"{printable(path)} is a classifier; open it with ClassRunner")
    if found != kind:
        what = f"is the {printable(found)} of a captioner"
        if found is None:
            what = "was not written by vit export"
        raise WeightsError(f"{printable(path)} {what}; give its {kind} here")
    return session
