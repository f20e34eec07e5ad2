"""`vit tune` on the command line: what it hands on, prints and refuses."""

import json
import re
from types import SimpleNamespace

import pytest

import vit
from vit.commands.main import main
from vit.training import tune as tuning


@pytest.fixture
def asked(monkeypatch):
    """What the library was called with."""
    calls = []

    def tune(*args, **options):
        calls.append((args, options))
        return SimpleNamespace(lines=("one", "two"), training=SimpleNamespace(failed={}))

    monkeypatch.setattr(tuning, "tune", tune)
    return calls


def test_flags_become_fixed_settings_of_the_search(asked, capsys):
    words = ["digits", "--time", "5m", "--trials", "6", "--depth", "3", "--out", "x", "--overwrite"]
    assert main(["tune", *words]) == 0
    (values, out), options = asked[0]
    assert values == {"data": "digits", "time": "5m", "depth": 3}
    assert (out, options["trials"], options["overwrite"]) == ("x", 6, True)
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_tuning_is_resumed_by_its_folder_alone(tmp_path, capsys):
    record = {"settings": {"data": "digits", "time": "5m", "lr": 0.1}, "asked": 6}
    record |= {"trials": [], "rungs": [], "results": [], "seconds": 1.0, "validation": 9}
    (tmp_path / "tune.json").write_text(json.dumps(record))
    values, trials, folder = tuning.resumed_settings({"lr": 0.2}, tmp_path, None, resume=True)
    assert values == {**record["settings"], "lr": 0.2}
    assert (trials, folder) == (6, tmp_path)
    (tmp_path / "tune.json").write_text("{")
    assert main(["tune", "--resume", "--out", str(tmp_path)]) == 2
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "DATA is missing"),
        (["digits"], "time is missing: say how long the whole tuning may take: --time 30m"),
        (["digits", "--time", "5m", "--trials", "0"], "not a whole number of at least 1"),
        (["digits", "--time", "5m", "--trials", "1"], "compares at least 2"),
        (["--resume", "--out", "nowhere"], "no tuning to resume there"),
        (["digits", "--time", "5m", "--model", "x"], "leave out --model, --weights and --method"),
    ],
)
def test_invalid_arguments_are_one_line_errors(words, message, capsys):
    assert main(["tune", *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_vit_tune_is_the_function_of_the_command():
    assert vit.tune is tuning.tune


@pytest.mark.slow
@pytest.mark.auto_precision
def test_the_digits_are_tuned_within_the_time(tmp_path, capsys):
    out = tmp_path / "out"
    words = ["tune", "digits", "--trials", "3", "--out", str(out)]
    code, printed = main([*words, "--time", "70s"]), capsys.readouterr()
    if code:  # a busy machine needs longer, and is told how long
        (longer,) = re.findall(r"use --time (\d+)s or more", printed.err)
        code = main([*words, "--time", f"{int(longer) + 20}s"])
        printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "trained for" in printed.out
    assert printed.err.count("rung 1, ") == 3
    assert (out / "best" / "report.html").is_file()
    assert (out / "tune.html").is_file()
