"""One network of the server: images in memory to rows of `vit predict --format jsonl`.

decode         bytes -> pixels as the network takes them, or BadImage   (threads that decode)
run            a batch of them -> outputs                               (threads that compute)
to_prediction  one output -> one prediction
format_row     one prediction -> one line, byte for byte that of `vit predict`
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vit.calibration_reference import CalibrationReference, load_reference
from vit.config.stored_config import run_folder_of
from vit.data.image_io import EncodedImage
from vit.data.instrument_images import Array
from vit.errors import BadImage, ConfigError, VitError
from vit.exported.engine import select_engine
from vit.inference.predictor import Predictor, model_files
from vit.output.prediction_results import (
    FORMATS,
    Layout,
    Prediction,
    check_classes,
    classes_per_row,
)
from vit.paths import sha256_of_files
from vit.score_calibration import ScoreCalibration
from vit.text import join_names, plural

Upload = EncodedImage | Array
"""An image file in memory, or its pixels, (height, width, 3) uint8."""


@dataclass(frozen=True)
class RowOptions:
    """Options of a request; fields are named as the flags of `vit predict`."""

    top_k: int | None = None
    threshold: float | None = None
    reject: bool = False
    sets: float | None = None


class ServedModel:
    """A network that is loaded and ready.

    Attributes:
        compute_threads: Batches that are computed at the same time; a session of an exported
            network uses all cores for one.
        batch_sizes: Sizes of batches that give the same digits, in order (batch_invariance).
        reference: The images of its calibration, if it is watched.
        exact_on_all_cores: Whether the smallest one gives these digits on all cores, and sooner.
        seconds: Seconds of one batch of each of them.
    """

    def __init__(
        self,
        name: str,
        source: str,
        engine: str | None,
        settings: dict[str, Any],
        watched: bool = False,
    ) -> None:
        self.name, self.source = name, source
        self.engine = select_engine(source, engine)
        if self.engine == "ray":
            raise ConfigError("engine=ray: not available for vit serve; leave it out")
        if self.engine != "torch" and settings.get("batch_size") is None:
            settings = {**settings, "batch_size": 1}
        # before it is loaded: if its files are replaced meanwhile, it is loaded again
        self.sha256 = sha256_of_files(model_files(source))
        self.predictor = predictor = Predictor(source, engine=self.engine, **settings)
        if predictor.n_best and (settings.get("batch_size") or 1) > 1:
            raise ConfigError(
                f"batch_size={settings['batch_size']}: captions are computed one by one, since "
                "their last digits depend on the batch; leave it out"
            )
        self.reference: CalibrationReference | None = None
        if watched:
            self.reference = load_reference(run_folder_of(source), predictor.calibration)
        predictor.read.holds = predictor.whole_images
        self.compute_threads = predictor.workers if predictor.reads_and_computes else 1
        if getattr(predictor.engine, "distance", None) is not None:
            predictor.engine.returns_distances = True  # same digits with and without
        self.batch_sizes: tuple[int, ...] = (1,)
        self.exact_on_all_cores = False
        self.seconds: dict[int, float] = {}

    def decode(self, name: str, upload: Upload) -> Any:
        """Pixels as `run` takes them."""
        if isinstance(upload, EncodedImage):
            upload = EncodedImage(name, upload.data)
        pixels = self.predictor.read(upload, name)
        if isinstance(pixels, BadImage):
            raise pixels
        return pixels

    def run(self, names: Sequence[str], images: Sequence[Any], rows: int) -> list[Any]:
        """Outputs of images of one shape, or the BadImage of each that has none."""
        outputs = self.predictor.run_batch(0, names, images, rows=rows)
        return [one if one.error is None else BadImage(one.image, one.error) for one in outputs]

    def sizes_for(self, pixels: Any) -> tuple[int, ...]:
        """`batch_sizes` of images of this size: fewer of large photographs, as in vit predict."""
        most = min(self.batch_sizes[-1], self.predictor.largest_batch(pixels.shape))
        return tuple(size for size in self.batch_sizes if size <= most) or (most,)

    @property
    def captions(self) -> bool:
        return bool(self.predictor.n_best)

    @property
    def explains(self) -> bool:
        """Whether it returns relevance maps."""
        return self.engine == "torch"

    @property
    def calibrated(self) -> bool:
        """Whether scores are calibrated, and not kept as they are."""
        calibration: ScoreCalibration | None = self.predictor.calibration
        return calibration is not None and calibration.scales

    def allows(self, options: RowOptions) -> bool:
        """Whether this network can fulfil the options."""
        with contextlib.suppress(ConfigError):
            self.check(options)
            return True
        return False

    def describe(self) -> dict[str, Any]:
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
            "answers": predictor.answers.describe() if predictor.answers else [],
            "probabilities": predictor.shares,
            "calibrated": self.calibrated,
            "rejects": self.allows(RowOptions(reject=True)),
            "sets": self.allows(RowOptions(sets=0.9)),
            "explains": self.explains,
            "image_size": list(predictor.preprocessing.image_size),
            "batch_sizes": list(self.batch_sizes),
        }

    def summary(self) -> str:
        """The properties in one line, for the log."""
        kind = plural(len(self.predictor.classes), "class", "classes")
        if numbers := self.predictor.answers and self.predictor.answer_columns():
            kind = join_names([*numbers])
        raw = "" if self.calibrated or self.captions or numbers else ", raw scores"
        return (
            f"{'captions' if self.captions else kind}, {self.engine} in "
            f"{self.predictor.precision} on {self.predictor.device}, up to "
            f"{plural(self.batch_sizes[-1], 'image')} a batch{raw}, sha256 {self.sha256[:12]}"
        )

    def check(self, options: RowOptions, *, explain: bool = False) -> None:
        """Refuse options that this network cannot fulfil."""
        if self.predictor.answers is not None:
            check_classes((), self.predictor.answers.kind, **{**vars(options), "sets": None})
        else:
            check_classes(self.predictor.classes, **vars(options))
        self.predictor.check_options(
            threshold=options.threshold, reject=options.reject, sets=options.sets
        )
        if not explain:
            return
        if not self.explains:
            raise ConfigError(
                "explain: an exported network has no relevance maps; serve the run folder"
            )
        from vit.inference.attribution_plot import check_explainable

        check_explainable(self.predictor)

    def to_prediction(self, name: str, output: Any, options: RowOptions) -> Prediction:
        if isinstance(output, BadImage):
            return Prediction(name, error=output.reason)
        (prediction,) = self.predictor.to_predictions(
            [replace(output, image=name)],
            options.top_k,
            options.threshold,
            reject=options.reject,
            sets=options.sets,
        )
        return replace(prediction, embedding=None)

    def format_row(self, prediction: Prediction, options: RowOptions) -> str:
        """The row of a prediction, without the end of the line."""
        predictor = self.predictor
        named = predictor.classes, predictor.thresholds
        layout = Layout(
            0 if predictor.answers else classes_per_row(*named, options.top_k),
            predictor.classes,
            (),
            predictor.n_best,
            predictor.thresholds is not None,
            shares=predictor.shares,
            reject=options.reject,
            sets=options.sets is not None and predictor.answers is None,
            answers=predictor.answer_columns(options.sets),
        )
        _, line = FORMATS["jsonl"](layout)
        return line(prediction).rstrip("\n")

    def explain(
        self, name: str, output: Any, options: RowOptions, with_image: bool
    ) -> dict[str, Any]:
        """Relevance maps of an output, as `vit predict --explain` writes them without the deletion
        metric: {"image", "seen", "classes": [{"label", "probability", "weights"}]}, or of a caption
        {"image", "seen", "caption", "words": [{"text", "weights"}]}.

        With the image as the network saw it, "seen" has it as "image", the address of a JPEG.
        """
        from vit.inference import attribution

        predictor = self.predictor
        seen = attribution.input_region(predictor, output.pixels, with_image=with_image)
        if output.captions:
            words = attribution.attribute_caption(predictor, output)
            record = attribution.word_attributions_to_json(output, words)
            return {"image": name, "seen": seen, **{k: record[k] for k in ("caption", "words")}}
        classes = [
            {
                "label": predictor.classes[index],
                attribution.score_name(predictor): float(output.probabilities[index]),
                "weights": attribution.rounded_weights(weights),
            }
            for index, weights in attribution.class_maps(
                predictor, output, threshold=options.threshold
            )
        ]
        return {"image": name, "seen": seen, "classes": classes}


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
