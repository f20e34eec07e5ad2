"""Export options and their validation."""

from dataclasses import dataclass, fields

from vit.errors import ConfigError
from vit.text import printable

PRECISIONS = ("fp32", "fp16", "int8")
OPSETS = (18, 19, 20, 21, 22, 23)
OPSET = 20
"""Of classifiers: the first one with Gelu. onnxruntime reads it since 1.17, OpenVINO since 2024;
later ones add nothing that these networks need."""
SAMPLES = 200
MAX_DROP = 0.01


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an export.

    Args:
        max_drop: Largest loss of top-1 (of mAP if multi-label) there; MAX_DROP by default.
        external_data: Store the weights in NAME.onnx.data, as always from 2 GB on.
    """

    precision: str = "fp32"
    tokens: bool = False
    opset: int | None = None
    calibration: str | None = None
    samples: int | None = None
    dynamic: bool = False
    static: bool = False
    validation: str | None = None
    max_drop: float | None = None
    external_data: bool = False
    no_calibration: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"precision={printable(repr(self.precision))}: choose one of "
                f"{', '.join(PRECISIONS)}"
            )
        if self.opset is not None and self.opset not in OPSETS:
            raise ConfigError(f"opset={self.opset}: choose one of {OPSETS[0]} to {OPSETS[-1]}")
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"samples={self.samples}: must be at least 1")
        if self.max_drop is not None and not 0 <= self.max_drop <= 1:
            raise ConfigError(f"max_drop={self.max_drop:g}: a share, from 0 to 1")
        self._check_int8()
        if self.max_drop is not None and self.measured_on is None:
            raise ConfigError(
                f"max_drop={self.max_drop:g}: nothing is measured without validation data; give "
                "--validation DATA"
            )

    def _check_int8(self) -> None:
        calibrated = self.precision == "int8" and not self.dynamic
        for name in ("dynamic", "static"):
            if getattr(self, name) and self.precision != "int8":
                raise ConfigError(
                    f"{name}=True: precision={self.precision} does not read it; choose int8"
                )
        if self.dynamic and self.static:
            raise ConfigError(
                "static=True: its ranges are those of calibration images, and dynamic has none; "
                "leave one of them out"
            )
        if self.static and self.calibration is None:
            raise ConfigError(
                "static=True: its ranges are those of calibration images; give --calibration DATA"
            )
        if self.static and self.opset is not None and self.opset > OPSET:
            raise ConfigError(
                f"opset={self.opset}: onnxruntime cannot open static int8 of it on CPUs without "
                f"VNNI; choose {OPSETS[0]} to {OPSET}"
            )
        if calibrated and self.calibration is None:
            raise ConfigError(
                "precision='int8': it is calibrated with images: give --calibration DATA, such as "
                "the data of the training, or --dynamic"
            )
        for name in () if calibrated else ("calibration", "samples"):
            if (value := getattr(self, name)) is not None:
                words = printable(repr(value))
                raise ConfigError(
                    f"{name}={words}: only int8 without --dynamic is calibrated; leave it out"
                )
        if self.precision == "int8" and self.external_data:
            raise ConfigError("external_data=True: int8 files are small; leave it out")

    @property
    def measured_on(self) -> str | None:
        """Data for the comparison of the accuracy."""
        return self.validation or self.calibration

    def check_unused(self, why: str, *read: str) -> None:
        """Raise ConfigError if an option that is not in `read` differs from its default."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in read and value != field.default:
                raise ConfigError(f"{field.name}={printable(repr(value))}: {why}; leave it out")
