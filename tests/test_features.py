"""docs/features.md says what the code is: each file has an owner, and lines are within a tenth."""

import re

import pytest

from tools.features import (
    CAPABILITIES,
    PAGE,
    ROOT,
    ROUNDING,
    SUPPORT,
    TOLERANCE,
    costs,
    owners,
    page,
    stale_names,
)
from vit.commands.main import COMMANDS

NUMBER = re.compile(r"(?<=\| )[\d,]+(?= \|)")


def test_every_file_belongs_to_one_capability():
    assert stale_names(ROOT) == []
    assert [path for path, name in owners(ROOT).items() if not name] == []
    names = [one.name for one in CAPABILITIES]
    assert len(names) == len({*names})


def test_every_command_belongs_to_a_capability():
    assert {name for one in CAPABILITIES for name in one.commands.split()} == {*COMMANDS}


@pytest.mark.parametrize("kind", SUPPORT)
def test_support_is_stated_in_the_words_of_the_columns(kind):
    for one in CAPABILITIES:
        stated = getattr(one, kind)
        known = stated() if callable(stated) else stated
        others = {*known.split()} - {*SUPPORT[kind]}
        assert others <= {"classify,caption"}, one.name


def test_the_page_is_what_the_tool_writes():
    """Lines may differ by a tenth: `python -m tools.features` writes the page again."""
    written, expected = PAGE.read_text(encoding="utf-8"), page(ROOT)
    assert NUMBER.sub("N", written) == NUMBER.sub("N", expected)
    for line, now in zip(written.splitlines(), expected.splitlines(), strict=True):
        pairs = zip(NUMBER.findall(line), NUMBER.findall(now), strict=True)
        for one, other in (tuple(int(x.replace(",", "")) for x in pair) for pair in pairs):
            assert abs(one - other) <= max(TOLERANCE * other, ROUNDING), now[:60]


def test_the_lines_of_all_capabilities_are_those_of_the_package():
    files = [file for folder in ("vit", "tests") for file in (ROOT / folder).rglob("*.py")]
    total = sum(file.read_text(encoding="utf-8").count("\n") for file in files)
    assert sum(one.lines + one.tests for one in costs(ROOT).values()) == total
