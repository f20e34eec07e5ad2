"""Remote tar shards: downloaded through fsspec to the user's cache, then read as local files.

A download appears complete or not at all. Its name is a hash of the address, the size and the
version that the file system reports, so a shard that changes is downloaded again.
"""

import contextlib
import hashlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vit.atomic_files import open_atomic
from vit.data.dataset_types import DatasetIndex
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.tar_shards import COMPRESSED, expand_braces, read_shards
from vit.errors import DataError, error_text
from vit.file_lock import locked
from vit.paths import user_cache
from vit.text import format_megabytes, plural, printable

RESERVED_BYTES = 2**28
"""Space to leave free on the disk of the cache."""
COPY_BYTES = 2**22
VERSION_KEYS = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified")
"""Keys of fsspec's file info that identify a version; over HTTP there is nothing else."""


def is_remote(data: str) -> bool:
    """Whether `data` is an address such as s3://bucket/train-{0000..0099}.tar."""
    scheme, colon, _ = data.partition("://")
    if scheme == "file" and ".tar" not in data:
        return False  # a path, which its reader names
    return bool(colon) and scheme.replace("+", "").replace("::", "").isalnum()


def read_remote(spec: DatasetSpec) -> DatasetIndex:
    """Index the images of remote shards, downloading the missing ones."""
    paths, notes = download_shards(spec.data)
    index = read_shards(spec, paths)
    key = hashlib.blake2b(spec.data.encode("utf-8", "replace"), digest_size=8).hexdigest()
    root = index.root
    if str(root).endswith(".tar") or ".tar/" in f"{root}/":  # names are unique in all shards
        root = _cache() / f"{key}.tar" / f"{root}/".partition(".tar/")[2]
    return replace(index, root=root, notes=notes + index.notes)


def _cache() -> Path:
    return user_cache() / "shards"


def download_shards(data: str) -> tuple[list[str], list[str]]:
    """Download the shards at the address `data` that are not in the cache.

    Returns:
        Paths of the local copies, and a note about those that were downloaded now.
    """
    filesystem, addresses = _list_addresses(data)
    cache = _cache()
    shards = [(address, *_local_path(filesystem, address, cache)) for address in addresses]
    missing = [shard for shard in shards if not _has_size(*shard[1:])]
    notes = []
    if missing:
        total = sum(size for *_, size in missing)
        _check_space(cache, total)
        for number, (address, path, size) in enumerate(missing, 1):
            progress = f"{number} of {len(missing)}, {format_megabytes(size)}"
            print(
                f"vit: {printable(f'copying shard {progress}: {address}')}",
                file=sys.stderr,
                flush=True,
            )
            _copy(filesystem, address, path, size)
        copied = plural(len(missing), "shard")
        notes.append(f"copied {copied}, {format_megabytes(total)}, to {cache}")
    return [str(path) for _, path, _ in shards], notes


def _list_addresses(data: str) -> tuple[Any, list[str]]:
    """The fsspec file system of `data`, and the sorted paths of its shards there."""
    if COMPRESSED.search(data):
        raise DataError(f"{printable(data)}: compressed; unpack such shards once, where they are")
    try:
        from fsspec import core
    except ImportError:
        raise DataError(
            f'{printable(data)} needs fsspec: pip install "vit-toolkit[shards]"'
        ) from None
    addresses: list[str] = []
    filesystem = None
    for name in expand_braces(data):
        with _readable_errors(data):
            filesystem, path = core.url_to_fs(name)
            if not path.lower().endswith(".tar"):
                patterns = [f"{path.rstrip('/')}/*.tar", f"{path.rstrip('/')}/*/*.tar"]
                matches = [match for pattern in patterns for match in filesystem.glob(pattern)]
            else:
                matches = filesystem.glob(path) if set("*?[") & set(path) else [path]
        if not matches:
            raise DataError(f"{printable(name)}: there are no shards (*.tar)")
        addresses += map(str, matches)
    return filesystem, sorted(set(addresses))


def _local_path(filesystem: Any, address: str, cache: Path) -> tuple[Path, int]:
    """Path of the local copy of a shard, and its size in bytes."""
    with _readable_errors(address):
        info = filesystem.info(address)
        size = info.get("size")
        versions = (str(info[name]) for name in VERSION_KEYS if info.get(name))
        version = next(versions, None) or filesystem.ukey(address)
    if not isinstance(size, int) or info.get("type") != "file":
        raise DataError(f"{printable(address)}: no file of a known size")
    identity = "\0".join([str(filesystem.protocol), address, str(size), version])
    key = hashlib.blake2b(identity.encode("utf-8", "replace"), digest_size=12).hexdigest()
    folder, name = address.rstrip("/").split("/")[-2:] if "/" in address else ("", address)
    # The last folder is kept, because its name may be that of the split.
    return cache / key / _safe_name(folder) / _safe_name(name), size


def _safe_name(name: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    return safe[-120:].lstrip(".") or "_"


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _check_space(cache: Path, total: int) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
    except OSError as error:
        raise DataError(f"{printable(cache)}: cannot be written ({error.strerror})") from None
    if total + RESERVED_BYTES > free:
        raise DataError(
            f"{printable(cache)}: the shards take {format_megabytes(total)} and "
            f"{format_megabytes(free)} are free; make room, or set XDG_CACHE_HOME to a folder on a "
            "larger disk"
        )


def _copy(filesystem: Any, address: str, path: Path, size: int) -> None:
    """Download to a temporary file, check its size, and rename it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent / ".lock"), _readable_errors(address):
        if _has_size(path, size):  # another process was faster
            return
        with open_atomic(path) as target, filesystem.open(address, "rb") as source:
            shutil.copyfileobj(source, target, COPY_BYTES)
            if (copied := target.tell()) != size:
                raise DataError(
                    f"{printable(address)}: {copied:,} of {size:,} bytes were received; try again"
                )


@contextlib.contextmanager
def _readable_errors(address: str) -> Iterator[None]:
    """Turn any error of a file system into a DataError of one line."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{printable(address)}: no such shard") from None
    except Exception as error:  # each kind of storage has exceptions of its own
        reason = f"{type(error).__name__}: {error_text(error)}"
        raise DataError(f"{printable(address)}: cannot be reached ({reason})") from None
