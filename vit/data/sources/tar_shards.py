"""Tar shard reader: images in class folders, or with labels beside them as in WebDataset.

    cat/0001.jpg                                 class folder
    0001.jpg 0001.cls                            name of the class, or its index in classes.json
    0001.jpg 0001.json {"label": "cat"}          or {"labels": ["cat", "tabby"]}: multi-label

DATA is one tar, a pattern with braces or wildcards, or a folder of tars. The split is in the name
of the shard (train-0000.tar), of its folder (train/0000.tar), or of the first folder in it
(train/cat/0001.jpg). Shards are not unpacked; see vit.data.archives.

Source: https://github.com/webdataset/webdataset
"""

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vit.data.archives import index_of, read_bytes
from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.sources.dataset_spec import SPLIT_NAMES
from vit.data.sources.file_walk import IMAGE_SUFFIXES, SYSTEM_NAMES, UNSUPPORTED_SUFFIXES
from vit.data.sources.row_errors import Faults, leave, nothing_left
from vit.data.sources.table_reader import whole_text
from vit.data.tar_index import BadShard, TarIndex
from vit.errors import DataError, printable
from vit.text import join_names, plural

MAX_SHARDS = 100_000
COMPRESSED = re.compile(r"\.(tar\.(gz|bz2|xz|zst|lz4)|tgz|tbz2?|txz)$", re.IGNORECASE)
RANGE = re.compile(r"(\d+)\.\.(\d+)")
LAYOUT = "expected CLASS/NAME.jpg in it, or NAME.jpg with NAME.cls or NAME.json beside"
MAX_LABEL_BYTES = 2**24
"""Largest label file in a shard."""
SIDECAR_SUFFIXES = (".cls", ".json", ".txt")
CLASS_TABLES = ("classes.json", "classes.txt")
T = TypeVar("T")
Labels = list[tuple[str, ...] | None]
"""Class names of each image; None for an image with an error."""


def is_shards(data: str) -> bool:
    """Whether `data` names tar shards, by its suffix, or is a folder that has some."""
    if data.lower().endswith(".tar") or COMPRESSED.search(data):
        return not os.path.isdir(data)
    return os.path.isdir(data) and bool(_shards_in_folder(data))


def shard_files(data: str) -> list[str]:
    """Expand `data` to sorted paths of shards.

    Raises:
        DataError: A pattern matches nothing, or a shard is missing.
    """
    if os.path.isdir(data):
        return _shards_in_folder(data)
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
        names = join_names([printable(name) for name in missing], 3)
        raise DataError(f"{printable(data)}: no such shard ({names}); give the existing ones")
    if compressed := [name for name in files if COMPRESSED.search(name)]:
        return compressed[:1]  # reading it raises, with the command that unpacks it
    return sorted(set(files))


def _shards_in_folder(folder: str) -> list[str]:
    """The tars of a folder without subfolders, or of its split folders.

    A tar beside class folders is taken for a copy of them, not for a shard.
    """
    names = _subfolders(folder)
    if not names:
        return _check_uncompressed(folder, _tars(folder))
    split_folders = [os.path.join(folder, name) for name in names if name in SPLIT_NAMES]
    if "train" not in names or any(_subfolders(path) for path in split_folders):
        return []
    return _check_uncompressed(folder, [path for split in split_folders for path in _tars(split)])


def _check_uncompressed(folder: str, paths: list[str]) -> list[str]:
    """`paths`, sorted.

    Raises:
        DataError: A tar is compressed, and its images would be missing.
    """
    compressed = [os.path.basename(path) for path in paths if COMPRESSED.search(path)]
    if compressed:
        names = join_names([printable(name) for name in sorted(compressed)], 2)
        raise DataError(
            f"{printable(folder)}: compressed shards ({names}): unpack them (gunzip, zstd -d); "
            "images are compressed already"
        )
    return sorted(paths)


def _subfolders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()]
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be listed ({error.strerror})") from None


def _tars(folder: str) -> list[str]:
    names = [
        name
        for name in os.listdir(folder)
        if not name.startswith(".") and (name.lower().endswith(".tar") or COMPRESSED.search(name))
    ]
    return [path for name in names if os.path.isfile(path := os.path.join(folder, name))]


def expand_braces(pattern: str) -> list[str]:
    """Expand `{00..02}` and `{train,val}` in every combination, as shells do.

    Raises:
        DataError: A brace is not closed, or there are more than `MAX_SHARDS` names.
    """
    names = []
    for name in _expand(pattern):
        names.append(name)
        if len(names) > MAX_SHARDS:
            raise DataError(f"{printable(pattern)}: more than {MAX_SHARDS:,} shards; use fewer")
    return names


def _expand(pattern: str) -> Iterator[str]:
    start = pattern.find("{")
    if start < 0:
        yield pattern
        return
    end = _closing_brace(pattern, start)
    for choice in _alternatives(pattern[start + 1 : end]):
        for middle in _expand(choice):
            for rest in _expand(pattern[end + 1 :]):
                yield pattern[:start] + middle + rest


def _closing_brace(pattern: str, start: int) -> int:
    depth = 0
    for at in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[at], 0)
        if not depth:
            return at
    raise DataError(f"{printable(pattern)}: a brace is not closed; expected such as {{000..099}}")


def _alternatives(inside: str) -> Iterator[str]:
    """The numbers of a range, or the parts between commas."""
    if match := RANGE.fullmatch(inside):
        first, last = match.groups()
        width = max(len(first), len(last)) if first[0] == "0" or last[0] == "0" else 0
        step = 1 if int(first) <= int(last) else -1
        yield from (f"{number:0{width}}" for number in range(int(first), int(last) + step, step))
        return
    depth, start = 0, 0
    for at, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            yield inside[start:at]
            start = at + 1
    yield inside[start:]


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
    """The split folder in the shard, with a slash; empty if there is none."""

    @property
    def path(self) -> str:
        """Address of the image, SHARD/MEMBER."""
        return f"{self.file}/{self.member}"

    @property
    def name_in_split(self) -> str:
        """Name without the common folder of all images."""
        return self.split_prefix + self.name


@dataclass
class Sidecars:
    """Label files of shards: by suffix, the (shard, stem) that have one."""

    stems: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    class_tables: list[tuple[str, str]] = field(default_factory=list)
    """Files with class names: (shard, member), or (empty, path) for a file beside the shards."""

    def add(self, file: str, stem: str, suffix: str) -> None:
        """Add a label file."""
        self.stems.setdefault(suffix, set()).add((file, stem))

    def with_suffix(self, suffix: str) -> set[tuple[str, str]]:
        """The (shard, stem) that have a label file of this suffix."""
        return self.stems.get(suffix, set())


def read_shards(data: str, faults: Faults = None) -> DatasetIndex:
    """Index the images of shards.

    Args:
        data: A shard, a pattern or a folder.
        faults: Collects the errors of shards and images, which are skipped; None: the first one
            is raised.

    Raises:
        DataError: A shard is missing, damaged or compressed, or an image has no class. With
            `faults`: no image is left.
    """
    return index_shards(shard_files(data), data, faults)


def index_shards(files: Sequence[str], data: str, faults: Faults = None) -> DatasetIndex:
    """Index the images of these shards.

    Args:
        files: Sorted paths of the shards.
        data: Their name in messages.
        faults: As in `read_shards`.
    """
    images, sidecars, notes = _list_members(files, faults=faults)
    if faults and not images:
        raise nothing_left(faults)
    if not images:
        raise DataError(f"{printable(data)}: no images in {plural(len(files), 'shard')}")
    images, common_folder = _strip_common_folder(images)
    if common_folder:
        notes.append(f"took {printable(common_folder)} in the shards for the folder of the data")
    images, more = _assign_splits(images)
    notes += more
    all_labels, multilabel, more = read_labels(images, sidecars, data, faults)
    notes += more
    splits: dict[str, list[ImageRecord]] = {}
    for image, labels in zip(images, all_labels, strict=True):
        if labels is not None:
            splits.setdefault(image.split, []).append(ImageRecord(image.path, labels))
    if faults and not splits:
        raise nothing_left(faults)
    root = _root(images, files, data, common_folder)
    # By name in the shards, as folders are walked; shards are only the last key.
    keys = {image.path: (image.name_in_split.split("/"), image.file) for image in images}
    for records in splits.values():
        records.sort(key=lambda record: keys[record.path])
    locations = {name: f"{printable(data)}" + (f" ({name})" if name else "") for name in splits}
    return DatasetIndex(root, splits, locations, notes, multilabel)


def list_shard_images(files: Sequence[str], data: str) -> tuple[list[str], list[str]]:
    """Addresses of the images in these shards, without their classes, and notes.

    They are in order of the shards, then of their names. Images of unsupported formats are
    included, as in folders, so that each gets its error.

    Raises:
        DataError: A shard is damaged or compressed, or there are no images.
    """
    images, _, notes = _list_members(files, IMAGE_SUFFIXES | UNSUPPORTED_SUFFIXES)
    if not images:
        raise DataError(f"{printable(data)}: no images in {plural(len(files), 'shard')}")
    order = {file: number for number, file in enumerate(files)}
    images.sort(key=lambda image: (order[image.file], image.name.split("/")))
    return [image.path for image in images], notes


def _list_members(
    files: Sequence[str], suffixes: Collection[str] = IMAGE_SUFFIXES, faults: Faults = None
) -> tuple[list[ShardImage], Sidecars, list[str]]:
    """The images of shards, their label files, and notes about ignored members."""
    images: list[ShardImage] = []
    sidecars = Sidecars()
    ignored_suffixes, special, hidden_names = Counter[str](), Counter[str](), set[str]()
    for file in files:
        index = _read_index(file, faults)
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
                sidecars.class_tables.append((file, name))
            elif suffix in suffixes:
                images.append(ShardImage(file, name, name, split_of_shard(file)))
            elif suffix in SIDECAR_SUFFIXES:
                sidecars.add(file, stem, suffix)
            else:
                ignored_suffixes[suffix or "no suffix"] += 1
    for folder in sorted({os.path.dirname(file) for file in files}):
        beside = (os.path.join(folder, name) for name in CLASS_TABLES)
        sidecars.class_tables += [("", path) for path in beside if os.path.isfile(path)]
    return images, sidecars, _ignored_notes(ignored_suffixes, special, hidden_names)


def _read_index(file: str, faults: Faults) -> TarIndex | None:
    try:
        return index_of(file)
    except DataError as error:
        last = printable(error.last) if isinstance(error, BadShard) else ""
        if faults is not None and last not in str(error):
            error = DataError(f"{error}; the last good member is {last}")
        leave(faults, "bad_shard", error, file)
        return None


def _ignored_notes(
    suffixes: Counter[str], special: Counter[str], hidden_names: set[str]
) -> list[str]:
    notes = []
    if suffixes:
        numbers = [f"{printable(suffix)} {number}" for suffix, number in suffixes.most_common()]
        unsupported = UNSUPPORTED_SUFFIXES & suffixes.keys()
        advice = "; convert them to JPEG or PNG" if unsupported else ""
        members = plural(suffixes.total(), "member")
        notes.append(f"left out {members} not taken for images: {join_names(numbers)}{advice}")
    if special:
        kinds = ", ".join(plural(number, kind) for kind, number in sorted(special.items()))
        notes.append(f"left out special members of the shards: {kinds}")
    if hidden_names:
        names = join_names(sorted(map(printable, hidden_names)))
        notes.append(f"left out hidden and system names: {names}")
    return notes


def _strip_common_folder(images: list[ShardImage]) -> tuple[list[ShardImage], str]:
    """Strip a folder that contains all images, as `tar cf photos.tar photos` writes it."""
    common = ""
    while True:
        parts = [image.name.split("/", 1) for image in images]
        first = parts[0][0]
        nested = all(len(pair) == 2 and "/" in pair[1] for pair in parts)
        if not nested or any(pair[0] != first for pair in parts) or first in SPLIT_NAMES:
            return images, common
        common += f"{first}/"
        images = [image._replace(name=pair[1]) for image, pair in zip(images, parts, strict=True)]


def _assign_splits(images: list[ShardImage]) -> tuple[list[ShardImage], list[str]]:
    """The images with their splits; if there are splits, images without one are left out."""
    if not any(image.split for image in images):
        images = [_split_from_folder(image) for image in images]
        if "train" not in {image.split for image in images}:
            return [image._replace(name=image.name_in_split, split="") for image in images], []
    others = sorted({os.path.basename(image.file) for image in images if not image.split})
    kept = [image for image in images if image.split]
    if not others:
        return kept, []
    left_out = plural(len(images) - len(kept), "image")
    names = join_names([*map(printable, others)])
    return kept, [f"left out {left_out} that belong to no split: {names}"]


def _split_from_folder(image: ShardImage) -> ShardImage:
    first, slash, rest = image.name.partition("/")
    if slash and "/" in rest and first in SPLIT_NAMES:
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


def read_labels(
    images: Sequence[ShardImage], sidecars: Sidecars, data: str, faults: Faults = None
) -> tuple[Labels, bool, list[str]]:
    """Read the class names of images in shards.

    Args:
        images: The images.
        sidecars: Their label files.
        data: Name of the dataset in messages.
        faults: As in `read_shards`.

    Returns:
        Labels, whether they are multi-label, and notes.

    Raises:
        DataError: An image has no label, or a label is invalid.
    """
    notes = []
    if captions := len(sidecars.with_suffix(".txt")):
        notes.append(f"left out {plural(captions, 'text')} (.txt): captions are no classes")
    class_names = _read_class_tables(sidecars)
    suffixes = (".cls", ".json")
    label_files = {
        suffix: [_label_file(image, sidecars, suffix) for image in images] for suffix in suffixes
    }
    suffix = next((suffix for suffix in suffixes if any(label_files[suffix])), None)
    notes += _orphan_notes(images, sidecars, label_files, faults)
    if suffix == ".json" and not _has_label_key(images, label_files[suffix], faults):
        notes.append("left out NAME.json beside images: they have neither label nor labels")
        suffix = None
    if suffix is None:
        return _folder_labels(images, data, faults), False, notes
    pairs = list(zip(images, label_files[suffix], strict=True))
    unlabelled = [image.path for image, name in pairs if not name]
    if unlabelled and faults is None:
        raise DataError(
            f"{printable(data)}: {plural(len(unlabelled), 'image')} without {suffix} beside, "
            f"which others have: {join_names([*map(printable, unlabelled)], 3)}"
        )
    _report_unlabelled(unlabelled, f"no {suffix} beside, which others have", faults)
    read = _read_cls if suffix == ".cls" else _read_json
    values = [
        _value_or_fault(partial(read, image, name), image, faults) if name else None
        for image, name in pairs
    ]
    multilabel = any(isinstance(value, list) for value in values)
    labels = [
        None
        if value is None
        else _value_or_fault(partial(_class_names, value, class_names, image), image, faults)
        for value, image in zip(values, images, strict=True)
    ]
    return labels, multilabel, notes


def _value_or_fault(function: Callable[[], T], image: ShardImage, faults: Faults) -> T | None:
    """The result of `function`; None if it raises, and its error is collected."""
    try:
        return function()
    except DataError as error:
        leave(faults, "bad_label", error, image.path)
        return None


def _report_unlabelled(paths: Sequence[str], reason: str, faults: Faults) -> None:
    for path in paths:
        leave(faults, "no_label", DataError(f"{printable(path)}: {reason}"), path)


def _orphan_notes(
    images: Sequence[ShardImage],
    sidecars: Sidecars,
    label_files: Mapping[str, Sequence[str]],
    faults: Faults,
) -> list[str]:
    """A note for each suffix with label files of no image; with `faults`, a fault for each file."""
    notes = []
    for suffix, names in label_files.items():
        if faults is None:
            if orphans := len(sidecars.with_suffix(suffix)) - len(set(names) - {""}):
                notes.append(f"left out {plural(orphans, 'file')} {suffix} beside no image")
            continue
        used = {(image.file, name) for image, name in zip(images, names, strict=True) if name}
        for file, stem in sorted(sidecars.with_suffix(suffix)):
            if (file, stem + suffix) not in used:
                path = f"{file}/{stem}{suffix}"
                error = DataError(f"{printable(path)}: no image beside, so it is left out")
                leave(faults, "lone_label", error, path)
    return notes


def _label_file(image: ShardImage, sidecars: Sidecars, suffix: str) -> str:
    """The label file of an image with this suffix; empty if it has none.

    The WebDataset key of a/b.left.jpg is a/b; here a/b.left is tried first.
    """
    folder, slash, name = image.member.rpartition("/")
    for stem in (os.path.splitext(name)[0], name.split(".")[0]):
        if (image.file, folder + slash + stem) in sidecars.with_suffix(suffix):
            return folder + slash + stem + suffix
    return ""


def _has_label_key(images: Sequence[ShardImage], names: Sequence[str], faults: Faults) -> bool:
    """Whether the first .json has a label; with `faults`, the first one that can be read."""
    for image, name in zip(images, names, strict=True):
        try:
            record = _read_object(image, name) if name else None
        except DataError:
            if faults is None:
                raise
            continue
        if record is not None:
            return "label" in record or "labels" in record
    return True


def _folder_labels(images: Sequence[ShardImage], data: str, faults: Faults) -> Labels:
    loose = [image.path for image in images if "/" not in image.name]
    if loose and faults is None:
        problem = f"{plural(len(loose), 'image')} without a class, such as {printable(loose[0])}"
        raise DataError(f"{printable(data)}: {problem}; {LAYOUT}")
    _report_unlabelled(loose, f"without a class; {LAYOUT}", faults)
    return [(image.name.split("/")[0],) if "/" in image.name else None for image in images]


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _class_names(value: object, table: dict[str, str], image: ShardImage) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_class_name(label, table, image) for label in _as_list(value)))


def _class_name(label: object, table: dict[str, str], image: ShardImage) -> str:
    text = str(label)
    if not table:
        return text
    if text in table:
        return table[text]
    if text in table.values():
        return text
    known = plural(len(table), "class", "classes")
    raise _error(image, f"label {text!r} is none of the {known} in classes.json or classes.txt")


def _error(image: ShardImage, problem: str) -> DataError:
    return DataError(f"{printable(image.path)}: {printable(problem)}")


def _read_text(file: str, name: str) -> str:
    content = read_bytes(file, name)
    try:
        if len(content) > MAX_LABEL_BYTES:
            raise ValueError("too long")
        return content.decode("utf-8-sig")
    except ValueError as error:
        raise DataError(
            f"{printable(file)}/{printable(name)}: not UTF-8 text ({printable(error)})"
        ) from None


def _read_cls(image: ShardImage, name: str) -> object:
    text = _read_text(image.file, name).strip()
    if not text or "\n" in text:
        raise _error(image, "its .cls is not the name or number of one class")
    return text


def _read_json(image: ShardImage, name: str) -> object:
    record = _read_object(image, name)
    value = record.get("labels", record.get("label"))
    labels = _as_list(value)
    valid = all(isinstance(one, str | int) and not isinstance(one, bool) for one in labels)
    if not valid or "" in labels or isinstance(value, list) != ("labels" in record):
        raise _error(image, 'its .json has no "label" (a name or number) or "labels" (a list)')
    return value


def _read_object(image: ShardImage, name: str) -> dict[str, Any]:
    record = _parse_json(_read_text(image.file, name), f"{image.file}/{name}")
    if not isinstance(record, dict):
        raise _error(image, 'its .json is no object such as {"label": "cat"}')
    return dict(record)


def _parse_json(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{printable(location)}: no JSON ({printable(error)})") from None


def _read_class_tables(sidecars: Sidecars) -> dict[str, str]:
    """Class name by index as text; empty without a table. All tables must be equal."""
    tables = []
    for file, name in sidecars.class_tables:
        text = _read_text(file, name) if file else whole_text(name)
        tables.append(_parse_class_table(text, f"{file}/{name}" if file else name))
    if any(table != tables[0] for table in tables):
        raise DataError("shards with different classes.json or classes.txt; keep one of them")
    return tables[0] if tables else {}


def _parse_class_table(text: str, location: str) -> dict[str, str]:
    if location.endswith(".txt"):
        table: Any = text.splitlines()
    else:
        table = _parse_json(text, location)
    if isinstance(table, list):
        table = {str(number): name for number, name in enumerate(table)}
    if isinstance(table, dict) and all(type(value) is int for value in table.values()):
        table = {str(number): name for name, number in table.items()}
    valid = isinstance(table, dict) and all(
        isinstance(name, str) and name for name in table.values()
    )
    if not valid or len(set(table.values())) != len(table):
        shape = "expected a list of different names, or an object of them by number"
        raise DataError(f"{printable(location)}: not the names of classes; {shape}")
    return dict(table)
