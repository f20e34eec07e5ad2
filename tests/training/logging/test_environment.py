"""environment.jsonl: command, versions and git commits of a run."""

import json
import sys

import pytest
import torch

from vit.errors import RunError
from vit.training.logging import environment
from vit.training.logging.environment import (
    command_line,
    read_environment,
    record_environment,
)
from vit.version import __version__


def test_each_other_command_adds_a_line(tmp_path, monkeypatch):
    assert read_environment(tmp_path) == []
    for option in ("--lr", "--lr", "--resume"):
        monkeypatch.setattr(sys, "argv", ["vit", "train", option])
        record_environment(tmp_path)
    first, second = read_environment(tmp_path)
    assert first["versions"]["vit"] == __version__
    assert first["versions"]["torch"] == torch.__version__
    assert first["cores"] >= 1
    assert first["processor"]
    assert (first["command"], second["command"]) == ("vit train --lr", "vit train --resume")
    assert second["began"] >= first["began"]


def test_a_cut_line_is_left_out(tmp_path):
    path = tmp_path / "environment.jsonl"
    path.write_text(json.dumps({"command": "a"}) + '\n[1]\n{"command": "b')
    assert read_environment(tmp_path) == [{"command": "a"}]
    path.write_bytes(b"\xff\xfe")
    assert read_environment(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    with pytest.raises(RunError, match="gone"):
        record_environment(tmp_path / "gone")


def test_a_machine_without_git_has_no_commits(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._git(tmp_path, "rev-parse", "HEAD") is None


@pytest.mark.parametrize(
    ("argv", "orig_argv", "expected"),
    [
        (["/x/bin/vit", "train", "a b"], ["/x/python", "/x/bin/vit"], "vit train 'a b'"),
        (["train.py", "--lr"], ["/x/python3", "train.py", "--lr"], "python3 train.py --lr"),
        (["/x/vit/__main__.py", "train"], ["python", "-m", "vit", "train"], "python -m vit train"),
        (["vit", "a\x1b\n"], ["python", "vit"], r"vit 'a\x1b\n'"),
    ],
)
def test_the_command_is_as_typed(monkeypatch, argv, orig_argv, expected):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert command_line() == expected
