"""Imports of large libraries without Python's cyclic garbage collector.

torch makes a million objects that stay: searching them for cycles again and again takes a fifth of
its import, and searching them once more at exit as long again.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from vit.supported_versions import require_supported_versions


@contextmanager
def quick_imports() -> Iterator[None]:
    """Inside, no cycles are searched for."""
    require_supported_versions()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
