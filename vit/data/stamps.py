"""What tells whether a picture's file is still the one that was looked at."""

import os

Stamp = tuple[int, int, int, int]
"""Size in bytes, nanoseconds of the last change of content and of anything, number on its disk."""
POSITIVE = 2**63 - 1
"""Of integers that databases and files hold; numbers on a disk may be larger."""


def stamp_of(path: str) -> Stamp:
    """The stamp of a file, or of the one that `path` lies inside of; zeros where there is none.

    Copying other content over a file with its times kept (`cp -p`) changes the third number:
    nobody can set that one.
    """
    while path:
        try:
            status = os.stat(path)
        except NotADirectoryError:  # noqa: PERF203 - something inside a file, or inside of such
            path = os.path.dirname(path)
        except OSError:
            break
        else:
            times = status.st_mtime_ns, status.st_ctime_ns
            return status.st_size, *times, status.st_ino & POSITIVE
    return 0, 0, 0, 0
