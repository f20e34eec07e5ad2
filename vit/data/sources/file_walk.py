"""Recursive listing of image folders, with a note for everything that is left out.

Hidden and system names are skipped, and so are folders that this toolkit wrote. Links are followed,
unless they lead to a folder that was visited already or that contains the current one.
"""

import contextlib
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from vit.data.image_io import read_header
from vit.data.sources.dataset_problem import Problem
from vit.errors import BadImage, DataError
from vit.paths import is_run_folder
from vit.text import join_names, plural, printable

READABLE = (
    ".jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .mpo "
    ".avif .avifs .jp2 .j2k .jpx .ico .qoi .npy"
)
ARRAY = ".npy"
IMAGE_SUFFIXES = frozenset(READABLE.split())
"""Suffixes of files that are taken for images, whatever their content."""
UNREADABLE = ".jxl .svg .psd .raw .dng .cr2 .nef .arw"
UNSUPPORTED_SUFFIXES = frozenset(UNREADABLE.split())
"""Suffixes of image formats that have no decoder here."""
EXTRAS = {
    "heic": ("pillow_heif", frozenset((".heic", ".heif", ".hif"))),
    "dicom": ("pydicom", frozenset((".dcm", ".dicom"))),
}
"""Extra -> its module, and the suffixes of the images that it reads."""
for _module, _suffixes in EXTRAS.values():
    if importlib.util.find_spec(_module) is not None:
        IMAGE_SUFFIXES |= _suffixes
    else:
        UNSUPPORTED_SUFFIXES |= _suffixes
SYSTEM_NAMES = frozenset(
    ("__MACOSX", "lost+found", "$RECYCLE.BIN", "System Volume Information", "@eaDir", "__pycache__")
)
MARKER_FILE = "vit-data.json"
"""Written to every exported folder; only a folder that has it is ever replaced."""
OUTPUT_MARKER = ".vit-output"
"""Written to folders of drawings, and to exports into the folder of their own data."""
OUTPUT_FILE = re.compile(
    r".+\.(csv|tsv|jsonl?|html|ya?ml|md|xlsx|parquet|np[yz]|safetensors|onnx|data|pt2|xml|bin|sqlite)"
    r"|images-[0-9a-f]{24}(\.lock)?",
    re.IGNORECASE,
)
"""Lists, reports, predictions, embeddings, networks and caches."""
LEFT_OUT = {
    "hidden": "left out hidden and system names",
    "output": "left out folders of runs, lists, reports, networks or other output",
    "empty_folder": "left out folders without images",
    "link": "left out links to folders of this dataset or around them",
    "outside_link": "followed links to folders outside",
    "not_a_file": "left out special files (pipes, broken links)",
    "loose_picture": "left out images that lie in no class folder",
}
"""Kind, as in vit.data.sources.dataset_problem -> what `FolderWalker.notes` says of it."""


def _is_marked(folder: str) -> bool:
    return is_run_folder(folder) or os.path.exists(os.path.join(folder, OUTPUT_MARKER))


def suffix_of(entry: os.DirEntry[str]) -> str:
    """The suffix in lower case; `.dcm` for a DICOM file without one, as hospitals name them."""
    suffix = os.path.splitext(entry.name)[1].lower()
    if not suffix and entry.name != "DICOMDIR":  # which lists files
        with contextlib.suppress(OSError):
            if entry.is_file():
                with open(entry.path, "rb", buffering=0) as file:
                    return ".dcm" if file.read(132)[128:] == b"DICM" else ""
    return suffix


def has_image(folder: str | os.PathLike[str], suffixes: Collection[str] = IMAGE_SUFFIXES) -> bool:
    """Whether an image is directly in `folder`, which is read up to the first one."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return any(suffix_of(one) in suffixes for one in entries if one.name[0] != ".")
    return False


def holds_output_only(folder: str, content: Collection[str] = IMAGE_SUFFIXES) -> bool:
    """Whether all files under `folder`, and at least one, were written by this toolkit.

    Images and other files of the suffixes `content` are data, except in a run folder and beside
    OUTPUT_MARKER.
    """
    if has_image(folder, IMAGE_SUFFIXES - {ARRAY}) and not _is_marked(folder):  # spares a listing
        return False
    result = False
    for path, folders, files in os.walk(folder):
        if _is_marked(path):
            result = True
            folders.clear()
            continue
        folders[:] = [name for name in folders if name[0] != "." and name not in SYSTEM_NAMES]
        shown = [name for name in files if name[0] != "."]
        suffixes = {os.path.splitext(name)[1].lower() for name in shown}
        if len(suffixes) > 1:  # embeddings beside a list
            suffixes.discard(ARRAY)
        if not suffixes.isdisjoint(content) or not all(map(OUTPUT_FILE.fullmatch, shown)):
            return False
        result = result or bool(shown)
    return result


def ignored_suffixes_note(suffixes: Counter[str], noun: str) -> str:
    """A note about files that are not taken for images, by suffix; `noun` is what they are."""
    ordered = sorted(suffixes.items(), key=lambda item: (-item[1], item[0]))
    numbers = join_names([f"{printable(suffix)} {number}" for suffix, number in ordered])
    advice = unsupported_advice(suffixes)
    return f"left out {plural(suffixes.total(), noun)} not taken for images: {numbers}{advice}"


def unsupported_advice(suffixes: Collection[str]) -> str:
    """What to do about images of formats that are not read, or empty."""
    advice, others = "", UNSUPPORTED_SUFFIXES & {*suffixes}
    for extra, (_, read) in EXTRAS.items():
        if names := sorted(others & read):
            advice += f"; to read {' and '.join(names)}: pip install 'vit-toolkit[{extra}]'"
        others -= read
    return advice + (f"; convert {', '.join(sorted(others))} to JPEG or PNG" if others else "")


def _cannot_list(folder: str, error: OSError) -> DataError:
    denied = isinstance(error, PermissionError)
    advice = "; allow reading it (chmod u+rwx), or move it out of the data" if denied else ""
    return DataError(f"{folder}: cannot be listed ({error.strerror}){advice}")


@dataclass
class FolderWalker:
    """Lists the images under one or more folders, and records what it leaves out.

    The fields besides `root` are records for `notes`, as names relative to it. `ignored_suffixes`
    counts the suffixes of those `ignored_files` that get a note.
    """

    root: str
    suffixes: frozenset[str] = IMAGE_SUFFIXES
    visited: set[tuple[int, int]] = field(default_factory=set)
    left_out: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in LEFT_OUT})
    ignored_files: list[str] = field(default_factory=list)
    ignored_suffixes: Counter[str] = field(default_factory=Counter)

    def images(self, folder: str) -> list[str]:
        """Paths of the images under `folder`, depth first, sorted by name in each folder."""
        paths: list[str] = []
        self._collect(folder, paths)
        return paths

    def subfolders(self, folder: str) -> list[str]:
        """Sorted names of the folders directly in `folder`, without hidden and system ones."""
        entries = [entry for entry in self._scan(folder) if not self._is_hidden(entry)]
        return sorted(entry.name for entry in entries if self._is_folder(entry))

    def class_folders(self, folder: str, known: Collection[str] = ()) -> list[str]:
        """`subfolders`, without those that this toolkit wrote, which no `known` ones are."""
        names = self.subfolders(folder)
        return [x for x in names if x in known or not self._is_output(os.path.join(folder, x))]

    def loose_images(self, folder: str) -> list[str]:
        """Paths of the images directly in `folder`, where class folders are expected.

        Other files are in `ignored_files` and not in `ignored_suffixes`: lists and texts beside
        class folders are common, and no reason for a note in every training.
        """
        files = [one for one in self._entries(folder) if self._is_file(one)]
        entries = [one for one in files if not self._is_hidden(one) and one.name != MARKER_FILE]
        paths = [entry.path for entry in entries if suffix_of(entry) in self.suffixes]
        self.left_out["loose_picture"] += map(self.relative_name, paths)
        others = {entry.path for entry in entries} - {*paths}
        self.ignored_files += map(self.relative_name, sorted(others))
        return paths

    def _collect(self, folder: str, paths: list[str]) -> None:
        if not self._enter(folder):
            return
        before, entries = len(paths), self._entries(folder)
        suffixes = {entry.name: suffix_of(entry) for entry in entries}
        taken = self._taken_of(suffixes.values())
        for entry in entries:
            if self._is_hidden(entry):
                continue
            if self._is_folder(entry):
                if self._is_output(entry.path):
                    continue
                if not entry.is_symlink() or self._may_follow(entry):
                    self._collect(entry.path, paths)
            elif not self._is_file(entry):
                self.left_out["not_a_file"].append(self.relative_name(entry.path))
            elif suffixes[entry.name] in taken:
                paths.append(entry.path)
            else:
                self.ignored_suffixes[suffixes[entry.name] or "no suffix"] += 1
                self.ignored_files.append(self.relative_name(entry.path))
        if len(paths) == before:
            self.left_out["empty_folder"].append(self.relative_name(folder))

    def _taken_of(self, suffixes: Iterable[str]) -> frozenset[str]:
        """The suffixes of images in a folder; an array beside other images is of embeddings."""
        others = self.suffixes - {ARRAY}
        return self.suffixes if others.isdisjoint(suffixes) else others

    def _is_output(self, folder: str) -> bool:
        if not holds_output_only(folder, self.suffixes | IMAGE_SUFFIXES):
            return False
        self.left_out["output"].append(self.relative_name(folder))
        return True

    def _enter(self, folder: str) -> bool:
        """Mark `folder` as visited; False if it already was."""
        try:
            status = os.stat(folder)
        except OSError as error:
            raise _cannot_list(folder, error) from None
        if (status.st_dev, status.st_ino) in self.visited:
            self.left_out["link"].append(self.relative_name(folder))
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
        if hidden and (self._suffix(entry.name) in self.suffixes or self._is_folder(entry)):
            self.left_out["hidden"].append(self.relative_name(entry.path))
        return hidden

    def _may_follow(self, entry: os.DirEntry[str]) -> bool:
        """Whether a linked folder lies outside of the dataset and does not contain the link."""
        target = os.path.realpath(entry.path)
        parent = os.path.realpath(os.path.dirname(entry.path))
        root = os.path.realpath(self.root)
        # A folder inside the dataset is listed in its own place, maybe as another class.
        if target == os.path.commonpath([target, parent]) or root == os.path.commonpath(
            [root, target]
        ):
            self.left_out["link"].append(self.relative_name(entry.path))
            return False
        self.left_out["outside_link"].append(self.relative_name(entry.path))
        return True

    @staticmethod
    def _suffix(name: str) -> str:
        return os.path.splitext(name)[1].lower()

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

    def other_files(self, folder: str) -> str:
        """The end of an error about missing images: the files under `folder`, and a remedy."""
        start = "" if folder == self.root else self.relative_name(folder) + os.sep
        names = [name for name in self.ignored_files if name.startswith(start)]
        suffixes = Counter(self._suffix(name) or "no suffix" for name in names)
        return f"; {self._ignored_note(suffixes)}" if names else ""

    def _ignored_note(self, suffixes: Counter[str]) -> str:
        """The note on ignored files; those that are images by their content get a remedy."""
        note = ignored_suffixes_note(suffixes, "file")
        first = {self._suffix(name) or "no suffix": name for name in reversed(self.ignored_files)}
        for name in (first[suffix] for suffix in suffixes):
            with contextlib.suppress(BadImage):
                kind = read_header(os.path.join(self.root, name)).format
                suffix = f".{kind.lower()[:4]}"  # .jpeg for JPEG2000: the content decides
                note += f"; {name} is a {kind} image: rename such files to end in {suffix}"
        return note

    def notes(self) -> list[str]:
        """One line for each reason for which something was left out."""
        suffixes = self.ignored_suffixes
        notes = [self._ignored_note(suffixes)] if suffixes else []
        for kind, names in self.left_out.items():
            shown = sorted({*map(os.path.basename, names)}) if kind == "hidden" else names
            notes += [f"{LEFT_OUT[kind]}: {join_names(dict.fromkeys(shown))}"] if names else []
        return notes

    def problems(self) -> list[Problem]:
        """All that was left out, as `vit check` lists it."""
        unread = {x for x in self.ignored_files if self._suffix(x) in UNSUPPORTED_SUFFIXES}
        advice = unsupported_advice({self._suffix(name) for name in unread})
        found = [
            ("foreign_format", f"left out images of a format that is not read{advice}", unread),
            ("ignored_file", "left out files not taken for images", {*self.ignored_files} - unread),
            *((kind, LEFT_OUT[kind], {*names}) for kind, names in self.left_out.items()),
        ]
        return [
            Problem(kind, text, tuple(os.path.join(self.root, name) for name in sorted(names)))
            for kind, text, names in found
            if names
        ]
