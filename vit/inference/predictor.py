"""Predictions for images: read, preprocess, run the network, return labels or captions.

Evaluation uses the same code (vit/inference/evaluate.py), so both give the same numbers.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vit.data.image_io import IntensityRange
from vit.data.image_objects import ImageInput, NamedImage, named_images
from vit.errors import BadImage, ConfigError, WeightsError
from vit.evaluation.classification_metrics import ranking
from vit.exported.load_exported import exported_engine
from vit.generation.generation_config import Caption, Search
from vit.inference.batch_pipeline import (
    ImageReader,
    chunks,
    default_batch_size,
    default_num_threads,
    explain_full_memory,
    make_thread_pool,
    prefetch,
)
from vit.inference.caption_generator import make_caption_generator
from vit.inference.model_runner import ModelRunner
from vit.inference.precision_autotune import PrecisionAutotuner
from vit.inference.tta import Views
from vit.model.captioner import use_column_major_weights
from vit.output.prediction_results import Prediction, check_top_k, resolve_top_k
from vit.precision import autocast, resolve_device, resolve_precision, should_benchmark_bf16
from vit.score_calibration import check_decisions, check_selection
from vit.tasks.task import calibrated_activation, get_task
from vit.text import Notify, print_to_stderr, printable
from vit.weights.adapt_weights import change_patches
from vit.weights.load_model import load_model
from vit.weights.saved_model import LoadedRun

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class ImageOutput:
    """Model output for one image, or its error; `to_predictions` makes Predictions of them.

    Args:
        probabilities: (classes,) float64, empty without a head; None on an error.
        error: Why there is no output, or None.
        captions: The best first; empty from a classifier.
        memory: The captioner's image tokens, (tokens, dim) on the device.
        pixels: Input of the encoder, uint8 (channels, height, width); (5, ...) with tta=crops.
        embedding: Input of the head, (dim,) float32, if requested.
    """

    image: str
    probabilities: Tensor | None
    error: str | None = None
    captions: tuple[Caption, ...] = ()
    memory: Tensor | None = None
    pixels: Tensor | None = None
    embedding: Tensor | None = None
    distance: float | None = None


class Predictor:
    """Classifies or captions images with a saved model.

    On one machine the same list gives the same numbers, to the last digit: batches are cut in its
    order, an unreadable image is replaced by a blank one, and the last batch is padded with blank
    images to a power of two, so that few shapes occur. (Rounding of a matrix product depends on
    its number of rows, so the last digits do depend on `batch_size`.) Captions leave the batch as
    they end and blank images get none: the last digits of their scores depend on the other images
    of the batch.

    Args:
        run: A run folder, any other source of weights with a head, or a loaded model.
        device: cpu, cuda, cuda:N or mps; the best available one by default.
        batch_size: Images in one forward pass. 64 by default; on a CPU 4 to 64 by the number of
            tokens of the network, and 16 for captions.
        precision: auto, fp32, bf16 or fp16. auto is bf16 where the hardware supports it; on a CPU
            whose bf16 may be fast or slow, a long list is timed in both once, and the result kept.
        workers: Threads that read images and, on a CPU, each compute a batch; one a core, at
            most 8, by default.
        merge_tokens: Patches merged in each block, faster and less exact; as in training by
            default.
        patch_size: Side of a patch in pixels, to which the weights are resized: preferably one
            that the network was trained with (`patch_sizes`). That of the network by default.
        keep_aspect: Keep the aspect ratio of images, with at most the usual number of patches,
            instead of a square. The last digits then depend on the other images of the batch.
        search: Generation settings of captions; greedy decoding by default. Sampling is seeded by
            the index of the image in the whole list.
        tta: Test-time augmentation, the mean over several views: `flip`, an image and its mirror
            image, or `crops`, those of its centre and four corners, ten in all.
        compile: Compile the network with torch.compile, which takes a minute and pays for many
            images (docs/predict.md).
        embeddings: Return an `embedding` with each prediction; the weights then need no head.
        intensity_range: Values of images of more than 8 bits per channel that become black and
            white; by default those of the training (docs/data.md).
        no_calibration: Return raw scores where the run has a calibration.
        notify: Called with notes: what foreign weights are, and which precision was chosen.

    Raises:
        VitError: The run, the device or a setting cannot be used.
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
        intensity_range: IntensityRange | None = None,
        no_calibration: bool = False,
        notify: Notify = print_to_stderr,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("workers", workers)):
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise ConfigError(f"{name}={value!r}: must be at least 1, a whole number")
        self.device = resolve_device(device)
        self.precision = resolve_precision(precision, self.device)
        if isinstance(run, LoadedRun):
            loaded = run
        elif exported_engine(run):
            raise ConfigError(
                f"{printable(os.fspath(run))} is a file of vit export, which torch does not run; "
                "give the run it was exported from; in Python: "
                "from vit.exported.load_exported import load_exported; "
                f"load_exported({os.fspath(run)!r})([image, ...])"
            )
        else:
            loaded = load_model(run, notify=notify, headless=embeddings)
        if no_calibration:
            loaded = loaded.without_calibration()
        measured = loaded.calibration
        loaded = change_patches(loaded, merge_tokens=merge_tokens, patch_size=patch_size)
        if measured is not None and measured.set_levels and loaded.calibration != measured:
            changed = "merge_tokens" if merge_tokens is not None else "patch_size"
            notify(
                f"note: {changed} changes the network that was calibrated, so it has no reject and "
                "no sets; leave it out for them"
            )
        self.classes = tuple(loaded.classes)
        self.preprocessing = loaded.preprocessing
        if intensity_range is not None:
            self.preprocessing = replace(self.preprocessing, intensity_range=intensity_range)
        with explain_full_memory():
            self.model = loaded.model.eval().to(self.device)
        self.caption_generator = make_caption_generator(loaded, search)
        captions = self.caption_generator is not None
        if self.caption_generator is not None and self.device.type == "cpu" and run is not loaded:
            # not in a network that the caller may save
            use_column_major_weights(self.caption_generator.decoder)
        self.keep_aspect = keep_aspect
        self.task = get_task(loaded.task_name)
        self.thresholds = loaded.thresholds
        """Probability from which on each class is named, of a multi-label model; else None."""
        self.calibration = loaded.calibration
        """Calibration of the scores; None where they are raw."""
        self.activation = calibrated_activation(loaded)
        self.runner = ModelRunner(
            self.model,
            self.preprocessing,
            self.device,
            keep_aspect=keep_aspect,
            tta=tta,
            embeddings=embeddings,
            compiled=compile,
            activation=self.activation,
            distance=loaded.distance,
        )
        side = self.model.patch_embed.patch_size if keep_aspect else None
        self.read = ImageReader(
            self.preprocessing, patch_size=side, crops=tta == "crops", notify=notify
        )
        self.batch_size = batch_size or default_batch_size(
            loaded.config, self.device, captions=captions
        )
        self.workers = workers or default_num_threads(self.device)
        self.precision_autotuner: PrecisionAutotuner | None = None
        if (
            precision == "auto"
            and should_benchmark_bf16(self.device)
            and self.classes
            and not captions
        ):
            usage = {"keep_aspect": keep_aspect, "compiled": compile}
            self.precision_autotuner = PrecisionAutotuner(
                loaded.config, usage, usual=self.precision, notify=notify
            )
            self.precision = self.precision_autotuner.precision

    @property
    def shares(self) -> bool:
        """Whether scores of classes are probabilities, which tables show in percent."""
        return self.task.activation_name != "identity"

    @property
    def block_size(self) -> int:
        """A list gives the same results when it is continued at a multiple of this."""
        return self.batch_size

    @property
    def n_best(self) -> int:
        """Captions of an image; 0 from a classifier."""
        return 0 if self.caption_generator is None else self.caption_generator.search.n_best

    def __call__(
        self,
        images: Iterable[ImageInput],
        *,
        top_k: int | None = None,
        threshold: float | None = None,
        reject: bool = False,
        sets: float | None = None,
    ) -> list[Prediction]:
        """One Prediction for each of `images`, in their order; see `stream`."""
        options = {"top_k": top_k, "threshold": threshold, "reject": reject, "sets": sets}
        return list(self.stream(images, **options))  # type: ignore[arg-type]

    def stream(
        self,
        images: Iterable[ImageInput],
        *,
        top_k: int | None = None,
        threshold: float | None = None,
        first: int = 0,
        reject: bool = False,
        sets: float | None = None,
    ) -> Iterator[Prediction]:
        """Iterate over predictions in the order of `images`, in constant memory.

        Args:
            images: Paths, PIL images, arrays (height, width, 3) or tensors (3, height, width),
                uint8 or in [0, 1] (vit/data/image_objects.py); or one array or tensor of a whole
                batch. Consumed lazily, a batch a worker ahead. An image in memory gives the
                prediction of a file with its pixels.
            top_k: Number of most probable classes to return, at most all. 5 by default; for a
                multi-label model all above their thresholds.
            threshold: Leave out classes that are less probable; replaces the model's thresholds.
            first: As for `batches`.
            reject: Mark answers as unknown that are too uncertain for the precision that the
                calibration of the run promises.
            sets: Add the classes that contain the true one with this probability.

        Raises:
            ConfigError: `top_k` is less than 1; the network has no calibration for `reject` or
                `sets`, or keeps the aspect ratio of images; `images` is one image instead of a
                list, or one of them is none; the last is raised when its turn comes.
        """
        check_top_k(top_k)
        if self.keep_aspect and (reject or sets is not None):
            raise ConfigError(
                f"{'reject' if reject else f'sets={sets:g}'}: thresholds, sets and distances are "
                "those of square crops; leave keep_aspect out"
            )
        check_selection(self.calibration, reject=reject, sets=sets)
        check_decisions(self.thresholds, reject=reject, threshold=threshold)
        if reject:
            self.return_distances()
        named_images(images)  # refuses a single image now, and not with the first result
        batches = self.batches(images, first=first)
        return (
            prediction
            for batch in batches
            for prediction in self.to_predictions(batch, top_k, threshold, reject=reject, sets=sets)
        )

    def batches(
        self, images: Iterable[ImageInput], *, first: int = 0
    ) -> Iterator[list[ImageOutput]]:
        """Iterate over the outputs of batches, in order, while threads work on the next ones.

        Args:
            images: As for `stream`.
            first: Index of the first image in a longer list. A list continued from a multiple of
                `batch_size` gives the digits of the whole list.

        Raises:
            RunError: The memory of the device is full.
        """
        with explain_full_memory():
            yield from self._batches(images, first)

    def _batches(self, images: Iterable[ImageInput], first: int) -> Iterator[list[ImageOutput]]:
        batches = chunks(named_images(images, first=first), self.batch_size, first=first)
        if isinstance(images, Sequence):
            self.autotune_precision(images)
        on_cpu = self.device.type == "cpu"
        workers = self.workers
        pool = make_thread_pool(workers) if on_cpu else ThreadPoolExecutor(workers, "read-image")
        try:
            if self.runner.compiled:
                pool.submit(self.runner.warm_up, self.batch_size, self.precision).result()
            if on_cpu:  # each thread reads and computes whole batches
                futures = (pool.submit(self._read_and_run, *batch) for batch in batches)
                for future in prefetch(futures, workers):
                    yield future.result()
            else:  # the threads read, this one computes
                reads = (
                    (start, batch, [pool.submit(self.read, one.source, one.name) for one in batch])
                    for start, batch in batches
                )
                for start, batch, read in prefetch(reads, 1):
                    names = [one.name for one in batch]
                    yield self.run_batch(start, names, [future.result() for future in read])
        finally:
            # an iterator that nobody finishes may be collected in one of these threads, which
            # cannot wait for itself
            with contextlib.suppress(RuntimeError):
                pool.shutdown(cancel_futures=True)

    def return_distances(self) -> None:
        """Return the distance of each image from those of training from now on, if it is known.

        Raises:
            ConfigError: Images keep their aspect ratio: distances are of square ones.
        """
        if self.keep_aspect:
            raise ConfigError(
                "reject: distances from the training images are those of square crops; leave "
                "keep_aspect out"
            )
        self.runner.returns_distances = True

    def autotune_precision(self, images: Sequence[ImageInput]) -> None:
        """Choose the precision for a list now, where `auto` leaves it to a trial."""
        if self.precision_autotuner is None:
            return
        choose = partial(self.precision_autotuner.choose, read=self.read, run=self.runner.run)
        with make_thread_pool(self.workers) as pool:  # as many threads a product as later
            self.precision = pool.submit(choose, images, self.batch_size).result()

    def to_predictions(
        self,
        outputs: Sequence[ImageOutput],
        top_k: int | None = None,
        threshold: float | None = None,
        *,
        reject: bool = False,
        sets: float | None = None,
    ) -> list[Prediction]:
        """Predictions of the outputs of a batch; arguments as for `stream`."""
        top_k, thresholds = resolve_top_k(self.classes, self.thresholds, top_k, threshold)
        rows = [output.probabilities for output in outputs if output.probabilities is not None]
        pairs: Iterator[tuple[list[int], list[float]]] = iter(())
        if rows:
            table = torch.stack(rows)
            order = ranking(table)
            best = order[:, :top_k]
            pairs = zip(best.tolist(), table.gather(1, best).tolist(), strict=True)
        least = [-math.inf] * len(self.classes) if thresholds is None else thresholds
        labels = (
            tuple(
                (self.classes[index], score)
                for index, score in zip(*pair, strict=True)
                if score >= least[index]
            )
            for pair in pairs
        )
        selected: Iterator[dict[str, Any]] = iter(())
        if rows and (reject or sets is not None):
            distances = [one.distance for one in outputs if one.probabilities is not None]
            selected = self._select(
                order, table.gather(1, order), distances, reject=reject, sets=sets
            )
        return [
            Prediction(output.image, error=output.error)
            if output.probabilities is None
            else Prediction(
                output.image,
                next(labels),
                captions=output.captions,
                embedding=output.embedding,
                **next(selected, {}),
            )
            for output in outputs
        ]

    def _select(
        self,
        order: Tensor,
        probabilities: Tensor,
        distances: Sequence[float | None],
        *,
        reject: bool,
        sets: float | None,
    ) -> Iterator[dict[str, Any]]:
        """Reason of a rejection and prediction set of each image, from its sorted classes."""
        assert self.calibration is not None, "checked by check_selection"
        for row in zip(order.tolist(), probabilities.tolist(), distances, strict=True):
            yield self.calibration.select(
                self.classes, *row, thresholds=self.thresholds, reject=reject, sets=sets
            )

    def _read_and_run(self, first: int, batch: list[NamedImage]) -> list[ImageOutput]:
        images = [self.read(one.source, one.name) for one in batch]
        return self.run_batch(first, [one.name for one in batch], images)

    def run_batch(
        self,
        first: int,
        names: Sequence[str],
        images: Sequence[Tensor | BadImage],
        *,
        rows: int | None = None,
    ) -> list[ImageOutput]:
        """Outputs of one batch.

        Args:
            first: Index of its first image in the whole list.
            names: Names of the images.
            images: Images as `read` returns them.
            rows: Size of the batch with the blank images that pad it; by default a power of two.
        """
        errors = {n: image.reason for n, image in enumerate(images) if isinstance(image, BadImage)}
        if len(errors) == len(names):
            return [ImageOutput(name, None, errors[n]) for n, name in enumerate(names)]
        blank = self.runner.blank_image()
        batch = [blank if isinstance(image, BadImage) else image for image in images]
        batch += [blank] * ((rows or self._padded_size(len(names))) - len(names))
        output = self.runner.run(batch, self.precision)
        finite = output.probabilities.isfinite().all(dim=1)
        if output.embeddings is not None:
            finite &= output.embeddings.isfinite().all(dim=1)
        for n, is_finite in enumerate(finite[: len(names)].tolist()):
            if not is_finite and n not in errors:
                errors[n] = f"the network overflowed in {self.precision}; try precision fp32"
        good = [n for n in range(len(names)) if n not in errors]
        captions = self._generate_captions(output.memories, good, first, errors)
        return [
            ImageOutput(name, None, errors[n])
            if n in errors
            else ImageOutput(
                name,
                output.probabilities[n],
                captions=captions.get(n, ()),
                memory=output.memories[n],
                pixels=batch[n],
                embedding=None if output.embeddings is None else output.embeddings[n],
                distance=None if output.distances is None else float(output.distances[n]),
            )
            for n, name in enumerate(names)
        ]

    def _padded_size(self, images: int) -> int:
        """Rows of a batch, with the blank images that pad it."""
        if self.keep_aspect:
            return images
        if self.runner.compiled:
            return self.batch_size
        return min(self.batch_size, 1 << (images - 1).bit_length())

    @torch.inference_mode()
    def _generate_captions(
        self,
        memories: Sequence[Tensor | None],
        indices: list[int],
        first: int,
        errors: dict[int, str],
    ) -> dict[int, tuple[Caption, ...]]:
        """Captions of the images at `indices`; failures are added to `errors`."""
        if self.caption_generator is None:
            return {}
        selected = [memory for n in indices if (memory := memories[n]) is not None]
        with autocast(self.precision, self.device):
            results = self.caption_generator.generate(selected, [first + n for n in indices])
        captions = {}
        for n, result in zip(indices, results, strict=True):
            if isinstance(result, WeightsError):
                errors[n] = str(result)
            else:
                captions[n] = result
        return captions
