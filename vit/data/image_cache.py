"""Cache of decoded training images, at the size that crops need, memory-mapped by all processes.

    header    magic, digest of the index                           128 bytes
    index     offset, height, width, fingerprint of the image's file
    pixels    RGB, (height, width, 3) uint8 each, or channels of instruments in the run's type

The file's name is a hash of the paths, their order, the side, and how values are read. A cache is
written under another name and renamed when it is complete and on the disk; the next builder deletes
what an interrupted one left. Unreadable images have no pixels in it: they are read from their
files, which raises their error again.
"""

import contextlib
import errno
import hashlib
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from vit.atomic_files import lock_file, locked, rename_file
from vit.data.image_io import (
    IntensityRange,
    file_fingerprint,
    read_channels,
    read_pixels,
    read_size,
)
from vit.data.instrument_images import Array, ChannelSpec
from vit.errors import BadImage, DataError
from vit.paths import user_cache
from vit.text import Notify, format_bytes, plural, printable

MAGIC_PREFIX = b"vit cache "
MAGIC = MAGIC_PREFIX + b"2\n"
HEADER_BYTES = 128
FINGERPRINT = ("size", "mtime", "ctime", "inode")
COLUMNS = ("offset", "height", "width", *FINGERPRINT)
INDEX = np.dtype({"names": COLUMNS, "formats": ["<i8"] * len(COLUMNS)})
FILE_NAME = re.compile(r"images-[0-9a-f]{24}")
UNREADABLE = -1
"""Offset of an image that cannot be read."""

Index = np.ndarray[Any, Any]
Kind = Literal["ram", "disk"]
MAX_TOTAL_BYTES = 100 * 2**30
"""Limit of all caches in a folder together; a single one may be larger."""
CHUNK = 256
"""Images that are decoded at a time."""
TASK = 16
"""Images of a task of a thread: the hand-over of each one takes as long as decoding a small one."""
MAX_SIZED = 4096
"""Images whose headers are read to estimate the size of a cache; all of them if there are fewer."""
SHARED_MEMORY = Path("/dev/shm")


class ImageCache:
    """Decoded images by sample index; the file may be deleted once this object exists.

    Args:
        spec: Channels of the images; None: they are RGB of 8 bits.
    """

    def __init__(self, file: Path, index: Index, spec: ChannelSpec | None = None) -> None:
        self.file, self.index, self.spec = file, index, spec
        self.channels = 3 if spec is None else len(spec.order)
        self.dtype = np.dtype("uint8" if spec is None else spec.value_type)
        self.pixel_bytes = pixel_bytes(spec)
        with file.open("rb") as opened:
            lock_file(opened, wait=True, shared=True)  # for as long as it is mapped
            if opened.read(HEADER_BYTES) != header_of(index.tobytes()):
                raise FileNotFoundError(errno.ENOENT, "replaced by another cache", str(file))
            # copy on write, since torch warns of read-only memory; nobody writes
            self.bytes = np.asarray(np.memmap(opened, np.uint8, mode="c"))
        with contextlib.suppress(OSError):
            os.utime(file)  # the time of the last use, for eviction

    def __reduce__(self) -> tuple[Any, ...]:
        # a spawned process maps the file itself
        return ImageCache, (self.file, self.index, self.spec)

    def pixels(self, number: int) -> Array | None:
        """The pixels of sample `number`, (height, width, channels); None if they are not here."""
        offset, height, width = (
            int(self.index[name][number]) for name in ("offset", "height", "width")
        )
        if offset == UNREADABLE:
            return None
        flat = self.bytes[offset : offset + self.pixel_bytes * height * width]
        return flat.view(self.dtype).reshape(height, width, self.channels)

    def unlink(self) -> None:
        """Delete the file's name; its memory is freed when the last process that maps it ends."""
        with contextlib.suppress(OSError), locked(_lock_file(self.file)):
            self.file.unlink()


def cache_side(image_size: int, min_crop: float) -> int:
    """Short side of cached images such that a crop of mean area is not upsampled."""
    return math.ceil(image_size / math.sqrt((min_crop + 1) / 2))


def pixel_bytes(spec: ChannelSpec | None) -> int:
    """Bytes of a pixel of RGB or of the channels `spec`."""
    return 3 if spec is None else len(spec.order) * np.dtype(spec.value_type).itemsize


def open_cache(
    paths: Sequence[str],
    *,
    side: int,
    kind: Kind,
    folder: Path | None = None,
    intensity_range: IntensityRange | None = None,
    channels: ChannelSpec | None = None,
    threads: int = 2,
    notify: Notify = lambda _: None,
    advance: Callable[[int], object] = lambda _: None,
) -> ImageCache:
    """Open the cache of `paths`, and build it if it is missing or out of date.

    Args:
        side: Short side of cached images, in pixels; smaller images are not resized.
        channels: Those that are kept of images of instruments; None: RGB of 8 bits.
    """
    folder = _folder(kind, folder)
    values = intensity_range or () if channels is None else (channels,)
    file = folder / _file_name(paths, side, *values)
    try:
        _make_folder(folder, private=kind == "ram")
        index = new_index(paths)
        cache = _open_valid(file, index, channels)
        if cache is None:
            with locked(_lock_file(file)):
                # another process may have built it meanwhile
                cache = _open_valid(file, index, channels)
                if cache is None:
                    builder = _Builder(paths, index, side, file, threads, intensity_range, channels)
                    builder.reserve_space(kind, notify)
                    cache = builder.build(advance)
        return cache
    except OSError as error:
        raise DataError(
            f"cache={kind}: {folder} cannot be written ({error.strerror}); choose "
            "another --cache-folder, or --cache none"
        ) from None


def _folder(kind: Kind, folder: Path | None) -> Path:
    if kind == "disk":
        return user_cache() / "pictures" if folder is None else folder
    if not SHARED_MEMORY.is_dir():
        raise DataError("cache=ram: there is no /dev/shm here, which only Linux has; use disk")
    return SHARED_MEMORY / f"vit-toolkit-{os.getuid()}"


def _make_folder(folder: Path, *, private: bool) -> None:
    """Create the folder of caches; `private` if all users can write to its parent."""
    if not private:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not own or status.st_mode & 0o077:
        raise DataError(
            f"cache=ram: {folder} is not a folder of this user alone, so others could "
            "change the images; have it deleted, or use --cache disk"
        )


def _file_name(paths: Sequence[str], *settings: object) -> str:
    folder = os.getcwd()
    absolute = (os.path.join(folder, path) for path in paths)
    named = "\0".join([*map(str, settings), *absolute])
    key = hashlib.sha256(named.encode("utf-8", "surrogateescape"))
    return f"images-{key.hexdigest()[:24]}"


def _lock_file(file: Path) -> Path:
    return file.with_suffix(".lock")


def _open_valid(file: Path, expected: Index, spec: ChannelSpec | None) -> ImageCache | None:
    """The cache in `file` if it is complete and its images are unchanged."""
    index = read_valid_index(file, expected)
    with contextlib.suppress(FileNotFoundError):  # deleted or rebuilt meanwhile
        return None if index is None else ImageCache(file, index, spec)
    return None


class _Builder:
    """Builds the cache `file`; `index` is `new_index` of `paths`."""

    def __init__(
        self,
        paths: Sequence[str],
        index: Index,
        side: int,
        file: Path,
        threads: int,
        intensity_range: IntensityRange | None,
        channels: ChannelSpec | None,
    ) -> None:
        self.paths, self.index, self.side, self.file = paths, index.copy(), side, file
        self.threads, self.intensity_range, self.channels = threads, intensity_range, channels
        sampled = paths[:: math.ceil(len(paths) / MAX_SIZED)]
        with ThreadPoolExecutor(threads, "cache-size") as pool:
            size = sum(pool.map(self._pixel_bytes, sampled, chunksize=CHUNK))
        self.bytes = HEADER_BYTES + index.nbytes + size * len(paths) // len(sampled)

    def reserve_space(self, kind: Kind, notify: Notify) -> None:
        """Evict caches beyond the limit, and in memory all that no process maps."""
        folder = self.file.parent
        for left in folder.glob("images-*.building-*"):  # of builders that were killed
            with contextlib.suppress(OSError), left.open("ab") as file:
                if lock_file(file):  # a live builder holds the lock of its file
                    left.unlink()
        limit = 0 if kind == "ram" else max(MAX_TOTAL_BYTES - self.bytes, 0)
        old = caches_to_evict(folder, self.file, limit)
        free = free_bytes(folder, memory=kind == "ram") + sum(old.values())
        if self.bytes > free:
            what = "memory" if kind == "ram" else f"space in {printable(folder)}"
            raise DataError(
                f"cache={kind}: {len(self.paths):,} images need {format_bytes(self.bytes)}, and "
                f"{format_bytes(free)} of {what} are free; use --cache none, or fewer or smaller "
                "images"
            )
        where = "memory" if kind == "ram" else printable(self.file)
        about = "about " if len(self.paths) > MAX_SIZED else ""
        deleted = [size for path, size in old.items() if is_unused(path, delete=True)]
        if deleted:
            notify(
                f"note: deleted {plural(len(deleted), 'unused cache')} in {printable(folder)}, "
                f"{format_bytes(sum(deleted))}"
            )
        notify(
            f"cache: {len(self.paths):,} images with a short side of {self.side} px or less take "
            f"{about}{format_bytes(self.bytes)} of {where}"
        )

    def build(self, advance: Callable[[int], object]) -> ImageCache:
        """Decode all images into the file, which gets its name when it is complete.

        After `reserve_space`; an OSError if it cannot be written.
        """
        unfinished = self.file.with_name(f"{self.file.name}.building-{os.getpid()}")
        try:
            with (
                unfinished.open("xb") as output,
                ThreadPoolExecutor(self.threads, "cache") as pool,
            ):
                lock_file(output, wait=True)
                output.seek(HEADER_BYTES + self.index.nbytes)
                for first, chunk in self._decode_chunks(pool):
                    for number, pixels in enumerate(chunk, first):
                        if pixels is not None:
                            self.index["offset"][number] = output.tell()
                            self.index["height"][number] = pixels.shape[0]
                            self.index["width"][number] = pixels.shape[1]
                            output.write(pixels.data)
                    advance(len(chunk))
                body = self.index.tobytes()
                output.seek(0)
                output.write(header_of(body) + body)
                output.flush()
                os.fsync(output.fileno())
            rename_file(unfinished, self.file)
        finally:
            unfinished.unlink(missing_ok=True)
        return ImageCache(self.file, self.index, self.channels)

    def _pixel_bytes(self, path: str) -> int:
        try:
            size = read_size(path, getattr(self.channels, "axes", ""))
            width, height = self._cached_size(*size)
        except BadImage:
            return 0
        return pixel_bytes(self.channels) * width * height

    def _decode_chunks(self, pool: ThreadPoolExecutor) -> Iterator[tuple[int, list[Array | None]]]:
        """All images in chunks, each with the number of its first image.

        This thread or those of `pool` decode them, whichever was faster: Python's part of small
        images is the larger one, for which threads only wait for each other.
        """
        seconds: list[float] = []
        for first in range(0, len(self.paths), CHUNK):
            chunk, began = self.paths[first : first + CHUNK], time.perf_counter()
            if not seconds or (len(seconds) > 1 and seconds[0] < seconds[1]):
                decoded = self._decode_all(chunk)
            else:
                tasks = [chunk[at : at + TASK] for at in range(0, len(chunk), TASK)]
                decoded = [*chain.from_iterable(pool.map(self._decode_all, tasks))]
            seconds.append(time.perf_counter() - began)
            yield first, decoded

    def _decode_all(self, paths: Sequence[str]) -> list[Array | None]:
        return [self._decode(path) for path in paths]

    def _decode(self, path: str) -> Array | None:
        try:
            if self.channels is not None:
                channels = read_channels(path, self.channels)
                size = self._cached_size(*channels.size)
                return channels.resize(size, Image.Resampling.BICUBIC).to_array()
            pixels = read_pixels(path, self._min_size, intensity_range=self.intensity_range)
        except BadImage:
            return None
        height, width = pixels.shape[:2]
        width, height = self._cached_size(width, height)
        if (height, width) == pixels.shape[:2]:
            return np.ascontiguousarray(pixels)
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        small = F.interpolate(image, (height, width), mode="bicubic", antialias=True)
        return small[0].permute(1, 2, 0).contiguous().numpy()

    def _min_size(self, width: int, height: int) -> tuple[int, int]:
        cached = self._cached_size(width, height)
        return min(2 * cached[0], width), min(2 * cached[1], height)

    def _cached_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of the cached version of an image."""
        short = min(width, height)
        if short <= self.side:
            return width, height
        return round(width * self.side / short), round(height * self.side / short)


# --- index, locks and eviction --------------------------------------------------------------------


def new_index(paths: Sequence[str]) -> Index:
    """An index with the fingerprint of each image's file, and no pixels yet."""
    index = np.zeros(len(paths), INDEX)
    index["offset"] = UNREADABLE
    fingerprints = np.array([file_fingerprint(path) for path in paths], np.int64)
    for number, name in enumerate(FINGERPRINT):
        index[name] = fingerprints.reshape(-1, len(FINGERPRINT))[:, number]
    return index


def read_valid_index(file: Path, expected: Index) -> Index | None:
    """The index of the cache `file`; None unless it is complete and equals `expected`.

    `expected` is `new_index` of its images, so it has their present fingerprints.
    """
    try:
        with file.open("rb") as opened:
            head, body = opened.read(HEADER_BYTES), opened.read(expected.nbytes)
    except FileNotFoundError:
        return None
    if head != header_of(body) or len(body) != expected.nbytes:
        return None
    index = np.frombuffer(body, INDEX)
    unchanged = all(np.array_equal(index[name], expected[name]) for name in FINGERPRINT)
    return index if unchanged else None


def header_of(index: bytes) -> bytes:
    """The header of a cache with this index."""
    return (MAGIC + hashlib.sha256(index).hexdigest().encode()).ljust(HEADER_BYTES)


def caches_to_evict(folder: Path, file: Path, limit: int) -> dict[Path, int]:
    """Least recently used caches beyond `limit` bytes that no process maps, with their sizes."""
    found: list[tuple[int, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if FILE_NAME.fullmatch(path.name) and path != file:
                status = path.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, path))
    excess = sum(size for _, size, _ in found) - limit
    chosen: dict[Path, int] = {}
    for _, size, path in sorted(found):
        if excess <= 0:
            break
        if is_unused(path):
            chosen[path] = size
            excess -= size
    return chosen


def is_unused(path: Path, *, delete: bool = False) -> bool:
    """Whether `path` is a cache that no process maps; if so, it may be deleted at once."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        if file.read(len(MAGIC_PREFIX)) == MAGIC_PREFIX and lock_file(file):
            if delete:
                path.unlink()
            return True
    return False


RESERVED = 0.1
"""Share of the free space that is left free."""
CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 2**62


def free_bytes(folder: Path, *, memory: bool = False) -> int:
    """Bytes that may be written into `folder`; `memory` if its files are in memory (tmpfs)."""
    free = shutil.disk_usage(folder).free
    if memory:
        free = min(free, _free_system_memory(), _free_cgroup_memory())
    return int(free * (1 - RESERVED))


def _free_system_memory() -> int:
    """Bytes of memory available on Linux."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return UNLIMITED


def _free_cgroup_memory() -> int:
    """Bytes left to the container of this process, if any."""
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        return UNLIMITED if limit == "max" else int(limit) - used
    except (OSError, ValueError):
        return UNLIMITED
