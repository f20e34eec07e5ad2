"""Decodes images in threads ahead of the network, in order and in bounded memory.

Windows of images depend only on the list, never on the threads' timing, so a list gives the same
batches, and the same results, every time.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from vit.cpu_cores import usable_cores
from vit.data.image_io import EncodedImage, IntensityRange, read_image, read_size
from vit.data.image_objects import ImageInput, NamedImage, named_images, to_rgb_image
from vit.data.intensity_range import DarkImageNote
from vit.errors import BadImage, ConfigError, error_text
from vit.exported.onnx_session import Array
from vit.text import Notify

PathLike = str | os.PathLike[str]
DecodedImage = tuple[str, Array | BadImage]
"""The name of an image with its pixels, uint8 (height, width, 3), or with the error."""
BATCH_SIZE = 16
PIXEL_LIMIT = 2**25
"""Pixels in memory, unless a single image has more: 100 MB as bytes, more while decoding."""


def resolve_batch_and_workers(batch_size: int | None, workers: int | None) -> tuple[int, int]:
    """Return both with their defaults filled in."""
    for name, value in (("batch_size", batch_size), ("workers", workers)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    return batch_size or BATCH_SIZE, workers or min(8, usable_cores())


def prefetch_images(
    images: Iterable[ImageInput | NamedImage],
    prepare: Callable[[Image.Image], object],
    *,
    workers: int,
    window_size: int,
    intensity_range: IntensityRange | None = None,
    notify: Notify = lambda _note: None,
) -> Iterator[list[DecodedImage]]:
    """Yield windows of images in order, while threads decode the next ones."""
    read = partial(
        decode_image, prepare=prepare, intensity_range=intensity_range, note=DarkImageNote(notify)
    )
    with ThreadPoolExecutor(workers, thread_name_prefix="read-image") as pool:
        named = named_images(images)
        queue = _PrefetchQueue(named, lambda one: pool.submit(read, one), window_size)
        try:
            while window := queue.next_window():
                yield window
                window.clear()  # the caller's loop still has it while the next one is read
        finally:
            pool.shutdown(cancel_futures=True)


class _PrefetchQueue:
    """Images that are being decoded, and the current window."""

    def __init__(
        self,
        images: Iterator[NamedImage],
        submit: Callable[[NamedImage], "Future[Array | BadImage]"],
        window_size: int,
    ) -> None:
        self.submit, self.window_size, self.delivered = submit, window_size, 0
        self.upcoming = ((one, _expected_pixels(one.source)) for one in images)
        self.next = next(self.upcoming, None)
        self.pending: deque[tuple[str, int, Future[Array | BadImage]]] = deque()
        self.pixels_in_memory = 0  # of pending images and the window

    def next_window(self) -> list[DecodedImage]:
        """Return the next images, none after the last; releases the previous window."""
        self.pixels_in_memory = sum(pixels for _, pixels, _ in self.pending)
        window: list[DecodedImage] = []
        pixels, capacity = 0, self.window_size - self.delivered % self.window_size
        self.fill()
        while self.pending and len(window) < capacity and 2 * pixels < PIXEL_LIMIT:
            name, expected, future = self.pending.popleft()
            image = future.result()
            size = 0 if isinstance(image, BadImage) else image.shape[0] * image.shape[1]
            pixels += size
            self.pixels_in_memory += size - expected
            window.append((name, image))
            self.fill()
        self.delivered += len(window)
        return window

    def fill(self) -> None:
        """Submit images as long as the limits allow."""
        while self.next is not None and len(self.pending) < self.window_size:
            one, pixels = self.next
            if self.pixels_in_memory and self.pixels_in_memory + pixels > PIXEL_LIMIT:
                return
            self.pending.append((one.name, pixels, self.submit(one)))
            self.pixels_in_memory += pixels
            self.next = next(self.upcoming, None)


def _expected_pixels(source: Any) -> int:
    """Pixels by the image's header; 0 for an unreadable one, whose error comes from decoding."""
    if not isinstance(source, str):  # a PIL image, or an array of any order
        return math.prod(getattr(source, "shape", None) or source.size)
    try:
        return math.prod(read_size(source))
    except BadImage:
        return 0


def decode_image(
    one: NamedImage,
    *,
    prepare: Callable[[Image.Image], object],
    intensity_range: IntensityRange | None,
    note: DarkImageNote,
) -> Array | BadImage:
    """Decode an image, which may be an EncodedImage too, and `prepare` it; or return its error."""
    options: dict[str, Any] = {
        "intensity_range": intensity_range,
        "on_dark": partial(note, one.name),
    }
    try:
        if isinstance(one.source, str | EncodedImage):
            image = read_image(one.source, **options)
        else:
            image = to_rgb_image(one.source, one.name, **options)
        return np.asarray(prepare(image))
    except BadImage as error:
        return error
    except ConfigError:  # an array that is no image
        raise
    except (ValueError, OSError, MemoryError) as error:
        return BadImage(one.name, f"cannot be prepared: {error_text(error)}")
