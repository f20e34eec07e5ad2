"""Images, and commands in this process, of which some are interrupted, refused or killed."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.interruptions import interrupt_at
from tests.inference.captioners import save_captioner
from vit.commands.main import main

Answer = tuple[int, list[str], list[str]]


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a table, or of JSON lines; a JSON file has one."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        if str(path).endswith(".csv"):
            return [*csv.DictReader(file)]
        return [*map(json.loads, file)] if str(path).endswith(".jsonl") else [json.load(file)]


@pytest.fixture
def input_images(tiny_data: Path) -> list[str]:
    return [str(path) for path in sorted((tiny_data / "val").rglob("*.*"))]


@pytest.fixture(scope="session")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a network that writes captions alone."""
    return save_captioner(tmp_path_factory.mktemp("captioner") / "run")


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captioner that names the classes of `tiny_data` too."""
    classes = ("apple", "class10", "class2")
    return save_captioner(tmp_path_factory.mktemp("speaking") / "run", classes=classes)


@pytest.fixture
def vit(capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs a command; gives exit code, lines of stdout, lines of stderr."""

    def run(*words: object) -> Answer:
        capfd.readouterr()
        code = main([*map(str, words)])
        captured = capfd.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run


@pytest.fixture
def refusal(vit: Callable[..., Answer]) -> Callable[..., str]:
    """Runs a command that cannot start; gives the one line that says why."""

    def run(*words: object) -> str:
        code, out, err = vit(*words)
        assert (code, out, len(err)) == (2, [], 1), err
        assert err[0].startswith(f"vit {words[0]}: ")
        return err[0]

    return run


@pytest.fixture
def predict(vit: Callable[..., Answer], tiny_run: Path) -> Callable[..., Answer]:
    """Runs `vit predict` on the tiny model."""

    def run(*words: object, model: object = tiny_run) -> Answer:
        return vit("predict", model, *words)

    return run


@pytest.fixture
def interrupted(
    predict: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """Runs `predict`, which an error, or what else `how` names, ends before a block."""

    def run(*words: object, block: int = 2, how: str = "fail") -> Answer:
        with monkeypatch.context() as patch:
            interrupt_at(block, how, patch.setattr)
            found = predict(*words)
        assert how != "fail" or found[0] == 2, found
        return found

    return run
