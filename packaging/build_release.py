"""Builds the sdist and the wheel twice from the last commit, compares the bytes, and checks both.

    python packaging/build_release.py [FOLDER]       (pip install --group release)

FOLDER (default: dist) receives both files, SHA256SUMS, and a bill of materials: what a plain
installation of the wheel brings today, in CycloneDX's JSON.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def call(*words: str, cwd: Path = ROOT, **environment: str) -> bytes:
    """Standard output of a command; its errors are shown, and a failure ends this program."""
    run = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=False
    )
    if run.returncode:
        sys.exit(f"{' '.join(words)}: exit code {run.returncode}\n{run.stdout.decode()}")
    return run.stdout


def build(folder: Path, seconds: str) -> dict[str, bytes]:
    """Names and contents of the sdist and the wheel of the last commit, built in `folder`."""
    source, out = folder / "source", folder / "out"
    with tarfile.open(fileobj=io.BytesIO(call("git", "archive", "HEAD"))) as archive:
        archive.extractall(source, filter="data")
    # the wheel is built from the sdist, so that the sdist is known to be complete
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    call(*command, cwd=folder, SOURCE_DATE_EPOCH=seconds)
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def write_bill_of_materials(path: Path) -> None:
    """What `pip install vit-toolkit` brings today, resolved without installing it."""
    with tempfile.TemporaryDirectory() as name:
        pinned = Path(name) / "requirements.txt"
        call("uv", "pip", "compile", "--quiet", "pyproject.toml", "--output-file", str(pinned))
        call(
            *("cyclonedx-py", "requirements", str(pinned), "--pyproject", "pyproject.toml"),
            *("--output-reproducible", "--output-format", "JSON", "--output-file", str(path)),
        )


def main() -> None:
    dist = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    seconds = call("git", "log", "-1", "--format=%ct").decode().strip()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        files, again = build(Path(one), seconds), build(Path(other), seconds)
    if files != again or len(files) != 2:
        sys.exit(f"two builds of the same commit differ: {sorted(files)}, {sorted(again)}")
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    for name, content in files.items():
        (dist / name).write_bytes(content)
    call(sys.executable, "-m", "twine", "check", "--strict", *(str(dist / name) for name in files))
    (wheel,) = (name for name in files if name.endswith(".whl"))
    write_bill_of_materials(dist / f"{'-'.join(wheel.split('-')[:2])}.cdx.json")
    sums = {path.name: hashlib.sha256(path.read_bytes()) for path in sorted(dist.iterdir())}
    lines = "".join(f"{sum_.hexdigest()}  {name}\n" for name, sum_ in sums.items())
    (dist / "SHA256SUMS").write_text(lines)
    print(f"{dist}: two equal builds\n{lines}", end="")


if __name__ == "__main__":
    main()
