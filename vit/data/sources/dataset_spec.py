"""Dataset specification: what to read and how, the path that DATA resolves to, and row errors."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit.config import DataConfig, SourceConfig, TrainingConfig
from vit.config.settings import TREE_TASKS
from vit.data.dataset_types import ImageGroups
from vit.data.sources import builtin_datasets
from vit.data.sources.dataset_problem import Problems
from vit.errors import ConfigError, DataError
from vit.paths import did_you_mean, is_group_list, is_run_folder, path_argument
from vit.text import nearest

HUB = "hf:"
LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".xlsx")
TAR_SUFFIXES = (
    *(".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tbz2", ".tar.xz", ".txz"),
    *(".tar.zst", ".tar.lz4"),
)
"""All but the first are compressed, and refused."""


def named_source(data: str) -> str:
    """What DATA names: hub, shards or list; empty for folders and other names."""
    if os.path.isdir(data):
        return ""
    lower = data.lower()
    named = {
        "hub": data.startswith(HUB),
        "shards": lower.endswith(TAR_SUFFIXES),
        "list": lower.endswith(LIST_SUFFIXES),
    }
    return next((source for source, fits in named.items() if fits), "")


def refuse_run_folder(data: str) -> None:
    if is_run_folder(data):
        raise DataError(
            f"{data} is a run folder, a trained network: give a folder or list of images"
        )


VAL_NAMES = ("val", "valid", "validation")
TEST = "test"
"""Split that no training learns from or chooses by."""
UNSEEN = "unseen"
"""Evaluation-only split: combinations that the training split lacks."""
SPLIT_NAMES = ("train", *VAL_NAMES, TEST, UNSEEN)
LAYOUT = "expected DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg, or DATA/CLASS/*.jpg"


def validation_split(available: Collection[str]) -> str | None:
    """The one of the `available` splits that a training validates on, if it holds out none."""
    return next((name for name in VAL_NAMES if name in available), None)


@dataclass(frozen=True)
class DatasetSpec:
    """Which images to read, and how to read their source.

    The fields up to `allow_outside` are those of `DataConfig`.
    """

    data: str
    images: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    caption_column: str | None = None
    target: tuple[str, ...] = ()
    group: str | None = None
    allow_outside: bool = False
    multilabel: bool | None = None
    """Whether an image may have any number of classes; None: inferred from the data."""
    split: str | None = None
    """The only split to read; None: training and validation images."""
    all_splits: bool = False
    """Read every split; `split` is ignored then."""
    reads_splits: bool = True
    """Whether the column of splits of a list is read; without it, all its images are in one."""
    captions: bool = False
    """Whether the images have captions."""
    labels: bool = True
    """Whether the images have classes."""
    optional_labels: bool = False
    """Whether images without classes are read too; then none of them has one."""
    skip_empty: bool = False
    """Whether class folders without images are left out, with a note."""
    exclude: str | None = None
    """List of images that are left out."""
    corrections: str | None = None
    """List of images and the classes that replace theirs."""
    label_list: str | None = None
    """List of the only images that are used, and their classes; those of the source are ignored."""
    unlabelled: bool = False
    """Whether training images that `label_list` does not label are kept: a teacher labels them."""
    columns: tuple[str, ...] = ()
    """More columns of a list to read, into `ImageRecord.cells`."""
    weight_column: str | None = None
    """One of `columns`, with the weights of images."""
    order: tuple[str, ...] = ()
    """The classes in their order, or BY_NUMBER; sorted by name without."""
    taxonomy: str | None = None
    """File or folder of the tree of the classes."""
    nested: bool = False
    """Whether classes are paths: in folders without `taxonomy`, those of nested folders."""
    units: tuple[str, ...] = ()
    """Units that the numbers are expected in; those without one are taken to be."""
    texts: tuple[str, ...] | None = ()
    """Columns of `target` whose cells are names of classes; None: what the cells hold decides."""
    choices: tuple[tuple[str, ...], ...] = ()
    """Classes of each of `target`, those of a network; none of a column of numbers."""
    problems: Problems = field(default=None, compare=False)
    """Receives what is wrong, which is skipped; None: the first error is raised."""
    finds_groups: bool = False
    """Whether a training looks for scenes, which are then groups, and for sources."""
    groups: ImageGroups = field(default_factory=ImageGroups, compare=False)
    """What a training found to belong together."""

    @classmethod
    def from_config(
        cls,
        data: DataConfig,
        *,
        split: str | None = None,
        multilabel: bool | None = None,
        captions: bool = False,
        labels: bool = True,
        optional_labels: bool = False,
    ) -> "DatasetSpec":
        """The specification of a training run's data."""
        finds_groups = data.group == "auto" or is_group_list(data.group)
        return cls(
            data.data,
            data.images,
            data.image_column,
            data.label_column or (",".join(data.target) if labels and data.target else None),
            data.caption_column,
            data.target,
            None if finds_groups else data.group,
            data.allow_outside,
            multilabel,
            split=split,
            captions=captions,
            labels=labels,
            optional_labels=optional_labels,
            skip_empty=data.on_bad_image == "skip",
            exclude=data.exclude,
            corrections=data.corrections,
            label_list=data.labels,
            columns=(data.weight_column,) if data.weight_column else (),
            weight_column=data.weight_column,
            order=data.order,
            taxonomy=data.taxonomy,
            finds_groups=finds_groups,
        )

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns that are read as numbers: `target`, where no classes are."""
        return () if self.labels or self.captions else self.target

    def select_splits(self, available: Collection[str]) -> list[str]:
        """The splits to read, of the `available` ones; the empty name is an undivided dataset."""
        if self.all_splits:
            return [*available]
        val = [name for name in (*VAL_NAMES, TEST) if name in available][:1]
        train = [name for name in ("train", "") if name in available]
        if self.split is None:
            return train + val
        if self.split != "val":
            return [name for name in (self.split,) if name in available]
        return val if val and val != [TEST] else train + val  # which training held images out of


def as_dataset_spec(
    data: Any,
    settings: Mapping[str, Any] | None = None,
    *,
    task: str | None = None,
    source: SourceConfig | None = None,
    **given: Any,
) -> DatasetSpec:
    """The DatasetSpec of the arguments of a Python call, or `data` if it is one."""
    given |= {} if source is None else vars(source)
    chosen = {name: value for name, value in given.items() if value not in (None, False, "", ())}
    if "labels" in chosen:
        chosen["label_list"] = chosen.pop("labels")
    if isinstance(data, DatasetSpec):
        if extra := [*chosen, *(["task"] if task else [])]:
            raise ConfigError(f"{', '.join(extra)}: a DatasetSpec has its own; set it there")
        return data
    path = path_argument("data", data, "a folder, a list of images, or the name of a dataset")
    if task is not None:
        training = TrainingConfig(task=task)
        chosen |= {"captions": training.captions, "labels": training.classifies}
        chosen["multilabel"] = training.multilabel
        if training.classifies and "target" in chosen:
            chosen.setdefault("label_column", ",".join(chosen["target"]))
    if task in TREE_TASKS or "taxonomy" in chosen:
        chosen["nested"] = True
    return DatasetSpec(path, **chosen, **(settings or {}))


def resolve_folder(data: str) -> tuple[Path, list[str]]:
    """Resolve DATA to a folder, with a note if a built-in dataset has the same name."""
    if not data:
        raise DataError(f"no data given; {LAYOUT}")
    root = Path(data)
    refuse_run_folder(data)
    if root.is_dir():
        shadowed = f"{data} is the folder ./{data} here, not the built-in dataset of that name"
        return root, [shadowed] if data in builtin_datasets.DATASETS else []
    if data in builtin_datasets.DATASETS:
        return builtin_datasets.DATASETS[data](), []
    if root.exists():
        raise DataError(
            f"{data} is a file, not a folder of images ({LAYOUT}), a list (.csv, "
            ".jsonl, .xlsx) or tar shards; unpack an archive, save a table as CSV, give Parquet "
            "with images as hf:PATH, and learn a list of captions with --task caption"
        )
    names = ", ".join(builtin_datasets.DATASETS)
    hint = nearest(data, builtin_datasets.DATASETS) or did_you_mean(data)
    raise DataError(f"{data}: no such folder or file, and no built-in dataset ({names}){hint}")
