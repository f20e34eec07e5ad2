"""Dataset export: any source as an image folder or as tar shards, with the images' own bytes.

    OUT/train/CLASS/NAME.jpg                     folder; without splits OUT/CLASS/NAME.jpg
    OUT/images/train/NAME.jpg, OUT/labels.jsonl  folder, multi-label
    OUT/train/NAME.jpg, OUT/train/metadata.jsonl folder, with captions
    OUT/train-000000.tar: CLASS/NAME.jpg         shards
    OUT/train-000000.tar: NAME.jpg, NAME.json    shards, multi-label, with captions, or with class
                                                 names that are no folder names (WebDataset)

The output is reproducible byte for byte: members are in order, without times and owners.
"""

import contextlib
import io
import itertools
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vit.atomic_files import atomic_folder
from vit.config import SourceConfig
from vit.config.inference_config import accepts_settings
from vit.config.settings import split_settings
from vit.data.dataset_types import DatasetIndex, ImageFile, ImageRecord
from vit.data.image_archives import open_binary, relative, split_address
from vit.data.image_io import EncodedImage, check_header, read_header
from vit.data.sources.dataset_spec import HUB, SPLIT_NAMES, DatasetSpec, as_dataset_spec
from vit.data.sources.file_walk import IMAGE_SUFFIXES, MARKER_FILE, OUTPUT_MARKER, SYSTEM_NAMES
from vit.data.sources.open_dataset import read_source
from vit.errors import BadImage, ConfigError, DataError
from vit.paths import UniqueNames, is_device_name, path_argument
from vit.text import join_names, printable

ExportFormat = Literal["folder", "shards"]

FORBIDDEN_CHARACTERS = frozenset('<>:"|?*\\/')
"""Characters that some file system does not allow in names."""
MAX_NAME_BYTES = 200
"""Longest component of a path, in bytes of UTF-8."""
FORMAT_SUFFIXES = {"JPEG": ".jpg", "TIFF": ".tif", "JPEG2000": ".jp2"}
"""Pillow's format -> suffix, where that is not its name in lower case."""
LABELS_FILE = "labels.jsonl"
"""List of the images and classes of a multi-label folder."""
CAPTIONS_FILE = "metadata.jsonl"
"""List of the images and captions of a folder, as the library `datasets` names it."""
MIN_SHARD_BYTES = 10**6
SHARD_SIZE = "256MB"


class WriteCounts(NamedTuple):
    """Numbers of images and of files written."""

    images: int
    files: int


@dataclass
class ExportReport:
    """Numbers of images and files written, images left out, and notes for the user."""

    images: int = 0
    files: int = 0
    bad: list[BadImage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, counts: WriteCounts) -> None:
        self.images += counts.images
        self.files += counts.files


def check_target(out: Path, source: str, *, overwrite: bool) -> None:
    """Check that the output folder may be written, before any work is done."""
    name = printable(out)
    target, data = os.path.realpath(out), os.path.realpath(source)
    if os.path.lexists(source) and (data == target or data.startswith(target + os.sep)):
        raise DataError(f"{name} holds the data themselves; give another --out")
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise DataError(f"{name} is a file; give the name of a new folder")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise DataError(f"{name} has files; give another --out, or add --overwrite")
    if not (out / MARKER_FILE).is_file():
        raise DataError(f"{name} was not written by vit data, so it is not replaced; empty it")


def _check_no_overlap(index: DatasetIndex, out: Path) -> None:
    """Refuse to replace a folder that contains images of `index`, also behind links."""
    if not os.path.lexists(out):
        return
    target = os.path.join(os.path.realpath(out), "")
    paths = (record.path for records in index.splits.values() for record in records)
    files = (found[0] if (found := split_address(path)) else path for path in paths)
    for file in dict.fromkeys(files):
        folder, name = os.path.split(file)
        link = os.path.join(os.path.realpath(folder), name)
        if link.startswith(target) or os.path.realpath(file).startswith(target):
            raise DataError(f"{out} holds images of the data, such as {file}; give another --out")


@accepts_settings(SourceConfig)
def export_data(
    data: str | os.PathLike[str] | DatasetSpec,
    out: str | os.PathLike[str],
    *,
    to: ExportFormat,
    task: str | None = None,
    shard_size: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
    **settings: Any,
) -> ExportReport:
    """Write the images of any source as a folder or as shards: `vit data`.

    Args:
        data: The source; a DatasetSpec has its splits and columns.
        out: Output folder; it appears complete or not at all.
        to: Output format.
        task: Task whose classes or captions are written; classes by default.
        shard_size: Most bytes of a shard, such as 1GB; 256MB by default.
        overwrite: Replace a folder that an earlier export wrote.
        progress: Called with the images done and their total.
        settings: Fields of SourceConfig: how `data` is read.

    Raises:
        ConfigError: The settings do not fit together.
        DataError: The source cannot be read, or the folder cannot be written.
    """
    (source,) = split_settings(settings, "vit data", SourceConfig)
    spec = as_dataset_spec(data, {"all_splits": True}, task=task, source=source)
    out = Path(path_argument("out", out, "the folder to write"))
    if shard_size is not None and to == "folder":
        raise ConfigError(f"shard_size={shard_size}: a folder has no shards")
    max_bytes = parse_shard_size(shard_size or SHARD_SIZE)
    check_target(out, spec.data.removeprefix(HUB), overwrite=overwrite)
    index = read_source(spec)
    return export_dataset(index, spec.data, out, to=to, max_bytes=max_bytes, progress=progress)


def parse_shard_size(size: str) -> int:
    """Bytes of a size such as 256MB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(I?)B?", size.strip().upper())
    if found is None:
        raise ConfigError(f"shard_size={size}: expected a size such as 256MB or 1GB")
    base = 1024 if found[3] else 1000
    number = int(float(found[1]) * base ** "_KMG".index(found[2] or "_"))
    if number < MIN_SHARD_BYTES:
        raise ConfigError(f"shard_size={size}: must be at least 1MB")
    return number


def export_dataset(
    index: DatasetIndex,
    source: str,
    out: Path,
    *,
    to: ExportFormat,
    max_bytes: int,
    progress: Callable[[int, int], object],
) -> ExportReport:
    """Write all images of `index`; the folder appears complete or not at all."""
    _check_no_overlap(index, out)
    report = ExportReport(notes=list(index.notes))
    classes = {
        label for records in index.splits.values() for record in records for label in record.labels
    }
    folders = class_folders(classes, split=set(index.splits) != {""})
    renamed = [name for name, folder in folders.items() if name != folder]
    captioned = any(record.captions for records in index.splits.values() for record in records)
    if renamed and to == "folder" and not (index.multilabel or captioned):
        pairs = [f"{printable(name)} is {printable(folders[name])}" for name in renamed]
        report.notes.append(
            f"classes with another folder name, since theirs is not valid or not distinct on every "
            f"system: {join_names(pairs)}"
        )
    done, total = itertools.count(1), sum(map(len, index.splits.values()))
    with atomic_folder(out) as folder:
        for split, records in index.splits.items():
            images = _readable_images(
                records, split, index.root, report, lambda: progress(next(done), total)
            )
            if to == "folder":
                in_lists = index.multilabel or captioned
                counts = write_folder(folder, split, images, None if in_lists else folders)
            else:
                counts = write_shards(
                    folder,
                    split,
                    images,
                    max_bytes,
                    in_class_folders=not (index.multilabel or captioned or renamed),
                    multilabel=index.multilabel,
                )
            report.add(counts)
        if not report.images:
            first = f", such as {report.bad[0]}" if report.bad else ""
            raise DataError(f"{source}: none of its images can be read{first}")
        marker = {"source": source, "pictures": report.images, "left_out": len(report.bad)}
        (folder / MARKER_FILE).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
        if os.path.isdir(source) and Path(source).resolve() in folder.resolve().parents:
            (folder / OUTPUT_MARKER).touch()
    return report


def _readable_images(
    records: list[ImageRecord],
    split: str,
    root: Path,
    report: ExportReport,
    advance: Callable[[], object],
) -> Iterator[ImageFile]:
    """The images whose header can be read; the others are added to the report."""
    for record in records:
        advance()
        try:
            check_header(record.path)
        except BadImage as bad:
            if "--axes" not in bad.reason:  # the file is good, and is copied
                report.bad.append(BadImage(bad.path, bad.reason))
                continue
        with open_binary(record.path) as file:
            content = file.read()
        name = _name_in_class(record, split, root)
        yield ImageFile(name, record.labels, content, record.captions)


def _name_in_class(record: ImageRecord, split: str, root: Path) -> str:
    name = relative(record.path, root)
    parts = name.split("/")
    if ".." in parts:
        return parts[-1]
    if split and len(parts) > 1 and parts[0] in SPLIT_NAMES:
        parts = parts[1:]
    if len(record.labels) == 1 and len(parts) > 1 and parts[0] == record.labels[0]:
        parts = parts[1:]
    return "/".join(parts)


def safe_name(name: str) -> str:
    """`name` as a path component that every file system accepts and `FolderWalker` lists."""
    safe = "".join(c if c.isprintable() and c not in FORBIDDEN_CHARACTERS else "_" for c in name)
    safe = safe.lstrip(" ").rstrip(". ")
    if not safe or safe.startswith(".") or safe in SYSTEM_NAMES or safe.lower().endswith(".tar"):
        safe = "_" + safe.replace(".", "_")
    elif is_device_name(safe):
        safe = "_" + safe
    stem, suffix = os.path.splitext(safe)
    while len((stem + suffix).encode("utf-8", "replace")) > MAX_NAME_BYTES:
        stem = stem[:-1]
    return stem + suffix


def class_folders(classes: Iterable[str], *, split: bool) -> dict[str, str]:
    """Folder name of each class: the class name itself if it is a valid folder name of its own,
    and, without `split`, not that of a split."""
    names, folders = UniqueNames(), {}
    for name in sorted(classes, key=lambda name: (safe_name(name) != name, name)):
        folder = safe_name(name)
        folder = f"{folder}_" if folder in SPLIT_NAMES and not split else folder
        folders[name] = names.add(folder)
    return folders


def _with_file_names(images: Iterable[ImageFile]) -> Iterator[tuple[str, ImageFile]]:
    """Yield each image after its safe name, with the suffix of its format if it has no other."""
    for image in images:
        parts = [safe_name(part) for part in image.name.split("/") if part not in ("", ".", "..")]
        last = parts.pop() if parts else "picture"
        if os.path.splitext(last)[1].lower() not in IMAGE_SUFFIXES:
            image_format = read_header(EncodedImage(image.name, image.content)).format
            last += FORMAT_SUFFIXES.get(image_format, f".{image_format.lower()}")
        yield "/".join([*parts, last]), image


def write_folder(
    root: Path, split: str, images: Iterable[ImageFile], folders: dict[str, str] | None
) -> WriteCounts:
    """Write the images of one split to class folders; where `folders` is None, multi-label images
    get a `LABELS_FILE`, captioned ones a `CAPTIONS_FILE`."""
    names, number = UniqueNames(), 0
    lines: dict[Path, list[str]] = {}
    for number, (name, image) in enumerate(_with_file_names(images), 1):  # noqa: B007
        if folders is None and image.captions:
            path = names.add("/".join(filter(None, [split, name])))
            line: dict[str, Any] = {"file_name": path.removeprefix(f"{split}/")}
            line |= image.annotations(multilabel=False)
            lines.setdefault(root / split / CAPTIONS_FILE, []).append(to_line(line))
        elif folders is None:
            path = names.add("/".join(filter(None, ["images", split, name])))
            line = {"image": path, **image.annotations(multilabel=True)}
            line |= {"split": split} if split else {}
            lines.setdefault(root / LABELS_FILE, []).append(to_line(line))
        else:
            path = names.add("/".join(filter(None, [split, folders[image.labels[0]], name])))
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(image.content)
    for list_path, records in lines.items():
        with open(list_path, "a", encoding="utf-8", newline="\n") as file:
            file.writelines(records)
    return WriteCounts(number, number)


def to_line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_shards(
    root: Path,
    split: str,
    images: Iterable[ImageFile],
    max_bytes: int,
    *,
    in_class_folders: bool,
    multilabel: bool = False,
) -> WriteCounts:
    """Write the images of one split to numbered shards of `max_bytes`; a single image may be
    larger."""
    names, number, files = UniqueNames(), 0, 0
    with contextlib.ExitStack() as stack:
        shard: tarfile.TarFile | None = None
        for number, (name, image) in enumerate(_with_file_names(images), 1):  # noqa: B007
            if in_class_folders:
                members = [(names.add(f"{image.labels[0]}/{name}"), image.content)]
            else:
                stem, suffix = os.path.splitext(name)
                folder, slash, last = stem.rpartition("/")
                # a WebDataset key ends at the first dot
                key = names.add(folder + slash + last.replace(".", "_"))
                text = json.dumps(image.annotations(multilabel=multilabel), ensure_ascii=False)
                members = [(key + suffix, image.content), (f"{key}.json", text.encode())]
            size = sum(len(content) + 1024 for _, content in members)
            if shard is None or shard.offset + size > max_bytes:
                stack.close()
                path = root / f"{split or 'images'}-{files:06d}.tar"
                shard = stack.enter_context(
                    tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="utf-8")
                )
                files += 1
            for member, content in members:
                info = tarfile.TarInfo(member)
                info.size, info.mode = len(content), 0o644
                shard.addfile(info, io.BytesIO(content))
    return WriteCounts(number, files)
