"""Dataset types: image records of a source, and samples with class indices."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vit.data.captions.tokenizer import Tokenizer
    from vit.data.image_cache import ImageCache

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


ImagesByClass = dict[str, list[str]]
"""Class name -> paths of its images."""


class ImageRecord(NamedTuple):
    """An image of a source, with its class names."""

    path: str
    labels: tuple[str, ...]
    """Class names: exactly one, unless the source is multi-label."""
    group: str = ""
    """Images of a group stay in one split; empty: the image is a group of its own."""


@dataclass(frozen=True)
class DatasetIndex:
    """The images of a source, before class matching and the training/validation split."""

    root: Path
    """Folder that image names are relative to."""
    splits: dict[str, list[ImageRecord]]
    """Images by split: train, val...; the empty name if there are no splits."""
    locations: dict[str, str]
    """Folder, list or shards of each split, for messages."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user, safe to print on a terminal."""
    multilabel: bool = False
    """Whether an image may have any number of classes."""
    has_groups: bool = False
    """Whether the records have the groups of `DatasetSpec.group`."""
    split_kind: str = "folder"
    """What the images of a split are in, for messages: folder, list or split."""


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
    cache: "ImageCache | None" = None
    """The training images decoded, where they are kept so."""
