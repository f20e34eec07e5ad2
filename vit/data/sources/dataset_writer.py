"""Writes images of any source as a folder or as tar shards; their bytes stay what they are.

    OUT/train/CLASS/NAME.jpg                     a folder; without a split OUT/CLASS/NAME.jpg
    OUT/images/train/NAME.jpg, OUT/labels.jsonl  a folder, where images may have several classes
    OUT/train-000000.tar: CLASS/NAME.jpg         shards
    OUT/train-000000.tar: NAME.jpg, NAME.json    where a class is no folder's name, or has several

The same images give the same bytes: members in order, no times, no owners.
"""

import contextlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vit.data.image_io import FORMATS, check_header
from vit.data.sources.class_names import SPLIT_NAMES
from vit.data.sources.file_walk import SUFFIXES, SYSTEM
from vit.errors import BadImage, DataError, printable

FORBIDDEN = frozenset('<>:"|?*\\/')
"""In names, on some system."""
LONGEST = 200
"""Bytes of one part of a name."""
ENDINGS = {"JPEG": ".jpg", "TIFF": ".tif", "JPEG2000": ".jp2"}
LABELS = "labels.jsonl"
"""In a folder whose images may have several classes: names them and their classes."""
MARK = "vit-data.json"
"""In each folder that was written here: only such a folder is ever replaced."""


class ImageFile(NamedTuple):
    """An image to write."""

    name: str
    """With folders, without its class."""
    labels: tuple[str, ...]
    content: bytes


class Written(NamedTuple):
    """What came of it."""

    images: int
    files: int


def safe_part(name: str) -> str:
    """`name` as one part of a path that every system takes, and no walk leaves out."""
    kept = "".join(one if one.isprintable() and one not in FORBIDDEN else "_" for one in name)
    kept = kept.strip(" ").rstrip(".")
    if not kept or kept.startswith(".") or kept in SYSTEM or kept.lower().endswith(".tar"):
        kept = "_" + kept.replace(".", "_")
    stem, suffix = os.path.splitext(kept)
    while len((stem + suffix).encode("utf-8", "replace")) > LONGEST:
        stem = stem[:-1]
    return stem + suffix


class Names:
    """Gives each name once: one that is taken gets a number."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def distinct(self, name: str) -> str:
        """`name`, or `name-2`..., with its suffix at the end."""
        stem, suffix = os.path.splitext(name)
        number = 1
        while name in self.taken:
            number += 1
            name = f"{stem}-{number}{suffix}"
        self.taken.add(name)
        return name


def class_folders(classes: Iterable[str], *, split: bool) -> dict[str, str]:
    """A folder's name for each class, its own wherever that is one.

    Args:
        classes: Names of the classes.
        split: Whether the images have a split; without one a folder `train` would be taken for it
    """
    names, folders = Names(), {}
    ordered = sorted(classes, key=lambda name: (safe_part(name) != name, name))
    for name in ordered:
        part = safe_part(name)
        part = f"{part}_" if part in SPLIT_NAMES and not split else part
        folders[name] = names.distinct(part)
    return folders


def file_name(name: str, content: bytes) -> str:
    """`name` made safe, with the suffix of its format where it has none of an image."""
    parts = [safe_part(part) for part in name.split("/") if part not in ("", ".", "..")]
    last = parts.pop() if parts else "picture"
    if os.path.splitext(last)[1].lower() not in SUFFIXES:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            kind = image.format or "PNG"
        last += ENDINGS.get(kind, f".{kind.lower()}")
    return "/".join([*parts, last])


def check_bytes(content: bytes, name: str) -> None:
    """Refuse what is clearly no image, as files are refused.

    Raises:
        BadImage: It is; `name` is what it is called.
    """
    with tempfile.NamedTemporaryFile(prefix="vit-") as file:
        file.write(content)
        file.flush()
        try:
            check_header(file.name)
        except BadImage as bad:
            raise BadImage(name, bad.reason) from None


def write_folder(
    root: Path, split: str, images: Iterable[ImageFile], folders: dict[str, str] | None
) -> Written:
    """Write the images of one split into class folders.

    Args:
        root: Folder that is being filled.
        split: Its name; empty where there is none.
        images: Taken one by one.
        folders: Folder of each class; None where images may have several: then labels.jsonl tells
    """
    names, number = Names(), 0
    lines = []
    for number, image in enumerate(images, 1):  # noqa: B007
        name = file_name(image.name, image.content)
        if folders is None:
            place = names.distinct("/".join(filter(None, ["images", split, name])))
            line = {"image": place, "labels": list(image.labels)}
            lines.append(json.dumps(line | ({"split": split} if split else {}), ensure_ascii=False))
        else:
            place = names.distinct("/".join(filter(None, [split, folders[image.labels[0]], name])))
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(image.content)
    if lines:
        with open(root / LABELS, "a", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
    return Written(number, number)


def write_shards(
    root: Path,
    split: str,
    images: Iterable[ImageFile],
    most: int,
    *,
    foldered: bool,
    multilabel: bool = False,
) -> Written:
    """Write the images of one split into numbered shards.

    Args:
        root: Folder that is being filled.
        split: Its name; empty where there is none.
        images: Taken one by one; one is in memory at a time.
        most: Bytes of a shard, unless a single image has more.
        foldered: Whether each lies in the folder of its class; else NAME.json says its classes.
        several: Whether it may have several.
    """
    names, number, files = Names(), 0, 0
    with contextlib.ExitStack() as stack:
        shard: tarfile.TarFile | None = None
        for number, image in enumerate(images, 1):  # noqa: B007
            name = file_name(image.name, image.content)
            if foldered:
                members = [(names.distinct(f"{image.labels[0]}/{name}"), image.content)]
            else:
                members = _with_label(names, name, image, multilabel)
            size = sum(len(content) + 1024 for _, content in members)
            if shard is None or shard.offset + size > most:
                stack.close()
                path = root / f"{split or 'images'}-{files:06d}.tar"
                shard = stack.enter_context(
                    tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="utf-8")
                )
                files += 1
            for member, content in members:
                _add(shard, member, content)
    return Written(number, files)


def _with_label(
    names: Names, name: str, image: ImageFile, multilabel: bool
) -> list[tuple[str, bytes]]:
    """The two members of an image; a key ends at its first dot, as WebDataset has it."""
    stem, suffix = os.path.splitext(name)
    folder, slash, last = stem.rpartition("/")
    key = names.distinct(folder + slash + last.replace(".", "_"))
    label = {"labels": list(image.labels)} if multilabel else {"label": image.labels[0]}
    text = json.dumps(label, ensure_ascii=False)
    return [(key + suffix, image.content), (f"{key}.json", text.encode())]


def _add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size, about.mode = len(content), 0o644
    shard.addfile(about, io.BytesIO(content))


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which is called `folder` once the block ends well; else nothing is left.

    Raises:
        DataError: It cannot be written.
    """
    fresh: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        yield fresh
        fresh.chmod(0o755)
        _replace(fresh, folder)
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be written ({error.strerror})") from None
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)


def _replace(fresh: Path, folder: Path) -> None:
    """Call `fresh` `folder`; what was called so is removed then, or comes back if that fails."""
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    before, done = aside / "before", False
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(before)
        fresh.rename(folder)
        done = True
    finally:
        if not done and os.path.lexists(before):
            _bring_back(before, folder)
        shutil.rmtree(aside, ignore_errors=True)


def _bring_back(before: Path, folder: Path) -> None:
    try:
        before.rename(folder)
    except OSError as error:
        raise DataError(
            f"{printable(folder)}: cannot be written ({error.strerror}); what was there is now "
            f"{printable(before)}"
        ) from None
