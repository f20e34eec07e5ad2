"""Dataset types: image records of a source, and samples with class indices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from vit.data.captions.tokenizer import Tokenizer
    from vit.data.device_cache import DeviceCache
    from vit.data.image_cache import ImageCache

NO_LABEL = -1
"""Label of a sample without exactly one class."""


@dataclass(frozen=True)
class Sample:
    """An image with its class index, its captions, or its multi-label class indices."""

    path: str
    """A file, or an address inside a file; see vit.data.image_archives."""
    label: int
    captions: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()
    """Sorted class indices of a multi-label image, possibly none."""
    numbers: tuple[float, ...] = ()
    """Of the columns `DatasetSpec.numbers`, of texts the class index; NaN of an empty cell."""
    weight: float = 1.0
    """In the loss, relative to other training images."""
    node: str = ""
    """Its class as a path, where that is none of the network's but below one of its nodes."""


ImagesByClass = dict[str, list[str]]
"""Class name -> paths of its images."""


class ImageRecord(NamedTuple):
    """An image of a source, with its class names."""

    path: str
    labels: tuple[str, ...]
    """Class names: exactly one, unless the source is multi-label."""
    group: str = ""
    """Images of a group stay in one split; empty: the image is a group of its own."""
    captions: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    """Of the columns `DatasetSpec.columns` of a list, or empty."""
    numbers: tuple[float, ...] = ()
    """As `Sample.numbers`; of texts an index into `DatasetIndex.target_classes`."""


class ImageFile(NamedTuple):
    """An encoded image with its annotations, as exports write it."""

    name: str
    """Path without the split and the class."""
    labels: tuple[str, ...]
    content: bytes
    captions: tuple[str, ...] = ()

    def annotations(self, *, multilabel: bool) -> dict[str, list[str] | str]:
        """Classes and captions as the keys of a JSON record."""
        found: dict[str, list[str] | str] = {}
        if multilabel:
            found["labels"] = list(self.labels)
        elif self.labels:
            found["label"] = self.labels[0]
        return found | ({"captions": list(self.captions)} if self.captions else {})


@dataclass(frozen=True)
class ImageGroups:
    """What a training found to belong together, by names of images relative to the dataset."""

    scenes: Mapping[str, str] = field(default_factory=dict)
    """The scene of each image that shares one with others."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The source of each image, such as its camera; empty where nothing tells sources apart."""
    new: Mapping[str, str] = field(default_factory=dict)
    """The source of each validation image of sources that no training image is of."""

    def __bool__(self) -> bool:
        return bool(self.scenes or self.sources or self.new)


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
    columns: tuple[str, ...] = ()
    """Columns of its lists that are not read, for messages."""
    unlabelled: list[ImageRecord] = field(default_factory=list)
    """Training images without a label, if `DatasetSpec.unlabelled`; they are in no split."""
    units: tuple[str, ...] = ()
    """As `Splits.units`."""
    target_classes: tuple[tuple[str, ...], ...] = ()
    """The texts in each of the columns `DatasetSpec.numbers`; none of numbers."""

    @property
    def train(self) -> list[ImageRecord]:
        """The images of the training split, or all of an undivided dataset; empty without both."""
        return self.splits.get("train", self.splits.get("", []))


@dataclass(frozen=True)
class Splits:
    """A dataset ready for training."""

    classes: tuple[str, ...]
    """Class names, sorted or in the order of grades; a label is an index into them. Empty for
    captions without classes."""
    train: tuple[Sample, ...]
    val: tuple[Sample, ...]
    notes: tuple[str, ...]
    """Notes for the user: what was left out, what looks wrong; safe to print on a terminal."""
    made: bool
    """Whether we held out the validation images, because the dataset has none."""
    root: Path
    """Folder that contains all images."""
    multilabel: bool = False
    """Whether an image may have any number of classes; they are in `Sample.labels`."""
    tokenizer: "Tokenizer | None" = None
    cache: "ImageCache | DeviceCache | None" = None
    """Cache of decoded training images; None without one."""
    unlabelled: frozenset[str] = frozenset()
    """Paths of training images without a label, which a teacher labels."""
    teacher_answers: "Tensor | None" = None
    """Scores of a teacher for the training images, (images, classes); see vit.training.teacher."""
    test: tuple[Sample, ...] = ()
    """Images of `test` where the validation images are held out: measured after the training."""
    targets: tuple[str, ...] = ()
    """Names of the numbers, or classes, of the images."""
    units: tuple[str, ...] = ()
    """Unit of each of the numbers of the images, such as cm, or empty."""
    target_classes: tuple[tuple[str, ...], ...] = ()
    """Classes of each of `targets`, sorted, of which a number is the index; none of numbers."""
    groups: ImageGroups = field(default_factory=ImageGroups)
    """What was found to belong together among the images."""


def labels_of(sample: Sample) -> tuple[int, ...]:
    """Class indices of an image, whether single-label or multi-label."""
    return sample.labels if sample.label == NO_LABEL else (sample.label,)


def has_multilabel(samples: Sequence[Sample]) -> bool:
    """Whether the samples are multi-label."""
    return any(sample.label == NO_LABEL for sample in samples)


def to_multilabel(splits: Splits) -> Splits:
    """Convert a single-label dataset to a multi-label one."""
    if splits.multilabel:
        return splits
    train, val = (
        tuple(replace(one, label=NO_LABEL, labels=labels_of(one)) for one in samples)
        for samples in (splits.train, splits.val)
    )
    return replace(splits, train=train, val=val, multilabel=True)
