"""`vit compare`: the counts are those of the predictions of both runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.inference.answers import right_answers
from vit.commands.main import main
from vit.config import Config, TrainingConfig
from vit.config.setting_layers import make_config, write_settings
from vit.data.dataset_types import NO_LABEL, Sample
from vit.errors import ConfigError, DataError
from vit.inference.compare import answer_of, compare, compare_runs
from vit.inference.evaluate import evaluate
from vit.weights.saved_model import load_run, save_model, update_run

EXACT = {"device": "cpu", "precision": "fp32"}
WORDS = ["--device", "cpu", "--precision", "fp32"]


def right_images(run, data):
    images = [str(path) for path in sorted((data / "val").rglob("*.*"))]
    right = right_answers(run, images)
    return {path for path, hit in zip(images, right, strict=True) if hit}


def saved_with_classes(folder, run, classes, task="classify"):
    """A run folder of the network of `run` with other classes."""
    folder.mkdir()
    config = Config(model=run.config, training=TrainingConfig(task=task))
    preprocessing = run.preprocessing
    save_model(folder, run.model, config=config, classes=classes, preprocessing=preprocessing)
    return folder


def copies_that_held_out(tiny_run, data, folder, places):
    """Copies of the run, each with a validation split of these slices of the sorted images."""
    names = sorted(path.relative_to(data).as_posix() for path in data.rglob("*.*"))
    runs = []
    for number, place in enumerate(places):
        runs.append(Path(shutil.copytree(tiny_run, folder / str(number))))
        record = {"root": str(data.resolve()), "val": names[place]}
        (runs[-1] / "split.json").write_text(json.dumps(record))
    return runs


@pytest.fixture
def other_run(tiny_run, tmp_path):
    """The same network with classes in another order, so that it answers otherwise."""
    run = load_run(tiny_run)
    return saved_with_classes(tmp_path / "other", run, run.classes[::-1])


def test_the_counts_are_those_of_the_predictions(tiny_run, other_run, tiny_data, tmp_path, capsys):
    out, page = tmp_path / "result.json", tmp_path / "page.html"
    words = [str(tiny_run), str(other_run), str(tiny_data), "--json", str(out), "--html", str(page)]
    assert main(["compare", *words, *WORDS]) == 0
    found = json.loads(out.read_text())
    assert list(found) == [
        *("count", "a", "b", "difference", "difference_interval", "p_value"),
        *("only_a_right", "only_b_right", "verdict", "images_needed", "failed"),
    ]
    a, b = right_images(tiny_run, tiny_data), right_images(other_run, tiny_data)
    assert (found["only_a_right"], found["only_b_right"]) == (len(a - b), len(b - a))
    assert len(a - b) + len(b - a) > 5
    for key, run in (("a", tiny_run), ("b", other_run)):
        scores = evaluate(run, str(tiny_data), **EXACT)
        shared = {name: scores[name] for name in ("top1", "top1_interval")}
        assert found[key] == {"run": str(run), **shared}
    assert found["count"] == 27
    assert found["difference"] == pytest.approx(found["b"]["top1"] - found["a"]["top1"])
    printed = capsys.readouterr().out
    assert found["verdict"] in printed
    text = page.read_text()
    for path in (a - b) | (b - a):
        assert Path(path).name in text


def test_runs_in_folders_of_the_same_name_are_told_apart(tiny_run, tiny_data, tmp_path):
    runs = [Path(shutil.copytree(tiny_run, tmp_path / name / "best")) for name in "ab"]
    found = compare(*runs, str(tiny_data), **EXACT)
    assert [found.to_dict()[key]["run"] for key in "ab"] == [str(run) for run in runs]
    assert all(str(run) in found.page() for run in runs)


def test_groups_are_compared_as_a_whole(tiny_run, other_run, tiny_data, capsys):
    words = ["compare", str(tiny_run), str(other_run), str(tiny_data), *WORDS]
    assert main([*words, "--group", r"(\d)\.\w+$"]) == 0
    assert "with 27 images of 9 groups" in capsys.readouterr().out
    runs = [tiny_run, other_run, tiny_run]
    found = compare_runs(runs, str(tiny_data), group=r"(\d)\.\w+$", **EXACT)
    assert found.to_dict()["groups"] == 9
    assert found.to_dict()["pairs"][1]["p_value"] == 1.0
    assert "sign flips" in found.page()


def test_groups_of_a_training_are_those_of_a_comparison(tiny_run, tiny_data, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    settings = {"data": str(tiny_data), "group": r"(\d)\.\w+$"}
    write_settings(run / "config.yaml", make_config(settings), "")
    assert compare(tiny_run, run, str(tiny_data), **EXACT).to_dict()["groups"] > 5
    copy = shutil.copytree(tiny_data, tmp_path / "copy")
    assert "groups" not in compare(tiny_run, run, str(copy), **EXACT).to_dict()


def test_a_run_is_not_distinguishable_from_itself(tiny_run, calibrated_run, tiny_data):
    found = compare(tiny_run, calibrated_run, str(tiny_data), **EXACT).to_dict()
    assert (found["p_value"], found["difference"]) == (1.0, 0.0)
    assert (found["verdict"], found["images_needed"]) == ("not distinguishable", None)
    low, high = found["difference_interval"]
    assert -low == pytest.approx(high)
    assert 0 < high < 0.1


def test_unreadable_images_are_left_out_and_named(tiny_run, other_run, tiny_data, tmp_path):
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    (data / "val" / "apple" / "0.png").write_text("no image")
    found = compare(tiny_run, other_run, str(data), **EXACT).to_dict()
    assert found["count"] == 26
    assert [Path(row["image"]).name for row in found["failed"]] == ["0.png"]


@pytest.mark.parametrize(
    ("places", "count", "told"),
    [
        ([(0, 9), (5, 15)], 4, "11 images left out, which only some of the runs held out"),
        ([(0, 9), (5, 15), (3, 8)], 3, "12 images left out, which only some of the runs held out"),
    ],
    ids=["two runs", "three runs"],
)
def test_only_images_that_all_runs_held_out_are_compared(
    tiny_run, tiny_data, tmp_path, places, count, told
):
    data, notes = tiny_data / "val", []
    slices = [slice(*place) for place in places]
    runs = copies_that_held_out(tiny_run, data, tmp_path, slices)
    found = compare_runs(runs, str(data), notify=notes.append, **EXACT).to_dict()
    assert found["count"] == count
    assert any(told in note for note in notes)
    assert len(notes) == len({*notes})  # those about the data are not repeated for each run


def test_runs_that_held_out_different_images_are_not_compared(tiny_run, tiny_data, tmp_path):
    data = tiny_data / "val"
    runs = copies_that_held_out(tiny_run, data, tmp_path, [slice(9), slice(20, 27)])
    with pytest.raises(DataError, match="no image is held out by all"):
        compare(*runs, str(data), **EXACT)


def test_images_of_a_class_that_one_of_them_does_not_have_are_left_out(
    tiny_run, tiny_data, tmp_path
):
    run = load_run(tiny_run)
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    first, *others = run.classes
    (data / "val" / first).rename(data / "val" / "hat")
    new = saved_with_classes(tmp_path / "new", run, ["hat", *others])
    notes: list[str] = []
    found = compare(tiny_run, new, str(data), notify=notes.append, **EXACT).to_dict()
    told = "9 images left out, of classes that only some models have: hat"
    assert sum(told in note for note in notes) == 1
    assert not any("no images of class" in note for note in notes)
    assert found["count"] == 18
    right = {path for path in right_images(tiny_run, data) if Path(path).parent.name != "hat"}
    assert found["a"]["top1"] == found["b"]["top1"] == len(right) / 18
    for name in others:
        shutil.rmtree(data / "val" / name)
    with pytest.raises(DataError, match=r"only images of classes that one .* \(hat\)"):
        compare(tiny_run, new, str(data), **EXACT)
    (data / "val" / "hat").rename(data / "val" / "shoe")
    with pytest.raises(DataError, match="classes that the model does not have: shoe"):
        compare(tiny_run, new, str(data), **EXACT)


def test_networks_of_one_and_of_several_classes_an_image_are_not_compared(
    tiny_run, several_run, tiny_data
):
    with pytest.raises(ConfigError, match=r"one of its classes an image, and .* several"):
        compare(several_run, tiny_run, str(tiny_data), **EXACT)


def test_networks_of_several_classes_are_compared_by_their_average_precision(
    several_run, several_list, tmp_path
):
    run = load_run(several_run)
    order = [2, 0, 1]  # of the outputs: the classes are matched by name
    with torch.no_grad():
        run.model.head.weight.copy_(-run.model.head.weight[order])
        run.model.head.bias.copy_(run.model.head.bias[order])
    classes = [run.classes[at] for at in order]
    other = saved_with_classes(tmp_path / "other", run, classes, "multilabel")
    update_run(other, {"thresholds": [0.7, 0.3, 0.5]})
    compared = compare(several_run, other, str(several_list), **EXACT)
    found = compared.to_dict()
    for key, one in (("a", several_run), ("b", other)):
        scores = evaluate(one, str(several_list), **EXACT)
        for name in ("map", "map_interval", "subset_accuracy"):
            assert found[key][name] == pytest.approx(scores[name])
    assert found["difference"] == pytest.approx(found["b"]["map"] - found["a"]["map"])
    low, high = found["difference_interval"]
    assert low < found["difference"] < high
    assert found["difference"] != 0
    assert "% mAP" in compared.sentence()
    assert "jackknife over images" in compared.page()
    three = compare_runs([several_run, other, several_run], str(several_list), **EXACT)
    assert three.to_dict()["pairs"][0]["p_value"] == found["p_value"]
    assert "mAP" in three.page()


def test_three_runs_are_compared_as_every_two_are(
    tiny_run, other_run, calibrated_run, tiny_data, tmp_path, capsys
):
    runs = [str(run) for run in (tiny_run, other_run, calibrated_run)]
    out, page = tmp_path / "result.json", tmp_path / "page.html"
    words = [*runs[:2], "--json", str(out), runs[2], str(tiny_data), "--html", str(page)]
    assert main(["compare", *words, *WORDS]) == 0
    found = json.loads(out.read_text())
    assert [(row["name"], row["run"]) for row in found["runs"]] == [*zip("ABC", runs, strict=True)]
    alone = compare(*runs[1:], str(tiny_data), **EXACT).to_dict()
    assert found["count"] == alone["count"] == 27
    assert found["runs"][1]["top1_interval"] == alone["a"]["top1_interval"]
    for name in ("difference", "p_value", "only_a_right", "only_b_right"):
        assert found["pairs"][2][name] == alone[name]
    assert found["sentence"] in capsys.readouterr().out
    differ = right_images(tiny_run, tiny_data) ^ right_images(other_run, tiny_data)
    assert f"{len(differ)} images on which they differ" in page.read_text()


def test_classes_whose_names_look_like_several_are_told_apart():
    classes, thresholds = ("cat", "dog", "cat, dog", "(no class)"), [0.5] * 4

    def answered(true, named):
        scores = torch.tensor([0.9 if at in named else 0.1 for at in range(4)])
        return answer_of(scores, Sample("a.png", NO_LABEL, labels=true), classes, thresholds)

    for true, named in (((2,), (0, 1)), ((), (3,))):
        found = answered(true, named)
        assert (found.label == found.answer, found.right) == (True, False)
        assert answered(true, true).right


def test_a_forgotten_data_set_and_a_single_run_are_one_line(tiny_run, other_run, tiny_data, capsys):
    words = ["compare", str(tiny_run), str(tiny_data), str(other_run), "--precision", "fp32"]
    assert main(words) == 2
    assert "no file of weights" in capsys.readouterr().err
    assert main(["compare", str(tiny_run), str(other_run)]) == 2
    assert "DATA" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="1 run: from 2 to 26 are compared"):
        compare_runs([tiny_run], str(tiny_data))


def corrected_run(tiny_run, data, folder, rows):
    """A copy of the run, trained on `data` with a list of corrections, {name: class}."""
    run = Path(shutil.copytree(tiny_run, folder))
    lines = [f"{name},{label}" for name, label in rows.items()]
    (folder / "new.csv").write_text("\n".join(["image,label", *lines]) + "\n")
    settings = {"data": str(data), "corrections": str(folder / "new.csv")}
    write_settings(run / "config.yaml", make_config(settings), "")
    return run


def test_corrections_of_one_training_are_those_of_both(tiny_run, tiny_data, tmp_path):
    names = sorted(path.relative_to(tiny_data).as_posix() for path in tiny_data.rglob("val/*/*"))
    others = dict(zip(names[:5], ["class2"] * 5, strict=True))  # all are of the first class
    corrected = corrected_run(tiny_run, tiny_data, tmp_path / "corrected", others)
    notes: list[str] = []
    same = compare(tiny_run, corrected, str(tiny_data), notify=notes.append, **EXACT).to_dict()
    assert (same["difference"], same["only_a_right"], same["only_b_right"]) == (0.0, 0, 0)
    assert sum("new.csv, as some were trained with" in note for note in notes) == 1
    assert same["b"]["top1"] == evaluate(corrected, str(tiny_data), **EXACT)["top1"]
    second = corrected_run(tiny_run, tiny_data, tmp_path / "second", {names[0]: "class2"})
    with pytest.raises(DataError, match="4 of 27 images have other labels for one run"):
        compare(second, corrected, str(tiny_data), **EXACT)
