"""What the reports of all tasks share: settings, commands, experts."""

import pytest
import torch

from vit.evaluation.classification_metrics import Outcomes
from vit.evaluation.classification_page import write_classification_report
from vit.evaluation.run_report import changed_settings, training_cost


@pytest.fixture
def write(tmp_path, make_facts, make_epochs):
    """Write a report of two images into a folder, and return its text."""

    def write(settings=None, folder="a run", event=None, **changes):
        (tmp_path / folder).mkdir()
        shown = {"folder": tmp_path / folder, "epochs": make_epochs(2, **(event or {})), **changes}
        write_classification_report(
            make_facts(("a", "b"), settings, **shown),
            Outcomes.of(torch.eye(2), torch.arange(2)),
            ["/nowhere/a.png", "/nowhere/b.png"],
        )
        return (tmp_path / folder / "report.html").read_text(encoding="utf-8")

    return write


def test_settings_that_differ_are_listed_and_no_others(write, parse, make_facts):
    text = parse(write({"lr": 0.25, "ema": 0.9, "depth": 12})).lines
    assert "\nlr\n0.25\n0.001\nPeak learning rate" in text
    assert "\nema\n0.9\n0.0\n" in text
    assert "\ndepth\n" not in text
    assert "\nnum_classes\n" not in text
    assert changed_settings(make_facts(("a", "b")).config) == []
    text = parse(write(folder="defaults")).prose
    assert "All settings are the defaults of vit_tiny_patch16_224." in text


def test_commands_are_quoted_for_a_shell(write, parse, tmp_path):
    code = parse(write(folder="it's <b>")).lines
    folder = str(tmp_path / "it's <b>")
    shell = folder.replace("'", "'\"'\"'")
    assert f"\nvit predict '{shell}' IMAGE...\n" in code
    assert f"\nvit train --config '{shell}/config.yaml' --out ANOTHER_FOLDER\n" in code
    assert f"\nimport vit; vit.Predictor({folder!r})(['image.jpg'])" in code


def test_notes_about_the_data_and_a_soup_are_in_the_report(write, parse):
    note = "2 images in training and in validation (leak): a<b>.png = c.png"
    page = parse(write(notes=(note,), soup=(1, 2)))
    assert note in page.prose
    assert "\nsoup of epochs\n1, 2\n" in page.lines
    assert "a soup, the average of epochs 1, 2," in page.prose
    assert "Notes about the data" not in parse(write(folder="none")).prose


def test_unreadable_images_are_listed_up_to_50(write, parse):
    page = parse(write(unreadable={f"/x/{number}.png": "damaged" for number in range(60)}))
    assert "60 images could not be read and took no part. The first 50:" in page.prose
    assert page.texts.count("damaged") == 50


def test_the_load_of_experts_is_that_of_the_best_epoch(write, parse):
    layer = {"block": 3, "load": [0.5, 0.375, 0.125, 0.0], "entropy": 0.875, "dropped": 0.01}
    text = parse(write(event={"routers": [layer]})).lines
    assert "\n3\n25.0%\n50.0%\n0.0%\n87.5%\n1.0%\n" in text
    assert "\nblock\n1\n2\n3\n4\n3\n50.0%\n37.5%\n12.5%\n0.0%" in text
    assert "How the experts are used" not in parse(write(folder="dense")).prose


def test_an_epoch_without_a_step_has_no_speed(tmp_path):
    probe = {"images_per_second": 0.0, "data_wait": 0.0, "seconds": 1.0}
    epoch = {"images_per_second": 50.0, "data_wait": 0.5, "seconds": 8.0}
    cost = training_cost(tmp_path, [probe, epoch])
    assert (cost["images_per_second"], cost["data_wait"], cost["seconds"]) == (50.0, 0.5, 9.0)
    assert training_cost(tmp_path, [probe])["images_per_second"] == 0.0


def test_the_origin_of_a_run_is_shown(write, parse, make_session):
    commands = "vit train '<b>pets' --lr 1e-3", "vit train --resume"
    text = parse(write(environment=[make_session(command) for command in commands])).prose
    for expected in (
        "vit train '<b>pets' --lr 1e-3",
        "resumed:vit train --resume",
        "vit 0.1, torch 2.9",
        "A processor, 8 cores; A GPU; Linux",
        "c0ffee, with changes",
    ):
        assert expected in text
    assert "How it was made" not in parse(write(folder="of an older version")).prose


def test_costs_are_those_of_the_training(write, parse):
    text = parse(write(event={"data_wait": 0.25}, flops=2_500_000_000)).lines
    for tile in (
        "parameters\n21.7 M",
        "FLOPs of an image\n2.5 G",
        "training, images/s\n812",
        "waiting for images\n25%",
        "training time\n2 min",
    ):
        assert f"\n{tile}\n" in text
    older = parse(write(folder="older")).lines
    assert "FLOPs" not in older
    assert "waiting for images" not in older
