"""Imports of large libraries: their versions are checked, and no cycles are collected meanwhile.

Versions older than those that the package is tested with are refused. The lower bounds are those
of pyproject.toml, as the installed package states them; pip respects them, and a later `pip
install` of something else may not.

torch makes a million objects that stay: searching them for cycles again and again takes a fifth of
its import, and searching them once more at exit as long again.
"""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager

from vit.errors import VitError

DISTRIBUTION = "vit-toolkit"
BOUND = re.compile(r"([\w.-]+)>=([\d.]+)$")


class VersionError(VitError, ImportError):
    """An installed library is too old."""


def lower_bounds() -> dict[str, str]:
    """Name of each required library -> its lowest version; empty if `vit` is not installed."""
    from importlib import metadata  # which takes longer to import than `vit --help` to print

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # on PYTHONPATH, say
        return {}
    return {found[1]: found[2] for found in map(BOUND.match, lines) if found}


def require_supported_versions() -> None:
    """Check the versions of all required libraries by their metadata, before they are imported."""
    from importlib import metadata

    for name, lowest in lower_bounds().items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # its import says so
        if release(version) < release(lowest):
            raise VersionError(
                f"{name} {version} is too old: vit needs {lowest} or newer; "
                f"pip install --upgrade '{name}>={lowest}'"
            )


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version without trailing zeros: (2, 8) of 2.8.0+cu128 and of 2.8.0rc1."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else [0]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Inside, no cycles are searched for; what was made counts as old after it."""
    require_supported_versions()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # else the next search of young objects goes over all
                gc.freeze()
                gc.unfreeze()
            gc.enable()
