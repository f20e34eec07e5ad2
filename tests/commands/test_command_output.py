"""Progress off a terminal and errors of the system: plain lines on standard error."""

import errno
import io
import os

import pytest

from vit.commands.command_output import Progress, print_result
from vit.commands.main import main
from vit.errors import RunError


@pytest.mark.parametrize(
    ("total", "head"), [(9, "vit data: 5 of 9 images read, "), (0, "vit data: 5 images read, ")]
)
def test_a_line_has_what_is_known(monkeypatch, capsys, total, head):
    monkeypatch.setattr("vit.commands.command_output.SECONDS", 0.0)
    with Progress("vit data") as progress:
        for done in (1, 5):
            progress(done, total, "read")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(head)
    assert line.endswith("left" if total else "images/s")


def test_long_commands_print_lines(tiny_run, tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vit.commands.command_output.SECONDS", 0.0)
    words = ["--device", "cpu", "--precision", "fp32", "-b", "9"]
    assert main(["evaluate", str(tiny_run), str(tiny_data), *words]) == 0
    assert "vit evaluate: 18 of 27 images, " in capsys.readouterr().err
    assert (
        main(["data", str(tiny_data / "val"), "--to", "shards", "--out", str(tmp_path / "x")]) == 0
    )
    assert "vit data: 2 of 27 images, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["data", "--to", "folder", "--out"], ["train", "--precision", "fp32", "--out"]]
)
def test_a_path_that_the_system_refuses_is_one_line(tmp_path, capsys, words):
    command, *flags = words
    name = "x" * 300
    assert main([command, name, *flags, str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.endswith(f"{name}: {os.strerror(errno.ENAMETOOLONG)}\n")


def test_a_result_is_printed_if_its_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    def full(_path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vit.output.output_file.os.fsync", full)
    with pytest.raises(RunError, match="the disk is full"):
        print_result("top-1 90 %", str(tmp_path / "a.json"), {"top1": 0.9})
    assert capsys.readouterr().out == "top-1 90 %\n"
    assert not [*tmp_path.iterdir()]


def test_files_of_a_result_are_written_if_nobody_reads_what_is_printed(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, _text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    page, record = tmp_path / "a.html", tmp_path / "a.json"
    with pytest.raises(BrokenPipeError):
        print_result("top-1 90 %", str(record), {}, write=lambda: page.touch())
    assert page.exists()
    assert record.exists()
