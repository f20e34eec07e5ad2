"""Loader processes: how many, how they start, what they leave alone."""

import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MOST_WORKERS = 8
REST_SECONDS = 0.05


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of more processes than cores, or of a fork beside threads such as torch's own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        yield


def default_workers(world_size: int) -> int:
    """Loader processes of one device: its share of the cores, at most 8."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(max(cores // world_size, 1), MOST_WORKERS)


def come_to_rest() -> None:
    """Let threads of torch.distributed leave Python before processes are forked.

    One that is just leaving holds a lock that would stay closed in the new process, for ever:
    python/cpython#112275, mended in Python 3.12.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and sys.version_info < (3, 12):
        time.sleep(REST_SECONDS)


def start_worker(_worker: int) -> None:
    """Called first in each loader process."""
    # The main process decides what a signal means, and may want one more step before it stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A scheduler may signal the whole group: a dead loader would break the step in progress.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What was inherited stays untouched: no finaliser of the main process's objects runs here, and
    # no page is copied for it.
    gc.freeze()
