"""Checks of output files before any work is done."""

import pytest

from vit.commands.main import main
from vit.errors import VitError
from vit.output.output_file import check_distinct

READ = "is a file that is read"
EMPTY = "the name of an output file is empty"
SUGGEST = "suggest data --weights run"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("evaluate run list.csv --json a.json --html ./a.json", "--json and --html are one file"),
        ("evaluate run list.csv --json list.csv", f"--json list.csv {READ}: give another name"),
        ("check list.csv --html link.csv", f"--html link.csv {READ}: give another name"),
        ("compare a b list.csv --json list.csv", f"--json list.csv {READ}"),
        (f"{SUGGEST} --labels list.csv --html link.csv", f"--html link.csv {READ}"),
        ("verify m.onnx --json m.onnx", f"--json m.onnx {READ}"),
        ("summary m.onnx --json m.onnx", f"--json m.onnx {READ}"),
        ("plan m.onnx --save m.onnx --overwrite", f"--save m.onnx {READ}"),
        ("export run --out m.onnx --json m.onnx", "--out and --json are one file"),
        ("evaluate m.onnx data --out old.csv", "old.csv exists; choose another name"),
        (f"{SUGGEST} -n 1 --out old.csv", "old.csv exists"),
        ("plan data --save old.csv", "old.csv exists; choose another name"),
        ("evaluate run data --json EMPTY", EMPTY),
        ("verify m.onnx --json EMPTY", EMPTY),
        ("plan data --save EMPTY", EMPTY),
        (f"{SUGGEST} --out EMPTY", EMPTY),
    ],
)
def test_outputs_replace_no_input_and_not_each_other_and_have_names(
    command, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    files = {"list.csv": "image,label\n", "m.onnx": "network", "old.csv": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.csv").symlink_to("list.csv")
    assert main(["" if word == "EMPTY" else word for word in command.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vit {command.split()[0]}: ")
    assert message in line
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_devices_and_new_names_are_distinct(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    check_distinct({"--json": "/dev/null", "--html": "/dev/null", "--out": None}, [str(data)])
    with pytest.raises(VitError, match="rows is a file that is read"):
        (tmp_path / "rows").write_text("")
        check_distinct({"--json": str(tmp_path / "rows")}, [str(tmp_path / "rows")])
