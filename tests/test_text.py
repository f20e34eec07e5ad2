"""Text formatting."""

import sys
import unicodedata

import pytest

from vit import text
from vit.text import (
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_parameters,
    join_names,
    plural,
    printable,
)


def test_plural():
    assert [plural(n, "image") for n in (0, 1, 2000)] == ["0 images", "1 image", "2,000 images"]
    assert plural(2, "class", "classes") == "2 classes"


def test_join_names_counts_the_names_beyond_the_limit():
    assert join_names(iter("abc")) == "a, b, c"
    assert join_names("abcde", 3) == "a, b, c and 2 more"
    assert join_names(range(2000), 1) == "0 and 1,999 more"
    assert join_names(["a\x1b", "b"]) == "a\\x1b, b"


def test_printable_text_is_returned_as_it_is_and_any_other_character_is_escaped(monkeypatch):
    # beyond them are ideographs, tags, and what nobody has assigned
    characters = [chr(code) for code in (*range(0x20000), *range(0xE0000, 0xE0200), sys.maxunicode)]
    shown = {c for c in characters if printable(c) == c}
    safe = {c for c in characters if unicodedata.category(c)[0] != "C"}
    assert shown == (safe | {"\u200c", "\u200d"}) - {"\u2028", "\u2029"}
    assert printable("a\x1b[31m\r\u202eb") == "a\\x1b[31m\\r\\u202eb"
    assert printable(b"a\xff.jpg") == "a\\udcff.jpg"
    monkeypatch.setattr(text, "_escape", None)  # which costs most of the time of long lists
    assert printable("caf\u00e9/\u732b 1.jpg") == "caf\u00e9/\u732b 1.jpg"


def test_sizes_in_bytes_have_a_unit():
    assert [format_bytes(n) for n in (2**20, 2**30)] == ["1.0 MiB", "1.00 GiB"]


def test_large_counts_have_a_unit_prefix():
    numbers = (0, 999, 1000, 86_567_656)
    assert [format_count(n, ".2f") for n in numbers] == ["0", "999", "1.00 k", "86.57 M"]
    assert format_count(21_670_000) == "21.7 M"


def test_numbers_of_parameters_have_all_digits_up_to_a_hundred_thousand():
    numbers = (99_999, 300_000, 21_670_000)
    assert [format_parameters(n) for n in numbers] == ["99,999", "0.30 M", "21.7 M"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.4, "12 s"), (89, "89 s"), (100, "2 min"), (1690, "28 min"), (7500, "2 h 5 min")],
)
def test_durations_have_a_unit(seconds, text):
    assert format_duration(seconds) == text


def test_clock_times():
    assert [format_clock(n) for n in (7, 750, 3723)] == ["0:07", "12:30", "1:02:03"]
