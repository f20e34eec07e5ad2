"""Images, and `vit predict` on the tiny model, in this process or in some that may be killed."""

from pathlib import Path

import pytest

from vit.commands.main import main


@pytest.fixture
def input_images(tiny_data: Path) -> list[str]:
    return [str(path) for path in sorted((tiny_data / "val").rglob("*.*"))]


@pytest.fixture
def predict(tiny_run, capfd):
    """Runs the command on the tiny model; gives exit code, lines of stdout, lines of stderr."""

    def run(*words: object, model: object = tiny_run):
        code = main(["predict", str(model), *map(str, words)])
        captured = capfd.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run
