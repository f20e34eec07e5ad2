"""Recursive listing of image folders, with a note for everything that is left out.

Hidden and system names are skipped. Links are followed, unless they lead to a folder that was
visited already or that contains the current one.
"""

import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from vit.data.image_io import reads_heic
from vit.errors import DataError
from vit.text import join_names, plural, printable

READABLE = (
    "jpg jpeg jpe jfif png apng webp gif bmp dib tif tiff ppm pgm pbm pnm mpo "
    "avif avifs jp2 j2k jpx ico qoi"
)
IMAGE_SUFFIXES = frozenset(f".{name}" for name in READABLE.split())
"""Suffixes of files that are taken for images, whatever their content."""
HEIC_SUFFIXES = frozenset((".heic", ".heif", ".hif"))
"""Suffixes of images that are read if pillow-heif is installed."""
UNREADABLE = "jxl svg psd raw dng cr2 nef arw"
UNSUPPORTED_SUFFIXES = frozenset(f".{name}" for name in UNREADABLE.split())
"""Suffixes of image formats that have no decoder here."""
if reads_heic():
    IMAGE_SUFFIXES |= HEIC_SUFFIXES
else:
    UNSUPPORTED_SUFFIXES |= HEIC_SUFFIXES
SYSTEM_NAMES = frozenset(
    ("__MACOSX", "lost+found", "$RECYCLE.BIN", "System Volume Information", "@eaDir", "__pycache__")
)
MARKER_FILE = "vit-data.json"
"""Written to every exported folder; only a folder that has it is ever replaced."""


def ignored_suffixes_note(suffixes: Counter[str], noun: str) -> str:
    """A note about files that are not taken for images, by suffix; `noun` is what they are."""
    ordered = sorted(suffixes.items(), key=lambda item: (-item[1], item[0]))
    numbers = join_names([f"{printable(suffix)} {number}" for suffix, number in ordered])
    advice = unsupported_advice(suffixes)
    return f"left out {plural(suffixes.total(), noun)} not taken for images: {numbers}{advice}"


def unsupported_advice(suffixes: Collection[str]) -> str:
    """What to do about images of formats that are not read; empty if there are none."""
    heic = sorted(HEIC_SUFFIXES & UNSUPPORTED_SUFFIXES & {*suffixes})
    others = sorted((UNSUPPORTED_SUFFIXES - HEIC_SUFFIXES) & {*suffixes})
    install = f"; to read {' and '.join(heic)}: pip install 'vit-toolkit[heic]'" if heic else ""
    convert = f"; convert {', '.join(others)} to JPEG or PNG" if others else ""
    return install + convert


def _cannot_list(folder: str, error: OSError) -> DataError:
    denied = isinstance(error, PermissionError)
    advice = "; allow reading it (chmod u+rwx), or move it out of the data" if denied else ""
    return DataError(f"{printable(folder)}: cannot be listed ({error.strerror}){advice}")


@dataclass
class FolderWalker:
    """Lists the images under one or more folders, and records what it leaves out.

    Args:
        root: Folder that names in notes are relative to.
        suffixes: Suffixes of the files to list, in lower case.
        visited: Visited folders, by device and inode.

    The other fields are records for `notes`, as names relative to `root`; `hidden_names` are base
    names, and `ignored_suffixes` counts the suffixes of those `ignored_files` that get a note.
    """

    root: str
    suffixes: frozenset[str] = IMAGE_SUFFIXES
    visited: set[tuple[int, int]] = field(default_factory=set)
    hidden_names: set[str] = field(default_factory=set)
    hidden_paths: set[str] = field(default_factory=set)
    empty_folders: list[str] = field(default_factory=list)
    skipped_links: list[str] = field(default_factory=list)
    followed_links: list[str] = field(default_factory=list)
    special_files: list[str] = field(default_factory=list)
    unclassified: list[str] = field(default_factory=list)
    ignored_files: list[str] = field(default_factory=list)
    ignored_suffixes: Counter[str] = field(default_factory=Counter)

    def images(self, folder: str) -> list[str]:
        """Paths of the images under `folder`, depth first, sorted by name in each folder.

        Raises:
            DataError: A folder cannot be listed.
        """
        paths: list[str] = []
        self._collect(folder, paths)
        return paths

    def subfolders(self, folder: str) -> list[str]:
        """Sorted names of the folders directly in `folder`, without hidden and system ones."""
        entries = [entry for entry in self._scan(folder) if not self._is_hidden(entry)]
        return sorted(entry.name for entry in entries if self._is_folder(entry))

    def loose_images(self, folder: str) -> list[str]:
        """Paths of the images directly in `folder`, where class folders are expected.

        Other files are in `ignored_files` and not in `ignored_suffixes`: lists and texts beside
        class folders are common, and no reason for a note in every training.
        """
        entries = [entry for entry in self._entries(folder) if self._is_file(entry)]
        paths = [entry.path for entry in entries if self._suffix(entry) in self.suffixes]
        self.unclassified += map(self.relative_name, paths)
        self.ignored_files += [
            self.relative_name(entry.path)
            for entry in entries
            if self._suffix(entry) not in self.suffixes
            and not self._is_hidden(entry)
            and entry.name != MARKER_FILE
        ]
        return paths

    def _collect(self, folder: str, paths: list[str]) -> None:
        if not self._enter(folder):
            return
        before = len(paths)
        for entry in self._entries(folder):
            if self._is_hidden(entry):
                continue
            if self._is_folder(entry):
                if not entry.is_symlink() or self._may_follow(entry):
                    self._collect(entry.path, paths)
            elif not self._is_file(entry):
                self.special_files.append(self.relative_name(entry.path))
            elif self._suffix(entry) in self.suffixes:
                paths.append(entry.path)
            else:
                self.ignored_suffixes[self._suffix(entry) or "no suffix"] += 1
                self.ignored_files.append(self.relative_name(entry.path))
        if len(paths) == before:
            self.empty_folders.append(self.relative_name(folder))

    def _enter(self, folder: str) -> bool:
        """Mark `folder` as visited; False if it already was."""
        try:
            status = os.stat(folder)
        except OSError as error:
            raise _cannot_list(folder, error) from None
        if (status.st_dev, status.st_ino) in self.visited:
            self.skipped_links.append(self.relative_name(folder))
            return False
        self.visited.add((status.st_dev, status.st_ino))
        return True

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        return sorted(self._scan(folder), key=lambda entry: entry.name)

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return [*entries]
        except OSError as error:
            raise _cannot_list(folder, error) from None

    def _is_hidden(self, entry: os.DirEntry[str]) -> bool:
        hidden = entry.name.startswith(".") or entry.name in SYSTEM_NAMES
        if hidden and (self._suffix(entry) in self.suffixes or self._is_folder(entry)):
            self.hidden_names.add(entry.name)
            self.hidden_paths.add(self.relative_name(entry.path))
        return hidden

    def _may_follow(self, entry: os.DirEntry[str]) -> bool:
        """Whether a linked folder lies outside of the dataset and does not contain the link."""
        target = os.path.realpath(entry.path)
        parent = os.path.realpath(os.path.dirname(entry.path))
        # A folder inside the dataset is listed in its own place, maybe as another class.
        if _contains(target, parent) or _contains(os.path.realpath(self.root), target):
            self.skipped_links.append(self.relative_name(entry.path))
            return False
        self.followed_links.append(self.relative_name(entry.path))
        return True

    @staticmethod
    def _suffix(entry: os.DirEntry[str]) -> str:
        return os.path.splitext(entry.name)[1].lower()

    @staticmethod
    def _is_folder(entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir()
        except OSError:  # a circular link
            return False

    @staticmethod
    def _is_file(entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_file()
        except OSError:
            return False

    def relative_name(self, path: str) -> str:
        """`path` relative to the root, safe to print on a terminal."""
        return printable(os.path.relpath(path, self.root))

    def notes(self) -> list[str]:
        """One line for each reason for which something was left out."""
        suffixes = self.ignored_suffixes
        notes = [ignored_suffixes_note(suffixes, "file")] if suffixes else []
        hidden = sorted(set(map(printable, self.hidden_names)))
        lines = [
            (hidden, "left out hidden and system names"),
            (self.empty_folders, "left out folders without images"),
            (self.skipped_links, "left out links to folders of this dataset or around them"),
            (self.followed_links, "followed links to folders outside"),
            (self.special_files, "left out special files (pipes, broken links)"),
            (self.unclassified, "left out images that lie in no class folder"),
        ]
        return notes + [f"{text}: {join_names(names)}" for names, text in lines if names]


def _contains(folder: str, path: str) -> bool:
    """Whether `path` is `folder` or below it; both are absolute."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
