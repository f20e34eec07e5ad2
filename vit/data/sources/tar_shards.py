"""Tar shard reader: images in class folders, or with labels and captions beside them (WebDataset).

    cat/0001.jpg                                 class folder
    0001.jpg 0001.cls                            name of the class, or its index in classes.json
    0001.jpg 0001.json {"label": "cat"}          or {"labels": ["cat", "tabby"]}: multi-label
    0001.jpg 0001.txt                            captions, one a line
    0001.jpg 0001.json {"captions": ["a cat"]}   or "caption", "text"...: as in lists

DATA is one tar, a pattern with braces or wildcards, or a folder of tars. The split is in the name
of the shard (train-0000.tar), of its folder (train/0000.tar), or of the first folder in it
(train/cat/0001.jpg). Shards are not unpacked; see vit.data.image_archives.

Source: https://github.com/webdataset/webdataset
"""

import contextlib
import glob
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.image_archives import TarIndex, index_of, read_bytes
from vit.data.sources.dataset_problem import Problems, all_skipped_error, skip_or_raise
from vit.data.sources.dataset_spec import SPLIT_NAMES, TAR_SUFFIXES, DatasetSpec
from vit.data.sources.file_walk import (
    IMAGE_SUFFIXES,
    SYSTEM_NAMES,
    UNSUPPORTED_SUFFIXES,
    FolderWalker,
    ignored_suffixes_note,
)
from vit.data.sources.list_columns import (
    caption_columns,
    cell_captions,
    cell_group,
    cell_labels,
    drop_uncaptioned,
    find_column,
)
from vit.data.sources.table_reader import parse_json, whole_text
from vit.errors import DataError
from vit.text import join_names, plural, printable

MAX_SHARDS = 100_000
BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
LAYOUT = "expected CLASS/NAME.jpg in it, or NAME.jpg with NAME.cls or NAME.json beside"
MAX_LABEL_BYTES = 2**24
"""Largest label file in a shard."""
LABEL_SUFFIXES = (".cls", ".json")
SIDECAR_SUFFIXES = (*LABEL_SUFFIXES, ".txt")
TEXT_COLUMN = "txt"
"""Column name of captions in .txt files, as in the WebDataset reader of `datasets`."""
CLASS_TABLES = ("classes.json", "classes.txt")
CAPTIONS_LAYOUT = "expected NAME.txt beside NAME.jpg, or NAME.json with its captions"


def shard_files(data: str) -> list[str]:
    """Expand `data` to sorted paths of shards."""
    if os.path.isdir(data):
        return shards_in_folder(data)
    if os.path.lexists(data):
        return [data]
    files: list[str] = []
    missing: list[str] = []
    for name in expand_braces(data):
        matches = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        if not matches or not os.path.isfile(matches[0]):
            missing.append(name)
        files += matches
    if missing:
        names = join_names(missing, 3)
        raise DataError(f"{data}: no such shard ({names}) on this disk; give the existing ones")
    return _compressed_first(files)


def _compressed_first(files: Iterable[str]) -> list[str]:
    """`files` sorted; or the first compressed one, which its reader refuses with a remedy."""
    ordered = sorted(set(files))
    return [name for name in ordered if name.lower().endswith(TAR_SUFFIXES[1:])][:1] or ordered


def shards_in_folder(folder: str) -> list[str]:
    """The tars of a folder without subfolders, or of its split folders.

    A tar beside class folders, or beside more images than tars, is taken for a copy of them, not
    for a shard.
    """
    walk = FolderWalker(folder)
    names = walk.class_folders(folder)
    if not names:
        tars = _tars(folder)
        suffixes = (os.path.splitext(name)[1].lower() for name in os.listdir(folder))
        if tars and sum(suffix in IMAGE_SUFFIXES for suffix in suffixes) > len(tars):
            return []
        return _compressed_first(tars)
    split_folders = [os.path.join(folder, name) for name in names if name in SPLIT_NAMES]
    if "train" not in names or any(map(walk.subfolders, split_folders)):
        return []
    return _compressed_first(path for split in split_folders for path in _tars(split))


def _tars(folder: str) -> list[str]:
    names = (name for name in os.listdir(folder) if name.lower().endswith(TAR_SUFFIXES))
    paths = (os.path.join(folder, name) for name in names if not name.startswith("."))
    return [path for path in paths if os.path.isfile(path)]


def expand_braces(pattern: str) -> list[str]:
    """Expand `{00..02}` and `{train,val}` in every combination, as shells do."""
    names = [pattern]
    while any("{" in name for name in names):
        expanded: dict[str, None] = {}
        for name in names:
            for choice in _expand_innermost(name, pattern):
                expanded[choice] = None
                if len(expanded) > MAX_SHARDS:
                    raise DataError(f"{pattern}: more than {MAX_SHARDS:,} shards; use fewer")
        names = [*expanded]
    return names


def _expand_innermost(name: str, pattern: str) -> Iterator[str]:
    found = BRACES.search(name)
    if found is None:
        if "{" in name:
            text = "a brace is not closed; expected such as {000..099}"
            raise DataError(f"{pattern}: {text}")
        yield name
        return
    choices: Iterable[str] = found[1].split(",")
    if match := RANGE.fullmatch(found[1]):
        first, last = match.groups()
        width = max(len(first), len(last)) if first[0] == "0" or last[0] == "0" else 0
        step = 1 if int(first) <= int(last) else -1
        choices = (f"{n:0{width}}" for n in range(int(first), int(last) + step, step))
    for choice in choices:
        yield name[: found.start()] + choice + name[found.end() :]


def split_of_shard(file: str) -> str:
    """The split in the name of a shard or of its folder; empty if neither has one."""
    folder, name = os.path.split(file)
    words = re.split(r"[-_.]", name.lower())
    split = next((word for word in words if word in SPLIT_NAMES), "")
    parent = os.path.basename(folder)
    return split or (parent if parent in SPLIT_NAMES else "")


class ShardImage(NamedTuple):
    """An image in a shard."""

    file: str
    member: str
    """Full name in the shard."""
    name: str
    """Name without the common folder of all images and the split folder."""
    split: str
    split_prefix: str = ""
    """The split folder in the shard, with a slash, or empty."""

    @property
    def path(self) -> str:
        """Address of the image, SHARD/MEMBER."""
        return f"{self.file}/{self.member}"

    @property
    def name_in_split(self) -> str:
        """Name without the common folder of all images."""
        return self.split_prefix + self.name


class _Members(NamedTuple):
    """The members of shards by kind."""

    images: list[ShardImage]
    sidecars: dict[str, set[tuple[str, str]]]
    """Suffix of an annotation file -> the (shard, stem) that have one."""
    class_tables: list[tuple[str, str]]
    """Files with class names: (shard, member), or (empty, path) for a file beside the shards."""
    notes: list[str]


def read_shards(spec: DatasetSpec) -> DatasetIndex:
    """Index the images of the shards of `spec.data`, with classes, captions, or both."""
    files, data, errors = shard_files(spec.data), printable(spec.data), spec.problems
    members = _list_members(files, errors=errors)
    images, notes = members.images, members.notes
    if errors and not images:
        raise all_skipped_error(errors)
    if not images:
        raise DataError(f"{data}: no images in {plural(len(files), 'shard')}")
    images, common_folder = _strip_common_folder(images, class_folders=spec.labels)
    if common_folder:
        notes.append(f"took {printable(common_folder)} in the shards for the folder of the data")
    images, more = _assign_splits(images, class_folders=spec.labels)
    notes += more
    annotations = _Annotations(images, members, spec)
    splits: dict[str, list[ImageRecord]] = {}
    for image in images:
        if (record := annotations.record(image)) is not None:
            splits.setdefault(image.split, []).append(record)
    if errors and not splits:
        raise all_skipped_error(errors)
    if spec.captions:
        if not any(record.captions for records in splits.values() for record in records):
            key = f" (--caption-column {spec.caption_column})" if spec.caption_column else ""
            shards = plural(len(files), "shard")
            raise DataError(f"{data}: no captions in {shards}; {CAPTIONS_LAYOUT}{key}")
        splits = drop_uncaptioned(splits, notes)
    # By name in the shards, as folders are walked; shards are only the last key.
    keys = {image.path: (image.name_in_split.split("/"), image.file) for image in images}
    for records in splits.values():
        records.sort(key=lambda record: keys[record.path])
    return DatasetIndex(
        _root(images, files, spec.data, common_folder),
        splits,
        {name: data + (f" ({name})" if name else "") for name in splits},
        notes,
        annotations.multilabel,
        bool(annotations.group_key),
    )


def list_shard_images(files: Sequence[str], data: str) -> tuple[list[str], list[str]]:
    """Addresses of the images in these shards, without annotations, and notes.

    They are in order of the shards, then of their names. Images of unsupported formats are
    included, as in folders, so that each gets its error.
    """
    images, _, _, notes = _list_members(files, IMAGE_SUFFIXES | UNSUPPORTED_SUFFIXES)
    if not images:
        raise DataError(f"{data}: no images in {plural(len(files), 'shard')}")
    order = {file: number for number, file in enumerate(files)}
    images.sort(key=lambda image: (order[image.file], image.name.split("/")))
    return [image.path for image in images], notes


def _list_members(
    files: Sequence[str], suffixes: Collection[str] = IMAGE_SUFFIXES, errors: Problems = None
) -> _Members:
    found = _Members([], {suffix: set() for suffix in SIDECAR_SUFFIXES}, [], [])
    ignored_suffixes, special, hidden_names = Counter[str](), Counter[str](), set[str]()
    for file in files:
        index = _read_index(file, errors)
        if index is None:
            continue
        special += index.ignored
        for name in index:
            parts = name.split("/")
            stem, suffix = os.path.splitext(name)
            suffix = suffix.lower()
            hidden = [part for part in parts if part.startswith(".") or part in SYSTEM_NAMES]
            if hidden:
                hidden_names.update(hidden)
            elif parts[-1] in CLASS_TABLES:
                found.class_tables.append((file, name))
            elif suffix in suffixes:
                found.images.append(ShardImage(file, name, name, split_of_shard(file)))
            elif suffix in SIDECAR_SUFFIXES:
                found.sidecars[suffix].add((file, stem))
            else:
                ignored_suffixes[suffix or "no suffix"] += 1
    for folder in sorted({os.path.dirname(file) for file in files}):
        beside = (os.path.join(folder, name) for name in CLASS_TABLES)
        found.class_tables.extend(("", path) for path in beside if os.path.isfile(path))
    if ignored_suffixes:
        found.notes.append(ignored_suffixes_note(ignored_suffixes, "member"))
    if special:
        kinds = ", ".join(plural(number, kind) for kind, number in sorted(special.items()))
        found.notes.append(f"left out special members of the shards: {kinds}")
    if hidden_names:
        names = join_names(sorted(hidden_names))
        found.notes.append(f"left out hidden and system names: {names}")
    return found


def _read_index(file: str, errors: Problems) -> TarIndex | None:
    try:
        return index_of(file)
    except DataError as error:
        skip_or_raise(errors, "bad_shard", error, file)
        return None


def _strip_common_folder(
    images: list[ShardImage], *, class_folders: bool
) -> tuple[list[ShardImage], str]:
    """Strip a folder that contains all images, as `tar cf photos.tar photos` writes it.

    With `class_folders` it contains folders, which may be classes.
    """
    common = ""
    while True:
        parts = [image.name.split("/", 1) for image in images]
        first = parts[0][0]
        nested = all(len(pair) == 2 and ("/" in pair[1] or not class_folders) for pair in parts)
        if not nested or any(pair[0] != first for pair in parts) or first in SPLIT_NAMES:
            return images, common
        common += f"{first}/"
        images = [image._replace(name=pair[1]) for image, pair in zip(images, parts, strict=True)]


def _assign_splits(
    images: list[ShardImage], *, class_folders: bool
) -> tuple[list[ShardImage], list[str]]:
    """The images with their splits; if there are splits, images without one are left out."""
    if not any(image.split for image in images):
        images = [_split_from_folder(image, class_folders=class_folders) for image in images]
        if "train" not in {image.split for image in images}:
            return [image._replace(name=image.name_in_split, split="") for image in images], []
    others = sorted({os.path.basename(image.file) for image in images if not image.split})
    kept = [image for image in images if image.split]
    if not others:
        return kept, []
    left_out = plural(len(images) - len(kept), "image")
    names = join_names(others)
    return kept, [f"left out {left_out} that belong to no split: {names}"]


def _split_from_folder(image: ShardImage, *, class_folders: bool) -> ShardImage:
    first, slash, rest = image.name.partition("/")
    if slash and ("/" in rest or not class_folders) and first in SPLIT_NAMES:
        return image._replace(name=rest, split=first, split_prefix=f"{first}/")
    return image


def _root(images: list[ShardImage], files: Sequence[str], data: str, common_folder: str) -> Path:
    """The root of relative names: inside the shards, or their folder if names are not unique."""
    names = Counter((image.split, image.name_in_split) for image in images)
    folder = (
        os.path.abspath(data)
        if os.path.isdir(data)
        else os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
    )
    if max(names.values()) > 1:
        return Path(folder)
    if len(files) == 1:
        return Path(os.path.abspath(files[0])) / common_folder
    return Path(folder) / "shards.tar" / common_folder


class _Annotations:
    """Classes, captions and groups of images in shards, from their folders and sidecar files."""

    def __init__(self, images: Sequence[ShardImage], members: _Members, spec: DatasetSpec) -> None:
        self.spec, self.multilabel = spec, False
        texts = len(members.sidecars[".txt"])
        if texts and not spec.captions:
            note = f"left out {plural(texts, 'text')} (.txt): captions are no classes"
            members.notes.append(note)
        self.files: dict[str, dict[str, str]] = {}
        """Suffix -> the member beside each image by its path, or an empty name."""
        for suffix in (*(LABEL_SUFFIXES if spec.labels else (".json",)), *[".txt"] * spec.captions):
            stems = members.sidecars[suffix]
            self.files[suffix] = {one.path: _sidecar(one, stems, suffix) for one in images}
            used = {f"{image.file}/{self.files[suffix][image.path]}" for image in images}
            lone = sorted({f"{file}/{stem}{suffix}" for file, stem in stems} - used)
            if lone and spec.problems is None:
                note = f"left out {plural(len(lone), 'file')} {suffix} beside no image"
                members.notes.append(note)
            for path in lone if spec.problems is not None else ():
                error = DataError(f"{path}: no image beside, so it is left out")
                skip_or_raise(spec.problems, "lone_label", error, path)
        self.class_names = _read_class_tables(members.class_tables) if spec.labels else {}
        suffixes = [s for s in LABEL_SUFFIXES if spec.labels and any(self.files[s].values())]
        self.label_suffix = next(iter(suffixes), "")
        keys = self._first_keys(images) if spec.group or self.label_suffix == ".json" else None
        self.group_key = find_column([*(keys or ())], spec.group) if spec.group else ""
        if self.label_suffix == ".json" and keys is not None and not {"label", "labels"} & keys:
            self.label_suffix = ""
            if not (spec.captions or self.group_key):
                note = "left out NAME.json beside images: they have neither label nor labels"
                members.notes.append(note)

    def _first_keys(self, images: Sequence[ShardImage]) -> set[str] | None:
        """Keys of the first readable .json, or None."""
        for image in images:
            with contextlib.suppress(DataError):  # of a damaged one: raised by `record`
                if name := self.files[".json"][image.path]:
                    return {*_read_object(image, name)}
        return None

    def record(self, image: ShardImage) -> ImageRecord | None:
        """The record of an image; None if its error is collected."""
        kind, path = "no_label", image.path
        try:
            labels = self._folder(image) if self.spec.labels and not self.label_suffix else ()
            if self.label_suffix and not self.files[self.label_suffix][path]:
                raise _error(image, f"no {self.label_suffix} beside, which others have")
            kind = "bad_label"
            values = self._values(image)
            if self.label_suffix:
                labels = self._labels(image, values)
            captions = self._captions(image, values) if self.spec.captions else ()
            group = cell_group(values.get(self.group_key), path, 0) if self.group_key else ""
        except DataError as error:
            skip_or_raise(self.spec.problems, kind, error, path)
            return None
        return ImageRecord(path, labels, group, captions)

    @staticmethod
    def _folder(image: ShardImage) -> tuple[str, ...]:
        folder, slash, _ = image.name.partition("/")
        if not slash:
            raise _error(image, f"without a class; {LAYOUT}")
        return (folder,)

    def _values(self, image: ShardImage) -> dict[str, Any]:
        """What the files beside an image say, by key: the columns that a list would have."""
        values: dict[str, Any] = {}
        text = self.files[".txt"][image.path] if self.spec.captions else ""
        if text and self.spec.caption_column in (None, TEXT_COLUMN):
            values[TEXT_COLUMN] = _read_text(image.file, text).splitlines()
        reads_json = (self.spec.captions and not values) or self.label_suffix == ".json"
        if (reads_json or self.group_key) and (name := self.files[".json"][image.path]):
            values = _read_object(image, name) | values
        if self.label_suffix == ".cls":
            values["label"] = _read_text(image.file, self.files[".cls"][image.path]).strip()
            values.pop("labels", None)
        return values

    def _labels(self, image: ShardImage, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Class names of an image."""
        value = values.get("labels", values.get("label"))
        self.multilabel |= isinstance(value, list)
        if self.label_suffix == ".cls" and (not value or "\n" in value):
            raise _error(image, "its .cls is not the name or number of one class")
        if isinstance(value, list):
            value = [self._class_name(one, image) for one in value]
        labels = cell_labels(self._class_name(value, image), image.path, 0)
        if labels is None:
            raise _error(image, 'its .json has no "label" (a name or number) or "labels" (a list)')
        return labels

    def _class_name(self, value: Any, image: ShardImage) -> Any:
        """The name of a class: a number of JSON or of .cls is its index, other text the name."""
        table = self.class_names
        if not table or type(value) not in (str, int):
            return value
        label = str(value)
        is_number = self.label_suffix == ".cls" or isinstance(value, int)
        if is_number and label in table:
            return table[label]
        if label not in table.values():
            known = plural(len(table), "class", "classes")
            tables = " or ".join(CLASS_TABLES)
            raise _error(image, f"label {label!r} is not one of the {known} in {tables}")
        return label

    def _captions(self, image: ShardImage, values: Mapping[str, Any]) -> tuple[str, ...]:
        """The captions in the columns of `values` that a list of captions would have."""
        chosen = self.spec.caption_column
        names = (chosen,) if chosen else (TEXT_COLUMN, *caption_columns([*values]))
        cells = ((name, values[name]) for name in names if name in values)
        found = (cell_captions(v, name, image.path, 0, is_table=False) for name, v in cells)
        return tuple(caption for captions in found for caption in captions)


def _sidecar(image: ShardImage, stems: Collection[tuple[str, str]], suffix: str) -> str:
    """The member beside an image with this suffix; empty if it has none.

    The WebDataset key of a/b.left.jpg is a/b; here a/b.left is tried first.
    """
    folder, slash, name = image.member.rpartition("/")
    for stem in (os.path.splitext(name)[0], name.split(".")[0]):
        if (image.file, folder + slash + stem) in stems:
            return folder + slash + stem + suffix
    return ""


def _error(image: ShardImage, problem: str) -> DataError:
    return DataError(f"{image.path}: {problem}")


def _read_text(file: str, name: str) -> str:
    content = read_bytes(file, name)
    try:
        if len(content) > MAX_LABEL_BYTES:
            raise ValueError("too long")
        return content.decode("utf-8-sig")
    except ValueError as error:
        raise DataError(f"{file}/{name}: not UTF-8 text ({error})") from None


def _read_object(image: ShardImage, name: str) -> dict[str, Any]:
    record = parse_json(_read_text(image.file, name), f"{image.file}/{name}")
    if not isinstance(record, dict):
        raise _error(image, 'its .json is no object such as {"label": "cat"}')
    return dict(record)


def _read_class_tables(files: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Class name by index as text; empty without a table. All tables must be equal."""
    tables = []
    for file, name in files:
        text = _read_text(file, name) if file else whole_text(name)
        tables.append(_parse_class_table(text, f"{file}/{name}" if file else name))
    if any(table != tables[0] for table in tables):
        raise DataError("shards with different classes.json or classes.txt; keep one of them")
    return tables[0] if tables else {}


def _parse_class_table(text: str, location: str) -> dict[str, str]:
    if location.endswith(".txt"):
        table: Any = text.splitlines()
    else:
        table = parse_json(text, location)
    if isinstance(table, list):
        table = {str(number): name for number, name in enumerate(table)}
    if isinstance(table, dict) and all(type(value) is int for value in table.values()):
        table = {str(number): name for name, number in table.items()}
    valid = isinstance(table, dict) and all(
        isinstance(name, str) and name for name in table.values()
    )
    if not valid or len(set(table.values())) != len(table):
        shape = "expected a list of different names, or an object of them by number"
        raise DataError(f"{location}: not the names of classes; {shape}")
    return dict(table)
