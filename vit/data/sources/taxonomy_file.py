"""Reads a tree of classes, whose names become paths.

tree.csv    columns class and parent; a class without a parent, or a parent without a row of
            its own, is at the top
FOLDER      nested folders, which may be empty
"""

import os

from vit.class_tree import SEPARATOR
from vit.data.sources.file_walk import FolderWalker
from vit.data.sources.list_formats import find_delimiter
from vit.data.sources.table_reader import read_table, wrong
from vit.errors import DataError
from vit.text import join_names, printable

HEADER = ("class", "parent")


def read_taxonomy(path: str) -> dict[str, str]:
    """Name of each node of a tree -> its path from the top."""
    return _read_folder(path) if os.path.isdir(path) else _read_table(path)


def _read_folder(root: str) -> dict[str, str]:
    found: dict[str, str] = {}
    walker = FolderWalker(root)
    levels = [""]
    for above in levels:
        for name in walker.subfolders(os.path.join(root, above)):
            node = f"{above}{SEPARATOR}{name}" if above else name
            if name in found:
                raise DataError(
                    f"{printable(os.path.join(root, node))}: {printable(root)} also has "
                    f"{printable(found[name])}; give each node a name of its own"
                )
            found[name] = node
            levels.append(node)
    if not found:
        raise DataError(f"{printable(root)}: no folders in it; give a folder for each node")
    return found


def _read_table(path: str) -> dict[str, str]:
    table = read_table(path, find_delimiter)
    if tuple(name.strip().lower() for name in table.names) != HEADER:
        given = join_names(table.names)
        raise wrong(path, f"has the columns {given}; expected class and parent", table.line)
    parents: dict[str, tuple[str, int]] = {}
    for line, cells in table.rows:
        name, above = (cell.strip() for cell in cells)
        if not name:
            raise wrong(path, "an empty class; give it a name, or leave the row out", line)
        if bad := next((one for one in (name, above) if SEPARATOR in one), None):
            raise wrong(path, f"{bad!r} has a {SEPARATOR}, which parts levels; rename it", line)
        if name in parents and parents[name][0] != above:
            other, first = parents[name]
            raise wrong(
                path,
                f"{name!r} has the parents {other!r} (line {first}) and {above!r}; keep one",
                line,
            )
        parents.setdefault(name, (above, line))
    if not parents:
        raise wrong(path, "no rows below its header; give a class and its parent in each")
    found: dict[str, str] = {}
    for name, (_, line) in parents.items():
        path_up = [name]
        while above := parents.get(path_up[-1], ("", 0))[0]:
            path_up.append(above)
            if above in path_up[:-1]:
                cycle = " > ".join(path_up[path_up.index(above) :])
                raise wrong(path, f"{cycle} is a cycle; leave one of these parents out", line)
        while path_up:
            found[path_up[0]] = SEPARATOR.join(reversed(path_up))
            del path_up[0]
    return found
