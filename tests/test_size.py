"""tools/size.py, the size of the package without its layout."""

from tools.size import Size, size_of, table

CODE = '''"""Module."""

import os  # a comment


def f(x: int) -> int:
    """One.

    More.
    """
    return (
        x
    )
'''


def test_layout_and_docstrings_are_no_tokens():
    dense = "import os\ndef f(x: int) -> int: return ( x )\n"
    assert size_of(CODE) == Size(1, 13, 5, size_of(dense).tokens)
    assert size_of(dense).tokens == 16


def test_a_table_has_a_row_for_each_package(tmp_path):
    for name in ("vit/a.py", "vit/model/b.py", "vit/model/c.py", "tests/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(CODE)
    _, *rows = (line.rsplit(maxsplit=4) for line in table(tmp_path))
    assert [row[:3] for row in rows] == [
        ["vit", "1", "13"], ["vit/model", "2", "26"], ["vit, all", "3", "39"],
        ["tests, all", "1", "13"],
    ]  # fmt: skip
