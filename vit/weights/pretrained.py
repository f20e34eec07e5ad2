"""A network that somebody trained, in our terms, whatever library's file it came from."""

from dataclasses import dataclass

from torch import Tensor

from vit.config import DecoderConfig, ModelConfig
from vit.data.captions.tokenizer import Tokenizer
from vit.data.preprocessing import Preprocessing


@dataclass(frozen=True)
class PretrainedDecoder:
    """A decoder that somebody trained with an encoder, and its words.

    Args:
        state: Tensors by the decoder's own names.
        config: The decoder they fit exactly.
        tokenizer: Of its captions.
    """

    state: dict[str, Tensor]
    config: DecoderConfig
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Weights and what is known about them.

    Args:
        state: Tensors by our names and in our shapes, float32, on the CPU.
        config: The network they fit exactly; `num_classes` is 0 where there is no head.
        classes: Names by output; None where the source does not say.
        preprocessing: How images were prepared; None where the source does not say.
        license: Under which terms the weights are given; None where the source does not say.
        origin: What they were, in a few words: "timm vit_small_patch16_224".
        stretches: Whether relative positions are stretched to another grid, as our networks do
            with images of another size; else they are spread as BEiT's makers do.
        decoder: Of a network that writes captions.
        thresholds: As in a LoadedRun: where an image may have several classes.
        notes: Lines for the user: what was assumed, which tensors were left out and why.
    """

    state: dict[str, Tensor]
    config: ModelConfig
    classes: tuple[str, ...] | None
    preprocessing: Preprocessing | None
    license: str | None
    origin: str
    linear_offsets: bool = False
    decoder: PretrainedDecoder | None = None
    thresholds: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()
