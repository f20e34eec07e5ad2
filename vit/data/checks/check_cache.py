"""Verdicts of earlier days, so that a second look at the same files is quick.

One small database for each data set, in the user's cache; it may be deleted at any time. A verdict
holds as long as the file has the same stamp. Only good images are kept: why another one failed
may be mended in many ways.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

from vit.data.checks.image_stats import VERSION, Facts
from vit.data.image_io import Stamp
from vit.errors import printable
from vit.paths import user_cache

TABLE = (
    "create table if not exists verdicts (path blob primary key, size integer, mtime integer, "
    "ctime integer, number integer, facts text, digest blob, look blob)"
)


class Store:
    """The verdicts on the images of one data set; without a place to write it keeps nothing.

    Args:
        root: Folder of the data set.
        folder: Of the databases; in the user's cache if None.
    """

    def __init__(self, root: Path, folder: Path | None = None) -> None:
        folder = user_cache() / "check" if folder is None else folder
        name = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=12).hexdigest()
        self.path = folder / f"{name}-v{VERSION}.sqlite"
        self.database: sqlite3.Connection | None = None
        self.note: str | None = None
        """Why nothing is kept, or None."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.database = self._open()
        except (OSError, sqlite3.Error) as error:
            self.note = f"note: {printable(self.path)}: {printable(error)}; nothing is kept there"

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connected()
        except sqlite3.OperationalError:  # in use by another process, or not to be written
            raise
        except sqlite3.DatabaseError:  # damaged: it can be made again
            self.path.unlink(missing_ok=True)
            return self._connected()

    def _connected(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=5)
        try:
            database.execute("pragma synchronous = off")
            database.execute(TABLE)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def known(self, stamps: Mapping[str, Stamp]) -> dict[str, Facts]:
        """Verdicts that still hold, by path."""
        found: dict[str, Facts] = {}
        if self.database is None:
            return found
        with contextlib.suppress(sqlite3.Error, ValueError, TypeError):
            for path, *stamp, facts, digest, look in self.database.execute(
                "select path, size, mtime, ctime, number, facts, digest, look from verdicts"
            ):
                name = os.fsdecode(path)
                if stamps.get(name) == tuple(stamp):
                    found[name] = Facts._make([*json.loads(facts), digest, look])
        return found

    def keep(self, verdicts: Iterable[tuple[str, Stamp, Facts]]) -> None:
        """Add some; all of them or none, if the work is killed."""
        rows: list[tuple[object, ...]] = [
            (os.fsencode(path), *stamp, json.dumps(facts[:-2]), facts.digest, facts.look)
            for path, stamp, facts in verdicts
        ]
        self._write("insert or replace into verdicts values (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def forget(self, paths: Iterable[str]) -> None:
        """Remove those that are not there any more."""
        self._write("delete from verdicts where path = ?", [(os.fsencode(path),) for path in paths])

    def paths(self) -> set[str]:
        """Of all images that there are verdicts on."""
        if self.database is None:
            return set()
        with contextlib.suppress(sqlite3.Error):
            rows = self.database.execute("select path from verdicts").fetchall()
            return {os.fsdecode(path) for (path,) in rows}
        return set()

    def close(self) -> None:
        """End the connection."""
        if self.database is not None:
            self.database.close()

    def _write(self, words: str, rows: list[tuple[object, ...]]) -> None:
        if self.database is None:
            return
        # a full disk or another process costs only time: what is not kept is made again
        with contextlib.suppress(sqlite3.Error), self.database:
            self.database.executemany(words, rows)
