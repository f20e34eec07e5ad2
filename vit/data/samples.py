"""What every source of pictures gives: samples, and classes by name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vit.data.cache import Cache
    from vit.data.captioning.tokenizer import Tokenizer

NO_LABEL = -1
"""Of a picture without a class, or with several."""


@dataclass(frozen=True)
class Sample:
    """A picture, the number of its class, and what people said of it."""

    path: str
    """Of a file, or of something inside a file; see vit.data.containers."""
    label: int
    captions: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()
    """Numbers of all its classes, sorted, maybe none, where a picture may have several."""


class Item(NamedTuple):
    """A picture as a source names it, before there is a list of all classes."""

    path: str
    labels: tuple[str, ...]
    """Names of its classes: one, unless the source has pictures with several."""
    group: str = ""
    """Pictures of one group stay on one side of a split; empty: it is alone."""


@dataclass(frozen=True)
class Listed:
    """What a source holds, before classes are matched and validation pictures are chosen."""

    root: Path
    """Folder that names in a split are relative to."""
    splits: dict[str, list[Item]]
    """Pictures by split: train, val... or all under the empty name where it has none."""
    where: dict[str, str]
    """What a message calls each split: its folder, list or shards."""
    notes: list[str] = field(default_factory=list)
    """What the user should know; safe on a terminal."""
    several: bool = False
    """Whether a picture may have several classes, or none."""
    grouped: bool = False
    """Whether the source itself knows the groups that were asked for."""
    part: str = "folder"
    """What holds the pictures of one split, in messages."""


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
    several: bool = False
    """Whether a picture may have several classes, or none: `Sample.labels` has them."""
    tokenizer: "Tokenizer | None" = None
    """Of the captions, where they are to be learned."""
    cache: "Cache | None" = None
    """The training pictures decoded, where they are kept so."""
