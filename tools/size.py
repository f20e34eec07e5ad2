"""The size of vit/, package by package, and of the tests: `python -m tools.size`.

Tokens count code without comments, docstrings and blank lines, so that nothing is gained by layout.
"""

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vit.text import align_columns

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


class Size(NamedTuple):
    """Size of some files of Python."""

    files: int
    lines: int
    code: int
    """Lines with code, docstrings left out."""
    tokens: int


def size_of(source: str) -> Size:
    """Size of one file."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT and token.start[0] not in documented
    ]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return Size(1, source.count("\n"), len(code), len(tokens))


def total(sizes: Iterable[Size]) -> Size:
    """Sum of sizes."""
    return Size(*map(sum, zip(*sizes, strict=True)))


def sizes_by_package(folder: Path) -> dict[str, Size]:
    """Size of each package below `folder`, without its sub-packages."""
    packages: dict[str, list[Size]] = defaultdict(list)
    for file in sorted(folder.rglob("*.py")):
        package = file.parent.relative_to(folder.parent).as_posix()
        packages[package].append(size_of(file.read_text(encoding="utf-8")))
    return {package: total(sizes) for package, sizes in sorted(packages.items())}


def table(root: Path) -> list[str]:
    """Lines of the table: the packages of vit/, their sum, and the tests."""
    packages = sizes_by_package(root / "vit")
    tests = total(sizes_by_package(root / "tests").values())
    rows = {**packages, "vit, all": total(packages.values()), "tests, all": tests}
    return align_columns(
        [
            ("package", "files", "lines", "code lines", "tokens"),
            *((name, *(f"{number:,}" for number in size)) for name, size in rows.items()),
        ],
        left={0},
    )


if __name__ == "__main__":
    print("\n".join(table(ROOT)))
