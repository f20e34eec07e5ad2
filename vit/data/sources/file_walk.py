"""Walks folders of images: nothing twice, nothing endless, nothing left out unsaid.

Hidden and system folders are no data. Links are followed unless they lead back to where the walk
has been or to a folder that holds the present one.
"""

import os
from collections import Counter
from dataclasses import dataclass, field

from vit.errors import DataError, printable
from vit.text import join_names, plural

READABLE = (
    "jpg jpeg jpe jfif png apng webp gif bmp dib tif tiff ppm pgm pbm pnm mpo "
    "avif avifs jp2 j2k jpx ico qoi"
)
SUFFIXES = frozenset(f".{name}" for name in READABLE.split())
"""Of files that are taken for images, whatever they hold."""
UNREADABLE = "heic heif jxl svg psd raw dng cr2 nef arw"
FOREIGN = frozenset(f".{name}" for name in UNREADABLE.split())
"""Of images that cannot be read here."""
SYSTEM = frozenset(
    ("__MACOSX", "lost+found", "$RECYCLE.BIN", "System Volume Information", "@eaDir", "__pycache__")
)


@dataclass
class Walk:
    """The images under one or more folders, and what was left out on the way.

    Args:
        root: Folder that names in notes are relative to.
        suffixes: Of files that are listed, in lower case.
        visited: Folders seen already, by device and inode.

    The other fields collect what `notes` tells; `ignored` and `hidden` have the places of `other`
    and `junk`.
    """

    root: str
    suffixes: frozenset[str] = SUFFIXES
    visited: set[tuple[int, int]] = field(default_factory=set)
    junk: set[str] = field(default_factory=set)
    empty: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)
    ignored: list[str] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)

    def images(self, folder: str) -> list[str]:
        """Paths of the images under `folder`, sorted, those of deeper folders at their place."""
        found: list[str] = []
        self._collect(folder, found)
        return found

    def subfolders(self, folder: str) -> list[str]:
        """Names of the folders straight in `folder` that are no junk, sorted."""
        entries = [entry for entry in self._entries(folder) if not self._is_junk(entry)]
        return [entry.name for entry in entries if self._is_folder(entry)]

    def loose_images(self, folder: str) -> list[str]:
        """Paths of the images straight in `folder`, where only folders are expected."""
        entries = [entry for entry in self._entries(folder) if self._is_file(entry)]
        loose = [entry.path for entry in entries if self._suffix(entry) in self.suffixes]
        self.loose += map(self.name, loose)
        return loose

    def _collect(self, folder: str, found: list[str]) -> None:
        if not self._enter(folder):
            return
        before = len(found)
        for entry in self._entries(folder):
            if self._is_junk(entry):
                continue
            if self._is_folder(entry):
                if not entry.is_symlink() or self._may_follow(entry):
                    self._collect(entry.path, found)
            elif not self._is_file(entry):
                self.strange.append(self.name(entry.path))
            elif self._suffix(entry) in self.suffixes:
                found.append(entry.path)
            else:
                self.other[self._suffix(entry) or "no suffix"] += 1
                self.ignored.append(self.name(entry.path))
        if len(found) == before:
            self.empty.append(self.name(folder))

    def _enter(self, folder: str) -> bool:
        """Mark `folder` as visited; False where it already was."""
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in self.visited:
            self.links.append(self.name(folder))
            return False
        self.visited.add((status.st_dev, status.st_ino))
        return True

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{printable(folder)}: cannot be listed ({error.strerror})") from None

    def _is_junk(self, entry: os.DirEntry[str]) -> bool:
        junk = entry.name.startswith(".") or entry.name in SYSTEM
        if junk and (self._suffix(entry) in self.suffixes or self._is_folder(entry)):
            self.junk.add(entry.name)
            self.hidden.add(self.name(entry.path))
        return junk

    def _may_follow(self, entry: os.DirEntry[str]) -> bool:
        """Whether a linked folder belongs to the one it stands in."""
        target, here = os.path.realpath(entry.path), os.path.realpath(os.path.dirname(entry.path))
        root = os.path.realpath(self.root)
        # Inside the data set its images are read at their own place, maybe as another class.
        if _holds(target, here) or _holds(root, target):
            self.links.append(self.name(entry.path))
            return False
        self.outside.append(self.name(entry.path))
        return True

    @staticmethod
    def _suffix(entry: os.DirEntry[str]) -> str:
        return os.path.splitext(entry.name)[1].lower()

    @staticmethod
    def _is_folder(entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir()
        except OSError:  # a link in a circle
            return False

    @staticmethod
    def _is_file(entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_file()
        except OSError:
            return False

    def name(self, path: str) -> str:
        """`path` relative to the root, safe on a terminal."""
        return printable(os.path.relpath(path, self.root))

    def notes(self) -> list[str]:
        """What was left out and why, a line a reason."""
        known = sorted(self.other.items(), key=lambda item: (-item[1], item[0]))
        endings = [f"{printable(suffix)} {count}" for suffix, count in known]
        others = plural(sum(self.other.values()), "file")
        advice = "; convert them to JPEG or PNG" if FOREIGN & self.other.keys() else ""
        lines = [
            (endings, f"left out {others} not taken for images", advice),
            (sorted(set(map(printable, self.junk))), "left out hidden and system names", ""),
            (self.empty, "left out folders without images", ""),
            (self.links, "left out links to folders of this data set or around them", ""),
            (self.outside, "followed links to folders outside", ""),
            (self.strange, "left out what is no regular file (pipes, broken links)", ""),
            (self.loose, "left out images that lie in no class folder", ""),
        ]
        return [f"{text}: {join_names(names)}{end}" for names, text, end in lines if names]


def _holds(folder: str, path: str) -> bool:
    """Whether `path` is `folder` or under it; both absolute."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
