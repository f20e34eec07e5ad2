"""Libraries that are too old are refused in one line, and others imported without collections."""

import gc
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import vit
from vit import quick_imports as imports
from vit.commands.main import main
from vit.quick_imports import VersionError, lower_bounds, quick_imports, release

ROOT = Path(__file__).parents[1]


@pytest.fixture
def old_torch(monkeypatch):
    """torch's version is said to be 1.13.1."""
    installed = metadata.version
    bounds = {"numpy": "1.26", "torch": "2.8"}
    monkeypatch.setattr(imports, "lower_bounds", lambda: bounds)
    monkeypatch.setattr(
        metadata, "version", lambda name: "1.13.1" if name == "torch" else installed(name)
    )


def test_a_command_refuses_an_old_library_in_one_line(old_torch, capsys):
    assert main(["plan", "digits"]) == 2
    assert capsys.readouterr().err == (
        "vit plan: torch 1.13.1 is too old: vit needs 2.8 or newer; "
        "pip install --upgrade 'torch>=2.8'\n"
    )


def test_python_refuses_an_old_library_at_the_first_use(old_torch, monkeypatch):
    monkeypatch.setattr(vit, "_checked", False)
    with pytest.raises(VersionError, match=r"torch 1\.13\.1 is too old"):
        vit.create_model("vit_tiny_patch16_224")
    monkeypatch.undo()
    assert callable(vit.create_model)


def test_the_bounds_are_read_from_the_metadata_of_the_package(monkeypatch):
    lines = ["torch>=2.8", "numpy>=1.26", "pyarrow>=17; extra == 'parquet'", "some-thing"]
    monkeypatch.setattr(metadata, "requires", lambda _: lines)
    assert lower_bounds() == {"torch": "2.8", "numpy": "1.26"}


def test_without_an_installation_there_are_no_bounds(monkeypatch):
    monkeypatch.setattr(imports, "DISTRIBUTION", "not-installed-anywhere")
    assert lower_bounds() == {}
    imports.require_supported_versions()


def test_every_required_library_has_a_lower_bound_that_is_read():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines = re.findall(r'"(.+)"', re.search(r"^dependencies = \[(.*?)^\]", text, re.S | re.M)[1])
    assert len(lines) > 10
    for line in lines:
        requirement, found = Requirement(line), imports.BOUND.match(line)
        assert found
        assert (found[1], f">={found[2]}") == (
            requirement.name,
            str(requirement.specifier),
        )


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("2.8", "2.8.1"),
        ("2.9", "2.10"),
        ("2.7.1+cu128", "2.8"),
        ("1.0.3", "1.0.22"),
        ("2", "3.0rc1"),
    ],
)
def test_versions_are_ordered_as_packaging_orders_them(older, newer):
    assert Version(older) < Version(newer)
    assert release(older) < release(newer)


def test_a_version_of_the_bound_itself_is_new_enough():
    assert release("2.8.0+cu128") == release("2.8") == release("2.8.0rc1")


def test_python_before_3_11_is_refused_by_the_first_line_that_runs():
    code = (
        "import sys; sys.version_info = (3, 10, 1)\n"
        "try:\n    import vit\nexcept ImportError as error:\n    print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert run.stdout == "vit needs Python 3.11 or newer; this is Python 3.10\n"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_inside_and_as_before_outside(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_what_was_imported_is_old_to_the_collector():
    """Its first search of young objects would go over a million of them, for 0.2 seconds."""
    code = (
        "import gc\n"
        "from vit.quick_imports import quick_imports\n"
        "with quick_imports():\n"
        "    made = [[] for _ in range(100_000)]\n"
        "print(len(gc.get_objects(0)) < 10_000, gc.get_freeze_count())\n"
        "gc.freeze()\n"
        "frozen = gc.get_freeze_count()\n"
        "with quick_imports():\n"
        "    pass\n"
        "print(gc.get_freeze_count() > frozen / 2)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout == "True 0\nTrue\n"
