"""`--group auto` in whole runs: scenes stay together from the split to the report."""

import csv
import json

import pytest

import vit
from tests.data.checks.test_duplicates import scene
from tests.training.runs import SHORT, assert_equal_runs, read_report
from vit.commands.main import main
from vit.errors import DataError
from vit.training import settings_from_data
from vit.training.train import train


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """Two classes of five films, of four overlapping frames each, and twelve single images."""
    root = tmp_path_factory.mktemp("films")
    for place, name in enumerate(("cat", "dog")):
        folder = root / name
        folder.mkdir()
        for film in range(5):
            for frame in range(4):
                cut = scene(100 * place + film).crop((frame, 0, frame + 90, 72))
                cut.save(folder / f"{film}_{frame}.png")
        for single in range(12):
            scene(100 * place + 50 + single).save(folder / f"single{single}.png")
    return root


def held_out(run):
    return set(json.loads((run / "split.json").read_text())["val"])


@pytest.mark.auto_precision
def test_no_film_is_divided_and_a_resumed_run_has_the_same_split(
    films, tiny_config, tmp_path, monkeypatch, capsys
):
    settings = {"data": str(films), **SHORT, "val_share": 0.4}
    run = train(tiny_config(**settings), tmp_path / "run").folder
    assert "40 images in 10 scenes" in capsys.readouterr().err
    with (run / "groups.csv").open() as file:
        groups = {row["image"]: row["group"] for row in csv.DictReader(file) if row["group"]}
    films_of = {name: f"{name.split('_')[0]}_0.png" for name in groups}
    assert groups == films_of
    assert len(groups) == 40
    held = held_out(run)
    assert {groups[name] for name in held & groups.keys()}.isdisjoint(
        groups[name] for name in groups.keys() - held
    )
    # the validation images count as their films and singles, here and in the report
    scores = vit.evaluate(run, str(films), device="cpu")
    assert scores["groups"] == len({groups.get(name, name) for name in held})
    assert "40 images in 10 scenes" in read_report(run)

    def refused(*_args, **_more):
        raise AssertionError("the scenes are recorded")

    monkeypatch.setattr(settings_from_data, "find_groups", refused)
    again = train(tiny_config(**settings), run, resume=True)
    assert again.folder == run
    monkeypatch.undo()
    (run / "groups.csv").unlink()
    with pytest.raises(DataError, match="changed since"):
        train(tiny_config(**settings), run, resume=True)


@pytest.mark.slow
@pytest.mark.auto_precision
def test_each_image_is_on_its_own_with_group_none(films, tiny_config, tmp_path):
    settings = {"data": str(films), **SHORT, "val_share": 0.4, "group": None}
    run = train(tiny_config(**settings), tmp_path / "run").folder
    assert not (run / "groups.csv").exists()
    assert len(held_out(run)) == 26
    assert "groups" not in vit.evaluate(run, str(films), device="cpu")
    (run / "config.yaml").read_text().index("group: null")  # as runs of earlier versions have it
    other = train(run / "config.yaml", tmp_path / "other").folder
    assert_equal_runs(run, other)


@pytest.mark.slow
@pytest.mark.auto_precision
def test_films_stay_together_in_folds(films, tiny_config, tmp_path):
    settings = {"data": str(films), **SHORT, "folds": 2}
    vit.cross_validate(tiny_config(**settings), tmp_path / "folds")
    first, second = (held_out(tmp_path / "folds" / f"fold-{n}") for n in (1, 2))
    assert len(first | second) == 64
    assert not {n.split("_")[0] for n in first if "_" in n} & {
        n.split("_")[0] for n in second if "_" in n
    }


@pytest.mark.slow
@pytest.mark.auto_precision
def test_the_groups_that_a_check_wrote_can_be_edited_and_given_back(
    films, tiny_config, tmp_path, capsys
):
    """Check and plan find what a training finds; the training takes the edited list."""
    table, page, answer = (tmp_path / name for name in ("groups.csv", "page.html", "found.json"))
    words = ["--write-groups", str(table), "--html", str(page), "--json", str(answer)]
    assert main(["check", str(films), *words, "--no-cache"]) == 0
    scenes = json.loads(answer.read_text())["scenes"]
    assert sorted(map(len, scenes)) == [4] * 10
    assert main(["plan", str(films), "--epochs", "2"]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("40 images of 10 scenes")
    text = page.read_text()
    assert "40 images of 10 scenes" in text
    assert text.count("<img") >= 40
    with table.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 64
    assert sum(bool(row["group"]) for row in rows) == 40
    for row in rows:
        row["group"] = "all dogs" if row["image"] in ("dog/0_0.png", "dog/single3.png") else ""
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    settings = {"data": str(films), **SHORT, "group": str(table)}
    run = train(tiny_config(**settings), tmp_path / "run").folder
    with (run / "groups.csv").open() as file:
        kept = {row["image"]: row["group"] for row in csv.DictReader(file) if row["group"]}
    assert kept == dict.fromkeys(("dog/0_0.png", "dog/single3.png"), "dog/0_0.png")
    table.unlink()
    train(tiny_config(**settings), run, resume=True)
