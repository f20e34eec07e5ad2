"""What is wanted of a source of images, and where a name on the command line leads."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from vit.config import DataConfig
from vit.config.parser import nearest
from vit.data.sources import builtin_datasets
from vit.data.sources.class_names import LAYOUT, VAL_NAMES
from vit.data.sources.input_hints import refuse_images, refuse_mistaken
from vit.data.sources.row_errors import Faults
from vit.errors import DataError, printable
from vit.paths import did_you_mean


@dataclass(frozen=True)
class DatasetSpec:
    """Which images are wanted, and how their source is to be read."""

    data: str
    """As in DataConfig, and so are those that follow."""
    images: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    group: str | None = None
    allow_outside: bool = False
    multilabel: bool | None = None
    """Whether an image may have several classes, or none; the data say so if left out."""
    split: str | None = None
    """The only part that is wanted; training and validation images if left out."""
    everything: bool = False
    """Whether all parts are wanted instead."""
    faults: Faults = field(default=None, compare=False)
    """Receives what is wrong with single lines or shards, which are left out then; if left out,
    the first one is raised."""

    @classmethod
    def of(cls, data: DataConfig, *, multilabel: bool | None = None) -> "DatasetSpec":
        """What the settings of a training ask for."""
        return cls(
            data.data,
            data.images,
            data.image_column,
            data.label_column,
            data.group,
            data.allow_outside,
            multilabel,
        )

    def needed(self, there: Collection[str]) -> list[str]:
        """The splits to read of those that are `there`; the empty name stands for no split."""
        if self.everything:
            return [*there]
        val = [name for name in VAL_NAMES if name in there][:1]
        train = [name for name in ("train", "") if name in there]
        if self.split is None:
            return train + val
        if self.split != "val":
            return [name for name in (self.split,) if name in there]
        # A test part may be kept for the end: then the images are those that training held out.
        return val if val and val != ["test"] else train + val


def resolve(data: str) -> tuple[Path, list[str]]:
    """The folder that `data` names, and a note where it is also the name of a built-in set.

    Raises:
        DataError: There is neither.
    """
    if not data:
        raise DataError(f"no data given; {LAYOUT}")
    root = Path(data)
    refuse_mistaken(data)
    if root.is_dir():
        here = f"{data} is the folder ./{data} here, not the built-in set of that name"
        return root, [here] if data in builtin_datasets.SETS else []
    if data in builtin_datasets.SETS:
        return builtin_datasets.SETS[data](), []
    refuse_images(data)
    if root.exists():
        raise DataError(
            f"{printable(data)} is a file, not a folder; {LAYOUT}; or a list of images and "
            "their classes in .csv or .jsonl; or, for a list of captions, --task caption"
        )
    names = ", ".join(builtin_datasets.SETS)
    hint = nearest(data, builtin_datasets.SETS) or did_you_mean(data)
    raise DataError(
        f"{printable(data)}: no such folder or file, and no built-in set ({names}){hint}"
    )
