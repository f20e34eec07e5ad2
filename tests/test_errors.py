"""Names are safe to print, and errors survive the way from a loader process."""

import pickle

import pytest

from vit.errors import BadImage, error_text
from vit.text import printable


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cat.jpg", "cat.jpg"),
        ("mèo 猫.jpg", "mèo 猫.jpg"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\rb\nc", "a\\rb\\nc"),
        ("a\u202eb", "a\\u202eb"),
        (b"a\xff.jpg", "a\\udcff.jpg"),
    ],
)
def test_printable(name, shown):
    assert printable(name) == shown


def test_a_bad_image_survives_pickling():
    bad = pickle.loads(pickle.dumps(BadImage("x.jpg", "is empty")))
    assert (bad.path, bad.reason, str(bad)) == ("x.jpg", "is empty", "x.jpg: is empty")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (MemoryError(), "out of memory"),
        (MemoryError("Unable to allocate 3 GiB"), "Unable to allocate 3 GiB"),
        (KeyError(), "KeyError"),
        (ValueError("two\n  lines"), "two lines"),
        (ValueError("long " * 99), "long " * 39 + "long "),
        (BadImage("x.jpg", "is long " * 99), "x.jpg: " + "is long " * 99),
    ],
)
def test_an_error_without_a_message_has_a_text(error, shown):
    assert error_text(error) == shown
