"""Decoded training images, at the size that crops need, in one file that all processes map.

The file's name says which images in which order and at which side, its index in which state. It
appears under that name when it is complete and on the disk, and never before: what an interruption
leaves is deleted by the next builder. Images that cannot be read have no place in it: they are
read from their files, which says again what is wrong with them.

The file of a cache: its header and index, and who may write it.

header    magic, digest of the index              128 bytes
index     place, height, width; stamp of the image's file (stamps.py)
pixels    RGB bytes, (height, width, 3) each
"""

import contextlib
import errno
import hashlib
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch.nn import functional as F

from vit.data.free_space import room_in
from vit.data.image_io import Pixels, read_pixels, read_size, stamp_of
from vit.errors import BadImage, DataError, printable
from vit.paths import user_cache
from vit.text import format_bytes

OURS = b"vit cache "
MAGIC = OURS + b"2\n"
HEADER = 128
STAMP = ("size", "mtime", "ctime", "number")
INDEX = np.dtype([(name, "<i8") for name in ("place", "height", "width", *STAMP)])
NAME = re.compile(r"images-[0-9a-f]{24}")
NOWHERE = -1
"""Place of an image that cannot be read."""

Index = np.ndarray[Any, Any]


def stamps_of(paths: Sequence[str]) -> Index:
    """An index with the stamp of each image's file, or of the file that it lies in."""
    index = np.zeros(len(paths), INDEX)
    index["place"] = NOWHERE
    stamps = np.array([stamp_of(path) for path in paths], np.int64).reshape(-1, len(STAMP))
    for name, column in zip(STAMP, stamps.T, strict=True):
        index[name] = column
    return index


def make_folder(folder: Path, *, private: bool) -> None:
    """Make the folder.

    Args:
        folder: Where it goes.
        private: Whether it lies where all users write: one of them may have made it before.

    Raises:
        DataError: It is not private.
        OSError: It cannot be made.
    """
    if not private:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not own or status.st_mode & 0o077:
        raise DataError(
            f"cache=ram: {printable(folder)} is not a folder of this user alone, so others could "
            "change the images; have it deleted, or use --cache disk"
        )


def usable_index(file: Path, stamps: Index) -> Index | None:
    """The index of a complete cache whose images are as they were, or None."""
    try:
        with file.open("rb") as opened:
            head, body = opened.read(HEADER), opened.read(stamps.nbytes)
    except FileNotFoundError:
        return None
    if head != header_of(body) or len(body) != stamps.nbytes:
        return None
    index = np.frombuffer(body, INDEX)
    same = all(np.array_equal(index[name], stamps[name]) for name in STAMP)
    return index if same else None


def header_of(index: bytes) -> bytes:
    return (MAGIC + hashlib.sha256(index).hexdigest().encode()).ljust(HEADER)


@contextlib.contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Be the only builder, where the system has locks; wait for one that is at work."""
    with lock.open("ab") as file:
        lock_file(file, wait=True)
        yield


def lock_file(file: BinaryIO, *, wait: bool, shared: bool = False) -> bool:
    """Lock `file` until it is closed, or its process killed; False where another one has it.

    Args:
        file: An open one; what maps it keeps the lock too.
        wait: Until the other one gives it back.
        shared: Among all who ask for it shared.
    """
    try:
        import fcntl
    except ImportError:  # Windows: two builders each build one, and the last one stays
        return True
    try:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, how | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def sweep(folder: Path) -> None:
    """Delete what builders left that were killed: a live one holds a lock on its file."""
    for left in folder.glob("images-*.building-*"):
        with contextlib.suppress(OSError), left.open("ab") as file:
            if lock_file(file, wait=False):
                left.unlink()


def surplus(folder: Path, file: Path, most: int) -> dict[Path, int]:
    """Caches besides `file` to delete, so that the others take `most` bytes, with their bytes.

    They are the least recently used ones; one that a process maps is never among them.
    """
    found: list[tuple[int, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if NAME.fullmatch(path.name) and path != file:
                status = path.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, path))
    over = sum(size for _, size, _ in found) - most
    chosen: dict[Path, int] = {}
    for _, size, path in sorted(found):
        if over <= 0:
            break
        if unused(path):
            chosen[path] = size
            over -= size
    return chosen


def unused(path: Path, *, delete: bool = False) -> bool:
    """Whether no process maps the cache in `path`; it may be deleted then."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        if file.read(len(OURS)) == OURS and lock_file(file, wait=False):
            if delete:
                path.unlink()
            return True
    return False


Kind = Literal["ram", "disk"]
MOST = 100 * 2**30
"""Bytes that the caches in a folder take together; a single one may be larger."""
WINDOW = 256
"""Images that are in work at once."""
SHARED = Path("/dev/shm")


class Cache:
    """Decoded images by their number.

    Args:
        file: A complete one; it may be deleted once this object exists.
        index: Its index.

    Raises:
        FileNotFoundError: It has gone, or is another one now.
    """

    def __init__(self, file: Path, index: Index) -> None:
        self.file = file
        self.index = index
        with file.open("rb") as opened:
            lock_file(opened, wait=True, shared=True)  # for as long as it is mapped
            if opened.read(HEADER) != header_of(index.tobytes()):
                raise FileNotFoundError(errno.ENOENT, "another one is in its place", str(file))
            # copy on write, for torch warns of memory that cannot be written; nobody writes
            self.bytes = np.asarray(np.memmap(opened, np.uint8, mode="c"))
        with contextlib.suppress(OSError):
            os.utime(file)  # the last use, by which old ones are deleted

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.file, self.index)  # a process that is not forked maps it anew

    def pixels(self, number: int) -> Pixels | None:
        """The image, (height, width, 3), or None where it has to be read from its own file."""
        place, height, width = (
            int(self.index[name][number]) for name in ("place", "height", "width")
        )
        if place == NOWHERE:
            return None
        return self.bytes[place : place + 3 * height * width].reshape(height, width, 3)

    def forget(self) -> None:
        """Delete the file's name: its memory is free when the last process that maps it ends."""
        with contextlib.suppress(OSError), locked(_lock(self.file)):
            self.file.unlink()


def side_for(image_size: int, min_crop: float) -> int:
    """Short side of kept images: a crop of the mean area is not enlarged to `image_size`."""
    return math.ceil(image_size / math.sqrt((min_crop + 1) / 2))


def open_cache(
    paths: Sequence[str],
    *,
    side: int,
    kind: Kind,
    folder: Path | None = None,
    threads: int = 2,
    notify: Callable[[str], None] = lambda _: None,
    advance: Callable[[int], object] = lambda _: None,
) -> Cache:
    """The cache of `paths`, built where there is none that is complete and up to date.

    Args:
        paths: Addresses of images.
        side: Short side of what is kept, in pixels; smaller images are kept as they are.
        kind: `disk` keeps it for other runs; `ram` until this process and its children end, and
            the caller deletes its name with `forget` when all of them have opened it.
        folder: Where `disk` keeps it; in the user's cache where left out.
        threads: How many images are decoded at a time.
        say: Told what is about to be built, and where, and what is deleted for it.
        advance: Told how many images have been added.

    Raises:
        DataError: There is no room for it, it cannot be written, or it would not be private.
    """
    folder = _folder(kind, folder)
    file = folder / _name(paths, side)
    try:
        make_folder(folder, private=kind == "ram")
        stamps = stamps_of(paths)
        cache = _ready(file, stamps)
        if cache is None:
            with locked(_lock(file)):
                cache = _ready(file, stamps)  # which another process has built meanwhile
                if cache is None:
                    builder = _Builder(paths, stamps, side, file, threads)
                    builder.plan(kind, notify)
                    cache = builder.built(advance)
        return cache
    except OSError as error:
        raise DataError(
            f"cache={kind}: {printable(folder)} cannot be written ({error.strerror}); choose "
            "another --cache-folder, or --cache none"
        ) from None


def _name(paths: Sequence[str], side: int) -> str:
    """The name of their file; equal words are other images in another working folder."""
    here = os.getcwd()
    whole = (os.path.join(here, path) for path in paths)
    key = hashlib.sha256("\0".join([str(side), *whole]).encode("utf-8", "surrogateescape"))
    return f"images-{key.hexdigest()[:24]}"


def _lock(file: Path) -> Path:
    return file.with_suffix(".lock")


def _ready(file: Path, stamps: Index) -> Cache | None:
    """The complete cache of images that are as they were, or None."""
    index = usable_index(file, stamps)
    with contextlib.suppress(FileNotFoundError):  # forgotten, or built anew, meanwhile
        return None if index is None else Cache(file, index)
    return None


def _folder(kind: Kind, folder: Path | None) -> Path:
    """Where a cache of this kind lies.

    Raises:
        DataError: This system shares no memory by name.
    """
    if kind == "disk":
        return user_cache() / "pictures" if folder is None else folder
    if not SHARED.is_dir():
        raise DataError("cache=ram: there is no /dev/shm here, which only Linux has; use disk")
    return SHARED / f"vit-toolkit-{os.getuid()}"


class _Builder:
    """Makes one cache.

    Args:
        paths: Addresses of images.
        index: Their stamps.
        side: Short side of what is kept.
        file: What to build.
        threads: How many images are decoded at a time.
    """

    def __init__(
        self, paths: Sequence[str], index: Index, side: int, file: Path, threads: int
    ) -> None:
        self.paths, self.index, self.side, self.file = paths, index.copy(), side, file
        self.pool_size = threads
        with ThreadPoolExecutor(threads, "cache-size") as pool:
            sizes = pool.map(self._bytes_of, paths, chunksize=WINDOW)
            self.bytes = HEADER + index.nbytes + sum(sizes)

    def plan(self, kind: Kind, notify: Callable[[str], None]) -> None:
        """Say what will be built, and delete caches that would be too many then.

        In memory, all that no process maps: they are of trainings that were killed.

        Raises:
            DataError: There is no room for it.
        """
        folder = self.file.parent
        sweep(folder)
        old = surplus(folder, self.file, 0 if kind == "ram" else max(MOST - self.bytes, 0))
        free = room_in(folder, memory=kind == "ram") + sum(old.values())
        if self.bytes > free:
            what = "memory" if kind == "ram" else f"space in {printable(self.file.parent)}"
            raise DataError(
                f"cache={kind}: {len(self.paths):,} images need {format_bytes(self.bytes)}, and "
                f"{format_bytes(free)} of {what} are free; use --cache none, or fewer or smaller "
                "images"
            )
        where = "memory" if kind == "ram" else printable(self.file)
        gone = [size for path, size in old.items() if unused(path, delete=True)]
        if gone:
            why = f" for the caches to stay within {MOST // 2**30} GiB" if kind == "disk" else ""
            notify(
                f"note: deleted the {len(gone)} least recently used of the caches in "
                f"{printable(folder)}, {format_bytes(sum(gone))},{why or ' left by killed runs'}"
            )
        notify(
            f"cache: {len(self.paths):,} images with a short side of {self.side} px or less take "
            f"{format_bytes(self.bytes)} of {where}"
        )

    def built(self, advance: Callable[[int], object]) -> Cache:
        """The cache, after `plan`.

        Raises:
            DataError: Somebody deleted its file at once.
            OSError: It cannot be written.
        """
        try:
            return Cache(self.file, self.build(advance))
        except FileNotFoundError:
            raise DataError(
                f"{printable(self.file)} was deleted while it was made; start once more"
            ) from None

    def build(self, advance: Callable[[int], object]) -> Index:
        """Decode all images into the file, which appears when it is complete."""
        aside = self.file.with_name(f"{self.file.name}.building-{os.getpid()}")
        try:
            with aside.open("xb") as output, ThreadPoolExecutor(self.pool_size, "cache") as pool:
                lock_file(output, wait=True)
                output.seek(HEADER + self.index.nbytes)
                for first in range(0, len(self.paths), WINDOW):
                    window = self.paths[first : first + WINDOW]
                    for number, pixels in enumerate(pool.map(self._small, window), first):
                        self._write(output, number, pixels)
                    advance(len(window))
                body = self.index.tobytes()
                output.seek(0)
                output.write(header_of(body) + body)
                output.flush()
                os.fsync(output.fileno())
            aside.replace(self.file)
        finally:
            aside.unlink(missing_ok=True)
        return self.index

    def _write(self, output: BinaryIO, number: int, pixels: Pixels | None) -> None:
        if pixels is None:
            return
        self.index["place"][number] = output.tell()
        self.index["height"][number], self.index["width"][number] = pixels.shape[:2]
        output.write(pixels.data)

    def _bytes_of(self, path: str) -> int:
        try:
            width, height = self._shrunk(*read_size(path))
        except BadImage:
            return 0
        return 3 * width * height

    def _small(self, path: str) -> Pixels | None:
        try:
            pixels = read_pixels(path, self._least)
        except BadImage:
            return None
        height, width = pixels.shape[:2]
        width, height = self._shrunk(width, height)
        if (height, width) == pixels.shape[:2]:
            return np.ascontiguousarray(pixels)
        whole = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        small = F.interpolate(whole, (height, width), mode="bicubic", antialias=True)
        return small[0].permute(1, 2, 0).contiguous().numpy()

    def _least(self, width: int, height: int) -> tuple[int, int]:
        least = self._shrunk(width, height)
        return min(2 * least[0], width), min(2 * least[1], height)

    def _shrunk(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of what is kept of an image."""
        short = min(width, height)
        if short <= self.side:
            return width, height
        return round(width * self.side / short), round(height * self.side / short)
