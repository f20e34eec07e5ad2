"""`vit tune` on the command line: what it hands on, prints and refuses."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import vit
from vit.commands.main import main
from vit.training import tune as tuning


def test_flags_become_fixed_settings_of_the_search(monkeypatch, capsys):
    calls = []

    def tune(*args, **options):
        calls.append((args, options))
        training = SimpleNamespace(folder=Path("x/best"), failed={})
        return SimpleNamespace(folder=Path("x"), changes={"lr": 0.1}, training=training)

    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.setattr(
        tuning, "read_run", lambda run, _: SimpleNamespace(folder=run, score_text="80.00%")
    )
    assert main(["tune", "digits", "--time", "5m", "--depth", "3", "--out", "x", "--resume"]) == 0
    (values, out), options = calls[0]
    assert values == {"data": "digits", "time": "5m", "depth": 3}
    assert (out, options["resume"]) == ("x", True)
    printed = capsys.readouterr().out
    assert printed == (
        "best: lr=0.1: validation 80.00%, run folder x/best; vit runs x compares the trials\n"
    )


def test_vit_tune_is_the_function_of_the_command():
    assert vit.tune is tuning.tune


@pytest.mark.slow
@pytest.mark.auto_precision
def test_the_digits_are_tuned_within_the_time(tmp_path, capsys):
    out = tmp_path / "out"
    code, printed = (
        main(["tune", "digits", "--out", str(out), "--time", "40s"]),
        capsys.readouterr(),
    )
    if code:  # a busy machine needs longer, and is told how long a trial does
        (longer,) = re.findall(r"use --time (\d+)s or more", printed.err)
        words = ["tune", "digits", "--out", str(out / "again")]
        code = main([*words, "--time", f"{10 * int(longer)}s"])
        printed = capsys.readouterr()
    assert code == 0, printed.err
    assert printed.out.startswith("best: ")
    assert printed.err.count("rung1-trial") == 3
    assert len([*out.rglob("report.html")]) == 1
    assert main(["runs", str(out)]) == 0
