"""What a release says about itself in several files agrees, and a build has all files."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tools import try_release
from vit.version import __version__

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"torch": "pytorch", "huggingface-hub": "huggingface_hub"}
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def requirements(lines: list[Any]) -> list[Requirement]:
    """Libraries of an extra or a group, without our own extras and other groups."""
    found = [Requirement(line) for line in lines if isinstance(line, str)]
    return [one for one in found if one.name != "vit-toolkit"]


PROJECT = tomllib.loads(read("pyproject.toml"))
REQUIRED = requirements(PROJECT["project"]["dependencies"])


def table(title: str) -> list[list[str]]:
    """Cells of the table in docs/dependencies.md below a heading."""
    section = read("docs/dependencies.md").split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!---)(.+) \|$", section, re.MULTILINE)
    return [[cell.strip() for cell in row.split(" | ")] for row in rows][1:]


def test_the_page_of_dependencies_names_every_required_library():
    assert len(REQUIRED) > 10
    assert [row[0] for row in table("Required")] == sorted(one.name for one in REQUIRED)


@pytest.mark.parametrize(
    ("title", "declared"),
    [
        ("Extras", PROJECT["project"]["optional-dependencies"]),
        ("Groups", PROJECT["dependency-groups"]),
    ],
)
def test_the_page_of_dependencies_names_every_extra_with_its_libraries(title, declared):
    stated = {row[0].strip("`"): row[1].split(", ") for row in table(title)}
    expected = {name: [one.name for one in requirements(of)] for name, of in declared.items()}
    assert {name: sorted(of, key=str.lower) for name, of in stated.items()} == {
        name: sorted(of, key=str.lower) for name, of in expected.items() if of
    }


def test_the_recipe_of_conda_has_the_same_version_and_bounds():
    recipe = yaml.safe_load(read("packaging/recipe.yaml"))
    assert recipe["context"]["version"] == __version__
    python, *rest = recipe["requirements"]["run"]
    assert python == "python >=${{ python_min }}"
    assert PROJECT["project"]["requires-python"] == f">={recipe['context']['python_min']}"
    scripts = PROJECT["project"]["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(one) for one in scripts]
    expected = [f"{CONDA_NAMES.get(one.name, one.name)} {one.specifier}" for one in REQUIRED]
    assert rest == expected


def test_the_citation_and_the_changelog_have_the_version():
    assert yaml.safe_load(read("CITATION.cff"))["version"] == __version__
    assert read("CHANGELOG.md").split("\n## ")[1].startswith(f"{__version__} (")


def test_the_lock_of_the_lowest_versions_has_the_lower_bounds():
    locked = dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", read("packaging/lowest.txt"), re.MULTILINE))
    for requirement in REQUIRED:
        (bound,) = requirement.specifier
        version = locked[requirement.name]
        assert version.removesuffix(".0") == bound.version.removesuffix(".0"), requirement


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_actions_by_commit_and_use_no_secret(workflow):
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (.+)", text)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    assert "secrets." not in text
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"run: make ([\w-]+)", text))
    assert targets <= set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))


def test_the_workflow_of_tests_runs_every_python_that_is_declared():
    jobs = yaml.safe_load(read(".github/workflows/tests.yml"))["jobs"]
    stated = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert jobs["default"]["strategy"]["matrix"]["python"] == stated == ["3.11", "3.12", "3.13"]


@pytest.mark.slow
def test_two_builds_are_equal_and_have_every_file_of_the_package(tmp_path, monkeypatch):
    pytest.importorskip("hatchling")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for folder in ("one", "other"):
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / folder)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    built = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert sorted(built) == [
        f"vit_toolkit-{__version__}-py3-none-any.whl", f"vit_toolkit-{__version__}.tar.gz",
    ]  # fmt: skip
    assert built == {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("no git repository: the files cannot be listed")
    with zipfile.ZipFile(next((tmp_path / "one").glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"vit_toolkit-{__version__}.dist-info/METADATA").decode()
    assert {name for name in tracked if name.startswith("vit/")} <= names
    assert not {name for name in names if name.startswith(("tests", "docs", "benchmarks"))}
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    with tarfile.open(next((tmp_path / "one").glob("*.tar.gz"))) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert set(tracked) <= inside


def test_the_bill_of_materials_is_part_of_a_release():
    text = read("packaging/build_release.py")
    assert "cyclonedx-py" in text
    assert json.dumps("--output-reproducible") in text


def test_a_release_is_tried_with_the_lines_of_the_pages(capsys):
    first = try_release.documented_lines("start.md")
    assert first[1].startswith("pip install vit-toolkit")
    typed = [line.split()[1] for line in first if line.startswith("vit ")]
    assert typed == ["demo", "check", "train", "predict", "predict"]
    assert [compile(shlex.split(line)[2], line, "exec") for line in first if "python -c" in line]
    readme = try_release.documented_lines("README.md", try_release.SECTIONS)
    assert {line.split()[1] for line in readme} == {"predict", "convert", "export", "verify"}
    assert capsys.readouterr().out.count("left out, because it ") == len(try_release.LEFT_OUT)


@pytest.mark.parametrize("right", [149, 150])
def test_a_release_fails_with_a_line_or_with_its_predictions(right, tmp_path):
    with pytest.raises(SystemExit, match="no such command\n\nexit code 3: echo"):
        try_release.type_line("echo no such command; exit 3", tmp_path)
    rows = [f"new-images/3-{number}.png,{3 if number < right else 7}" for number in range(200)]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["image,label_1", *rows]), encoding="utf-8-sig")
    with pytest.raises(SystemExit) if right < 150 else contextlib.nullcontext():
        try_release.check_predictions(table)
