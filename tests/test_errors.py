"""Names are safe to print, and errors survive the way from a loader process."""

import pickle

import pytest

from vit.errors import BadImage
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
