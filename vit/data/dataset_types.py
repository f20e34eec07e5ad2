"""What every source of images gives: samples, and classes by name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vit.data.captions.tokenizer import Tokenizer
    from vit.data.image_cache import Cache

NO_LABEL = -1
"""Of an image without a class, or with several."""


@dataclass(frozen=True)
class Sample:
    """An image, the number of its class, and what people said of it."""

    path: str
    """Of a file, or of something inside a file; see vit.data.archives."""
    label: int
    captions: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()
    """Numbers of all its classes, sorted, maybe none, where an image may have several."""


class Item(NamedTuple):
    """An image as a source names it, before there is a list of all classes."""

    path: str
    labels: tuple[str, ...]
    """Names of its classes: one, unless the source has images with several."""
    group: str = ""
    """Images of one group stay on one side of a split; empty: it is alone."""


@dataclass(frozen=True)
class Listed:
    """What a source holds, before classes are matched and validation images are chosen."""

    root: Path
    """Folder that names in a split are relative to."""
    splits: dict[str, list[Item]]
    """Images by split: train, val... or all under the empty name where it has none."""
    where: dict[str, str]
    """What a message calls each split: its folder, list or shards."""
    notes: list[str] = field(default_factory=list)
    """What the user should know; safe on a terminal."""
    multilabel: bool = False
    """Whether an image may have several classes, or none."""
    grouped: bool = False
    """Whether the source itself knows the groups that were asked for."""
    part: str = "folder"
    """What holds the images of one split, in messages."""


@dataclass(frozen=True)
class Splits:
    """A data set ready for training."""

    classes: tuple[str, ...]
    """Names of the classes, sorted; a label is an index into them. None where all is captions."""
    train: tuple[Sample, ...]
    """Training images."""
    val: tuple[Sample, ...]
    """Validation images."""
    notes: tuple[str, ...]
    """What the user should know: what was left out, what looks wrong; safe on a terminal."""
    made: bool
    """Whether the validation images were chosen by us."""
    root: Path
    """Folder that holds all of them."""
    multilabel: bool = False
    """Whether an image may have several classes, or none: `Sample.labels` has them."""
    tokenizer: "Tokenizer | None" = None
    """Of the captions, where they are to be learned."""
    cache: "Cache | None" = None
    """The training images decoded, where they are kept so."""
