"""What every source of pictures gives: samples, and classes by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit.data.tokenizer import Tokenizer

NO_LABEL = -1
"""Of a picture without a class."""


@dataclass(frozen=True)
class Sample:
    """A file, the number of its class, and what people said of it."""

    path: str
    label: int
    captions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Splits:
    """A data set ready for training."""

    classes: tuple[str, ...]
    """Names of the classes, sorted; a label is an index into them. None where all is captions."""
    train: tuple[Sample, ...]
    """Training pictures."""
    val: tuple[Sample, ...]
    """Validation pictures."""
    notes: tuple[str, ...]
    """What the user should know: what was left out, what looks wrong; safe on a terminal."""
    made: bool
    """Whether the validation pictures were chosen by us."""
    root: Path
    """Folder that holds all of them."""
    tokenizer: "Tokenizer | None" = None
    """Of the captions, where they are to be learned."""
