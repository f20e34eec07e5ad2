"""Settings of inference: how a network runs over images. Flags, help and arguments are its fields.

vit.Predictor("runs/photos", batch_size=32, tta="flip")
vit predict runs/photos holiday/ --batch-size 32 --tta flip
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from vit.config.data_config import check_intensity_range
from vit.config.settings import (
    Section,
    setting,
    settings_of,
    split_settings,
)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(Section):
    """How a network runs over images."""

    batch_size: int | None = setting(None, "-b", least=1)
    """Images in one pass through the network (default: 4 to 64 on a CPU, by the size of the images;
    else 64)."""
    device: str | None = None
    """Where the network computes: cpu, cuda, cuda:N or mps (default: the best one here)."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the network; auto is bf16 where the hardware has it and it is faster, which is
    tried once on a CPU with many images."""
    workers: int | None = setting(None, "-j", least=1)
    """Threads that read images, and compute on a CPU (default: one a core, at most 8)."""
    keep_aspect: bool = False
    """Keep the aspect ratio of images, with at most as many patches as usual, instead of a square
    crop; the last digits then depend on the other images of a batch."""
    intensity_range: tuple[float, float] | None = None
    """Values of images of more than 8 bits per channel that become black and white (default: as in
    training)."""
    no_calibration: bool = False
    """Return raw scores, without the calibration that the run has measured."""
    merge_tokens: int | None = None
    """Patches merged in each block: faster, less exact (default: as in training)."""
    patch_size: int | None = None
    """Pixels on a side of a patch, best one that --patch-sizes trained: larger is faster, smaller
    more exact (default: as in training)."""
    tta: Literal["flip"] | None = None
    """Test-time augmentation, classification only: average over an image and its mirror image."""
    compile: bool = False
    """Compile the network with torch.compile, which takes a minute and pays for many images."""
    search: Any = None
    """Search of captions (vit.generation.generation_config); greedy decoding by default."""
    embeddings: bool = False
    """Return an `embedding` with each prediction; the weights then need no head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intensity_range is not None:
            check_intensity_range(self.intensity_range)


RAY, NO_DRAWINGS = {"engine=ray": ""}, {"explain": "predict twice"}


@dataclass(frozen=True, kw_only=True)
class PredictionConfig(Section):
    """What `vit predict` writes."""

    model: str = ""
    """A run folder, other weights with a head, or an exported network (.onnx, .xml)."""
    inputs: tuple[str, ...] = ()
    """Images, folders, patterns, lists; `-` is a list of paths on standard input."""
    top_k: int | None = setting(None, "-k", "--topk", least=1)
    """Most probable classes in a row (default: 5; for a multi-label network all above their
    thresholds)."""
    threshold: float | None = setting(None, least=0, most=1, incompatible_with=RAY)
    """Minimum probability of a class in a row (default: none; for a multi-label network the
    threshold of each class, and 0 gives all classes)."""
    reject: bool = setting(False, incompatible_with=RAY | NO_DRAWINGS)
    """Answer `unknown` where the network is too uncertain to be right as often as its calibration
    promises (98 % of what is answered, or --target-precision of vit calibrate)."""
    sets: float | None = setting(None, above=0, most=1, incompatible_with=RAY | NO_DRAWINGS)
    """Add to each row the classes that contain the true one with this probability, such as 0.9."""
    format: Literal["table", "jsonl", "csv", "xlsx"] | None = None
    """Format of the rows (default: by the suffix of --out, else table); xlsx is a file for Excel
    and needs --out."""
    csv_separator: Literal["comma", "semicolon", "tab"] | None = None
    """Separator of CSV (default: comma); semicolon, with a decimal comma, is what Excel opens in
    most of Europe."""
    csv_digits: int | Literal["full"] | None = None
    """Decimal digits of scores in CSV, or full for all (default: 4)."""
    out: str | None = None
    """File of results; named OUT.partial until it is complete (default: standard output)."""
    resume: bool = setting(
        False,
        needs={"out": "it continues a file"},
        incompatible_with=RAY | {"explain": "drawings are always made anew"},
    )
    """Continue an interrupted OUT.partial; start from the beginning without one."""
    overwrite: bool = False
    """Replace OUT, OUT.partial, and drawings of the same names in the folder of --explain."""
    sort_into: str | None = setting(None, incompatible_with=RAY)
    """Folder: copy each image into its subfolder <predicted class>, or _unsure if the class is
    below --threshold; originals are not changed."""
    sort_with: Literal["copy", "symlink"] | None = setting(
        None, needs={"sort_into": "it places images there"}
    )
    """How images are placed in --sort-into (default: copy)."""
    embeddings: str | None = setting(
        None,
        needs={"out": "rows and vectors are resumed together"},
        incompatible_with=RAY | NO_DRAWINGS,
    )
    """File of image embeddings, the input of the network's head, as .npy (needs --out)."""
    explain: str | None = setting(None, incompatible_with=RAY)
    """Folder of attribution maps, per caption word or per top class, as PNG and JSON."""
    no_deletion: bool = setting(False, needs={"explain": "it draws maps"})
    """Draw the maps of --explain without the deletion metric, which takes 119 passes an image."""
    engine: Literal["torch", "onnx", "openvino", "ray"] | None = None
    """Inference engine (default: torch; onnx for an .onnx, openvino for an .xml); ray distributes
    over a cluster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_row_settings(self)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """What `vit evaluate` measures beside the usual scores, and the rows that it writes."""

    out: str | None = None
    """A row for each image, .jsonl, .csv or .xlsx: image, the cells of a list, label, its score,
    predictions; with several labels an image, its true labels and those above their thresholds."""
    top_k: int | None = setting(
        None, least=1, needs={"out": "it is the number of classes in a row"}
    )
    """Predicted classes in a row of --out (default: 5; of a multi-label network all above their
    thresholds)."""
    all_scores: bool = setting(False, needs={"out": "they are columns of its rows"})
    """The score of every class in a row of --out, in columns class_score_NAME."""
    csv_separator: Literal["comma", "semicolon", "tab"] | None = None
    """Separator of CSV (default: comma); semicolon, with a decimal comma, is what Excel opens in
    most of Europe."""
    csv_digits: int | Literal["full"] | None = None
    """Decimal digits of scores in CSV, or full for all (default: 4)."""
    slice: tuple[str, ...] = ()
    """Column of a list: accuracy by its values too; may be repeated (always: by image size, aspect,
    brightness, sharpness, file type, frequency of the class, folder)."""
    corruptions: bool = False
    """Measure images with noise, blur, JPEG artefacts, other brightness and contrast, and rotated
    ones as well, each in five severities: 30 more passes over the images."""
    page: bool = False
    """Refuse a network that the page of --html does not show, before any image is read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_row_settings(self)


INT8 = ({"precision": ("int8",)},)
CALIBRATED = (*INT8, {"dynamic": (False,)})


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Section):
    """What `vit export` makes of a network."""

    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    """Weights and arithmetic of the network."""
    tokens: bool = False
    """Add the outputs tokens, embedding and attention."""
    opset: int | None = setting(None, least=18, most=23)
    """Version of ONNX's operators (default: 20)."""
    calibration: str | None = setting(None, read_by=CALIBRATED)
    """Dataset whose training images int8 is fitted to."""
    samples: int | None = setting(None, least=1, read_by=CALIBRATED)
    """Calibration images (default: 200)."""
    dynamic: bool = setting(False, read_by=INT8)
    """int8 without calibration images: less exact."""
    static: bool = setting(
        False, read_by=INT8, needs={"calibration": "its ranges are those of calibration images"}
    )
    """int8 with the ranges that activations have on the calibration images, as OpenVINO fuses them
    best: less exact."""
    validation: str | None = None
    """Labelled images on which top-1 (or mAP) of run and file are compared (default: those of
    --calibration)."""
    max_drop: float | None = setting(None, least=0, most=1)
    """Write no file that loses more of top-1, or of mAP, than this (default: 0.01)."""
    no_calibration: bool = False
    """Write raw scores, not calibrated ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision == "int8" and not self.dynamic and self.calibration is None:
            why = "give --calibration DATA, such as the data of the training, or --dynamic"
            self.refuse("precision", f"it is calibrated with images: {why}")
        if self.static and (self.opset or 0) > 20:
            why = "onnxruntime cannot open static int8 of it on CPUs without VNNI; at most 20"
            self.refuse("opset", why)
        if self.max_drop is not None and self.measured_on is None:
            why = "nothing is measured without validation data; give --validation DATA"
            self.refuse("max_drop", why)

    @property
    def measured_on(self) -> str | None:
        """Data for the comparison of the accuracy."""
        return self.validation or self.calibration

    def check_unused(self, why: str, *read: str) -> None:
        """Raise ConfigError if an option that is not in `read` differs from its default."""
        for field in fields(self):
            if field.name not in read and getattr(self, field.name) != field.default:
                self.refuse(field.name, f"{why}; leave it out")


def check_row_settings(config: PredictionConfig | EvaluationConfig) -> None:
    if isinstance(config.csv_digits, int) and not 0 <= config.csv_digits <= 17:
        config.refuse("csv_digits", "choose 0 to 17, or full")


def inference_config(
    config: InferenceConfig | None, settings: Mapping[str, Any]
) -> InferenceConfig:
    """`config`, or one of `settings` by name: the arguments of a Python call."""
    if config is not None and not settings:
        return config
    given = {**({} if config is None else vars(config)), **settings}
    found: InferenceConfig = split_settings(given, "a Predictor", InferenceConfig)[0]
    return found


def accepts_settings(*kinds: type) -> Callable[[F], F]:
    """Show the fields of `kinds` in the signature of a function that takes `**settings`."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        shown = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        names = {one.name for one in shown}
        for kind in kinds:
            for name, found in settings_of(kind).items():
                if name not in names:
                    names.add(name)
                    shown.append(
                        inspect.Parameter(
                            name,
                            inspect.Parameter.KEYWORD_ONLY,
                            default=found.default,
                            annotation=found.kind,
                        )
                    )
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate
