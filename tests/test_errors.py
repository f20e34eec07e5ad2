"""Errors survive the way from a loader process, and each has a text."""

import pickle

import pytest

from vit.errors import BadImage, error_text


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
