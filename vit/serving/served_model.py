"""One network of the server: images in memory to rows of `vit predict --format jsonl`.

    decode         bytes -> pixels as the network takes them, or BadImage   (threads that decode)
    run            a batch of them -> outputs                               (threads that compute)
    to_prediction  one output -> one prediction
    format_row     one prediction -> one line, byte for byte that of `vit predict`

The three kinds of predictors, of run folders and of exported classifiers and captioners, have one
adapter each; only the first one needs torch.
"""

import contextlib
import io
import math
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from vit.data.image_io import EncodedImage, read_size
from vit.data.image_objects import Array, NamedImage
from vit.data.intensity_range import DarkImageNote
from vit.errors import BadImage, ConfigError, VitError
from vit.exported.image_prefetch import decode_image
from vit.exported.onnx_captioner import ExportedCaptioner
from vit.exported.onnx_classifier import OUTPUT, ExportedClassifier
from vit.inference.backends import (
    ImagePredictor,
    model_files,
    open_predictor,
    select_engine,
)
from vit.inference.prediction_job import apply_threshold, classes_per_row
from vit.output.prediction_results import FORMATS, Layout, Prediction, check_top_k, resolve_top_k
from vit.paths import sha256_of_files
from vit.score_calibration import check_decisions, check_selection
from vit.text import plural

if TYPE_CHECKING:
    from vit.generation.generation_config import Caption
    from vit.inference.predictor import Predictor

Upload = EncodedImage | Array
"""An image file in memory, or its pixels, (height, width, 3) uint8."""


@dataclass(frozen=True)
class RowOptions:
    """Options of a request; fields are named as the flags of `vit predict`."""

    top_k: int | None = None
    threshold: float | None = None
    reject: bool = False
    sets: float | None = None


class ModelAdapter(Protocol):
    """What differs between the kinds of predictors."""

    @property
    def predictor(self) -> ImagePredictor: ...

    @property
    def compute_threads(self) -> int:
        """Batches that are computed at the same time."""

    limits_pixels: bool
    """Whether the adapter itself limits the pixels that are decoded at the same time."""
    keeps_pixels: bool
    """Whether images are resized by the network, and until then in memory as they are."""

    def decode(self, name: str, upload: Upload) -> Any:
        """Pixels as `run` takes them."""

    def group(self, pixels: Any) -> Hashable:
        """Images of one group may share a batch."""

    def most_images(self, pixels: Any) -> int | None:
        """Most images of this size in a batch; None where only the network limits it."""

    def probe(self, number: int) -> Any:
        """Random pixels, the same ones for the same number."""

    def run(self, names: Sequence[str], images: Sequence[Any], rows: int) -> list[Any]:
        """Outputs of images of one group, or the BadImage of each that has none."""

    def probabilities(self, output: Any) -> Array:
        """(classes,) float64."""

    def to_prediction(self, name: str, output: Any, options: RowOptions) -> Prediction:
        """The prediction of one output."""


class TorchAdapter:
    """A run folder, or other weights, in torch."""

    limits_pixels, keeps_pixels = True, False

    def __init__(self, predictor: "Predictor") -> None:
        self.predictor = predictor
        self.compute_threads = predictor.workers if predictor.device.type == "cpu" else 1
        if predictor.runner.distance is not None:
            predictor.return_distances()  # same digits with and without

    def decode(self, name: str, upload: Upload) -> Any:
        source: Any = (
            EncodedImage(name, upload.data) if isinstance(upload, EncodedImage) else upload
        )
        pixels = self.predictor.read(source, name)
        if isinstance(pixels, BadImage):
            raise pixels
        return pixels

    def group(self, pixels: Any) -> Hashable:
        return tuple(pixels.shape)

    def most_images(self, _pixels: Any) -> int | None:
        return None

    def probe(self, number: int) -> Any:
        import torch

        generator = torch.Generator().manual_seed(number)
        shape = self.predictor.runner.blank_image().shape
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def run(self, names: Sequence[str], images: Sequence[Any], rows: int) -> list[Any]:
        outputs = self.predictor.run_batch(0, names, images, rows=rows)
        return [one if one.error is None else BadImage(one.image, one.error) for one in outputs]

    def probabilities(self, output: Any) -> Array:
        probabilities: Array = output.probabilities.numpy()
        return probabilities

    def to_prediction(self, name: str, output: Any, options: RowOptions) -> Prediction:
        several = self.predictor.thresholds is not None
        (found,) = self.predictor.to_predictions(
            [output],
            max(classes_per_row(self.predictor, options.top_k), 1),
            options.threshold if several else None,
            reject=options.reject,
            sets=options.sets,
        )
        return Prediction(
            name,
            found.predictions,
            captions=found.captions,
            unknown=found.unknown,
            prediction_set=found.prediction_set,
        )


class ExportedAdapter:
    """What exported classifiers and captioners share."""

    limits_pixels = False
    compute_threads = 1
    """A session uses all cores for one batch."""

    def __init__(
        self,
        predictor: ExportedClassifier | ExportedCaptioner,
        prepare: Callable[[Any], object],
    ) -> None:
        self.preprocessing = predictor.preprocessing
        self._decode = partial(
            decode_image,
            prepare=prepare,
            intensity_range=self.preprocessing.intensity_range,
            note=DarkImageNote(predictor.notify),
        )

    def decode(self, name: str, upload: Upload) -> Any:
        pixels = self._decode(NamedImage(name, upload))
        if isinstance(pixels, BadImage):
            raise pixels
        return pixels

    def group(self, pixels: Any) -> Hashable:
        return tuple(pixels.shape)

    def most_images(self, _pixels: Any) -> int | None:
        return None

    def probe(self, number: int) -> Any:
        shape = (*self.preprocessing.image_size, 3)
        return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


class ExportedClassifierAdapter(ExportedAdapter):
    """An exported classifier, in onnxruntime or OpenVINO. Arguments as for TorchAdapter."""

    keeps_pixels = True

    def __init__(self, predictor: ExportedClassifier) -> None:
        super().__init__(predictor, np.asarray)
        self.predictor = predictor

    def most_images(self, pixels: Any) -> int | None:
        return self.predictor.most_images(*pixels.shape[:2])

    def run(self, names: Sequence[str], images: Sequence[Any], rows: int) -> list[Any]:
        named = list(zip(names, images, strict=True))
        named += [("", np.zeros_like(images[0]))] * (rows - len(named))
        return self.predictor.run_batch(named, self.predictor.output_names)[: len(names)]

    def probabilities(self, output: Any) -> Array:
        probabilities: Array = output[OUTPUT]
        return probabilities

    def to_prediction(self, name: str, output: Any, options: RowOptions) -> Prediction:
        predictor = self.predictor
        threshold = options.threshold if predictor.thresholds is not None else None
        top_k = classes_per_row(predictor, options.top_k)
        top_k, thresholds = resolve_top_k(predictor.classes, predictor.thresholds, top_k, threshold)
        # without `reject` vit predict does not look at the distance either
        row = output if options.reject else {OUTPUT: output[OUTPUT]}
        return predictor.to_prediction(
            name, row, top_k, thresholds, reject=options.reject, sets=options.sets
        )


class ExportedCaptionerAdapter(ExportedAdapter):
    """An exported captioner, in onnxruntime. Arguments as for TorchAdapter."""

    keeps_pixels = False

    def __init__(self, predictor: ExportedCaptioner) -> None:
        super().__init__(predictor, predictor.preprocessing.resize_and_crop)
        self.predictor = predictor

    def run(self, names: Sequence[str], images: Sequence[Any], rows: int) -> list[Any]:
        assert rows == len(names) == 1, "captioners take one image a batch"
        return list(self.predictor.caption([*images], max(len(self.predictor.classes), 1)))

    def probabilities(self, output: "tuple[Caption, tuple[tuple[str, float], ...]]") -> Array:
        scores = dict(output[1])
        return np.array([scores[name] for name in self.predictor.classes], dtype=np.float64)

    def to_prediction(self, name: str, output: Any, options: RowOptions) -> Prediction:
        caption, classes = output
        top_k = classes_per_row(self.predictor, options.top_k)
        return Prediction(name, classes[: max(top_k, 1)], captions=(caption,))


class ServedModel:
    """A network that is loaded and ready.

    Attributes:
        adapter: What differs between kinds of predictors.
        engine: torch, onnx or openvino.
        batch_sizes: Sizes of batches that give the same digits, in order (exact_batch_sizes).
        exact_on_all_cores: Whether the smallest one gives these digits on all cores, and sooner.
        seconds: Seconds of one batch of each of them.
        sha256: Digest of its files, which tells versions apart.
    """

    def __init__(
        self, name: str, source: str, engine: str | None, settings: dict[str, Any]
    ) -> None:
        self.name, self.source = name, source
        self.engine = select_engine(source, engine)
        if self.engine == "ray":
            raise ConfigError("engine=ray: not available for vit serve; leave it out")
        exported = self.engine != "torch"
        if exported and settings.get("batch_size") is None:
            settings = {**settings, "batch_size": 1}
        # before it is loaded: if its files are replaced meanwhile, it is loaded again
        self.sha256 = sha256_of_files(model_files(source, self.engine))
        predictor = open_predictor(source, self.engine, settings, (), explain=None)
        if predictor.n_best and (settings.get("batch_size") or 1) > 1:
            raise ConfigError(
                f"batch_size={settings['batch_size']}: captions are computed one by one, since "
                "their last digits depend on the batch; leave it out"
            )
        self.adapter: ModelAdapter
        if isinstance(predictor, ExportedClassifier):
            self.adapter = ExportedClassifierAdapter(predictor)
        elif isinstance(predictor, ExportedCaptioner):
            self.adapter = ExportedCaptionerAdapter(predictor)
        else:
            self.adapter = TorchAdapter(cast("Predictor", predictor))
        self.batch_sizes: tuple[int, ...] = (1,)
        self.exact_on_all_cores = False
        self.seconds: dict[int, float] = {}

    @property
    def predictor(self) -> ImagePredictor:
        return self.adapter.predictor

    def sizes_for(self, pixels: Any) -> tuple[int, ...]:
        """`batch_sizes` of images of this size: fewer of large photographs, as in vit predict."""
        most = self.adapter.most_images(pixels) or self.batch_sizes[-1]
        return tuple(size for size in self.batch_sizes if size <= most) or (most,)

    @property
    def captions(self) -> bool:
        """Whether it writes captions."""
        return self.predictor.n_best > 0

    @property
    def explains(self) -> bool:
        """Whether it returns relevance maps."""
        return self.engine == "torch"

    @property
    def calibrated(self) -> bool:
        """Whether scores are calibrated, and not kept as they are."""
        calibration = getattr(self.predictor, "calibration", None)
        return calibration is not None and calibration.scales

    def allows(self, options: RowOptions) -> bool:
        """Whether this network can fulfil the options."""
        with contextlib.suppress(ConfigError):
            self.check(options)
            return True
        return False

    def describe(self) -> dict[str, Any]:
        """Its properties for JSON."""
        predictor = self.predictor
        return {
            "name": self.name,
            "engine": self.engine,
            "sha256": self.sha256,
            "device": str(predictor.device),
            "precision": predictor.precision,
            "classes": list(predictor.classes),
            "multilabel": predictor.thresholds is not None,
            "captions": self.captions,
            "probabilities": predictor.shares,
            "calibrated": self.calibrated,
            "rejects": self.allows(RowOptions(reject=True)),
            "sets": self.allows(RowOptions(sets=0.9)),
            "explains": self.explains,
            "image_size": list(predictor.preprocessing.image_size),  # type: ignore[attr-defined]
            "batch_sizes": list(self.batch_sizes),
        }

    def summary(self) -> str:
        """The properties in one line, for the log."""
        classes = plural(len(self.predictor.classes), "class", "classes")
        raw = "" if self.calibrated or self.captions else ", raw scores"
        return (
            f"{'captions' if self.captions else classes}, {self.engine} in "
            f"{self.predictor.precision} on {self.predictor.device}, up to "
            f"{plural(self.batch_sizes[-1], 'image')} a batch{raw}, sha256 {self.sha256[:12]}"
        )

    def check(self, options: RowOptions, *, explain: bool = False) -> None:
        """Refuse options that this network cannot fulfil."""
        check_top_k(options.top_k)
        flags = {"threshold": options.threshold, "reject": options.reject, "sets": options.sets}
        classes_per_row(self.predictor, options.top_k, **flags)
        calibration = getattr(self.predictor, "calibration", None)
        if options.reject or options.sets is not None:
            check_selection(calibration, reject=options.reject, sets=options.sets)
        thresholds = self.predictor.thresholds
        check_decisions(thresholds, reject=options.reject, threshold=options.threshold)
        if not explain:
            return
        if not self.explains:
            raise ConfigError(
                "explain: an exported network has no relevance maps; serve the run folder"
            )
        from vit.inference.attribution_plot import check_explainable

        check_explainable(cast("Predictor", self.predictor))

    def to_prediction(self, name: str, output: Any, options: RowOptions) -> Prediction:
        """The prediction of an image, of its output or its BadImage."""
        if isinstance(output, BadImage):
            return Prediction(name, error=output.reason)
        return self.adapter.to_prediction(name, output, options)

    def format_row(self, prediction: Prediction, options: RowOptions) -> str:
        """The row of a prediction, without the end of the line."""
        predictor = self.predictor
        layout = Layout(
            classes_per_row(predictor, options.top_k),
            predictor.classes,
            (),
            predictor.n_best,
            predictor.thresholds is not None,
            shares=predictor.shares,
            reject=options.reject,
            sets=options.sets is not None,
        )
        _, line = FORMATS["jsonl"](layout)
        return line(apply_threshold(prediction, options.threshold)).rstrip("\n")

    def explain(self, name: str, output: Any, options: RowOptions) -> dict[str, Any]:
        """Relevance maps of an output, as `vit predict --explain` writes them without the deletion
        metric: {"image", "seen", "classes": [{"label", "probability", "weights"}]}, or of a caption
        {"image", "seen", "caption", "words": [{"text", "weights"}]}."""
        from vit.inference import attribution

        predictor = cast("Predictor", self.predictor)
        seen = attribution.input_region(predictor)
        if output.captions:
            words = attribution.attribute_caption(predictor, output)
            record = attribution.word_attributions_to_json(output, words)
            return {"image": name, "seen": seen, **{k: record[k] for k in ("caption", "words")}}
        classes = [
            {
                "label": predictor.classes[index],
                "probability": float(output.probabilities[index]),
                "weights": attribution.rounded_weights(weights),
            }
            for index, weights in attribution.class_maps(
                predictor, output, threshold=options.threshold
            )
        ]
        return {"image": name, "seen": seen, "classes": classes}

    def draw(self, name: str, output: Any, options: RowOptions) -> bytes:
        """The same maps over the image, as a PNG file."""
        import torch

        from vit.inference.attribution import view_lines
        from vit.inference.attribution_plot import plot_attributions

        record = self.explain(name, output, options)
        parts = record.get("classes") or record["words"]
        texts = [
            [one["label"], f"{one['probability']:.2%}"] if "label" in one else [one["text"]]
            for one in parts
        ]
        maps = [torch.tensor(one["weights"], dtype=torch.float64) for one in parts]
        lines = view_lines(cast("Predictor", self.predictor))
        plot = plot_attributions(output.pixels, maps, [lines, *texts])
        file = io.BytesIO()
        plot.save(file, format="PNG")
        return file.getvalue()


def count_pixels(upload: Upload) -> int:
    """Pixels of an image by its header; 0 of one that cannot be read, whose error is decoding's."""
    if not isinstance(upload, EncodedImage):
        return math.prod(upload.shape[:2])
    with contextlib.suppress(BadImage):
        return math.prod(read_size(upload))
    return 0


def split_name(word: str) -> tuple[str, str]:
    """Name and source of an argument `NAME=SOURCE`, or `SOURCE` alone, whose stem is the name."""
    name, separator, source = word.partition("=")
    if not separator or os.path.exists(word):
        source = word
        name = os.path.basename(os.path.normpath(word))
        for suffix in (".onnx", ".xml", ".safetensors"):
            name = name.removesuffix(suffix)
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in name) or "model"
    if not name or not all(c.isalnum() or c in "._-" for c in name):
        raise ConfigError(
            f"{word!r}: a name of a model has letters, digits and . _ - only: NAME=SOURCE"
        )
    return name, source


def check_names(words: Sequence[str]) -> dict[str, str]:
    """Sources by name."""
    sources: dict[str, str] = {}
    for word in words:
        name, source = split_name(word)
        if name in sources:
            raise VitError(
                f"two models are called {name}; give each a name of its own, as in "
                f"first={sources[name]} second={source}"
            )
        sources[name] = source
    return sources
