"""Checks of output files before any work is done."""

import pytest

from vit.commands.main import main
from vit.errors import VitError
from vit.output.output_file import check_distinct


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json", "a.json", "--html", "./a.json"], "--json and --html are one file"),
        (["--json", "list.csv"], "--json list.csv is a file that is read: give another name"),
        (["--html", "link.csv"], "--html link.csv is a file that is read: give another name"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "run", "list.csv"],
        ["check", "list.csv"],
        ["compare", "a", "b", "list.csv"],
        ["suggest", "photos", "--weights", "run", "--labels", "list.csv"],
    ],
)
def test_outputs_replace_no_input_and_not_each_other(
    command, words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.csv").write_text("image,label\n")
    (tmp_path / "link.csv").symlink_to("list.csv")
    assert main([*command, *words]) == 2
    assert f"vit {command[0]}: {message}" in capsys.readouterr().err
    assert (tmp_path / "list.csv").read_text() == "image,label\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["verify", "m.onnx", "--json", "m.onnx"], "--json m.onnx is a file that is read"),
        (["summary", "m.onnx", "--json", "m.onnx"], "--json m.onnx is a file that is read"),
        (["evaluate", "m.onnx", "data", "--out", "old.csv"], "old.csv exists; choose another name"),
        (["suggest", "data", "--weights", "r", "-n", "1", "--out", "old.csv"], "old.csv exists"),
        (["plan", "data", "--save", "old.csv"], "old.csv exists; choose another name"),
        (["plan", "m.onnx", "--save", "m.onnx", "--overwrite"], "--save m.onnx is a file that is"),
        (["export", "run", "--out", "m.onnx", "--json", "m.onnx"], "--out and --json are one file"),
        (["evaluate", "run", "data", "--json", ""], "the name of an output file is empty"),
        (["verify", "m.onnx", "--json", ""], "the name of an output file is empty"),
        (["plan", "data", "--save", ""], "the name of an output file is empty"),
        (["suggest", "data", "--weights", "run", "--out", ""], "the name of an output file is"),
    ],
)
def test_a_model_is_no_output_and_an_output_has_a_name(
    command, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.onnx").write_text("network")
    (tmp_path / "old.csv").touch()
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert (tmp_path / "m.onnx").read_text() == "network"


def test_devices_and_new_names_are_distinct(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    check_distinct({"--json": "/dev/null", "--html": "/dev/null", "--out": None}, [str(data)])
    with pytest.raises(VitError, match="rows is a file that is read"):
        (tmp_path / "rows").write_text("")
        check_distinct({"--json": str(tmp_path / "rows")}, [str(tmp_path / "rows")])
