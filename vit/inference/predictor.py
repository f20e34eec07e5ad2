"""A trained network answers for pictures: read, prepare, normalise, network, softmax or words.

Evaluation goes the same way (vit/inference/evaluate.py), so both give the same numbers.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from vit.data.decoding import read_image
from vit.errors import BadImage, ConfigError, WeightsError
from vit.evaluation.metrics import ranking
from vit.generation.caption import Caption
from vit.generation.search import Search
from vit.inference.speaking import speaker_of
from vit.model.captioner import Captioner, lay_out
from vit.model.packing import check_packable
from vit.precision import autocast, resolve_device, resolve_precision
from vit.runtime.results import Prediction
from vit.weights.folder import LoadedRun
from vit.weights.loading import load_model
from vit.weights.repatching import with_patches

PathLike = str | os.PathLike[str]
# larger batches leave a CPU's caches: a fifth slower at 64 than at 16 (ViT-Ti and ViT-S at 224)
BATCH_SIZES = {"cpu": 16}


@dataclass(frozen=True)
class Answer:
    """All that the network says of one picture, or why it says nothing.

    Args:
        image: The picture's path.
        probabilities: Of the classes, (classes,) float64; of none, where it has no head.
        error: Why there is no answer, or None.
        captions: The best first; none from a classifier.
        memory: What a captioner's decoder looked at, (tokens, dim) on the device.
        picture: What the encoder looked at, bytes (channels, height, width).
    """

    image: str
    probabilities: Tensor | None
    error: str | None = None
    captions: tuple[Caption, ...] = ()
    memory: Tensor | None = None
    picture: Tensor | None = None


class Predictor:
    """Labels pictures, or writes their captions, with a saved model.

    On one machine a list gives the same numbers every time, to the last digit: batches are cut
    in its order, a picture that cannot be read leaves its place blank, and the last batch is
    filled up with blank ones to a power of two, so that few shapes occur. (A matrix product
    rounds differently for another number of rows: the last digits do depend on `batch_size`.)
    Captions leave the work as they end and blank places get none: the last digits of their scores
    depend on the pictures of the same batch.

    Args:
        run: A run folder or any other source of weights with a head, or one that is loaded.
        device: cpu, cuda, cuda:N or mps; the best one here when left out.
        batch_size: Pictures in one pass through the network; 16 on a CPU, else 64 when left out.
        precision: auto, fp32, bf16 or fp16; auto is bf16 where the hardware has it.
        workers: Threads that read pictures; one a core, at most 8, when left out.
        merge_tokens: Patches merged in each block, which is faster and less exact; as many as in
            training when left out.
        patch_size: Side of a patch in pixels, to which the weights are resized: best one that the
            network was trained with (`patch_sizes`). Its usual one when left out.
        keep_aspect: Show the network whole pictures in their own aspect, with at most as many
            patches as usual, where else it sees a square. Last digits then depend on neighbours.
        search: How captions are looked for; the likeliest word each time when left out. Words are
            drawn by the number of the picture in the whole list.

    Raises:
        VitError: The run, the device or a setting cannot be used; the message says why.
    """

    def __init__(
        self,
        run: PathLike | LoadedRun,
        *,
        device: str | None = None,
        batch_size: int | None = None,
        precision: str = "auto",
        workers: int | None = None,
        merge_tokens: int | None = None,
        patch_size: int | None = None,
        keep_aspect: bool = False,
        search: Search | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: must be at least 1")
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers}: must be at least 1")
        self.device = resolve_device(device)
        self.precision = resolve_precision(precision, self.device)
        loaded = run if isinstance(run, LoadedRun) else load_model(run)
        loaded = with_patches(loaded, merge_tokens=merge_tokens, patch_size=patch_size)
        self.classes = tuple(loaded.classes)
        self.preprocessing = loaded.preprocessing
        self.model = loaded.model.eval().to(self.device)
        self.speaker = speaker_of(loaded, search)
        if self.speaker is not None and self.device.type == "cpu" and run is not loaded:
            lay_out(self.speaker.decoder)  # not in a network that somebody else may save
        self.keep_aspect = keep_aspect
        if keep_aspect and isinstance(self.model, Captioner):
            self.model.check_packable()
        elif keep_aspect:
            check_packable(self.model)
        self.batch_size = batch_size or BATCH_SIZES.get(self.device.type, 64)
        self.workers = workers or min(8, os.cpu_count() or 1)

    @property
    def n_best(self) -> int:
        """Captions of a picture; 0 from a network that writes none."""
        return 0 if self.speaker is None else self.speaker.search.n_best

    def __call__(self, images: Iterable[PathLike], *, top_k: int = 5) -> list[Prediction]:
        """One Prediction for each path of `images`, in their order; see `stream`."""
        return list(self.stream(images, top_k=top_k))

    def stream(
        self, images: Iterable[PathLike], *, top_k: int = 5, first: int = 0
    ) -> Iterator[Prediction]:
        """Predictions in the order of `images`, as they are made; memory does not grow.

        Args:
            images: Paths of pictures; taken as they are needed, two batches ahead.
            top_k: Most probable classes to name; all of them where there are fewer.
            first: Number of the first picture, where they are a part of a longer list.

        Raises:
            ConfigError: `top_k` is less than 1, or `images` is one path instead of several.
        """
        if top_k < 1:
            raise ConfigError(f"top_k={top_k}: must be at least 1")
        if isinstance(images, str | bytes | os.PathLike):
            raise ConfigError(f"images={images!r} is one path; give a list of paths")
        found = self.batches(images, first=first)
        return (self.name(answer, top_k) for batch in found for answer in batch)

    def batches(self, images: Iterable[PathLike], *, first: int = 0) -> Iterator[list[Answer]]:
        """Answers of `batch_size` pictures at a time, in order, while threads read the next."""
        paths = (os.fspath(path) for path in images)
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="read-image")
        ahead: deque[tuple[int, list[str], list[Future[Tensor | BadImage]]]] = deque()
        taken = first
        try:
            while chunk := list(islice(paths, self.batch_size)):
                ahead.append((taken, chunk, [pool.submit(self._read, path) for path in chunk]))
                taken += len(chunk)
                if len(ahead) > 1:
                    yield self._answer(*ahead.popleft())
            while ahead:
                yield self._answer(*ahead.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, path: str) -> Tensor | BadImage:
        """One prepared picture, uint8 (channels, height, width), or why there is none."""
        try:
            image = read_image(path)
            if self.keep_aspect:
                return self.preprocessing.whole(image, self.model.patch_embed.patch_size)
            return self.preprocessing(image)
        except BadImage as error:
            return error
        except (ValueError, OSError, MemoryError) as error:
            return BadImage(path, f"cannot be resized: {error}")

    def _answer(
        self, first: int, paths: list[str], pictures: list[Future[Tensor | BadImage]]
    ) -> list[Answer]:
        """Answers for one batch; `first` is the number of its first picture in the whole list."""
        height, width = self.preprocessing.image_size
        rows = len(paths)
        if not self.keep_aspect:
            rows = min(self.batch_size, 1 << (rows - 1).bit_length())
        images = [torch.zeros(3, height, width, dtype=torch.uint8)] * rows
        errors: dict[int, str] = {}
        for place, future in enumerate(pictures):
            picture = future.result()
            if isinstance(picture, BadImage):
                errors[place] = picture.reason
            else:
                images[place] = picture
        if len(errors) == len(paths):
            return [Answer(path, None, errors[place]) for place, path in enumerate(paths)]
        probabilities, memories = self._see(images)
        for place, row in enumerate(probabilities[: len(paths)]):
            if place not in errors and not row.isfinite().all():
                errors[place] = f"the network overflowed in {self.precision}; try precision fp32"
        good = [place for place in range(len(paths)) if place not in errors]
        captions = self._captions(memories, good, first, errors)
        return [
            Answer(path, None, errors[place])
            if place in errors
            else Answer(
                path,
                probabilities[place],
                captions=captions.get(place, ()),
                memory=memories[place],
                picture=images[place],
            )
            for place, path in enumerate(paths)
        ]

    @torch.inference_mode()
    def _see(self, images: list[Tensor]) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Probabilities and, of a captioner, the memory of each image.

        Args:
            images: uint8, each (channels, height, width).

        Returns:
            float64 on the CPU, (batch, classes or 0), and `batch` of (tokens, dim) or None.
        """
        with autocast(self.precision, self.device):
            if isinstance(self.model, Captioner):
                logits, memories = self._told(self.model, images)
            else:
                logits = self._packed(images) if self.keep_aspect else self._batch(images)
                memories = [None] * len(images)
        return logits.float().cpu().double().softmax(dim=1), memories

    def _batch(self, images: list[Tensor]) -> Tensor:
        """Logits of uint8 images of one size."""
        logits: Tensor = self.model(self._floats(torch.stack(images)))
        return logits

    def _packed(self, images: list[Tensor]) -> Tensor:
        """Logits of uint8 images of any sizes."""
        return self.model.forward_packed([self._floats(image) for image in images])

    def _told(self, model: Captioner, images: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        """Class logits and memories of uint8 images."""
        if self.keep_aspect:
            classes, packed = model.see_packed([self._floats(image) for image in images])
            return classes, [*packed]
        classes, memory = model.see(self._floats(torch.stack(images)))
        return classes, [*memory]

    @torch.inference_mode()
    def _captions(
        self,
        memories: Sequence[Tensor | None],
        places: list[int],
        first: int,
        errors: dict[int, str],
    ) -> dict[int, tuple[Caption, ...]]:
        """Captions of the pictures at `places`; `errors` receives those that get none."""
        if self.speaker is None:
            return {}
        seen = [memory for place in places if (memory := memories[place]) is not None]
        with autocast(self.precision, self.device):
            written = self.speaker.write(seen, [first + place for place in places])
        captions = {}
        for place, found in zip(places, written, strict=True):
            if isinstance(found, WeightsError):
                errors[place] = str(found)
            else:
                captions[place] = found
        return captions

    def _floats(self, images: Tensor) -> Tensor:
        """uint8 (..., channels, height, width) -> normalised, on the device"""
        return self.preprocessing.normalise(images.to(self.device))

    def name(self, answer: Answer, top_k: int) -> Prediction:
        """What people are told of an answer, with `top_k` classes."""
        if answer.probabilities is None:
            return Prediction(answer.image, error=answer.error)
        best = ranking(answer.probabilities.unsqueeze(0))[0, :top_k]
        scores = answer.probabilities[best].tolist()
        labels = [self.classes[index] for index in best.tolist()]
        pairs = tuple(zip(labels, scores, strict=True))
        return Prediction(answer.image, pairs, captions=answer.captions)
