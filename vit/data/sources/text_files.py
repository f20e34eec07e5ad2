"""Reads text files that somebody else wrote, line by line, or says in one line why not.

They are in UTF-8, or in UTF-16 with a byte order mark as Excel writes "Unicode text".
"""

import codecs
import os
import stat
from collections.abc import Callable, Iterator

from vit.errors import DataError, printable

MAX_BYTES = 10 * 2**30
MAX_JSON_BYTES = 2 * 2**30
"""Of a file that is read as a whole."""
MAX_LINE = 2**24
BEGINNING = 2**16
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
REMEDY = "save it as UTF-8 (in Excel: CSV UTF-8)"

OnWrong = Callable[[DataError], object]
"""What a reader does about a line that is wrong; where it returns, the line is left out."""


def stop(error: DataError) -> None:
    """Read no further.

    Raises:
        DataError: Always.
    """
    raise error


def wrong(path: str, what: str, line: int = 0) -> DataError:
    """The error for what is wrong in the file `path`, at a line where there is one."""
    where = f", line {line}" if line else ""
    return DataError(f"{printable(path)}{where}: {printable(what)}")


def text_lines(path: str) -> Iterator[str]:
    """The lines of a file, each with its end; a byte order mark is left out.

    Raises:
        DataError: It is no file of text, or too long.
    """
    utf16 = _bytes(path, MAX_BYTES, 2) in UTF16
    try:
        yield from _utf16_lines(path) if utf16 else _utf8_lines(path)
    except OSError as error:
        raise wrong(path, f"cannot be read ({error.strerror})") from None


def _utf8_lines(path: str) -> Iterator[str]:
    with open(path, "rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE + 1):
            number += 1
            if len(raw) > MAX_LINE:
                raise wrong(path, f"more than {MAX_LINE:,} bytes in one line", number)
            yield _decoded(raw, path, number)


def _utf16_lines(path: str) -> Iterator[str]:
    number = 1
    try:
        with open(path, encoding="utf-16", newline="\n") as text:
            while line := text.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    raise wrong(path, f"more than {MAX_LINE:,} characters in one line", number)
                if "\0" in line:
                    raise wrong(path, "has a NUL character; expected text", number)
                yield line
                number += 1
    except UnicodeDecodeError:
        raise wrong(path, f"damaged UTF-16; {REMEDY}", number) from None


def _decoded(raw: bytes, path: str, number: int, *, whole: bool = True) -> str:
    """The text of `raw`, whose first line has this number; its end may be cut if not `whole`."""
    if number == 1 and raw.startswith(UTF16):
        try:
            return codecs.utf_16_decode(raw, "strict", whole)[0]
        except UnicodeDecodeError:
            raise wrong(path, f"damaged UTF-16; {REMEDY}") from None
    if b"\0" in raw:
        line = number + raw[: raw.index(b"\0")].count(b"\n")
        raise wrong(path, "has a NUL byte; expected text in UTF-8", line)
    try:
        text, _ = codecs.utf_8_decode(raw, "strict", whole)
    except UnicodeDecodeError as error:
        line = number + raw[: error.start].count(b"\n")
        byte = raw[error.start]
        raise wrong(path, f"not UTF-8 (byte 0x{byte:02x}); {REMEDY}", line) from None
    return text.removeprefix("\ufeff") if number == 1 else text


def check_file(path: str, most: int) -> None:
    """Refuse what is no regular file, empty, or longer than `most` bytes.

    Raises:
        DataError: It is.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise wrong(path, f"cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise wrong(path, "no regular file")
    if not status.st_size:
        raise wrong(path, "an empty file (0 bytes)")
    if status.st_size > most:
        size, limit = status.st_size / 2**30, most / 2**30
        raise wrong(path, f"{size:.1f} GiB, more than the {limit:.0f} GiB read here; split it")


def beginning(path: str) -> str:
    """The first characters of a file of text, `BEGINNING` bytes of them.

    Raises:
        DataError: As in `text_lines`.
    """
    raw = _bytes(path, MAX_BYTES, BEGINNING)
    return _decoded(raw, path, 1, whole=len(raw) < BEGINNING)


def whole_text(path: str) -> str:
    """All of a file of text that is short enough to be read as a whole.

    Raises:
        DataError: As in `text_lines`.
    """
    return _decoded(_bytes(path, MAX_JSON_BYTES, -1), path, 1)


def _bytes(path: str, most: int, number: int) -> bytes:
    check_file(path, most)
    try:
        with open(path, "rb") as file:
            return file.read(number)
    except OSError as error:
        raise wrong(path, f"cannot be read ({error.strerror})") from None
