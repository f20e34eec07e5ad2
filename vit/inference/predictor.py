"""Predictions for images: read, prepare, run the network, return labels or captions.

Evaluation uses the same code (vit/inference/evaluate.py), so both give the same numbers. Needs no
torch unless the engine is torch (vit/inference/torch_engine.py).
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vit.class_tree import COLUMNS, ROOT, ClassTree, answer_of
from vit.config.inference_config import InferenceConfig, accepts_settings, inference_config
from vit.config.settings import TREE_TASKS
from vit.data.image_objects import ImageInput, NamedImage, named_images
from vit.data.instrument_images import Array
from vit.errors import BadImage, ConfigError, WeightsError, error_text, explain_full_memory
from vit.exported.engine import (
    Engine,
    exported_files,
    exported_suffix,
    open_exported,
    select_engine,
)
from vit.exported.image_prefetch import ImageReader, chunks, expected_pixels, prefetch
from vit.output.prediction_results import (
    ImageOutput,
    Prediction,
    check_classes,
    check_top_k,
    classes_per_row,
)
from vit.quick_imports import quick_imports
from vit.score_calibration import UNCERTAIN, check_decisions, check_selection, node_threshold
from vit.text import Notify, print_to_stderr, printable

if TYPE_CHECKING:
    from vit.tasks.task import Task
    from vit.weights.saved_model import LoadedRun

PathLike = str | os.PathLike[str]
EXPORTED_TASKS = {"softmax": "classify", "sigmoid": "multilabel", "units": "regression"}
"""Activation in the metadata of an exported file -> the task that evaluates it."""


OUTPUTS = ("probabilities", "captions", "memory", "pixels", "embedding", "distance")
"""Outputs of an engine that an ImageOutput has."""


class Predictor:
    """Classifies or captions images with a saved model.

    On one machine the same list gives the same numbers, to the last digit: batches are cut in its
    order, and do not depend on the threads. (Rounding of a matrix product depends on its number of
    rows, so the last digits do depend on `batch_size`; those of captions, of images that keep their
    aspect ratio, and of an exported network also on the other images of the list.)

    Args:
        model: A run folder, any other source of weights with a head, a loaded model, a file of
            `vit export`, or an engine (vit/exported/engine.py).
        engine: torch, onnx or openvino; by default the suffix of the model decides.
        threads: Compute threads of an exported network; one per core by default.
        config: All settings as one object, instead of `settings`.
        notify: Called with notes: what foreign weights are, and which precision was chosen.
        settings: Of InferenceConfig (vit/config/inference_config.py).

    Attributes:
        read: Reads an image as the engine takes it.

    Raises:
        VitError: The model, the device or a setting cannot be used.
    """

    def __init__(
        self,
        model: "PathLike | LoadedRun | Engine",
        *,
        engine: str | None = None,
        threads: int | None = None,
        config: InferenceConfig | None = None,
        notify: Notify = print_to_stderr,
        **settings: Any,
    ) -> None:
        config = inference_config(config, settings)
        self.engine: Any = model
        if not hasattr(model, "run"):
            self.engine = open_engine(model, engine, config, threads, notify)
        network: Engine = self.engine
        self.read = ImageReader(network.prepare, network.preprocessing, notify=notify)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the engine: classes, precision, and what torch has besides."""
        if name == "engine":  # not set yet
            raise AttributeError(name)
        return getattr(self.engine, name)

    @cached_property
    def task(self) -> "Task":
        """The task that evaluates the network."""
        from vit.tasks.task import get_task

        if self.exported:
            metadata = self.engine.metadata
            name = EXPORTED_TASKS[metadata.get("activation", "softmax")]
            name = metadata.get("task", name)
        else:
            name = self.engine.task_name
        task = get_task(name)
        task.answers = self.answers
        return task

    @cached_property
    def tree(self) -> ClassTree | None:
        """The tree whose nodes are answers; None of another network."""
        metadata = getattr(self.engine, "metadata", {})
        name = getattr(self.engine, "task_name", metadata.get("task"))
        return ClassTree(self.classes) if name in TREE_TASKS else None

    def __call__(
        self, images: Iterable[ImageInput], *, top_k: int | None = None, **options: Any
    ) -> list[Prediction]:
        """One Prediction for each of `images`, in their order; arguments as for `stream`."""
        return list(self.stream(images, top_k=top_k, **options))

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
            sets: Add the classes that contain the true one with this probability; of a network of
                numbers the coverage of its intervals, 0.9 by default.

        Raises:
            ConfigError: `top_k` is less than 1; the network has no calibration for `reject` or
                `sets`, or keeps the aspect ratio of images; `images` is one image instead of a
                list, or one of them is not an image; the last is raised when its turn comes.
        """
        check_top_k(top_k)
        self.check_options(threshold=threshold, reject=reject, sets=sets)
        if reject:
            self.engine.returns_distances = True
        named_images(images)  # refuses a single image now, and not with the first result
        batches = self.batches(images, first=first)
        return (
            prediction
            for batch in batches
            for prediction in self.to_predictions(batch, top_k, threshold, reject=reject, sets=sets)
        )

    def check_options(self, *, threshold: float | None, reject: bool, sets: float | None) -> None:
        """Refuse options of `stream` that this network cannot fulfil."""
        if self.answers is not None:
            check_classes((), self.answers.kind, threshold=threshold, reject=reject)
            self.answers.check_coverage(sets)
            return
        if self.keep_aspect and (reject or sets is not None):
            raise ConfigError(
                f"{'reject' if reject else f'sets={sets:g}'}: thresholds, sets and distances are "
                "those of square crops; leave keep_aspect out"
            )
        check_selection(self.calibration, reject=reject, sets=sets)
        check_decisions(self.thresholds, reject=reject, threshold=threshold)

    def answer_columns(self, sets: float | None = None) -> dict[str, str]:
        """Columns of numbers or nodes in a row and their units; none of a network without them."""
        if self.tree is not None:
            return dict.fromkeys(COLUMNS, "")
        return {} if self.answers is None else self.answers.columns(sets)

    def autotune_precision(self, images: Sequence[ImageInput]) -> None:
        """Choose the precision for a list now, where `auto` leaves it to a trial."""
        if not self.exported:
            self.engine.autotune_precision(images, self.read)

    def batches(
        self, images: Iterable[ImageInput], *, first: int = 0
    ) -> Iterator[list[ImageOutput]]:
        """Iterate over the outputs of batches, in order, while threads work on the next ones.

        Args:
            images: As for `stream`.
            first: Index of the first image in a longer list. A list continued from a multiple of
                `block_size` gives the digits of the whole list.

        Raises:
            RunError: The memory of the device is full.
        """
        with explain_full_memory():
            yield from self._batches(images, first)

    def _batches(self, images: Iterable[ImageInput], first: int) -> Iterator[list[ImageOutput]]:
        network: Engine = self.engine
        counted = {"count_pixels": expected_pixels} if network.whole_images else {}
        named = named_images(images, first=first)
        batches = chunks(named, network.block_size, first=first, **counted)
        if isinstance(images, Sequence):
            self.autotune_precision(images)
        pool = network.pool()
        try:
            if network.reads_and_computes:
                futures = (pool.submit(self._read_and_run, *batch) for batch in batches)
                for future in prefetch(futures, network.workers):
                    yield future.result()
            else:  # the threads read, this one computes
                reads = (
                    (start, batch, [pool.submit(self.read, one.source, one.name) for one in batch])
                    for start, batch in batches
                )
                for start, batch, read in prefetch(reads, 1):
                    names = [one.name for one in batch]
                    images_read = [future.result() for future in read]
                    read.clear()
                    yield self._run_groups(start, names, images_read)
        finally:
            # an iterator that nobody finishes may be collected in one of these threads, which
            # cannot wait for itself
            with contextlib.suppress(RuntimeError):
                pool.shutdown(cancel_futures=True)

    def _read_and_run(self, first: int, batch: list[NamedImage]) -> list[ImageOutput]:
        images = [self.read(one.source, one.name) for one in batch]
        return self._run_groups(first, [one.name for one in batch], images)

    def _run_groups(self, first: int, names: Sequence[str], images: list[Any]) -> list[ImageOutput]:
        """Outputs of images that were read; those of one forward pass fail together."""
        outputs = {
            index: ImageOutput(names[index], None, image.reason)
            for index, image in enumerate(images)
            if isinstance(image, BadImage)
        }
        for group in self.engine.groups(images) if len(outputs) < len(names) else ():
            parts = [names[index] for index in group], [images[index] for index in group]
            outputs |= zip(group, self._run_or_explain(first + group[0], *parts), strict=True)
        images.clear()
        return [outputs[index] for index in range(len(names))]

    def _run_or_explain(
        self, first: int, names: Sequence[str], images: Sequence[Any]
    ) -> list[ImageOutput]:
        """As `run_batch`; if it fails, images are computed one by one, so that one fails alone."""
        try:
            return self.run_batch(first, names, images)
        except (WeightsError, MemoryError, BadImage) as error:
            if len(images) == 1:
                return [ImageOutput(names[0], None, error_text(error))]
        alone = zip(names, images, strict=True)
        return [
            one for name, image in alone for one in self._run_or_explain(first, [name], [image])
        ]

    def run_batch(
        self,
        first: int,
        names: Sequence[str],
        images: Sequence[Any],
        *,
        rows: int | None = None,
    ) -> list[ImageOutput]:
        """Outputs of one batch of images that `read` returned; arguments as for `Engine.run`."""
        try:
            output = self.engine.run(images, first=first, rows=rows)
        except BadImage as error:  # tiles are decoded there
            if len(images) > 1:
                raise
            return [ImageOutput(names[0], None, error.reason)]
        finite = np.isfinite(output["probabilities"]).all(axis=1)
        if (embeddings := output.get("embedding")) is not None:
            finite &= np.isfinite(np.asarray(embeddings)).all(axis=1)
        overflow = f"the network overflowed in {self.precision}; {self.engine.remedy}"
        outputs = []
        for n, (name, image) in enumerate(zip(names, images, strict=True)):
            values = {key: output[key][n] for key in OUTPUTS if key in output}
            failed = values.get("captions")
            if isinstance(image, BadImage):
                outputs.append(ImageOutput(name, None, image.reason))
            elif not finite[n]:
                outputs.append(ImageOutput(name, None, printable(overflow)))
            elif isinstance(failed, WeightsError):
                outputs.append(ImageOutput(name, None, str(failed)))
            else:
                outputs.append(ImageOutput(name, **values))
        return outputs

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
        if self.answers is not None:
            return [self._answer(output, sets) for output in outputs]
        count = classes_per_row(self.classes, self.thresholds, top_k)
        thresholds = self.thresholds if threshold is None else [threshold] * len(self.classes)
        rows = [one.probabilities for one in outputs if one.probabilities is not None]
        orders: Iterator[Array] = iter(ranked_classes(np.stack(rows)) if rows else [])
        predictions = []
        for output in outputs:
            if output.probabilities is None:
                predictions.append(Prediction(output.image, error=output.error))
                continue
            order = next(orders)
            best = order[:count]
            pairs = zip(best.tolist(), output.probabilities[best].tolist(), strict=True)
            selected: dict[str, Any] = {}
            if reject or sets is not None:
                selected = self.calibration.select(
                    self.classes,
                    order.tolist(),
                    output.probabilities[order].tolist(),
                    output.distance,
                    thresholds=self.thresholds,
                    reject=reject and self.tree is None,
                    sets=sets,
                )
            if self.tree is not None:
                selected |= self._node(self.tree, output, reject=reject)
            predictions.append(
                Prediction(
                    output.image,
                    tuple(
                        (self.classes[index], score)
                        for index, score in pairs
                        if thresholds is None or score >= thresholds[index]
                    ),
                    captions=output.captions,
                    embedding=output.embedding,
                    **selected,
                )
            )
        return predictions

    def _node(self, tree: ClassTree, output: ImageOutput, *, reject: bool) -> dict[str, Any]:
        """Fields of a Prediction of a tree: the deepest node that is an answer."""
        assert output.probabilities is not None
        (path,) = tree.paths(output.probabilities[None])
        node, score = answer_of(path, node_threshold(self.calibration))
        reason = self.calibration.reject_reason(path[0][1], output.distance) if reject else None
        if reject and node == ROOT:
            reason = reason or UNCERTAIN  # also where no threshold is proven
        known = node != ROOT and reason is None
        cells = (node, score) if known else (None, None)
        return {"answers": dict(zip(COLUMNS, cells, strict=True)), "unknown": reason}

    def _answer(self, output: ImageOutput, sets: float | None) -> Prediction:
        if output.probabilities is None:
            return Prediction(output.image, error=output.error)
        cells = self.answers.row(output.probabilities.tolist(), sets)
        return Prediction(output.image, answers=cells, embedding=output.embedding)


accepts_settings(InferenceConfig)(Predictor)


def ranked_classes(probabilities: Array) -> Array:
    """Classes from the most to the least probable, (..., classes); of equal ones the first."""
    order: Array = np.argsort(-probabilities, kind="stable")
    return order


def open_engine(
    model: Any, engine: str | None, config: InferenceConfig, threads: int | None, notify: Notify
) -> Any:
    """Open a model in its engine; exported networks without importing torch."""
    is_path = isinstance(model, str | os.PathLike)
    engine = select_engine(model, engine) if is_path else "torch"
    if engine == "ray":
        raise ConfigError("engine=ray: only vit predict and vit serve start workers; leave it out")
    if engine != "torch":
        return open_exported(os.fspath(model), engine, config, threads)
    with quick_imports():
        from vit.inference.torch_engine import TorchEngine

    return TorchEngine(model, config, notify)


def open_evaluated(model: "PathLike | LoadedRun", *, notify: Notify, **settings: Any) -> Predictor:
    """Open a network whose answers are measured."""
    predictor = Predictor(model, notify=notify, **settings)
    if not predictor.exported:
        return predictor
    name = printable(model)
    if predictor.n_best:
        raise ConfigError(
            f"{name} writes captions, which are measured with the run: vit evaluate RUN DATA"
        )
    if predictor.metadata.get("activation", "softmax") not in EXPORTED_TASKS:
        raise ConfigError(
            f"{name}: its outputs are no probabilities of classes; evaluate the run that it was "
            "exported from"
        )
    if source_run(predictor) is None:
        source = Path(predictor.metadata.get("source_run", ""))
        notify(
            f"note: the run that {name} was exported from, {printable(source)}, is not here: "
            "images of its training are not left out"
        )
    return predictor


def source_run(predictor: Predictor) -> Path | None:
    """Folder of the run that a file was exported from; None if it is not here."""
    source = Path(predictor.metadata.get("source_run", ""))
    return source if (source / "config.json").is_file() else None


def model_files(model: str, *, offline: bool | None = None) -> list[Path]:
    """Files of the model, for its digest; `offline` as for `locate_weights`."""
    if exported_suffix(model):
        return exported_files(model)
    from vit.weights.resolve_source import locate_weights

    found = locate_weights(model, offline=offline)
    shards = found.folder.glob("*-of-*") if found.weights.suffix == ".json" else ()
    names = ("tokenizer.json", "distance.safetensors")
    others = (found.config, found.processor, *(found.folder / name for name in names))
    files = [found.weights, *shards, *(one for one in others if one is not None)]
    return sorted(file for file in files if file.is_file())
