"""Batches in the making: begun in order by threads, ended in order, a few at a time.

On a CPU each thread does whole batches from the files to the answers, with its share of the cores.
Batches wait for no other that way, where threads inside of one product wait for each other at
every layer (benchmarks/results/prediction_xeon_2026-11-21.md). Elsewhere the threads read, and the
device computes.

Files become prepared images; few large ones are open at once, whatever the threads.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from vit.config import ModelConfig
from vit.data.image_io import MAX_PIXELS, read_image
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage


class Window:
    """Pixels that may be decoded at the same time; one image always may.

    Args:
        most: Pixels of all images together.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self.changed = threading.Condition()

    def take(self, pixels: int) -> None:
        """Wait until there is room for an image; who waits holds none."""
        with self.changed:
            self.changed.wait_for(lambda: not self.held or self.held + pixels <= self.most)
            self.held += pixels

    def give(self, pixels: int) -> None:
        """An image of so many pixels is done with."""
        with self.changed:
            self.held -= pixels
            self.changed.notify_all()


class Reader:
    """Reads and prepares one image; any number of threads may ask at once.

    Args:
        preprocessing: Of the network.
        patch_size: Side of a patch, where images are shown whole; None for the usual square.
        crops: Five crops of each image instead of one.
    """

    def __init__(
        self, preprocessing: Preprocessing, *, patch_size: int | None = None, crops: bool = False
    ) -> None:
        self.prepare: Callable[..., Tensor] = preprocessing
        if crops:
            self.prepare = preprocessing.crops
        elif patch_size is not None:
            self.prepare = lambda image: preprocessing.whole(image, patch_size)
        self.window = Window(MAX_PIXELS)

    def __call__(self, path: str) -> Tensor | BadImage:
        """uint8 (channels, height, width), with crops five of them, or why there is none."""
        held: list[int] = []

        def admit(pixels: int) -> None:
            self.window.take(pixels)
            held.append(pixels)

        try:
            return self.prepare(read_image(path, admit=admit))
        except BadImage as error:
            return error
        except (ValueError, OSError, MemoryError) as error:
            return BadImage(path, f"cannot be resized: {error}")
        finally:
            for pixels in held:
                self.window.give(pixels)


T = TypeVar("T")
Read = TypeVar("Read")


GPU_BATCH, CAPTION_BATCH = 64, 16
CPU_TOKENS = 2304
"""Tokens of a batch on a CPU: more leave its caches, and few cost more to call than to compute."""


def usual_batch(config: ModelConfig, device: torch.device, *, captions: bool) -> int:
    """Images of a batch where nobody says how many."""
    if device.type != "cpu":
        return GPU_BATCH
    if captions:
        return CAPTION_BATCH
    fitting = CPU_TOKENS // (config.image_size // config.patch_size) ** 2
    return 1 << (min(max(fitting, 4), 64).bit_length() - 1)


def threads_of(device: torch.device) -> int:
    """Threads where nobody says how many: one a core, on a CPU one a thread of torch; at most 8."""
    return min(8, torch.get_num_threads() if device.type == "cpu" else os.cpu_count() or 1)


def lanes(count: int) -> ThreadPoolExecutor:
    """`count` threads that share torch's threads; nobody else's products change.

    torch keeps a number of threads for each thread, and one for threads that are still to come.
    """
    usual = torch.get_num_threads()
    share, ready = max(1, usual // count), threading.Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # takes the usual number, which else happens later
        torch.set_num_threads(share)
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="read-image", initializer=begin)
    try:
        for _ in range(count):
            pool.submit(int)  # a thread is started for each, since none is free yet
    except RuntimeError:
        ready.abort()
        raise
    ready.wait()
    torch.set_num_threads(usual)
    return pool


def in_order(
    paths: Iterator[str],
    size: int,
    begin: Callable[[int, list[str]], Callable[[], T]],
    *,
    ahead: int,
    first: int = 0,
) -> Iterator[T]:
    """What each batch of `size` paths becomes, in order.

    Args:
        paths: Taken as they are needed.
        size: Of a batch.
        begin: Starts on the batch whose first image has a number; what it returns ends it.
        ahead: Batches begun before one is ended.
        first: Number of the first image.
    """
    begun: deque[Callable[[], T]] = deque()
    while chunk := list(islice(paths, size)):
        begun.append(begin(first, chunk))
        first += len(chunk)
        if len(begun) > ahead:
            yield begun.popleft()()
    while begun:
        yield begun.popleft()()


def all_of(
    pool: ThreadPoolExecutor, read: Callable[[str], Read], paths: Iterable[str]
) -> Callable[[], list[Read]]:
    """Reading that has begun; the result waits for its end."""
    futures = [pool.submit(read, path) for path in paths]
    return lambda: [future.result() for future in futures]
