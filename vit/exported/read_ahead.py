"""What all runners share: images are read ahead of the network, in their order, in bounds.

Threads decode while the network computes. How images are put together depends on the list alone,
never on which thread was faster, so the answers of a list are the same every time.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from PIL import Image

from vit.data.image_io import count_pixels, read_image
from vit.errors import BadImage, ConfigError
from vit.exported.greedy_numpy import Array
from vit.output.prediction_results import TOP_K

PathLike = str | os.PathLike[str]
Read = tuple[str, Array | BadImage]
"""A path, and its image, uint8 (height, width, 3), or why there is none."""
BATCH_SIZE = 16
PIXELS = 2**25
"""In memory at a time, unless a single image has more: 100 MB as bytes, more while decoding."""


def sizes(batch_size: int | None, workers: int | None) -> tuple[int, int]:
    """Both as they are used: given, or the usual ones.

    Raises:
        ConfigError: One is less than 1.
    """
    for name, value in (("batch_size", batch_size), ("workers", workers)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    return batch_size or BATCH_SIZE, workers or min(8, os.cpu_count() or 1)


def paths_of(images: Iterable[PathLike]) -> Iterator[str]:
    """The paths of `images`, taken as they are needed.

    Raises:
        ConfigError: It is one path instead of several.
    """
    if isinstance(images, str | bytes | os.PathLike):
        raise ConfigError(f"images={images!r} is one path; give a list of paths")
    return (os.fspath(path) for path in images)


def check_top_k(top_k: int | None) -> None:
    """Refuse to name no class.

    Raises:
        ConfigError: `top_k` is less than 1.
    """
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}: must be at least 1")


def how_many(
    classes: Sequence[str],
    thresholds: Sequence[float] | None,
    top_k: int | None,
    threshold: float | None,
) -> tuple[int, Sequence[float] | None]:
    """How many classes of an image are named at most, and from which probabilities on.

    Args:
        classes: Of the network.
        thresholds: Their own, where an image may have several; None where it has one.
        top_k: As asked for; where nobody asks, 5, or all that an image may have.
        threshold: As asked for, for all classes; where nobody asks, their own.
    """
    if top_k is None:
        top_k = TOP_K if thresholds is None else max(len(classes), 1)
    return top_k, thresholds if threshold is None else [threshold] * len(classes)


def named(
    classes: Sequence[str],
    probabilities: Array,
    top_k: int,
    thresholds: Sequence[float] | None = None,
) -> tuple[tuple[str, float], ...]:
    """The most probable classes with their probabilities; of equal ones the first.

    With `thresholds`, one a class, those below them are left out.
    """
    best = np.argsort(-probabilities, kind="stable")[:top_k]
    least = [0.0] * len(classes) if thresholds is None else thresholds
    pairs = ((place, float(probabilities[place])) for place in best)
    return tuple((classes[place], score) for place, score in pairs if score >= least[place])


def windows(
    paths: Iterator[str], prepare: Callable[[Image.Image], object], *, workers: int, most: int
) -> Iterator[list[Read]]:
    """All images in their order, some at a time, while threads read the next ones.

    Args:
        paths: Of images; taken as they are needed.
        prepare: Makes of an upright RGB image what numpy takes for an array.
        workers: Threads.
        most: Images in a window at most, and one ends after every `most` images of the list, so
            that a list can be gone on with from there. Where images have many pixels there are
            fewer. A window is empty once the next one is asked for.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="read-image") as pool:
        ahead = _Ahead(paths, lambda path: pool.submit(_read, path, prepare), most)
        try:
            while window := ahead.window():
                yield window
                window.clear()  # the caller's loop still has it while the next one is read
        finally:
            pool.shutdown(cancel_futures=True)


class _Ahead:
    """Images that are being read, and one window of those that are.

    Args:
        paths: Of images.
        start: Has one read.
        most: That are being read, or in a window, at a time.
    """

    def __init__(
        self,
        paths: Iterator[str],
        start: Callable[[str], "Future[Array | BadImage]"],
        most: int,
    ) -> None:
        self.start, self.most, self.taken = start, most, 0
        self.coming = ((path, _pixels(path)) for path in paths)
        self.next = next(self.coming, None)
        self.waiting: deque[tuple[str, int, Future[Array | BadImage]]] = deque()
        self.held = 0  # pixels, of those that are waiting and of the window

    def window(self) -> list[Read]:
        """The next images; none after the last. Those of the window before are done with."""
        self.held = sum(pixels for _, pixels, _ in self.waiting)
        found: list[Read] = []
        pixels, room = 0, self.most - self.taken % self.most
        self.fill()
        while self.waiting and len(found) < room and 2 * pixels < PIXELS:
            path, expected, future = self.waiting.popleft()
            image = future.result()
            size = 0 if isinstance(image, BadImage) else image.shape[0] * image.shape[1]
            pixels += size
            self.held += size - expected
            found.append((path, image))
            self.fill()
        self.taken += len(found)
        return found

    def fill(self) -> None:
        """Have more images read, where there is room for them."""
        while self.next is not None and len(self.waiting) < self.most:
            path, pixels = self.next
            if self.held and self.held + pixels > PIXELS:
                return
            self.waiting.append((path, pixels, self.start(path)))
            self.held += pixels
            self.next = next(self.coming, None)


def _pixels(path: str) -> int:
    """What an image will take, as far as its header is right; why it is not, reading it tells."""
    try:
        return count_pixels(path)
    except BadImage:
        return 0


def _read(path: str, prepare: Callable[[Image.Image], object]) -> Array | BadImage:
    """One prepared image, or why there is none."""
    try:
        return np.asarray(prepare(read_image(path)))
    except BadImage as error:
        return error
    except (ValueError, OSError, MemoryError) as error:
        return BadImage(path, f"cannot be prepared: {error}")
