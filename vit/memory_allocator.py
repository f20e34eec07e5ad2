"""Keeps freed memory in the process: tensors of the next step reuse it without page faults.

glibc returns large blocks to the system when they are freed, and each step gets them back page by
page, zeroed by the kernel: a sixth to a third of the time of a step or of a forward pass.
"""

import os
import sys

# of mallopt, in malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_KEPT = 2**30
"""Bytes of free memory that stay with the process."""
MAX_BLOCK = 2**25
"""Size in bytes up to which a block is kept; the largest that glibc takes."""


def keep_freed_memory() -> bool:
    """Set glibc's allocator for the rest of the process; whether it did.

    Does nothing without glibc, or where the environment has settings for the allocator.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, MAX_KEPT) and mallopt(M_MMAP_THRESHOLD, MAX_BLOCK))
