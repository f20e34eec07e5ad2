"""`vit summary` shows the network that would be built, and says in a line what cannot be."""

import json
import shutil
import subprocess
import sys

import pytest

from vit.commands.main import main
from vit.evaluation.model_summary import Part, equal_blocks, number_ranges
from vit.model.build import create_model
from vit.weights.convert import convert

TINY = ["--depth", "2", "--img-size", "32", "--num-classes", "10"]


def lines_of(capsys, *words: str) -> list[str]:
    assert main(["summary", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_summary_shows_parts_totals_and_memory(capsys):
    words = ["vit_tiny_patch16_224", "--position", "rotary", "--num-classes", "10"]
    lines = lines_of(capsys, *words, "--img-size", "96", "-b", "7")
    network = create_model("vit_tiny_patch16_224", position="rotary", num_classes=10, image_size=96)
    millions = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    name, *rest = lines[0].split()
    assert name == "vit_tiny_patch16_224:"
    assert rest[:2] == [f"{millions:.2f}", "M"]
    text = "\n".join(lines)
    for part in ("patch embedding", "blocks 1-12 (x 12)", "  attention", "  feed-forward", "head"):
        assert f"\n{part}" in text
    total = next(line for line in lines if line.startswith("total"))
    assert f"{millions:.2f} M" in total
    assert "training, 7 images" in text
    assert "RotaryEmbedding" in text


def test_the_json_has_every_part(capsys, tmp_path):
    lines = lines_of(capsys, "vit_tiny_patch16_224", *TINY, "--json", str(tmp_path / "cost.json"))
    assert lines[0].startswith("vit_tiny_patch16_224: ")
    content = json.loads((tmp_path / "cost.json").read_text())
    assert content["settings"]["num_classes"] == 10
    assert content["parameters"] == sum(part["parameters"] for part in content["parts"])
    blocks = next(part for part in content["parts"] if part["name"] == "blocks")
    assert len(blocks["parts"]) == 2
    assert content["memory"]["weights"] == 4 * content["parameters"]
    shown = json.loads("\n".join(lines_of(capsys, "vit_tiny_patch16_224", *TINY, "--json", "-")))
    assert shown == content


def test_a_run_folder_needs_only_its_config(capsys, tmp_path, tiny_run):
    shutil.copy(tiny_run / "config.json", tmp_path)
    lines = lines_of(capsys, str(tmp_path), "--img-size", "32")
    assert lines[0].endswith("3 x 32 x 32")
    assert any(line.startswith("blocks 1-2 (x 2)") for line in lines)


def test_a_timm_folder_is_summarised_with_changed_settings(capsys, tmp_path, tiny_run):
    convert(tiny_run, "timm", tmp_path / "timm")
    lines = lines_of(capsys, str(tmp_path / "timm"), "--num-classes", "7")
    assert any(line.startswith("blocks 1-2 (x 2)") for line in lines)
    assert any(line.split()[:3] == ["head", "Linear", "7"] for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["vit_smal_patch16_224"], "the nearest are vit_small_patch16_224"),
        (["vit_tiny_patch16_224", "--position", "rotry"], "did you mean rotary?"),
        (["vit_tiny_patch16_224", "--img-size", "97"], "the nearest are 96 and 112"),
        (["vit_tiny_patch16_224", "--epochs", "3"], "--epochs is not an argument"),
        (["vit_tiny_patch16_224", "--dim", "3000000000000"], "choose smaller sizes"),
        (["vit_tiny_patch16_224", "-b", "0"], "whole number"),
        (["vit_tiny_patch16_224", "--json", "missing/x.json"], "no folder missing"),
        (["./nowhere"], "nowhere is not there"),
        (["runs\0"], "is not a preset"),
    ],
)
def test_invalid_arguments_are_one_line_errors(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["summary", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_damaged_config_is_a_one_line_error(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"vit": {"version": 1}}')
    assert main(["summary", str(tmp_path)]) == 2
    assert "has the keys ['version']" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["vit_smal"], ["vit_tiny_patch16_224", "--norm", "batch"], ["--help"]]
)
def test_help_and_errors_of_arguments_do_not_import_torch(words):
    code = (
        "import sys; from vit.commands.main import main; code = main(['summary', *sys.argv[1:]]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == (0 if "--help" in words else 2), run.stderr


def test_equal_blocks_share_one_row():
    one, other = Part("block", ("A",), (3, 4), 5, 6), Part("block", ("B",), (3, 4), 5, 6)
    assert equal_blocks([one] * 4) == [[1, 2, 3, 4]]
    assert equal_blocks([one, other] * 2) == [[1, 3], [2, 4]]


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        (range(1, 13), "1-12"),
        (range(2, 13, 2), "2, 4 .. 12"),
        ([1, 2, 4, 5, 7], "1-2, 4-5, 7"),
        ([3], "3"),
        ([1, 3], "1, 3"),
    ],
)
def test_block_numbers_are_abbreviated_as_ranges(numbers, shown):
    assert number_ranges([*numbers]) == shown
