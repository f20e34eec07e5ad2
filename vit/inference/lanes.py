"""Batches in the making: begun in order by threads, ended in order, a few at a time.

On a CPU each thread does whole batches from the files to the answers, with its share of the cores.
Batches wait for no other that way, where threads inside of one product wait for each other at
every layer (benchmarks/results/prediction_xeon_2026-11-21.md). Elsewhere the threads read, and the
device computes.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch

from vit.config import ModelConfig

T = TypeVar("T")
Read = TypeVar("Read")


GPU_BATCH, CAPTION_BATCH = 64, 16
CPU_TOKENS = 2304
"""Tokens of a batch on a CPU: more leave its caches, and few cost more to call than to compute."""


def usual_batch(config: ModelConfig, device: torch.device, *, captions: bool) -> int:
    """Pictures of a batch where nobody says how many."""
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
        begin: Starts on the batch whose first picture has a number; what it returns ends it.
        ahead: Batches begun before one is ended.
        first: Number of the first picture.
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
