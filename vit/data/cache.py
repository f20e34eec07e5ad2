"""Decoded training pictures, at the size that crops need, in one file that all processes map.

The file's name says which pictures in which order and at which side, its index in which state. It
appears under that name when it is complete and on the disk, and never before: what an interruption
leaves is deleted by the next builder. Pictures that cannot be read have no place in it: they are
read from their files, which says again what is wrong with them.
"""

import contextlib
import errno
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch.nn import functional as F

from vit.data.cache_file import (
    HEADER,
    NOWHERE,
    Index,
    header_of,
    lock_file,
    locked,
    make_folder,
    stamps_of,
    surplus,
    sweep,
    unused,
    usable_index,
)
from vit.data.decoding import read_pixels, read_size
from vit.data.jpeg import Pixels
from vit.data.room import room_in, shown_bytes
from vit.data.sources.builtin import user_cache
from vit.errors import BadImage, DataError, printable

Kind = Literal["ram", "disk"]
MOST = 100 * 2**30
"""Bytes that the caches in a folder take together; a single one may be larger."""
WINDOW = 256
"""Pictures that are in work at once."""
SHARED = Path("/dev/shm")


class Cache:
    """Decoded pictures by their number.

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
        """The picture, (height, width, 3), or None where it has to be read from its own file."""
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
    """Short side of kept pictures: a crop of the mean area is not enlarged to `image_size`."""
    return math.ceil(image_size / math.sqrt((min_crop + 1) / 2))


def open_cache(
    paths: Sequence[str],
    *,
    side: int,
    kind: Kind,
    folder: Path | None = None,
    threads: int = 2,
    say: Callable[[str], None] = lambda _: None,
    advance: Callable[[int], object] = lambda _: None,
) -> Cache:
    """The cache of `paths`, built where there is none that is complete and up to date.

    Args:
        paths: Addresses of pictures.
        side: Short side of what is kept, in pixels; smaller pictures are kept as they are.
        kind: `disk` keeps it for other runs; `ram` until this process and its children end, and
            the caller deletes its name with `forget` when all of them have opened it.
        folder: Where `disk` keeps it; in the user's cache where left out.
        threads: How many pictures are decoded at a time.
        say: Told what is about to be built, and where, and what is deleted for it.
        advance: Told how many pictures have been added.

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
                    builder.plan(kind, say)
                    cache = builder.built(advance)
        return cache
    except OSError as error:
        raise DataError(
            f"cache={kind}: {printable(folder)} cannot be written ({error.strerror}); choose "
            "another --cache-folder, or --cache none"
        ) from None


def _name(paths: Sequence[str], side: int) -> str:
    """The name of their file; equal words are other pictures in another working folder."""
    here = os.getcwd()
    whole = (os.path.join(here, path) for path in paths)
    key = hashlib.sha256("\0".join([str(side), *whole]).encode("utf-8", "surrogateescape"))
    return f"pictures-{key.hexdigest()[:24]}"


def _lock(file: Path) -> Path:
    return file.with_suffix(".lock")


def _ready(file: Path, stamps: Index) -> Cache | None:
    """The complete cache of pictures that are as they were, or None."""
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
        paths: Addresses of pictures.
        index: Their stamps.
        side: Short side of what is kept.
        file: What to build.
        threads: How many pictures are decoded at a time.
    """

    def __init__(
        self, paths: Sequence[str], index: Index, side: int, file: Path, threads: int
    ) -> None:
        self.paths, self.index, self.side, self.file = paths, index.copy(), side, file
        self.pool_size = threads
        with ThreadPoolExecutor(threads, "cache-size") as pool:
            sizes = pool.map(self._bytes_of, paths, chunksize=WINDOW)
            self.bytes = HEADER + index.nbytes + sum(sizes)

    def plan(self, kind: Kind, say: Callable[[str], None]) -> None:
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
                f"cache={kind}: {len(self.paths):,} images need {shown_bytes(self.bytes)}, and "
                f"{shown_bytes(free)} of {what} are free; use --cache none, or fewer or smaller "
                "images"
            )
        where = "memory" if kind == "ram" else printable(self.file)
        gone = [size for path, size in old.items() if unused(path, delete=True)]
        if gone:
            why = f" for the caches to stay within {MOST // 2**30} GiB" if kind == "disk" else ""
            say(
                f"note: deleted the {len(gone)} least recently used of the caches in "
                f"{printable(folder)}, {shown_bytes(sum(gone))},{why or ' left by killed runs'}"
            )
        say(
            f"cache: {len(self.paths):,} images with a short side of {self.side} px or less take "
            f"{shown_bytes(self.bytes)} of {where}"
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
        """Decode all pictures into the file, which appears when it is complete."""
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
        """(width, height) of what is kept of a picture."""
        short = min(width, height)
        if short <= self.side:
            return width, height
        return round(width * self.side / short), round(height * self.side / short)
