"""Reads images in threads, ahead of the network and within one budget of decoded pixels.

Needs no torch: run folders and exported files are read by the same code.
"""

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from vit.data.image_io import MAX_PIXELS, EncodedImage, read_size
from vit.data.image_objects import ImageInput, NamedImage
from vit.data.preprocessing import AnyImage, Preprocessing
from vit.errors import BadImage, ConfigError, error_text
from vit.text import Notify, printable

T = TypeVar("T")
WINDOW_PIXELS = 2**24
"""Pixels of whole images from which on a window takes no more; the next one is read meanwhile."""


class PixelBudget:
    """Limits the pixels that are decoded at the same time; a single image is always admitted."""

    def __init__(self, limit: int = MAX_PIXELS) -> None:
        self.limit, self.held = limit, 0
        self.turn, self.changed = threading.Lock(), threading.Condition()

    def acquire(self, pixels: int) -> None:
        """Block until `pixels` more are within the limit; who waits first is first."""
        with self.turn, self.changed:
            self.changed.wait_for(lambda: not self.held or self.held + pixels <= self.limit)
            self.held += pixels

    def release(self, pixels: int) -> None:
        with self.changed:
            self.held -= pixels
            self.changed.notify_all()


DECODED_PIXELS = PixelBudget()


class ImageReader:
    """Reads and prepares one image; thread-safe.

    Attributes:
        transform: Applied to each decoded image, if set.
        observe: Called with the name of each image, its (width, height), its file format and the
            result, if set; in the threads that read.
        holds: Whether an image counts against the budget as long as its result exists, and not only
            until it is prepared: a server keeps whole images in memory.
    """

    transform: Callable[[Any], AnyImage] | None = None
    observe: Callable[[str, tuple[int, int], str, Any], object] | None = None
    holds = False

    def __init__(
        self,
        prepare: Callable[[Any], Any],
        preprocessing: Preprocessing,
        *,
        notify: Notify = lambda _note: None,
    ) -> None:
        self.prepare, self.preprocessing = prepare, preprocessing
        self.note_dark = DarkImageNote(notify)
        self.budget = DECODED_PIXELS

    def __call__(self, image: ImageInput | EncodedImage, name: str = "image") -> Any:
        held: list[int] = []

        def admit(pixels: int) -> None:
            self.budget.acquire(pixels)
            held.append(pixels)

        name = os.fspath(image) if isinstance(image, str | os.PathLike) else name
        on_dark = partial(self.note_dark, name)
        try:
            if isinstance(image, EncodedImage | str | os.PathLike):
                decoded = self.preprocessing.read(image, before_decode=admit, on_dark=on_dark)
            else:
                decoded = self.preprocessing.from_memory(image, name, on_dark)
            if self.transform is not None:
                decoded = self.transform(decoded)
            result = self.prepare(decoded)
            if self.observe is not None:
                self.observe(name, decoded.size, decoded.format or "", result)
            while self.holds and held:
                weakref.finalize(result, self.budget.release, held.pop())
            return result
        except ConfigError:  # an array that is no image
            raise
        except BadImage as error:
            return error
        except (ValueError, OSError, MemoryError) as error:
            return BadImage(name, f"cannot be resized: {error_text(error)}")
        finally:
            for pixels in held:
                self.budget.release(pixels)


def chunks(
    images: Iterable[T],
    size: int,
    *,
    first: int = 0,
    count_pixels: Callable[[T], int] = lambda _image: 0,
) -> Iterator[tuple[int, list[T]]]:
    """Batches of a list, each with the index of its first item; `first` is that of the first.

    A batch ends at a multiple of `size`, and where its images have WINDOW_PIXELS. So batches after
    a multiple of `size` do not depend on the images before it.
    """
    batch, pixels = list[T](), 0
    for index, image in enumerate(images, first):
        batch.append(image)
        pixels += count_pixels(image)
        if (index + 1) % size == 0 or pixels >= WINDOW_PIXELS:
            yield index + 1 - len(batch), batch
            batch, pixels = [], 0
    if batch:
        yield index + 1 - len(batch), batch


def expected_pixels(image: NamedImage) -> int:
    """Pixels by the image's header; 0 for an unreadable one, whose error comes from decoding."""
    source = image.source
    if not isinstance(source, str):  # a PIL image, or an array of any order
        return math.prod(getattr(source, "shape", None) or source.size)
    try:
        return math.prod(read_size(source))
    except BadImage:
        return 0


def prefetch(items: Iterable[T], ahead: int) -> Iterator[T]:
    """Items in order, each produced `ahead` items before it is needed.

    With an iterator that submits work as it advances, `ahead` batches are in flight.
    """
    pending: deque[T] = deque()
    for item in items:
        pending.append(item)
        if len(pending) > ahead:
            yield pending.popleft()
    while pending:
        yield pending.popleft()


class DarkImageNote:
    """Writes one note, in any thread, about the first image that is read nearly black."""

    def __init__(self, notify: Notify) -> None:
        self.notify = notify
        self.lock = threading.Lock()
        self.written = False

    def __call__(self, path: str, highest: int) -> None:
        """Report that `path`, whose values are up to `highest` of 65535, is read nearly black."""
        with self.lock:
            if self.written:
                return
            self.written = True
        top = (1 << highest.bit_length()) - 1
        self.notify(
            f"note: {printable(path)} has 16 bits per channel and values up to {highest:,} of "
            "65,535, and the network has no range for such images: it is read nearly black; "
            f"vit predict --intensity-range 0 {top} reads 0 to {top:,} as black to white, and vit "
            "train with it stores the range with the network"
        )
