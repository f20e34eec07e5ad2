"""The help of one screen, of a group, of a flag, and of everything."""

import importlib

import pytest

from vit.commands.command_parser import CommandParser
from vit.commands.main import COMMANDS, main
from vit.commands.train_command import TITLES
from vit.config.parser import all_settings

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
        if setting.name != "data":
            assert f"--{setting.name.replace('_', '-')}" in found[setting.section]


@pytest.mark.parametrize("word", ["weight_decay", "--weight-decay", "weight-decay"])
def test_one_flag_has_its_help(word, capsys):
    arguments = [f"--help={word}"] if word.startswith("-") else ["--help", word]
    text = show(capsys, "train", *arguments)
    assert text.strip().startswith("--weight-decay DECAY")
    assert "--lr" not in text


def test_a_topic_that_is_none_is_an_error_with_the_nearest(capsys):
    assert main(["train", "--help", "augmentatoin"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "did you mean augmentation?" in err
    assert "fine-tuning" in err


def test_a_name_that_begins_with_a_dash_is_written_with_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-kleider").mkdir()
    assert main(["predict", "runs/x", "-kleider"]) == 2
    assert "of this name, write ./-kleider" in capsys.readouterr().err
    assert main(["predict", "runs/x", "-keks"]) == 2
    assert "./" not in capsys.readouterr().err
