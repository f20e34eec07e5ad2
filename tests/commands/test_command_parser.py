"""The help of one screen, of a group, of a flag, and of everything; the flags of DATA."""

import importlib
import os
import shutil

import pytest

from tests.commands.conftest import read_rows
from vit.commands.command_parser import CommandParser, dataset_spec
from vit.commands.main import COMMANDS, main, refuse_other_distribution
from vit.commands.train_command import TITLES
from vit.config import SourceConfig
from vit.config.setting_layers import all_settings
from vit.config.settings import settings_of

POSITIONAL = {"compare": ["A", "B"], "evaluate": ["RUN"], "calibrate": ["RUN"]}
FIXED = ["--device", "cpu", "--precision", "fp32", "-j", "1"]
SHORT = ("train", "plan", "tune", "predict")


@pytest.fixture(autouse=True)
def screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def show(capsys, *words):
    assert main([*words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_in_the_whole_help(command, capsys):
    parser = CommandParser(prog=f"vit {command}")
    importlib.import_module(f"vit.commands.{command}_command").add_arguments(parser)
    text = show(capsys, command, "--help-all")
    shown = [one for one in parser._actions if one.option_strings != ["--help-all"]]
    assert len(shown) > 1
    for action in shown:
        assert (action.option_strings or [action.metavar])[-1] in text


@pytest.mark.parametrize("command", SHORT)
def test_the_short_help_fits_a_screen_and_leads_to_the_rest(command, capsys):
    text = show(capsys, command, "--help")
    lines = text.splitlines()
    assert 20 < len(lines) <= 40, len(lines)
    assert max(map(len, lines)) <= 80
    assert "--help-all" in text
    assert f"vit {command} " in text.split("examples:\n")[1]


def test_a_command_with_few_flags_shows_all_of_them(capsys):
    assert show(capsys, "check", "-h") == show(capsys, "check", "--help-all")


def test_every_setting_of_a_training_is_in_a_group_of_its_own_help(capsys):
    short = show(capsys, "train", "--help")
    found = {}
    for section, title in TITLES.items():
        name = title.split(" (")[0].split(":")[0]
        assert name in short
        found[section] = show(capsys, "train", "--help", name)
    for setting in all_settings().values():
        if setting.name != "data" and setting.properties.named:
            assert f"--{setting.name.replace('_', '-')}" in found[setting.section]


@pytest.mark.parametrize("word", ["weight_decay", "--weight-decay", "weight-decay"])
def test_one_flag_has_its_help(word, capsys):
    arguments = [f"--help={word}"] if word.startswith("-") else ["--help", word]
    text = show(capsys, "train", *arguments)
    assert text.strip().startswith("--weight-decay DECAY")
    assert "--lr" not in text


@pytest.mark.parametrize("command", ["check", "data", "evaluate", "compare", "calibrate"])
def test_data_are_read_by_the_same_flags_everywhere(command, tmp_path):
    module = importlib.import_module(f"vit.commands.{command}_command")
    parser = CommandParser(prog=command)
    module.add_arguments(parser)
    fixed = ("data", "exclude", "corrections", *(["group"] if command == "data" else []))
    names = [name for name in settings_of(SourceConfig) if name not in fixed]
    values = [name for name in names if name != "allow_outside"]
    flags = [word for name in values for word in (f"--{name.replace('_', '-')}", name.upper())]
    words = [*POSITIONAL.get(command, ()), "DATA", *flags, "--allow-outside"]
    more = ["--to", "folder", "--out", str(tmp_path)] if command == "data" else []
    spec = dataset_spec(parser.parse([*words, *more]))
    found = {**vars(spec), "labels": spec.label_list, "target": ",".join(spec.target)}
    assert {name: found[name] for name in values} == {name: name.upper() for name in values}
    assert spec.allow_outside
    assert spec.split == (None if command in ("check", "data") else "val")


@pytest.fixture
def photos(tiny_data, tmp_path, monkeypatch):
    """The images of tiny_data straight in a folder, some of them with hostile names."""
    hostile = [b"=1+1", b"-a", b"\\x1b", b"\x1b", b" a", b"\xff", b"a\n", b"\xe2\x80\xae", b"a,'b"]
    (tmp_path / "photos").mkdir()
    for path in tiny_data.rglob("*.*"):
        name = hostile[int(path.stem)] + os.fsencode(path.suffix)
        to = os.fsencode(tmp_path / "photos") + b"/" + path.parent.name.encode() + name
        shutil.copy(path, to)
    monkeypatch.chdir(tmp_path)
    return "photos"


@pytest.mark.usefixtures("twenty_images_calibrate")
def test_lists_go_from_command_to_command(photos, tiny_run, capsys):
    run = shutil.copytree(tiny_run, "run")
    for suffix in ("csv", "jsonl"):
        lists = f"first.{suffix}", f"second.{suffix}"
        assert main(["predict", str(run), photos, "--out", lists[0], *FIXED]) == 0
        assert main(["predict", str(run), lists[0], "--out", lists[1], *FIXED]) == 0
        first, second = map(read_rows, lists)
        assert [row["image"] for row in first] == [row["image"] for row in second]
        answer = "label_1" if suffix == "csv" else "predictions"
        assert [row[answer] for row in first] == [row[answer] for row in second]
    names = [row["image"] for row in read_rows("first.csv")]
    assert len(names) == 27
    labels = ["--labels", "first.csv", "--label-column", "label_1"]
    assert main(["evaluate", str(run), photos, *labels, "--json", "e.json", *FIXED]) == 0
    (found,) = read_rows("e.json")
    assert (found["top1"], found["count"]) == (1.0, 27)  # the labels are its own answers
    assert main(["calibrate", str(run), photos, *labels, "--json", "c.json", *FIXED]) == 0
    assert read_rows("c.json")[0]["calibration"]["images"] == 27
    assert main(["compare", str(run), str(tiny_run), photos, *labels, *FIXED]) == 0
    assert main(["data", photos, *labels, "--to", "folder", "--out", "copied"]) == 0
    assert sum(len(files) for _, _, files in os.walk("copied")) == 28  # and vit-data.json
    capsys.readouterr()
    words = ["suggest", photos, "--weights", str(run), "--out", "list.csv", "-n", "9", *FIXED]
    assert main([*words, "--exclude", "first.csv"]) == 2
    assert "no images to suggest from" in capsys.readouterr().err
    assert main(words) == 0
    assert main(["predict", str(run), "list.csv", "--out", "third.csv", *FIXED]) == 0
    with open("third.csv", "rb") as file:
        assert file.read().count(b"\r\n") == 10


def test_another_project_in_the_same_package_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "vit_toolkit-0.1.0.dist-info").mkdir()
    refuse_other_distribution(tmp_path)
    (tmp_path / "vit-2.3.4.dist-info").mkdir()
    with pytest.raises(SystemExit) as stop:
        refuse_other_distribution(tmp_path)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("vit: vit-2.3.4 is another project, whose files ")
