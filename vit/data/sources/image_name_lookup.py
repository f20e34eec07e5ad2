"""Image names: which image a name in a list means, whatever program wrote the list.

a/1.png              the image's own name, relative to a folder, or its whole path
'=a/1\\x1b.png        a cell of vit's CSV files and workbooks (`csv_text`, `printable`)
a\\1.png              a name that Windows wrote
a/1                  without the suffix, where one image has it
"""

import functools
import itertools
import os
import posixpath
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from vit.data.dataset_types import DatasetIndex
from vit.data.image_archives import index_of, relative, split_address
from vit.data.sources.file_walk import IMAGE_SUFFIXES
from vit.errors import DataError
from vit.text import csv_text, join_names, printable

Find = Callable[[str, bool], str | None]
"""(name as written, whether in a cell of a table) -> the image, or None."""


def is_plain(name: str) -> bool:
    """Whether a name has one spelling only: no escapes, apostrophes, drives, outer spaces."""
    return not ("\\" in name or "'" in name or ":" in name) and name == name.strip()


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


class ImageNames:
    """The files of a tree of folders, by all spellings that a list may have of their names.

    Args:
        names_in: The names in a folder, relative or absolute; called once for each folder, and
            only where a name is not plain or lacks the suffix of an image.
    """

    def __init__(self, names_in: Callable[[str], Iterable[str]]) -> None:
        self._names_in = names_in
        self._tables: dict[str, dict[str, list[str]]] = {}

    def find(self, written: str, is_cell: bool) -> str | None:
        """The file that a name means; a plain name is that of a file, which may be missing."""
        if is_plain(written) and _is_image(written):
            return posixpath.normpath(written)
        tidy = written.strip()
        spellings = dict.fromkeys((written, tidy))
        if not tidy.startswith("\\"):  # a place on another computer
            spellings[tidy.replace("\\", "/")] = None
        return next(filter(None, (self._path(one, is_cell) for one in spellings)), None)

    def _path(self, spelling: str, is_cell: bool) -> str | None:
        path = posixpath.normpath(spelling)
        folders = ["/" if path.startswith("/") else ""]
        parts = path.lstrip("/").split("/")
        for place, part in enumerate(parts, 1):
            without_suffix = place == len(parts) and not _is_image(part)
            if is_plain(part) and not without_suffix and len(folders) == 1:
                folders = [posixpath.join(folders[0], part)]
                continue
            folders = [
                posixpath.join(folder, file)
                for folder in folders
                for file in self._spelled(folder, part, is_cell, without_suffix)
            ]
        if len(folders) > 1:
            raise DataError(
                f"{spelling}: CSV files and workbooks write several names so: "
                f"{join_names(sorted(folders))}; rename one of the files, or give JSON lines"
            )
        return folders[0] if folders else None

    def _spelled(
        self, folder: str, name: str, is_cell: bool, without_suffix: bool
    ) -> Sequence[str]:
        """The names in a folder that `name` may mean."""
        table = self._table(folder)
        found = table.get(name, [])
        if name in found and not is_cell:
            return [name]
        stems = table.get(f"{name}/", []) if without_suffix and not found else []
        return stems if len(stems) == 1 else found

    def _table(self, folder: str) -> dict[str, list[str]]:
        """The files of a folder by spelling, and with a slash behind by name without suffix."""
        if folder not in self._tables:
            table: dict[str, list[str]] = defaultdict(list)
            for file in self._names_in(folder):
                # behind a slash nothing is taken for the beginning of a formula
                cell = csv_text(f"/{file}")[1:] if folder else csv_text(file)
                for spelling in {file, cell, printable(file)}:
                    table[spelling].append(file)
                if _is_image(file):
                    table[f"{os.path.splitext(file)[0]}/"].append(file)
            self._tables[folder] = dict(table)
        return self._tables[folder]


def folder_names(base: str) -> ImageNames:
    """The files in a folder, which are listed as they are needed, and those of absolute paths."""

    def names_in(folder: str) -> Iterable[str]:
        place = os.path.join(base, folder) or os.curdir
        try:
            if (address := split_address(f"{place}/")) is None:
                return os.listdir(place)
            shard, inside = address
            below = (name[len(inside) :] for name in index_of(shard) if name.startswith(inside))
            return {name.partition("/")[0] for name in below}
        except (OSError, DataError):  # its reader reports it
            return []

    return ImageNames(names_in)


def index_finder(index: DatasetIndex) -> Find:
    """Finds the path of the image of a dataset that a name means.

    The result raises DataError for a name that several images have.
    """
    records = itertools.chain(*index.splits.values(), index.unlabelled)
    paths = [*dict.fromkeys(record.path for record in records)]
    named: dict[str, list[str]] = {}
    for path in paths:
        named.setdefault(relative(path, index.root), []).append(path)
    for path in paths:
        named.setdefault(path, [path])

    @functools.cache
    def tree() -> dict[str, dict[str, None]]:
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for name in named:
            folder, tail = posixpath.split(name)
            while tail and tail not in found[folder]:
                found[folder][tail] = None
                folder, tail = posixpath.split(folder)
        return found

    @functools.cache
    def real() -> dict[str, str]:
        return {os.path.realpath(path): path for path in paths}

    names, root = ImageNames(lambda folder: tree().get(folder, ())), index.root.resolve()
    disks = [(base, folder_names(base)) for base in (os.curdir, str(index.root))]

    def find(written: str, is_cell: bool) -> str | None:
        name = names.find(written, is_cell) or written
        found = named.get(name, [])
        if len(found) > 1:
            raise DataError(
                f"{name} is the name of several images, such as "
                f"{' and '.join(map(printable, found[:2]))}: give their whole paths"
            )
        if found:
            return found[0]
        # begins in a folder above the data, such as the working folder of vit predict then
        above, _, rest = f"/{name}".partition(f"/{root.name}/")
        if len(named.get(rest, [])) == 1 and str(root.parent).endswith(above.replace("/..", "")):
            return named[rest][0]
        files = ((base, disk.find(written, is_cell) or written) for base, disk in disks)
        places = (os.path.realpath(os.path.join(base, file)) for base, file in files)
        return next((real()[place] for place in places if place in real()), None)

    return find
