"""Tries what `make release` built, as somebody who has nothing else.

    python -m tools.try_release [--only wheel|sdist] [--dist FOLDER]

wheel: in an empty folder outside of the repository, a shell gets the lines of docs/start.md and of
two sections of the README, from the virtual environment to the verification of an exported file.
`pip install vit-toolkit` installs the wheel, and the images are digits of the package. Prints the
seconds of each line. sdist: its default tests run where it is unpacked, with the libraries of this
Python (pip install '.[test]'). The first failure ends the program with exit code 1.
"""

import argparse
import csv
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
from pathlib import Path

from tools.code_blocks import ROOT, read_blocks, shell_lines

SECTIONS = ("Predict", "Convert and export")
"""Of the README; docs/start.md is typed whole."""
LEFT_OUT = {
    "--weights auto": "needs a network connection",
    "20m": "trains for 20 minutes",
    "--reject": "is refused if the validation images prove no precision of 98 %",
}
"""A part of a line or Python block that is not typed -> the reason."""
MAKE_IMAGES = """\
import shutil
from pathlib import Path
from PIL import Image
from vit.data.sources.builtin_datasets import digits_folder

for label in map(str, range(10)):
    files = sorted((digits_folder() / "train" / label).iterdir())
    for number, file in enumerate(files[:120]):
        folder = Path("photos", label) if number < 100 else Path("new-images")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{label}-{number}.{'jpg' if number % 2 else 'png'}"
        Image.open(file).convert("RGB").resize((64, 64)).save(folder / name)
shutil.copytree("new-images", "holiday")
shutil.copy("new-images/3-101.jpg", "cat.jpg")
shutil.copy("new-images/7-101.jpg", "dog.jpg")
"""
"""Writes 100 images a class to photos/, and 20 others, named by their class, to new-images/."""


def documented_lines(page: str, sections: tuple[str, ...] = ()) -> list[str]:
    """What a page says to type, in all or some of its sections; a Python block is one line.

    Names the lines that are left out.
    """
    lines = []
    for block in read_blocks("sh python"):
        if block.page == page and (not sections or block.section in sections):
            python = [f"python -c {shlex.quote(block.text)}"]
            lines += shell_lines(block.text) if block.language == "sh" else python
    for line in lines:
        for part, reason in LEFT_OUT.items():
            if part in line:
                print(f"left out, because it {reason}: {textwrap.shorten(line, 100)}")
    return [line for line in lines if not any(part in line for part in LEFT_OUT)]


def type_line(line: str, folder: Path) -> float:
    """Run a line in `folder`, whose virtual environment is active, and return its seconds.

    Raises:
        SystemExit: It fails; its output is the message.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    path = f"{folder / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    start = time.perf_counter()
    run = subprocess.run(
        ["bash", "-c", line], cwd=folder, env={**kept, "PATH": path}, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    print(f"{seconds:6.1f} s  {line.splitlines()[0]}", flush=True)
    if run.returncode:
        sys.exit(f"{run.stdout}\nexit code {run.returncode}: {line}")
    return seconds


def try_wheel(wheel: Path) -> None:
    """Install `wheel` in a virtual environment of its own, and follow the pages with it."""
    with tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name), 0.0
        install = f"pip install {shlex.quote(str(wheel))}"
        for line in documented_lines("start.md"):
            seconds += type_line(line.replace("pip install vit-toolkit", install), folder)
            if "pip install" in line:
                type_line(f"python -c {shlex.quote(MAKE_IMAGES)}", folder)
                seconds = 0.0
        print(f"{seconds:6.1f} s  all lines of docs/start.md after the installation")
        check_predictions(folder / "labels.csv")
        type_line(f"pip install {shlex.quote(f'{wheel}[onnx]')}", folder)
        for line in documented_lines("README.md", SECTIONS):
            type_line(line, folder)


def check_predictions(table: Path) -> None:
    """Most images of new-images/ are labelled with the class in their name.

    Raises:
        SystemExit: They are not; one in ten is chance.
    """
    with table.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    right = sum(row["label_1"] == Path(row["image"]).name.split("-")[0] for row in rows)
    print(f"{right} of {len(rows)} new images are labelled right")
    if len(rows) != 200 or right < 150:
        sys.exit("predictions are not sensible: 150 of 200 should be right")


def try_sdist(sdist: Path) -> None:
    """Run the default tests of `sdist` outside of the repository."""
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(sdist) as archive:
            archive.extractall(name, filter="data")
        (folder,) = Path(name).iterdir()
        command = [sys.executable, "-m", "pytest", "-n", "auto"]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        run = subprocess.run(command, cwd=folder, env=environment, check=False)
        if run.returncode:
            sys.exit(f"{sdist.name}: its tests fail")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("wheel", "sdist"), help="default: both")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="default: dist")
    args = parser.parse_args()
    for kind, pattern, attempt in (
        ("wheel", "*.whl", try_wheel),
        ("sdist", "*.tar.gz", try_sdist),
    ):
        if args.only in (None, kind):
            found = sorted(args.dist.resolve().glob(pattern))
            if len(found) != 1:
                sys.exit(f"{args.dist}: {len(found)} files {pattern}, not one; run make release")
            attempt(found[0])


if __name__ == "__main__":
    main()
