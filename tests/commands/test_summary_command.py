"""`vit summary` shows the network that would be built, and says in a line what cannot be."""

import json
import shutil

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
