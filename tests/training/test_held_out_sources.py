"""Whole sources are held out of a training, and top-1 on them is the second number everywhere."""

import csv
import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

import vit
from tests.training.runs import SHORT, read_report
from vit.commands.main import main
from vit.training.train import train

ROOMS = 12


@pytest.fixture(scope="module")
def rooms(tmp_path_factory):
    """Two classes of 180 images each, of 12 rooms by their names."""
    root, random = tmp_path_factory.mktemp("rooms"), np.random.default_rng(0)
    for place, name in enumerate(("cat", "dog")):
        (root / name).mkdir()
        for number in range(180):
            pixels = random.integers(0, 255, (24, 24, 3), dtype=np.uint8)
            pixels[:, :, place] |= 128
            image = Image.fromarray(pixels)
            image.save(root / name / f"room{number % ROOMS}_{number:03}.png")
    return root


@pytest.mark.auto_precision
def test_a_training_reports_top1_of_sources_that_it_has_not_seen(
    rooms, tiny_config, tmp_path, capsys
):
    settings = {"data": str(rooms), **SHORT, "val_share": 0.4}
    run = train(tiny_config(**settings), tmp_path / "run").folder
    log = capsys.readouterr().err
    held = set(json.loads((run / "split.json").read_text())["val"])
    rooms_of = {name: name.split("/")[1].split("_")[0] for name in held}
    whole = [room for room, images in Counter(rooms_of.values()).items() if images == 30]
    assert len(whole) == 2  # a fifth of the images; the rest is of all others
    assert {*rooms_of.values()} == {f"room{number}" for number in range(ROOMS)}
    assert "all 60 of 2 sources (by file name, such as room" in log
    assert "new sources: top-1" in log
    assert "--sets holds for images of new sources too" in log
    with (run / "groups.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 360
    assert all(row["source"] == f"file name: {row['image'][4:].split('_')[0]}_" for row in rows)
    new = {row["image"] for row in rows if row["new_source"]}
    assert new == {name for name in held if rooms_of[name] in whole}
    scores = vit.evaluate(run, str(rooms), device="cpu")
    found = scores["new_source"]
    assert (found["images"], found["sources"], found["by"]) == (60, 2, "file name")
    low, high = found["top1_interval"]
    assert low <= found["top1"] <= high
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (event,) = [one for one in events if one["event"] == "new_source"]
    summary = json.loads((run / "summary.json").read_text())["new_source"]
    for one in (event, summary):
        assert {key: one[key] for key in found} == found
    assert "new sources: top-1" in read_report(run)
    assert main(["runs", str(tmp_path), "--json", str(tmp_path / "runs.json")]) == 0
    (row,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert row["new_source"] == found
    assert row["interval"] is not None  # sources are no groups of images that are alike
    (run / "report.html").unlink()
    train(tiny_config(**settings), run, resume=True)  # has the same split, or is refused


@pytest.mark.slow
@pytest.mark.auto_precision
def test_backgrounds_stand_for_sources_that_nothing_tells_apart(rooms, tiny_config, tmp_path):
    data = tmp_path / "data"
    for number, path in enumerate(sorted(rooms.rglob("*.png"))):
        name = "".join(chr(97 + number // 26**place % 26) for place in range(3))
        copy = data / path.parent.name / f"{name}.png"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    run = train(tiny_config(data=str(data), **SHORT, val_share=0.4), tmp_path / "run").folder
    found = vit.evaluate(run, str(data), device="cpu")["new_source"]
    assert (found["images"], found["sources"], found["by"]) == (36, 0, "background")


@pytest.mark.slow
@pytest.mark.auto_precision
def test_groups_that_a_user_names_are_new_sources(rooms, tiny_config, tmp_path):
    settings = {"data": str(rooms), **SHORT, "val_share": 0.4, "group": r"(room\d+)_"}
    run = train(tiny_config(**settings), tmp_path / "run").folder
    scores = vit.evaluate(run, str(rooms), device="cpu")
    found = scores["new_source"]
    assert found["top1"] == pytest.approx(scores["top1"])
    assert (found["images"], found["sources"], found["by"]) == (150, 5, "group")


@pytest.mark.slow
@pytest.mark.auto_precision
def test_folds_have_whole_sources(rooms, tiny_config, tmp_path):
    settings = {"data": str(rooms), **SHORT, "folds": 3}
    vit.cross_validate(tiny_config(**settings), tmp_path / "folds")
    rooms_of = []
    for fold in (1, 2, 3):
        run = tmp_path / "folds" / f"fold-{fold}"
        held = json.loads((run / "split.json").read_text())["val"]
        rooms_of.append({name.split("/")[1].split("_")[0] for name in held})
        found = vit.evaluate(run, str(rooms), device="cpu")["new_source"]
        assert (found["images"], found["sources"], found["by"]) == (120, 4, "file name")
    assert len(set.union(*rooms_of)) == sum(map(len, rooms_of)) == ROOMS


@pytest.mark.slow
@pytest.mark.auto_precision
def test_what_the_weights_have_not_seen_stays_unseen(rooms, tiny_config, tmp_path):
    settings = {"data": str(rooms), **SHORT, "val_share": 0.4}
    first = train(tiny_config(**settings, group=None), tmp_path / "first").folder
    second = vit.train(
        str(rooms), str(tmp_path / "second"), weights=str(first), epochs=1, device="cpu", workers=0
    ).folder
    held = [json.loads((run / "split.json").read_text())["val"] for run in (first, second)]
    assert held[0] == held[1]
