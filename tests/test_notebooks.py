"""The notebooks of docs/notebooks: executed in order, and their text says what they print."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
STATED = re.compile(r"\*\*(\d+(?:\.\d+)?) %\*\*")
"""A figure of the text that the notebook prints: `**97 %**` is printed as `97%`."""
POINTS = 8
"""Other processors and versions round differently, and so answer differently for some images."""
notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    """Cells of a notebook of this kind."""
    every = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in every if cell["cell_type"] == kind]


def printed(path: Path) -> list[str]:
    """What each code cell printed."""
    return [
        "".join("".join(output.get("text", [])) for output in cell["outputs"])
        for cell in cells(path, "code")
    ]


def stated(path: Path) -> list[str]:
    """Figures of the text that the notebook prints."""
    texts = ["".join(cell["source"]) for cell in cells(path, "markdown")]
    return [f"{figure}%" for text in texts for figure in STATED.findall(text)]


def test_there_are_notebooks_of_folders_few_images_and_captions():
    assert [path.stem for path in NOTEBOOKS] == ["captions", "few-images", "own-images"]


@notebook
def test_the_saved_results_are_of_one_execution_from_top_to_bottom(path):
    counts = [cell["execution_count"] for cell in cells(path, "code")]
    assert counts == list(range(1, len(counts) + 1))
    text = path.read_text(encoding="utf-8")
    assert "stderr" not in text  # progress, with speeds of one machine
    assert not re.search(r"/tmp/|/home/|/root/|site-packages|\.cache", text)


@notebook
def test_figures_of_the_text_are_printed(path):
    figures, words = stated(path), re.findall(r"\d+(?:\.\d+)?%", "\n".join(printed(path)))
    assert figures
    assert set(figures) <= set(words)


@pytest.mark.slow
@pytest.mark.auto_precision
@notebook
def test_a_notebook_prints_the_same_again(path, tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    command = [sys.executable, str(ROOT / "tools/execute_notebooks.py"), "--out", str(tmp_path)]
    run = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    pairs = list(zip(printed(path), printed(tmp_path / path.name), strict=True))
    compared = 0
    for before, again in pairs:
        figures, others = (re.findall(r"(\d+(?:\.\d+)?)%", text) for text in (before, again))
        for at, figure in enumerate(figures):
            if f"{figure}%" in stated(path):
                assert float(others[at]) == pytest.approx(float(figure), abs=POINTS), (
                    before,
                    again,
                )
                compared += 1
    assert compared >= len(set(stated(path)))
