"""Executes the notebooks of docs/notebooks from top to bottom, and saves what they print.

    python tools/execute_notebooks.py [--out FOLDER] [NOTEBOOK ...]      (pip install '.[dev]')

Each runs in an empty folder with the package of this repository. Standard error, which has progress
and speeds, is not saved. Without --out, the notebooks themselves are written.
"""

import argparse
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "docs" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""The same for all machines: an execution adds the version of Python."""


def execute(path: Path, out: Path) -> None:
    """Run all cells of the notebook `path`, and write it to `out` with their results.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=None, resources=resources, record_timing=False).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    notebook.metadata = nbformat.from_dict(METADATA)
    nbformat.write(notebook, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for path in args.notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        execute(path, path if args.out is None else args.out / path.name)
        print(path.name, flush=True)


if __name__ == "__main__":
    main()
