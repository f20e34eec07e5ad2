"""Dataset specification: what to read and how, the path that DATA resolves to, and row errors."""

import mmap
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit.config import DataConfig, SourceConfig, TrainingConfig
from vit.data.sources import builtin_datasets
from vit.data.sources.file_walk import IMAGE_SUFFIXES, UNSUPPORTED_SUFFIXES
from vit.data.sources.problems import Problems
from vit.errors import ConfigError, DataError
from vit.paths import did_you_mean, is_run_folder, names_in, path_argument
from vit.text import nearest, printable

SAVE = "not a list: save it as CSV and give that file"
FILES = "save its images as files in class folders, or as files with a list (.csv) of their classes"
MISTAKEN = {
    ".xls .xlsm .xlsb": f"an Excel workbook of another kind than .xlsx, {SAVE}",
    ".ods .fods .numbers .gsheet": f"a spreadsheet, {SAVE}",
    ".zip .rar .7z .tgz .gz .bz2 .xz .zst .txz .tbz .tbz2": "an archive: unpack it first, and give "
    "the folder or the list",
    ".parquet .pq": "a Parquet table: if it has images, give it as hf:PATH (pip install "
    "'vit-toolkit[datasets]'); if it has names of files, save it as CSV",
    ".arrow .feather": "an Arrow table: if it has images, give the folder that the library "
    "datasets has saved as hf:FOLDER; if it has names of files, save it as CSV",
    ".tfrecord .tfrecords .h5 .hdf5 .npz .npy .mat .mdb .lmdb .pkl .pickle .pt .pth": "a file of "
    f"records, arrays or Python objects: {FILES}",
}
"""Suffixes of files that are no data here -> kind of file, and the way to use it."""
STORES = (".parquet", ".tfrecord", ".mdb")
"""Suffixes of files whose folder is one dataset."""
PART = re.compile(r"-\d+-of-\d+$")
"""Behind the suffix of a file that is a part of several."""
EXPECTED = "DATA is one folder, with a folder for each class, or one list (.csv, .jsonl, .xlsx)"
WILDCARDS = re.compile(r"[*?]")


def refuse_mistaken(data: str) -> None:
    """Refuse files of other kinds, such as spreadsheets and archives; and run folders."""
    names = names_in(data)
    stored = [name for name in names if _suffix(name) in STORES]
    if stored and any(os.path.isdir(os.path.join(data, name)) for name in names):
        stored = []  # class folders, beside such a file
    if os.path.isfile(data) or stored:
        suffix = _suffix(stored[0] if stored else data)
        for suffixes, kind in MISTAKEN.items():
            if suffix in suffixes.split():
                raise DataError(f"{data} {'has' if stored else 'is'} {kind}")
    if is_run_folder(data):
        raise DataError(
            f"{data} is a run folder, a trained network: give a folder or list of images"
        )


def _suffix(name: str) -> str:
    return os.path.splitext(PART.sub("", name))[1].lower()


def json_file_kind(path: str) -> str:
    """What a JSON file without captions is, and the way to use it; empty of other files."""
    if not (path.lower().endswith(".json") and os.path.isfile(path) and os.access(path, os.R_OK)):
        return ""
    if has_json_key(path, "category_id"):
        return (
            "COCO's annotations with categories, not a list: write one (.csv) with file_name of "
            "images, and as label the name in categories of the image's annotations (several with "
            "| between them)"
        )
    if has_json_key(path, "choices"):
        return "an export of Label Studio: export it there as CSV, and add --label-column choice"
    return (
        'not a list: write one object, such as {"image": "1.jpg", "label": "cat"}, in each line '
        "of a .jsonl (jq -c '.[]' does so with an array)"
    )


def has_json_key(path: str, key: str) -> bool:
    """Whether a JSON file has a key anywhere, without parsing it."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(f'"{key}"'.encode()) >= 0


def refuse_single_images(data: str) -> None:
    """Refuse a single image or a glob of images, where one folder or list is expected."""
    if is_image(data) and os.path.isfile(data):
        raise DataError(f"{EXPECTED}, not a single image: {data}")
    if WILDCARDS.search(data) and not os.path.lexists(data):
        raise DataError(f"{EXPECTED}, not a pattern: {data}")


def no_match_message(pattern: str) -> str:
    """The error for a glob that matches no file."""
    folder = os.path.dirname(re.split(r"[*?\[]", pattern, maxsplit=1)[0]) or os.curdir
    name = printable(pattern)
    if not os.path.isdir(folder):
        return f"{name}: matches no file, there is no folder {printable(folder)}" + (
            did_you_mean(folder) or "; correct the pattern"
        )
    return (
        f"{name}: matches no file; correct the pattern, or give {printable(folder)} for all in it"
    )


def is_image(name: str) -> bool:
    """Whether a name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES | UNSUPPORTED_SUFFIXES


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
    problems: Problems = field(default=None, compare=False)
    """Receives what is wrong, which is skipped; None: the first error is raised."""

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
        return cls(
            data.data,
            data.images,
            data.image_column,
            data.label_column,
            data.caption_column,
            data.group,
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
        )

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
    """The DatasetSpec of the arguments of a Python call, or `data` if it is one.

    Args:
        source: How the caller wants `data` to be read.
        given: More fields that the caller may choose; None or False where they did not.
    """
    given |= {} if source is None else vars(source)
    chosen = {name: value for name, value in given.items() if value not in (None, False, "")}
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
    return DatasetSpec(path, **chosen, **(settings or {}))


def resolve_folder(data: str) -> tuple[Path, list[str]]:
    """Resolve DATA, a folder or the name of a built-in dataset, to a folder.

    Returns:
        The folder, and a note if `data` is also the name of a built-in dataset.
    """
    if not data:
        raise DataError(f"no data given; {LAYOUT}")
    root = Path(data)
    refuse_mistaken(data)
    if root.is_dir():
        shadowed = f"{data} is the folder ./{data} here, not the built-in dataset of that name"
        return root, [shadowed] if data in builtin_datasets.DATASETS else []
    if data in builtin_datasets.DATASETS:
        return builtin_datasets.DATASETS[data](), []
    refuse_single_images(data)
    if root.exists():
        kind = json_file_kind(data) or (
            f"a file, not a folder; {LAYOUT}; or a list of images and their classes in .csv or "
            ".jsonl; or, for a list of captions, --task caption"
        )
        raise DataError(f"{data} is {kind}")
    names = ", ".join(builtin_datasets.DATASETS)
    hint = nearest(data, builtin_datasets.DATASETS) or did_you_mean(data)
    raise DataError(f"{data}: no such folder or file, and no built-in dataset ({names}){hint}")
