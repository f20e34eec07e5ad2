"""A trained network answers for images: read, prepare, normalise, network, scores or words.

Evaluation goes the same way (vit/inference/evaluate.py), so both give the same numbers.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from vit.errors import BadImage, ConfigError, WeightsError
from vit.generation.caption import Caption
from vit.generation.generation_config import Search
from vit.inference.batch_pipeline import Reader, all_of, in_order, lanes, threads_of, usual_batch
from vit.inference.caption_generator import speaker_of
from vit.inference.model_runner import Network, Views
from vit.inference.outputs import Answer, named
from vit.inference.precision_autotune import Choice
from vit.model.captioner import lay_out
from vit.output.prediction_results import Prediction, check_top_k, resolve_top_k
from vit.precision import autocast, may_choose, resolve_device, resolve_precision
from vit.weights.adapt_weights import change_patches
from vit.weights.load_model import load_model, print_to_stderr
from vit.weights.saved_model import LoadedRun

__all__ = ["Answer", "PathLike", "Predictor"]

PathLike = str | os.PathLike[str]


class Predictor:
    """Labels images, or writes their captions, with a saved model.

    On one machine a list gives the same numbers every time, to the last digit: batches are cut
    in its order, an image that cannot be read leaves its place blank, and the last batch is
    filled up with blank ones to a power of two, so that few shapes occur. (A matrix product
    rounds differently for another number of rows: the last digits do depend on `batch_size`.)
    Captions leave the work as they end and blank places get none: the last digits of their scores
    depend on the images of the same batch.

    Args:
        run: A run folder or any other source of weights with a head, or one that is loaded.
        device: cpu, cuda, cuda:N or mps; the best one here when left out.
        batch_size: Images in one pass through the network; when left out 64, and on a CPU as
            many as its caches like, by the network's tokens: 4 to 64, and 16 for captions.
        precision: auto, fp32, bf16 or fp16. auto is bf16 where the hardware has it; where a CPU's
            bf16 may be fast or slow, a long list is tried both ways once, and the verdict kept.
        workers: Threads that read images and, on a CPU, each compute a batch; one a core, at
            most 8, when left out.
        merge_tokens: Patches merged in each block, which is faster and less exact; as many as in
            training when left out.
        patch_size: Side of a patch in pixels, to which the weights are resized: best one that the
            network was trained with (`patch_sizes`). Its usual one when left out.
        keep_aspect: Show the network whole images in their own aspect, with at most as many
            patches as usual, where else it sees a square. Last digits then depend on neighbours.
        search: How captions are looked for; the likeliest word each time when left out. Words are
            drawn by the number of the image in the whole list.
        tta: Answer by the mean over several views: `flip`, an image and its mirror image, or
            `crops`, those of its centre and its four corners, ten in all.
        compile: Compile the network with torch.compile, which takes a minute and pays for many
            images (docs/predict.md).
        embeddings: Whether answers have an `embedding`; the weights then need no head.
        say: Told what weights of others are, and which precision was picked.

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
        tta: Views | None = None,
        compile: bool = False,  # noqa: A002
        embeddings: bool = False,
        notify: Callable[[str], object] = print_to_stderr,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: must be at least 1")
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers}: must be at least 1")
        self.device = resolve_device(device)
        self.precision = resolve_precision(precision, self.device)
        if isinstance(run, LoadedRun):
            loaded = run
        else:
            loaded = load_model(run, notify=notify, headless=embeddings)
        loaded = change_patches(loaded, merge_tokens=merge_tokens, patch_size=patch_size)
        self.classes = tuple(loaded.classes)
        self.preprocessing = loaded.preprocessing
        self.model = loaded.model.eval().to(self.device)
        self.speaker = speaker_of(loaded, search)
        if self.speaker is not None and self.device.type == "cpu" and run is not loaded:
            lay_out(self.speaker.decoder)  # not in a network that somebody else may save
        self.keep_aspect = keep_aspect
        self.thresholds = loaded.thresholds
        """Of each class, from which on it is named, where an image may have several; or None."""
        about = (self.model, self.preprocessing, self.device, keep_aspect, tta, embeddings, compile)
        self.network = Network(*about, multilabel=self.thresholds is not None)
        size = self.model.patch_embed.patch_size if keep_aspect else None
        self.read = Reader(self.preprocessing, patch_size=size, crops=tta == "crops")
        captions = self.speaker is not None
        self.batch_size = batch_size or usual_batch(loaded.config, self.device, captions=captions)
        self.workers = workers or threads_of(self.device)
        self.notify = notify
        self.choice: Choice | None = None
        if precision == "auto" and may_choose(self.device) and self.classes and not captions:
            use = {"keep_aspect": keep_aspect, "compiled": compile}
            self.choice = Choice(loaded.config, use, usual=self.precision, notify=notify)
            self.precision = self.choice.precision

    @property
    def block_size(self) -> int:
        """A list gives the same results when it is continued at a multiple of this."""
        return self.batch_size

    @property
    def n_best(self) -> int:
        """Captions of an image; 0 from a network that writes none."""
        return 0 if self.speaker is None else self.speaker.search.n_best

    def __call__(
        self,
        images: Iterable[PathLike],
        *,
        top_k: int | None = None,
        threshold: float | None = None,
    ) -> list[Prediction]:
        """One Prediction for each path of `images`, in their order; see `stream`."""
        return list(self.stream(images, top_k=top_k, threshold=threshold))

    def stream(
        self,
        images: Iterable[PathLike],
        *,
        top_k: int | None = None,
        threshold: float | None = None,
        first: int = 0,
    ) -> Iterator[Prediction]:
        """Predictions in the order of `images`, as they are made; memory does not grow.

        Args:
            images: Paths of images; taken as they are needed, a batch a worker ahead.
            top_k: Most probable classes to name; all of them where there are fewer. When left out
                5, and where an image may have several classes all above their thresholds.
            threshold: Name no class that is less probable, whatever its own threshold is.
            first: As for `batches`.

        Raises:
            ConfigError: `top_k` is less than 1, or `images` is one path instead of several.
        """
        check_top_k(top_k)
        if isinstance(images, str | bytes | os.PathLike):
            raise ConfigError(f"images={images!r} is one path; give a list of paths")
        batches = self.batches(images, first=first)
        return (told for batch in batches for told in self.names(batch, top_k, threshold))

    def batches(self, images: Iterable[PathLike], *, first: int = 0) -> Iterator[list[Answer]]:
        """Answers of `batch_size` images at a time, in order, while threads make the next.

        Args:
            images: As for `stream`.
            first: Number of the first image in a longer list. The rest of a list from a multiple
                of `batch_size` on has the digits that it has in the whole list.
        """
        paths = (os.fspath(path) for path in images)
        if isinstance(images, Sequence):
            self.settle(images)
        on_cpu = self.device.type == "cpu"
        pool = lanes(self.workers) if on_cpu else ThreadPoolExecutor(self.workers, "read-image")
        begin = partial(self._lane if on_cpu else self._device, pool)
        try:
            if self.network.compiled:
                pool.submit(self.network.warm_up, self.batch_size, self.precision).result()
            ahead = self.workers if on_cpu else 1
            yield from in_order(paths, self.batch_size, begin, ahead=ahead, first=first)
        finally:
            pool.shutdown(cancel_futures=True)

    def settle(self, images: Sequence[PathLike]) -> None:
        """Pick the precision for a list now, where `auto` leaves it to a trial."""
        if self.choice is None:
            return
        trial = partial(self.choice.settle, read=self.read, see=self.network.see)
        with lanes(self.workers) as pool:  # as many threads for a product as later
            self.precision = pool.submit(trial, images, self.batch_size).result()

    def _lane(
        self, pool: ThreadPoolExecutor, first: int, paths: list[str]
    ) -> Callable[[], list[Answer]]:
        """A batch done by one thread, from the files to the answers."""

        def whole() -> list[Answer]:
            return self._answer(first, paths, [self.read(path) for path in paths])

        return pool.submit(whole).result

    def _device(
        self, pool: ThreadPoolExecutor, first: int, paths: list[str]
    ) -> Callable[[], list[Answer]]:
        """A batch read by the threads, and answered by the device when its turn comes."""
        read = all_of(pool, self.read, paths)
        return lambda: self._answer(first, paths, read())

    def _answer(
        self, first: int, paths: list[str], input_images: Sequence[Tensor | BadImage]
    ) -> list[Answer]:
        """Answers for one batch; `first` is the number of its first image in the whole list."""
        errors = {n: p.reason for n, p in enumerate(input_images) if isinstance(p, BadImage)}
        if len(errors) == len(paths):
            return [Answer(path, None, errors[place]) for place, path in enumerate(paths)]
        blank = self.network.blank()
        images = [blank if isinstance(image, BadImage) else image for image in input_images]
        images += [blank] * (self._rows(len(paths)) - len(paths))
        seen = self.network.see(images, self.precision)
        finite = seen.probabilities.isfinite().all(dim=1)
        if seen.embeddings is not None:
            finite &= seen.embeddings.isfinite().all(dim=1)
        for place, good in enumerate(finite[: len(paths)].tolist()):
            if not good and place not in errors:
                errors[place] = f"the network overflowed in {self.precision}; try precision fp32"
        good_ones = [place for place in range(len(paths)) if place not in errors]
        captions = self._captions(seen.memories, good_ones, first, errors)
        return [
            Answer(path, None, errors[place])
            if place in errors
            else Answer(
                path,
                seen.probabilities[place],
                captions=captions.get(place, ()),
                memory=seen.memories[place],
                pixels=images[place],
                embedding=None if seen.embeddings is None else seen.embeddings[place],
            )
            for place, path in enumerate(paths)
        ]

    def _rows(self, images: int) -> int:
        """Rows of a batch with the blank ones."""
        if self.keep_aspect:
            return images
        if self.network.compiled:
            return self.batch_size
        return min(self.batch_size, 1 << (images - 1).bit_length())

    @torch.inference_mode()
    def _captions(
        self,
        memories: Sequence[Tensor | None],
        places: list[int],
        first: int,
        errors: dict[int, str],
    ) -> dict[int, tuple[Caption, ...]]:
        """Captions of the images at `places`; `errors` receives those that get none."""
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

    def name(
        self, answer: Answer, top_k: int | None = None, threshold: float | None = None
    ) -> Prediction:
        """What people are told of an answer; see `stream`."""
        return self.names([answer], top_k, threshold)[0]

    def names(
        self, answers: Sequence[Answer], top_k: int | None = None, threshold: float | None = None
    ) -> list[Prediction]:
        """What people are told of each answer of a batch; see `stream`."""
        most, least = resolve_top_k(self.classes, self.thresholds, top_k, threshold)
        return named(answers, self.classes, most, least)
