"""Pretrained weights converted to our names and settings, from any library's file."""

from dataclasses import dataclass

from torch import Tensor

from vit.config import DecoderConfig, ModelConfig
from vit.data.captions.tokenizer import Tokenizer
from vit.data.preprocessing import Preprocessing
from vit.number_answers import NumberAnswers
from vit.score_calibration import ScoreCalibration


@dataclass(frozen=True)
class PretrainedDecoder:
    """A pretrained caption decoder and its tokenizer."""

    state: dict[str, Tensor]
    config: DecoderConfig
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Pretrained weights and their metadata; whatever is unknown is None.

    Args:
        state: Tensors by our names and in our shapes, float32, on the CPU.
        config: Settings that match `state` exactly; `num_classes` is 0 without a head.
        linear_offsets: Whether relative position biases are resized linearly, as our networks do
            for images of another size; otherwise geometrically, as in BEiT.
    """

    state: dict[str, Tensor]
    config: ModelConfig
    origin: str
    classes: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    license: str | None = None
    linear_offsets: bool = False
    antialias: bool = True
    decoder: PretrainedDecoder | None = None
    thresholds: tuple[float, ...] | None = None
    calibration: ScoreCalibration | None = None
    answers: NumberAnswers | None = None
    from_scratch: bool = False
    notes: tuple[str, ...] = ()
