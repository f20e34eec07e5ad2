"""Classes of images from the file of `vit export`, without torch: onnxruntime, numpy, Pillow.

The graph takes the bytes of an image of any size and does everything else: it resizes, normalises
and gives probabilities. Here images are read, by the code that training used, and put together.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage, ConfigError, WeightsError, printable
from vit.exported.greedy_numpy import Array
from vit.exported.onnx_session import Graph, Session
from vit.exported.read_ahead import (
    PathLike,
    Read,
    check_top_k,
    how_many,
    named,
    paths_of,
    sizes,
    windows,
)
from vit.output.prediction_results import Prediction

INPUT, OUTPUT = "images", "probabilities"
WINDOW = 8
"""Batches among which images of one size are looked for."""
BATCH_PIXELS = 2**22
"""In one pass: the graph needs 12 bytes and more for each."""
Row = dict[str, Array]


class ClassRunner:
    """Labels images with an exported classifier.

    Images of one height and width go through the graph together, where they are near each other
    in the list. A list gives the same numbers every time; the last digits depend on `batch_size`
    and on the other images.

    Args:
        path: X.onnx, or a graph that another engine has opened.
        providers: What computes it, by onnxruntime's names; the CPU when left out.
        batch_size: Images in one pass at most.
        workers: Threads that read images; one a core, at most 8, when left out.
        threads: That compute; one a core when left out.

    Attributes:
        classes: Names, by output of the network.
        preprocessing: What the graph does with an image before the network sees it.
        precision: fp32, fp16 or int8: the arithmetic of the graph.
        thresholds: Of each class, from which on it is named, where an image may have several and
            the graph ends in sigmoids; None where it has one.
        block: Images from the start of a list on whose answers depend on each other alone.
        metadata: All that the file says of itself.

    Raises:
        ConfigError: A setting is out of range, or cannot be used on this machine.
        WeightsError: The file is missing, damaged, or not of vit export.
        VitError: onnxruntime is not installed.
    """

    n_best = 0
    """Captions of an image."""

    def __init__(
        self,
        path: PathLike | Graph,
        providers: Sequence[str] | None = None,
        *,
        batch_size: int | None = None,
        workers: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.batch_size, self.workers = sizes(batch_size, workers)
        self.block = WINDOW * self.batch_size
        if isinstance(path, str | os.PathLike):
            self._name = printable(path)
            self._graph: Graph = Session(path, providers, threads=threads)
        elif providers is None and threads is None:
            self._name, self._graph = "the graph", path
        else:
            raise ConfigError("providers and threads are those of the graph that was given")
        self.metadata = self._graph.metadata
        self._check_kind()
        try:
            self.classes = _class_names(self.metadata["classes"])
            self.preprocessing = Preprocessing.from_dict(json.loads(self.metadata["preprocessing"]))
            self.precision = self.metadata["precision"]
            self.thresholds = _thresholds(self.metadata, self.classes)
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise WeightsError(
                f"{self._name}: its metadata are damaged ({printable(error)}); export it again"
            ) from None
        self._check_declared(getattr(self._graph, "declared", {}))

    def _check_kind(self) -> None:
        """Refuse what is no classifier of vit export."""
        kind = self.metadata.get("graph")
        if kind is None:
            raise WeightsError(f"{self._name} was not written by vit export; give a file that was")
        if kind != "classifier":
            raise WeightsError(
                f"{self._name} is the {printable(kind)} of a captioner, not a classifier; open it "
                "with CaptionRunner"
            )
        if self._graph.inputs != [INPUT] or OUTPUT not in self._graph.outputs:
            names = f"{self._graph.inputs} -> {self._graph.outputs}"
            raise WeightsError(
                f"{self._name}: computes {printable(names)}, expected {INPUT} -> {OUTPUT}; "
                "export it again"
            )

    def _check_declared(self, declared: dict[str, tuple[str, tuple[Any, ...]]]) -> None:
        """Compare what the graph says of its input and output with what is going to be used."""
        kind, shape = declared.get(INPUT, ("tensor(uint8)", (None, None, None, 3)))
        free = len(shape) == 4 and not any(isinstance(side, int) for side in shape[:3])
        if kind != "tensor(uint8)" or not free or shape[3] != 3:
            raise WeightsError(
                f"{self._name}: takes {kind} of shape {printable(list(shape))}, expected bytes of "
                "any (batch, height, width, 3); export it again"
            )
        _, shape = declared.get(OUTPUT, ("", (None, len(self.classes))))
        if len(shape) != 2 or shape[1] != len(self.classes):
            raise WeightsError(
                f"{self._name}: gives probabilities of shape {printable(list(shape))}, and names "
                f"{len(self.classes)} classes; export it again"
            )

    def __call__(
        self,
        images: Iterable[PathLike],
        *,
        top_k: int | None = None,
        threshold: float | None = None,
    ) -> list[Prediction]:
        """One answer for each path of `images`, in their order; see `stream`."""
        return list(self.stream(images, top_k=top_k, threshold=threshold))

    def stream(
        self,
        images: Iterable[PathLike],
        *,
        top_k: int | None = None,
        threshold: float | None = None,
    ) -> Iterator[Prediction]:
        """Answers in the order of `images`, as they are made; memory does not grow.

        Args:
            images: Paths of images.
            top_k: Most probable classes to name; all of them where there are fewer. When left out
                5, and where an image may have several classes all above their thresholds.
            threshold: Name no class that is less probable, whatever its own threshold is.

        Raises:
            ConfigError: `top_k` is less than 1, or `images` is one path instead of several.
            WeightsError: The graph gives other shapes than it must.
        """
        check_top_k(top_k)
        asked = how_many(self.classes, self.thresholds, top_k, threshold)
        return (self._told(path, row, *asked) for path, row in self._rows(paths_of(images)))

    def probabilities(self, images: Iterable[PathLike]) -> Iterator[Array | BadImage]:
        """Of each image in order, (classes,) float64, or why there are none."""
        rows = self._rows(paths_of(images))
        return (row if isinstance(row, BadImage) else row[OUTPUT] for _, row in rows)

    def outputs(self, images: Iterable[PathLike], names: Sequence[str]) -> Iterator[Row | BadImage]:
        """Of each image in order the outputs called `names`, without the axis of the batch.

        Raises:
            ConfigError: The graph has no such output, or `images` is one path instead of several.
        """
        for name in names:
            if name not in self._graph.outputs:
                raise ConfigError(
                    f"output={name!r}: {self._name} gives {', '.join(self._graph.outputs)}; export "
                    "it with --tokens"
                )
        return (row for _, row in self._rows(paths_of(images), names))

    def _told(
        self, path: str, row: Row | BadImage, top_k: int, thresholds: Sequence[float] | None
    ) -> Prediction:
        if isinstance(row, BadImage):
            return Prediction(path, error=row.reason)
        return Prediction(path, named(self.classes, row[OUTPUT], top_k, thresholds))

    def _rows(
        self, paths: Iterator[str], names: Sequence[str] = (OUTPUT,)
    ) -> Iterator[tuple[str, Row | BadImage]]:
        for window in windows(paths, np.asarray, workers=self.workers, most=self.block):
            yield from zip([path for path, _ in window], self._window(window, names), strict=True)

    def _window(self, window: list[Read], names: Sequence[str]) -> list[Row | BadImage]:
        """What is said of each image of a window; those of one size are computed together."""
        said: dict[int, Row | BadImage] = {}
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, (_, image) in enumerate(window):
            if isinstance(image, BadImage):
                said[place] = image
            else:
                alike[image.shape].append(place)
        for (height, width, _), places in alike.items():
            size = max(1, min(self.batch_size, BATCH_PIXELS // (height * width)))
            for first in range(0, len(places), size):
                chosen = places[first : first + size]
                said |= zip(chosen, self._batch([window[i] for i in chosen], names), strict=True)
        return [said[place] for place in range(len(window))]

    def _batch(self, images: list[Read], names: Sequence[str]) -> list[Row | BadImage]:
        """What is said of each of some images of one size."""
        pixels = [np.asarray(image) for _, image in images]
        try:
            found = self._graph({INPUT: np.stack(pixels) if len(pixels) > 1 else pixels[0][None]})
        except (WeightsError, MemoryError) as error:
            return [BadImage(path, str(error)) for path, _ in images]
        outputs = dict(zip(self._graph.outputs, found, strict=True))
        outputs[OUTPUT] = outputs[OUTPUT].astype(np.float64)
        if outputs[OUTPUT].shape != (len(images), len(self.classes)):
            raise WeightsError(
                f"{self._name}: gives probabilities of shape {list(outputs[OUTPUT].shape)} for "
                f"{len(images)} images and {len(self.classes)} classes; export it again"
            )
        finite = [bool(np.isfinite(row).all()) for row in outputs[OUTPUT]]
        overflow = f"the network overflowed in {printable(self.precision)}; export it as fp32"
        return [
            {name: outputs[name][place] for name in names}
            if finite[place]
            else BadImage(path, overflow)
            for place, (path, _) in enumerate(images)
        ]


def _class_names(text: str) -> tuple[str, ...]:
    """The names in a JSON list.

    Raises:
        ValueError: It is no list of different names.
    """
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("classes are no list of names")
    if not names or len(set(names)) != len(names):
        raise ValueError("classes are none, or two have one name")
    return tuple(names)


def _thresholds(metadata: dict[str, str], classes: Sequence[str]) -> tuple[float, ...] | None:
    """Of each class, where an image may have several; None of softmax, and of older files.

    Raises:
        ValueError: There are none, or they are no probabilities.
    """
    kind = metadata.get("activation", "softmax")
    if kind == "softmax":
        return None
    values = json.loads(metadata.get("thresholds", "null"))
    listed = isinstance(values, list) and len(values) == len(classes)
    if kind != "sigmoid" or not listed or not all(_is_share(value) for value in values):
        raise ValueError(f"activation {printable(kind)} needs a threshold for each class")
    return tuple(map(float, values))


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1
