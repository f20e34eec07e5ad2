"""Reading and predicting batches in threads, in the order of the list.

On a CPU each thread processes whole batches, from files to outputs, with its share of the cores:
threads inside one matrix product would wait for each other at every layer
(benchmarks/results/prediction_xeon_2026-11-21.md). On other devices the threads only read images.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from vit.config import ModelConfig
from vit.cpu_cores import usable_cores
from vit.data.image_io import MAX_PIXELS, EncodedImage, read_image
from vit.data.image_objects import ImageInput, to_rgb_image
from vit.data.intensity_range import DarkImageNote
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage, ConfigError, RunError, error_text, is_out_of_memory
from vit.text import Notify

T = TypeVar("T")
GPU_BATCH_SIZE, CAPTION_BATCH_SIZE = 64, 16
CPU_TOKENS = 2304
"""Tokens of a batch on a CPU: more overflow its caches, fewer are dominated by call overhead."""


class PixelBudget:
    """Limits the pixels that are decoded at the same time; a single image is always admitted."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self.changed = threading.Condition()

    def acquire(self, pixels: int) -> None:
        """Block until `pixels` more are within the limit."""
        with self.changed:
            self.changed.wait_for(lambda: not self.held or self.held + pixels <= self.limit)
            self.held += pixels

    def release(self, pixels: int) -> None:
        """Return `pixels` to the budget."""
        with self.changed:
            self.held -= pixels
            self.changed.notify_all()


class ImageReader:
    """Reads and preprocesses one image; thread-safe.

    Args:
        patch_size: Patch side in pixels, to keep the aspect ratio of images; None for squares.

    Attributes:
        transform: Applied to each decoded image, if set.
        observe: Called with the name of each image, its (width, height), its file format and the
            result, if set; in the threads that read.
    """

    transform: Callable[[Image.Image], Image.Image] | None = None
    observe: Callable[[str, tuple[int, int], str, Tensor], object] | None = None

    def __init__(
        self,
        preprocessing: Preprocessing,
        *,
        patch_size: int | None = None,
        crops: bool = False,
        notify: Notify = lambda _note: None,
    ) -> None:
        self.intensity_range = preprocessing.intensity_range
        self.note_dark = DarkImageNote(notify)
        self.prepare: Callable[..., Tensor] = preprocessing
        if crops:
            self.prepare = preprocessing.five_crops
        elif patch_size is not None:
            self.prepare = lambda image: preprocessing.keep_aspect(image, patch_size)
        self.budget = PixelBudget(MAX_PIXELS)

    def __call__(self, image: ImageInput | EncodedImage, name: str = "image") -> Tensor | BadImage:
        """Image as uint8 (channels, height, width), with `crops` (5, ...), or its error."""
        held: list[int] = []

        def admit(pixels: int) -> None:
            self.budget.acquire(pixels)
            held.append(pixels)

        name = os.fspath(image) if isinstance(image, str | os.PathLike) else name
        options: dict[str, Any] = {
            "intensity_range": self.intensity_range,
            "on_dark": partial(self.note_dark, name),
        }
        try:
            if isinstance(image, EncodedImage | str | os.PathLike):
                decoded = read_image(image, before_decode=admit, **options)
            else:
                decoded = to_rgb_image(image, name, **options)
            if self.transform is not None:
                decoded = self.transform(decoded)
            result = self.prepare(decoded)
            if self.observe is not None:
                self.observe(name, decoded.size, decoded.format or "", result)
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


def default_batch_size(config: ModelConfig, device: torch.device, *, captions: bool) -> int:
    """Images of a batch: on a CPU a power of two by the tokens of the network."""
    if device.type != "cpu":
        return GPU_BATCH_SIZE
    if captions:
        return CAPTION_BATCH_SIZE
    images = CPU_TOKENS // (config.image_size // config.patch_size) ** 2
    return 1 << (min(max(images, 4), 64).bit_length() - 1)


def default_num_threads(device: torch.device) -> int:
    """One thread a core, on a CPU one a thread of torch; at most 8."""
    return min(8, torch.get_num_threads() if device.type == "cpu" else usable_cores())


def make_thread_pool(count: int) -> ThreadPoolExecutor:
    """`count` threads that divide torch's intra-op threads; other threads keep theirs.

    torch keeps a number of threads for each thread, and one for threads still to be started.
    """
    usual = torch.get_num_threads()
    share, ready = max(1, usual // count), threading.Barrier(count + 1)

    def initialize() -> None:
        torch.get_num_threads()  # takes the default number now, which torch else does later
        torch.set_num_threads(share)
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="inference", initializer=initialize)
    try:
        for _ in range(count):
            pool.submit(int)  # starts a thread each time, since none is idle yet
    except RuntimeError:
        ready.abort()
        raise
    ready.wait()
    torch.set_num_threads(usual)
    return pool


@contextlib.contextmanager
def explain_full_memory() -> Iterator[None]:
    """Turn an error of torch about full memory inside the `with` into a RunError with a remedy."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(
            "out of memory: use another --device, or a smaller --batch-size where a command has it"
        ) from None


def chunks(
    images: Iterable[T], batch_size: int, *, first: int = 0
) -> Iterator[tuple[int, list[T]]]:
    """Batches of a list, each with the index of its first item; `first` is that of the first."""
    remaining = iter(images)
    while batch := list(islice(remaining, batch_size)):
        yield first, batch
        first += len(batch)


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
