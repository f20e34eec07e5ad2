"""`vit demo` trains on the digits of the package, and labels two of each class."""

import pytest

from vit.commands import train_command
from vit.commands.main import main

TINY = "--image-size 16 --patch-size 8 --dim 32 --depth 2 --num-heads 2 --epochs 1 --precision fp32"


def test_the_demo_is_a_training_on_the_digits_that_replaces_only_its_own_run(monkeypatch, tmp_path):
    trained = []
    monkeypatch.setattr(train_command, "run", lambda args: trained.append(args) or 2)
    assert main(["demo"]) == main(["demo", "--out", str(tmp_path), "--epochs", "3"]) == 2
    first, second = trained
    assert (first.data, first.out, first.overwrite) == ("digits", "runs/demo", True)
    assert (second.out, second.overwrite) == (str(tmp_path), False)
    assert train_command.chosen_settings(second) == {"data": "digits", "epochs": 3}


@pytest.mark.slow
@pytest.mark.auto_precision
def test_the_demo_writes_a_run_and_prints_twenty_labels(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *TINY.split()]) == 0
    printed = capfd.readouterr()
    assert sum(".png" in line for line in printed.out.splitlines()) == 20
    assert "runs/demo/report.html" in printed.err
    assert (tmp_path / "runs/demo/report.html").is_file()
    assert main(["demo", *TINY.split(), "--out", "runs/demo"]) == 2
    assert "--overwrite" in capfd.readouterr().err
