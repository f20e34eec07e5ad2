"""The fenced code blocks of README.md, CONTRIBUTING.md and docs/: tests and a release run them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(
    r"^## (?P<section>[^\n]+)$|^```(?P<language>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    """Name of the file."""
    text: str
    section: str
    """The heading of second level above it; empty before the first."""
    language: str


def read_blocks(languages: str) -> list[Block]:
    """Every block in one of `languages`, which are separated by spaces, in the order of reading."""
    found = []
    for page in PAGES:
        section = ""
        for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
            section = match["section"] or section
            if match["text"] is not None and match["language"] in languages.split():
                found.append(Block(page.name, match["text"], section, match["language"]))
    return found


def shell_lines(text: str) -> list[str]:
    """The commands of a block of the shell: lines, joined where a backslash ends them."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.strip()]
