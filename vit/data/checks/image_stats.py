"""Statistics of images for `vit check`: computed by worker processes, cached in a database.

An image that hangs or crashes the decoder costs only itself: its process is replaced. This module
imports no torch, so that the processes start quickly.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sqlite3
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vit.data.image_archives import content_digest
from vit.data.image_io import (
    MAX_PIXELS,
    STACKS,
    Fingerprint,
    Origin,
    check_header,
    has_more_frames,
    max_pixels,
    read_header,
    read_image,
    read_intensities,
    read_origin,
    set_max_pixels,
)
from vit.errors import BadImage, DataError
from vit.paths import user_cache
from vit.process_resources import usable_cores
from vit.text import printable

VERSION = 6
"""Of the statistics; those of another version are computed again."""
THUMBNAIL_SIDE = 32
"""Of the grey thumbnail, in pixels."""
CHROMA_SIDE = 8
"""Of the thumbnails of the colour differences, in pixels."""
GREY_TOLERANCE = 6
"""Difference between channels up to which a pixel counts as grey; JPEG makes some."""
BLANK_TOLERANCE = 2
"""Difference between pixels up to which an image counts as blank."""
TIMEOUT_SECONDS = 60.0
"""For one image."""
CHUNK = 32
"""Images that a process gets at a time."""
MAX_WORKERS = 16
LEVEL_SHARES = (0.001, 0.01, 0.999)
"""Shares of an image's pixels of which `Levels` has the values."""
MAX_LEVEL_VALUES = 2**20


class Levels(NamedTuple):
    """Values that few pixels of an image exceed, in the unit in which it is stored."""

    lowest: float
    """Of 0.1 % of the pixels, in the darkest channel."""
    shadow: float
    """Of 1 % of the pixels, in the darkest channel."""
    highest: float
    """Of 99.9 % of the pixels, in the brightest channel."""
    contrast: float
    """Largest difference between the values of 99.9 % and 0.1 % of the pixels of a channel."""
    floating: bool
    """Whether the values are floating-point numbers."""
    channels: list[list[float]] | None = None
    """Of a deep image: of each channel the values of 0.1 % and 99.9 % of the pixels, the mean, and
    the smallest and largest value."""
    names: list[str] | None = None
    """Of the channels, where the file has them."""


class ImageStats(NamedTuple):
    """Statistics of a readable image, from one pass over it."""

    format: str
    """File format, as Pillow names it."""
    mode: str
    """Pixel format, as Pillow names it."""
    width: int
    """In pixels, upright like the height."""
    height: int
    exif_rotated: bool
    """Whether its EXIF orientation rotates or flips it."""
    alpha: bool
    """Whether pixels may be transparent."""
    grey: bool
    """Whether it has no colours, in whichever mode it is stored."""
    blank: bool
    """Whether all pixels are equal."""
    deep: bool
    """Whether it has more than 8 bits per channel."""
    frames: bool
    """Whether it has several frames or pages, of which the first is read."""
    levels: Levels
    origin: Origin
    digest: bytes
    """Hash of the file's content."""
    thumbnail: bytes
    """Y at THUMBNAIL_SIDE squared, then Cb and Cr at CHROMA_SIDE squared, uint8."""

    @property
    def channels(self) -> int:
        """Those that networks take in their full depth; 0: RGB of 8 bits is made of the image."""
        _, _, number = self.mode.partition(" x ")
        return int(number) if number.isdecimal() and number not in ("1", "3") else 0


StatsOrReason = ImageStats | str
"""The statistics of an image, or the reason why it cannot be read."""


def compute_stats(path: str, axes: str = "") -> StatsOrReason:
    """Compute the statistics of the image at `path`."""
    try:
        header = read_header(path, axes)
        image = read_image(path, intensity_range="own", axes=axes)
        levels = None
        if header.deep:
            levels, stored = deep_levels(read_intensities(path, axes)), check_header(path, axes)
            levels = levels._replace(names=[*stored.names] if stored else None)
        origin = read_origin(path, axes)
        frames = header.format in STACKS and not axes and has_more_frames(path)
        digest = content_digest(path)
    except BadImage as bad:
        return bad.reason
    except OSError as error:
        return error.strerror or "cannot be read again"
    small = np.asarray(downscaled(image), dtype=np.int16)
    histogram = np.array(image.histogram()).reshape(3, 256)
    used = [np.flatnonzero(channel) for channel in histogram]
    flat = int(np.ptp(small, axis=(0, 1)).max()) <= 4 * BLANK_TOLERANCE
    return ImageStats(
        format=header.format,
        mode=header.mode,
        width=image.width,
        height=image.height,
        exif_rotated=header.exif_rotated,
        alpha=header.alpha,
        grey=int(np.ptp(small, axis=2).max()) <= GREY_TOLERANCE,
        blank=flat and all(values[-1] - values[0] <= BLANK_TOLERANCE for values in used),
        deep=header.deep,
        frames=frames,
        levels=levels or levels_of_histogram(histogram),
        origin=origin,
        digest=digest,
        thumbnail=encode_thumbnail(small),
    )


def levels_of_histogram(histogram: np.ndarray[Any, Any]) -> Levels:
    """`Levels` of an 8-bit image, from the counts of each channel, (3, 256)."""
    shares = histogram.cumsum(axis=1) / histogram.sum(axis=1, keepdims=True)
    low, shadow, high = ((shares < share).sum(axis=1) for share in LEVEL_SHARES)
    return _levels(low, shadow, high, floating=False)


def deep_levels(values: np.ndarray[Any, Any]) -> Levels:
    """`Levels` of a deep image, (height, width) or (height, width, channels)."""
    channels = values.reshape(-1, 1 if values.ndim == 2 else values.shape[2])
    step = max(len(channels) // MAX_LEVEL_VALUES, 1) | 1
    some = channels[::step]
    known = some[~np.isnan(some).any(axis=1)]  # pixels with values
    known = known if len(known) else np.zeros_like(some)
    low, shadow, high = np.quantile(known, LEVEL_SHARES, axis=0)
    table = np.stack([low, high, known.mean(0, np.float64), known.min(0), known.max(0)], axis=1)
    found = _levels(low, shadow, high, floating=values.dtype.kind == "f")
    return found._replace(channels=table.tolist())


def _levels(low: Any, shadow: Any, high: Any, *, floating: bool) -> Levels:
    return Levels(
        float(low.min()),
        float(shadow.min()),
        float(high.max()),
        float((high - low).max()),
        floating,
    )


def downscaled(image: Image.Image) -> Image.Image:
    """An RGB image at THUMBNAIL_SIDE squared, whatever its aspect ratio."""
    size = (THUMBNAIL_SIDE, THUMBNAIL_SIDE)
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)


def encode_thumbnail(small: np.ndarray[Any, Any]) -> bytes:
    """`ImageStats.thumbnail` of a (THUMBNAIL_SIDE, THUMBNAIL_SIDE, 3) image: JPEG's Y, Cb, Cr."""
    red, green, blue = (small[..., channel].astype(np.float32) for channel in range(3))
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    step = THUMBNAIL_SIDE // CHROMA_SIDE
    chroma = 128 + 0.564 * (blue - grey), 128 + 0.713 * (red - grey)
    blocks = (CHROMA_SIDE, step, CHROMA_SIDE, step)
    planes = [grey, *(plane.reshape(blocks).mean(axis=(1, 3)) for plane in chroma)]
    return b"".join(np.rint(plane).clip(0, 255).astype(np.uint8).tobytes() for plane in planes)


def compute_all_stats(
    paths: Sequence[str],
    *,
    workers: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
    axes: str = "",
) -> Iterator[tuple[int, StatsOrReason]]:
    """Compute the statistics of `paths` in worker processes; yields their indices in any order."""
    pending = deque(range(at, min(at + CHUNK, len(paths))) for at in range(0, len(paths), CHUNK))
    number = min(workers or min(usable_cores(), MAX_WORKERS), len(pending))
    processes = [StatsWorker(paths, timeout, axes) for _ in range(number)]
    try:
        while pending or any(process.assigned for process in processes):
            for process in processes:
                if not process.assigned and pending:
                    process.assign(pending.popleft())
            busy = {process.pipe: process for process in processes if process.assigned}
            ready = wait(list(busy), timeout=min(timeout / 4, 1.0))
            for pipe, process in busy.items():
                yield from process.results(pipe in ready)
    finally:
        for process in processes:
            process.stop()


def serve_stats(pipe: Connection, limit: int, axes: str = "") -> None:
    """Main function of a worker: receives lists of paths, sends the statistics of each path."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops it
    set_max_pixels(limit)
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        pipe.send(None)  # the process has started
        while True:
            for path in pipe.recv():
                pipe.send(compute_stats(path, axes))


class StatsWorker:
    """One worker process, replaced when it fails."""

    target = staticmethod(serve_stats)

    def __init__(self, paths: Sequence[str], timeout: float, axes: str = "") -> None:
        self.paths, self.timeout, self.axes = paths, timeout, axes
        self.assigned: deque[int] = deque()
        """Indices of images without a result; the process works on the first."""
        self.last_progress = 0.0
        self._start()

    def assign(self, indices: Sequence[int]) -> None:
        """Send images to the process, which must be idle."""
        self.assigned.extend(indices)
        self.last_progress = time.monotonic()
        with contextlib.suppress(OSError):  # it has ended: handled by `results`
            self.pipe.send([self.paths[index] for index in indices])

    def results(self, ready: bool) -> Iterator[tuple[int, StatsOrReason]]:
        """Receive the results that are available; `ready` if the pipe has data, or is closed."""
        try:
            while self.assigned and (ready or self.pipe.poll()):
                result = self.pipe.recv()
                ready, self.last_progress = False, time.monotonic()
                if result is None:
                    self.started = True
                    continue
                yield self.assigned.popleft(), result
        except (EOFError, OSError):
            if not self.started:
                raise DataError(
                    "processes that read images cannot be started; a script must call this under "
                    "if __name__ == '__main__'"
                ) from None
            yield self.assigned.popleft(), "the decoder crashes on it"
            self._restart()
        overdue = time.monotonic() - self.last_progress > self.timeout
        if self.started and self.assigned and overdue:
            yield self.assigned.popleft(), f"not decoded within {self.timeout:g} seconds"
            self._restart()

    def stop(self) -> None:
        """Kill the process."""
        self.pipe.close()
        self.process.kill()
        self.process.join()

    def _restart(self) -> None:
        remaining = list(self.assigned)
        self.assigned.clear()
        self.stop()
        self._start()
        if remaining:
            self.assign(remaining)

    def _start(self) -> None:
        # spawned: a fork of a process with threads of torch may hang
        self.started = False
        context: Any = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.pipe: Connection = ours
        args = theirs, max_pixels(), self.axes
        self.process = context.Process(target=self.target, args=args, daemon=True)
        self.process.start()
        theirs.close()


TABLE = (
    "create table if not exists verdicts (path blob primary key, size integer, mtime integer, "
    "ctime integer, number integer, facts text, digest blob, look blob)"
)


class StatsCache:
    """Statistics of the images of one dataset, in a small SQLite database; safe to delete.

    Entries are valid while the file has the same fingerprint. Only readable images are stored: the
    reason of an error may be removed in many ways. Without a writable folder nothing is stored.
    """

    def __init__(self, root: Path, folder: Path | None = None) -> None:
        folder = user_cache() / "check" if folder is None else folder
        name = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=12).hexdigest()
        limit = "" if max_pixels() == MAX_PIXELS else f"-{max_pixels()}"  # others are readable
        self.path = folder / f"{name}-v{VERSION}{limit}.sqlite"
        self.database: sqlite3.Connection | None = None
        self.note: str | None = None
        """Why nothing is stored, or None."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.database = self._open()
        except (OSError, sqlite3.Error) as error:
            self.note = f"note: {printable(self.path)}: {printable(error)}; nothing is kept there"

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.OperationalError:  # in use by another process, or not writable
            raise
        except sqlite3.DatabaseError:  # damaged: its content can be computed again
            self.path.unlink(missing_ok=True)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=5)
        try:
            database.execute("pragma synchronous = off")
            database.execute(TABLE)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def read(self, fingerprints: Mapping[str, Fingerprint]) -> dict[str, ImageStats]:
        """The valid entries, by path."""
        found: dict[str, ImageStats] = {}
        if self.database is None:
            return found
        with contextlib.suppress(sqlite3.Error, ValueError, TypeError):
            for path, *fingerprint, stats, digest, thumbnail in self.database.execute(
                "select path, size, mtime, ctime, number, facts, digest, look from verdicts"
            ):
                name = os.fsdecode(path)
                if fingerprints.get(name) == tuple(fingerprint):
                    *plain, levels, (size, *origin) = json.loads(stats)
                    both = Levels(*levels), Origin(tuple(size), *origin)
                    found[name] = ImageStats._make([*plain, *both, digest, thumbnail])
        return found

    def write(self, entries: Iterable[tuple[str, Fingerprint, ImageStats]]) -> None:
        """Store entries in one transaction."""
        rows: list[tuple[object, ...]] = [
            (os.fsencode(path), *fingerprint, json.dumps(stats[:-2]), stats.digest, stats.thumbnail)
            for path, fingerprint, stats in entries
        ]
        if self.database is None:
            return
        # a full disk or another process costs only time: what is not stored is computed again
        with contextlib.suppress(sqlite3.Error), self.database:
            statement = "insert or replace into verdicts values (?, ?, ?, ?, ?, ?, ?, ?)"
            self.database.executemany(statement, rows)

    def close(self) -> None:
        """Close the database."""
        if self.database is not None:
            self.database.close()
