"""Shards on another machine, through fsspec: copied once into the user's cache, then local files.

A copy appears whole or not at all, under a name made of its address, its size and what its file
system says of its version, so a shard that changes there is copied again.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vit.data.dataset_types import Listed
from vit.data.sources.row_errors import Faults
from vit.data.sources.tar_shards import PACKED, expand_braces, listed_shards, shard_images
from vit.errors import DataError, printable
from vit.paths import user_cache
from vit.text import format_megabytes, join_names, plural

SPARE = 2**28
"""Bytes that stay free on the disk of the cache."""
PIECE = 2**22
VERSIONS = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified")
"""What tells two versions of a shard apart, the first that is said; over HTTP nothing else does."""


def is_remote(data: str) -> bool:
    """Whether `data` is an address such as s3://bucket/train-{0000..0099}.tar."""
    scheme, colon, _ = data.partition("://")
    return bool(colon) and scheme.replace("+", "").replace("::", "").isalnum()


def read_remote(data: str, faults: Faults = None) -> Listed:
    """The images in the shards at `data`, which are copied where they are not yet.

    Args:
        data: The address.
        faults: As for `read_shards`.

    Raises:
        DataError: They cannot be reached or copied, or are no shards.
    """
    places, notes = _copies(data)
    listed = listed_shards(places, data, faults)
    key = hashlib.blake2b(data.encode("utf-8", "replace"), digest_size=8).hexdigest()
    clash = not str(listed.root).endswith(".tar") and ".tar/" not in f"{listed.root}/"
    root = listed.root if clash else _cache() / f"{key}.tar" / _inside(listed.root)
    return replace(listed, root=root, notes=notes + listed.notes)


def remote_images(data: str) -> tuple[list[str], list[str]]:
    """Addresses of the images in the shards at `data`, which need no classes, and notes.

    Raises:
        DataError: They cannot be reached or copied, or are no shards.
    """
    places, notes = _copies(data)
    images, more = shard_images(places, data)
    return images, notes + more


def _cache() -> Path:
    return user_cache() / "shards"


def _copies(data: str) -> tuple[list[str], list[str]]:
    """Where the copies of the shards at `data` are, and a note of those that were made now."""
    system, addresses = _addresses(data)
    cache = _cache()
    wanted = [(address, *_kept(system, address, cache)) for address in addresses]
    missing = [(address, place, size) for address, place, size in wanted if not _whole(place, size)]
    notes = []
    if missing:
        total = sum(size for *_, size in missing)
        _check_space(cache, total)
        for number, (address, place, size) in enumerate(missing, 1):
            _say(f"copying shard {number} of {len(missing)}, {format_megabytes(size)}: {address}")
            _copy(system, address, place, size)
        notes.append(
            f"copied {plural(len(missing), 'shard')}, {format_megabytes(total)}, to {cache}"
        )
    return [str(place) for _, place, _ in wanted], notes


def _inside(root: Path) -> str:
    return f"{root}/".partition(".tar/")[2]


def _addresses(data: str) -> tuple[Any, list[str]]:
    """The file system of `data`, and the paths of its shards there, sorted."""
    if PACKED.search(data):
        raise DataError(f"{printable(data)}: compressed; unpack such shards once, where they are")
    try:
        from fsspec import core
    except ImportError:
        raise DataError(
            f'{printable(data)} needs fsspec: pip install "vit-toolkit[shards]"'
        ) from None
    found: list[str] = []
    system = None
    for name in expand_braces(data):
        with _reaching(data):
            system, path = core.url_to_fs(name)
            if not path.lower().endswith(".tar"):
                patterns = [f"{path.rstrip('/')}/*.tar", f"{path.rstrip('/')}/*/*.tar"]
                here = [one for pattern in patterns for one in system.glob(pattern)]
            else:
                here = system.glob(path) if set("*?[") & set(path) else [path]
        if not here:
            raise DataError(f"{printable(name)}: there are no shards (*.tar)")
        found += map(str, here)
    return system, sorted(set(found))


def _kept(system: Any, address: str, cache: Path) -> tuple[Path, int]:
    """Where a shard is kept, and its bytes."""
    with _reaching(address):
        about = system.info(address)
        size = about.get("size")
        said = (str(about[name]) for name in VERSIONS if about.get(name))
        version = next(said, None) or system.ukey(address)
    if not isinstance(size, int) or about.get("type") != "file":
        raise DataError(f"{printable(address)}: no file of a known size")
    words = "\0".join([str(system.protocol), address, str(size), version])
    key = hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=12).hexdigest()
    folder, name = address.rstrip("/").split("/")[-2:] if "/" in address else ("", address)
    # the last folder may say the split
    return cache / key / _plain(folder) / _plain(name), size


def _plain(name: str) -> str:
    kept = "".join(one if one.isalnum() or one in "-_." else "_" for one in name)
    return kept[-120:].lstrip(".") or "_"


def _whole(place: Path, size: int) -> bool:
    try:
        return place.stat().st_size == size
    except OSError:
        return False


def _check_space(cache: Path, total: int) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
    except OSError as error:
        raise DataError(f"{printable(cache)}: cannot be written ({error.strerror})") from None
    if total + SPARE > free:
        raise DataError(
            f"{printable(cache)}: the shards take {format_megabytes(total)} and "
            f"{format_megabytes(free)} are free; make room, or set XDG_CACHE_HOME to a folder on "
            "a larger disk"
        )


def _copy(system: Any, address: str, place: Path, size: int) -> None:
    """Copy beside its place, check its size, and rename."""
    name = ""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.parent), _reaching(address):
            if _whole(place, size):  # another process was faster
                return
            number, name = tempfile.mkstemp(prefix=".copying-", dir=place.parent)
            with os.fdopen(number, "wb") as target, system.open(address, "rb") as source:
                shutil.copyfileobj(source, target, PIECE)
                target.flush()
                os.fsync(target.fileno())
            if (copied := os.path.getsize(name)) != size:
                raise DataError(f"{printable(address)}: {copied:,} of {size:,} bytes came; again?")
            os.chmod(name, 0o644)
            os.replace(name, place)
    finally:
        if name:
            Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time, where the system has such locks; elsewhere several may copy."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _reaching(address: str) -> Iterator[None]:
    """Turn whatever a file system raises into one line."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{printable(address)}: no such shard") from None
    except Exception as error:  # each kind of storage has exceptions of its own
        words = " ".join(str(error).split())[:200] or type(error).__name__
        remedy = join_names([f"{type(error).__name__}: {words}"])
        raise DataError(f"{printable(address)}: cannot be reached ({printable(remedy)})") from None


def _say(words: str) -> None:
    print(f"vit: {printable(words)}", file=sys.stderr, flush=True)
