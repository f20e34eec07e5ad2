"""split.json of a run folder: the images that its training held out for validation.

An image was held out if its size and digest are recorded, whatever its name and folder are. Names
are looked up first, so that unchanged data are not read as a whole.
"""

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.image_archives import MAX_BYTES, content_digest, relative, size_of
from vit.errors import BadImage, RunError
from vit.text import plural

SPLIT_FILE = "split.json"


class HeldOutMatch(NamedTuple):
    """The images of a dataset that a training held out."""

    paths: frozenset[str]
    recorded: int
    """Number of images that the training held out."""
    changed: int = 0
    """Images with the name of a held-out one that is not there, and other content."""
    known: bool = True
    """Whether held-out images can be recognised in this dataset."""

    def describe(self, total: int) -> str:
        """Which of `total` images are measured."""
        if self.paths:
            less = f" left of the {self.recorded:,}" if len(self.paths) < self.recorded else ""
            taken = f"took the {plural(len(self.paths), 'image')}{less} that training held out"
            changed = f"; the content of {plural(self.changed, 'other')} has changed"
            return taken + (changed if self.changed else "")
        reason = "training held out none of them"
        if not self.known:
            reason = "the run knows its images by name only, and they were in another folder"
        if self.changed:
            reason += f"; equal in name, but not in content: {plural(self.changed, 'image')}"
        if self.changed or not self.known:
            reason += ". If these are its data, the numbers are too good"
        return f"took all {total:,} images: {reason}"


class HeldOutSplit(NamedTuple):
    """The images that a training held out for validation."""

    root: Path
    """Folder that the names are relative to."""
    val: list[str]
    digests: list[str | None] | None = None
    """Of each image, as of `file_digests`; None in a split of an earlier version."""

    def lies_in(self, folder: Path) -> bool:
        """Whether `folder`, or a shard, has images of the split by their names."""
        return any(self.find([str(folder / name)], folder).paths for name in self.val[:9])

    def find(self, paths: Iterable[str], root: Path) -> HeldOutMatch:
        """The held-out images among `paths`; without digests, those that are the recorded files."""
        every, place = [*paths], root.resolve()
        named = {relative(path, root): path for path in every}
        if self.digests is None:
            own = self.val
            if place != self.root:
                own = [relative(str(self.root / name), place) for name in self.val]
            found = frozenset(named[name] for name in own if name in named)
            return HeldOutMatch(found, len(self.val), known=place == self.root or bool(found))
        wanted = {*self.digests} - {None}
        recorded = [*zip(map(named.get, self.val), self.digests, strict=True)]
        seen = file_digests(path for path, _ in recorded if path)
        matched = {
            path: own for path, own in recorded if path and own in wanted and own == seen[path]
        }
        if missing := wanted - {*matched.values()}:
            sizes = {digest.partition(":")[0] for digest in missing if digest}
            seen |= file_digests((path for path in every if path not in seen), sizes)
            matched |= {path: digest for path, digest in seen.items() if digest in missing}
        lost = wanted - {*matched.values()}
        changed = sum(path is not None and digest in lost for path, digest in recorded)
        return HeldOutMatch(frozenset(matched), len(self.val), changed)


def file_digests(
    paths: Iterable[str], sizes: Collection[str] | None = None
) -> dict[str, str | None]:
    """`SIZE:DIGEST` of the bytes of images, in files or archives; None of unreadable ones.

    Also None of those of other `sizes`, if given, which are not read.
    """

    def digest(path: str) -> str | None:
        with contextlib.suppress(OSError, BadImage):
            size = str(image_bytes(path))
            if sizes is None or size in sizes:
                return f"{size}:{content_digest(path).hex()}"
        return None

    every = [*dict.fromkeys(paths)]
    with ThreadPoolExecutor() as pool:  # a network drive answers many requests at a time
        return dict(zip(every, pool.map(digest, every), strict=True))


def image_bytes(path: str) -> int:
    """Bytes of an image; a size that no image has is an error, as reading might never end."""
    size = size_of(path)
    if not 0 < size <= MAX_BYTES:
        raise BadImage(path, f"an image of {size:,} bytes")
    return size


def split_record(paths: Sequence[str], root: Path) -> dict[str, Any]:
    """The content of split.json that identifies the held-out images `paths` of a dataset."""
    digests = file_digests(paths)
    return {
        "root": str(root.resolve()),
        "val": [relative(path, root) for path in paths],
        "val_digests": [digests[path] for path in paths],
    }


def read_split(run: Path) -> HeldOutSplit | None:
    """The split that the training of `run` made; None if its data had one, or there is no run."""
    path = run / SPLIT_FILE
    if not path.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        names, digests = [os.fspath(name) for name in record["val"]], record.get("val_digests")
        if digests is not None and len(digests) != len(names):
            raise ValueError(f"{len(digests)} digests of {plural(len(names), 'image')}")
        if not all(isinstance(one, str | None) for one in digests or ()) or "\0" in "".join(names):
            raise ValueError("a digest is no text, or a name has a NUL character")
        return HeldOutSplit(Path(record["root"]), names, digests)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}); restore it") from None
