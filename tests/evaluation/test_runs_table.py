"""`vit runs`: what is read of run folders is what the trainings wrote, and torch is not needed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scipy.stats import binomtest

from vit.commands.main import main
from vit.config.setting_layers import (
    make_config,
    read_settings,
    read_stored_settings,
    write_settings,
)
from vit.config.training_config import TASKS
from vit.errors import ConfigError, RunError
from vit.evaluation.runs_table import runs
from vit.event_log import best_epoch, ranking_metric
from vit.model.build import build_classifier
from vit.tasks.task import get_task
from vit.weights.saved_model import CALIBRATION_ERROR, load_run, save_model, update_run

RECIPES = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


def epoch(number, top1=0.5, **more):
    return {
        "event": "epoch",
        "epoch": number,
        "step": 10 * number,
        "train_loss": 1.0,
        "val_loss": 1.0,
        "val_top1": top1,
        "val_balanced_accuracy": top1,
        "val_images": 40,
        "lr": 0.1,
        "images_per_second": 100.0,
        "data_wait": 0.0,
        "seconds": 2.5,
        **more,
    }


@pytest.fixture
def add_run(tiny_run, tmp_path):
    """Add a run folder to tmp_path/runs: weights, settings, and steps before each epoch."""

    def add(name, found=(), *, weights=True, **settings):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        if weights:
            for file in ("config.json", "model.safetensors"):
                shutil.copy(tiny_run / file, folder)
        sizes = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 2}
        config = make_config({"data": "photos", "epochs": 2, **sizes, **settings})
        write_settings(folder / "config.yaml", config, "Settings.\nMore.")
        step = {"event": "step", "step": 1, "epoch": 1, "loss": 1.0, "lr": 0.1, "grad_norm": None}
        lines = (json.dumps(event) + "\n" for one in found for event in (step, one))
        (folder / "metrics.jsonl").write_text("".join(lines))
        return folder

    return add


@pytest.fixture
def found(tmp_path):
    """The records of tmp_path/runs by name."""
    return lambda: {run.name: run for run in runs(tmp_path / "runs").runs}


def test_a_finished_run_has_all_columns(add_run, found):
    folder = add_run("deep/er/one", [epoch(1, 0.9), epoch(2, 0.8)], lr=0.5)
    update_run(folder, {CALIBRATION_ERROR: 0.0125})
    (folder / "report.html").write_text("")
    run = found()["deep/er/one"]
    assert (run.state, run.reason, run.has_report) == ("finished", "", True)
    assert (run.epochs, run.best_epoch, run.metric, run.score) == (2, 1, "val_top1", 0.9)
    wilson = binomtest(36, 40).proportion_ci(method="wilson")
    assert run.interval == pytest.approx((wilson.low, wilson.high))
    assert (run.calibration_error, run.seconds) == (0.0125, 5.0)
    assert run.network == "2 x 32, patch 8, 16 px"
    network = load_run(folder).model
    assert run.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert run.settings == read_settings(folder / "config.yaml")


@pytest.mark.parametrize(
    "settings",
    [
        {"position": "sinusoidal_2d", "stem": "conv", "stem_norm": "batchnorm", "pooling": "mean"},
        {"position": "rotary"},
        {"position": "learned", "feedforward": "swiglu", "registers": 2},
    ],
)
def test_parameters_are_those_of_the_network(add_run, found, settings, tiny_run):
    folder = add_run("one", [epoch(1)], weights=False, **settings)
    config = make_config({**read_settings(folder / "config.yaml"), "num_classes": 3})
    model = build_classifier(config.model)
    preprocessing = load_run(tiny_run).preprocessing
    save_model(folder, model, config=config, classes=tuple("abc"), preprocessing=preprocessing)
    assert found()["one"].parameters == sum(each.numel() for each in model.parameters())


def test_states(add_run, found):
    add_run("all epochs", [epoch(1), epoch(2)])
    add_run("stopped early", [epoch(n, 0.9 - n / 10) for n in (1, 2, 3)], epochs=9, patience=2)
    probe = add_run("probe", [epoch(0)])
    (probe / "report.html").write_text("")
    add_run("half", [epoch(1)])
    add_run("no epoch", weights=False)
    add_run("trial", [epoch(1), epoch(2)], weights=False)  # as the search that made it leaves it
    killed = add_run("killed", [epoch(1)])
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"event": "epoch", "epoch": 2, "val_')
    assert {name: run.state for name, run in found().items()} == {
        **dict.fromkeys(["all epochs", "stopped early", "probe", "trial"], "finished"),
        **dict.fromkeys(["half", "no epoch", "killed"], "unfinished"),
    }
    assert found()["killed"].epochs == 1


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", lambda content: content[:-1], "cut"),
        ("config.yaml", None, "No such file"),
        ("config.yaml", lambda _: b"lr: [1", "config.yaml"),
        ("config.yaml", lambda _: b"", ""),
        ("config.yaml", lambda _: b"lr: 0.1\npatch_dro", ""),
        ("metrics.jsonl", None, "metrics.jsonl has no epoch"),
        ("metrics.jsonl", lambda _: b"", "metrics.jsonl has no epoch"),
        ("metrics.jsonl", lambda content: content[:-9], ""),
        ("metrics.jsonl", lambda _: b'{"event": "epoch", "epo\n', "line 1 of metrics.jsonl cannot"),
        ("metrics.jsonl", lambda _: bytes(99), ""),
    ],
)
def test_a_run_whose_file_is_damaged_is_broken(add_run, found, file, damage, reason):
    folder = add_run("one", [epoch(1), epoch(2)])
    (folder / "report.html").write_text("")
    if damage is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(damage((folder / file).read_bytes()))
    run = found()["one"]
    assert run.state == "broken"
    assert reason in run.reason
    if file == "config.yaml":
        assert (run.score, run.network) == (0.5, None)
    elif "no epoch" not in reason and file == "metrics.jsonl":
        assert run.epochs < 2


@pytest.mark.skipif(sys.platform == "win32", reason="no locks between processes")
def test_a_run_that_another_process_trains_is_running(add_run, found):
    folder = add_run("one", [epoch(1), epoch(2)])
    (folder / ".lock").touch()
    assert found()["one"].state == "finished"
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, folder / ".lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        other.stdout.readline()
        assert found()["one"].state == "running"
        other.stdin.close()
    assert found()["one"].state == "finished"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("images", [99, 100])
def test_the_best_epoch_is_that_of_the_task(task, images):
    features = [{"val_rankme": one, "val_knn": one / 10} for one in (9.0, 7.0, 8.0)]
    scores = {
        "classify": [{"val_top1": 0.5}, {"val_top1": 0.75}, {"val_top1": 0.75}],
        "taxonomy": [{"val_top1": 0.5}, {"val_top1": 0.75}, {"val_top1": 0.75}],
        "multilabel": [{"chosen_by": "val_map", "val_map": one} for one in (0.2, 0.9, 0.3)],
        "ordinal": [{"chosen_by": "val_kappa", "val_kappa": one} for one in (0.2, 0.9, -0.3)],
        "caption": [{"val_cider": one} for one in (0.2, 0.1, 0.9)],
        "classify,caption": [{"val_cider": one, "val_top1": one} for one in (0.2, 0.1, 0.9)],
        "mae": [{"val_rankme": one} for one in (9.0, 7.0, 8.0)],
        "regression": [{"val_mae": one} for one in (0.2, 0.1, 0.9)],
        "attributes": [{"val_score": one, "val_top1_kind": 0.5} for one in (0.2, 0.9, 0.3)],
    }.get(task, features)
    losses = (0.7, 0.3, 0.2)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        epochs = [
            {"epoch": place, "val_loss": losses[place], "val_images": images, **scores[place]}
            for place in order
        ]
        assert best_epoch(epochs) == max(epochs, key=get_task(task).rank)
    balanced = [{**epoch(1), "chosen_by": "val_balanced_accuracy"}]
    assert ranking_metric(balanced[0]) == "val_balanced_accuracy"


def test_errors_of_different_targets_are_not_ranked_together(add_run, tmp_path):
    scores = {"age 3": 3.0, "width 2": 2.0, "age 1": 1.0}
    for name, mae in scores.items():
        event = {**epoch(1), "chosen_by": "val_mae", "val_mae": mae}
        add_run(name, [event], task="regression", target=name.split()[0])
    assert [run.name for run in runs(tmp_path / "runs").runs] == ["age 1", "age 3", "width 2"]


def test_only_shares_of_images_have_an_interval_and_a_soup_that_is_better_counts(add_run, found):
    more = {"chosen_by": "val_balanced_accuracy"}
    add_run("balanced", [epoch(1, **more), epoch(2, 0.625, **more)])
    soup = {"event": "soup", "epochs": [1, 2], "val_loss": 1.0, "val_top1": 0.75, "better": True}
    add_run("soup", [epoch(1), epoch(2), soup])
    add_run("bad soup", [epoch(1), epoch(2), {**soup, "val_top1": 0.25, "better": False}])
    add_run("patients", [epoch(1)], group="patient")
    records = found()
    assert (records["balanced"].score, records["balanced"].interval) == (0.625, None)
    assert (records["patients"].score, records["patients"].interval) == (0.5, None)
    assert (records["soup"].score, records["soup"].best_epoch) == (0.75, None)
    assert (records["bad soup"].score, records["bad soup"].best_epoch) == (0.5, 1)


def test_what_a_training_wrote_is_not_read_again_from_its_events(add_run, found):
    folder = add_run("one", weights=False)
    facts = {"metric": "val_top1", "score": 0.75, "interval": [0.5, 0.875], "seconds": 2.5}
    text = json.dumps({"epochs": 1, "best_epoch": 1, "stopped_early": True, **facts})
    (folder / "summary.json").write_text(text)
    run = found()["one"]
    assert (run.state, run.epochs, run.score, run.score_text) == ("finished", 1, 0.75, "75.00%")
    assert {name: getattr(run, name) for name in facts} == facts
    (folder / "summary.json").write_text(text[:-9])
    assert found()["one"].state == "broken"


def test_only_settings_that_differ_are_shown(add_run, tmp_path):
    usual = {"schedule": "wsd", "cooldown_epochs": 1}
    add_run("a", [epoch(1)], **usual)
    more = {"cooldown_shares": (0.5,)}  # the corrections of a time budget are not compared
    add_run("b", [epoch(1)], lr=0.5, data="other", epochs=7, **usual, **more)
    old = add_run("old", [epoch(1)], seed=3, **usual) / "config.yaml"
    lines = old.read_text().splitlines(keepends=True)
    old.write_text("".join(line for line in lines if not line.startswith("soup:")))
    (add_run("broken", [epoch(1)]) / "config.yaml").unlink()
    table = runs(tmp_path / "runs", sort="name")
    assert table.differing == {"lr": "0.001", "seed": "0"}
    assert [run.name for run in table.runs] == ["a", "b", "broken", "old"]
    assert [*map(table.deviations, table.runs)] == [{}, {"lr": "0.5"}, {}, {"seed": "3"}]
    content = table.to_dict()
    assert content["differing"] == ["lr", "seed"]
    assert [row["settings"] for row in content["runs"][1:3]] == [{"lr": 0.5, "seed": 0}, {}]
    assert json.loads(json.dumps(content, allow_nan=False)) == content


def test_runs_are_sorted_and_those_without_a_value_come_last(add_run, tmp_path):
    add_run("b", [epoch(1, 0.4)], lr=0.25, patience=5)
    add_run("a", [epoch(1, 0.9), epoch(2, 0.8)], lr=0.5)
    add_run("c", weights=False, lr=0.125, patience=9)
    add_run("d", [epoch(1, 0.6, val_map=0.7, chosen_by="val_map")])

    def order(sort, *, reverse=False):
        return "".join(run.name for run in runs(tmp_path / "runs", sort=sort, reverse=reverse).runs)

    assert order("score") == "dabc"  # mAP, then top-1
    assert order("score", reverse=True) == "badc"
    assert order("name", reverse=True) == "dcba"
    assert order("lr") == "dcba"
    assert order("patience")[:2] == "bc"
    assert order("patience", reverse=True)[:2] == "cb"
    assert order("time")[:2] == "bd"
    for place, name in enumerate("abcd"):
        os.utime(tmp_path / "runs" / name / "metrics.jsonl", (place, place))
    assert order("date") == "dcba"
    with pytest.raises(ConfigError, match=r"sort=scoer: .* did you mean score"):
        order("scoer")


def test_the_smallest_mean_absolute_error_is_the_best(add_run, tmp_path):
    for name, errors in (("large", (40.0, 30.0)), ("small", (2.5, 2.75))):
        events = [epoch(place, val_mae=error) for place, error in enumerate(errors, 1)]
        add_run(name, [{k: v for k, v in one.items() if k != "val_top1"} for one in events])
    found = runs(tmp_path / "runs").runs
    assert [(one.name, one.score, one.best_epoch) for one in found] == [
        ("small", 2.5, 1),
        ("large", 30.0, 2),
    ]
    assert [one.score_text for one in found] == ["MAE 2.5", "MAE 30"]


def test_what_is_no_run_folder_is_left_out(add_run, tmp_path, tiny_run):
    run = add_run("a", [epoch(1)])
    shutil.copytree(run, run / "best")
    shutil.copytree(run, run / "nested")
    shutil.copytree(run, tmp_path / "runs" / ".hidden")
    (tmp_path / "runs" / "link").symlink_to(run)
    (tmp_path / "runs" / "recipes").mkdir()
    shutil.copy(run / "config.yaml", tmp_path / "runs" / "recipes")
    shutil.copytree(tiny_run, tmp_path / "runs" / "exported")
    assert sorted(one.name for one in runs(tmp_path / "runs").runs) == ["a", "a/nested"]
    assert [one.name for one in runs(run / "best").runs] == ["best"]
    with pytest.raises(RunError, match="neither it nor a folder below it is a run folder"):
        runs(tmp_path / "runs" / "exported")
    with pytest.raises(RunError, match="not a folder; did you mean"):
        runs(tmp_path / "rums")


def test_hostile_names_stay_text(add_run, tmp_path, assert_harmless, hostile_names):
    for number, name in enumerate(hostile_names):
        folder = add_run(name, [epoch(1)], data=name, lr=0.1 * (number + 1))
        (folder / "report.html").touch()
    page = assert_harmless(runs(tmp_path / "runs").page(tmp_path / "page.html"))
    links = [link["href"] for link in page.find("a")]
    assert len(links) == len(hostile_names)
    assert not [link for link in links if ":" in link or not link.startswith("runs/")]


def test_the_page_sorts_by_numbers_marks_what_is_rare_and_links_to_reports(
    add_run, tmp_path, parse
):
    for name, top1 in (("a", 0.5), ("b", 0.75), ("c", 0.25)):
        add_run(name, [epoch(1, top1)], lr=0.5 if name == "b" else 0.25)
    (tmp_path / "runs" / "b" / "report.html").touch()
    (tmp_path / "pages").mkdir()
    page = parse(runs(tmp_path / "runs").page(tmp_path / "pages" / "page.html"))
    assert [link["href"] for link in page.find("a")] == ["../runs/b/report.html"]
    (table,) = page.find("table")
    assert "sortable" in table["class"].split()
    numbers = [cell["data-sort"] for cell in page.find("td") if "data-sort" in cell]
    assert [one for one in numbers if one in ("0.5", "0.75", "0.25")] == ["0.75", "0.5", "0.25"]
    marked = [cell for cell in page.find("td") if "--bar" in cell.get("style", "")]
    assert len(marked) == 1
    assert "3 runs: 1 finished, 2 unfinished" in page.prose


def test_the_command_prints_a_line_for_each_run(add_run, tmp_path, capsys):
    add_run("good", [epoch(1, 0.875), epoch(2, 0.75)], data="/photos/train")
    (add_run("bad\x1b[31m", [epoch(1)], lr=0.5) / "model.safetensors").unlink()
    page, out = tmp_path / "page.html", tmp_path / "runs.json"
    folder = str(tmp_path / "runs")
    assert main(["runs", folder, "--html", str(page), "--json", str(out)]) == 0
    head, good, bad, why = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "state", "date", "data"]
    assert good.split()[:2] == ["good", "finished"]
    assert "photos/train" in good
    assert "87.50%  73.89% to 94.54%" in good
    assert bad.startswith("bad\\x1b[31m")
    assert bad.endswith("lr=0.5")
    assert why == "bad\\x1b[31m: model.safetensors is missing"
    assert "good" in page.read_text()
    shown = json.loads(out.read_text())
    assert shown["differing"] == ["lr"]
    states = {row["name"]: row["state"] for row in shown["runs"]}
    assert states == {"good": "finished", "bad\x1b[31m": "broken"}
    assert main(["runs", folder, "--sort", "size"]) == 2


def test_tables_and_pages_need_no_torch(add_run, tmp_path):
    add_run("one", [epoch(1)])
    code = (
        "import sys; from vit.commands.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'timm', 'torchvision', 'accelerate', 'transformers', 'safetensors'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); sys.exit(code)"
    )
    words = ["runs", str(tmp_path / "runs"), "--html", str(tmp_path / "page.html")]
    run = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "one" in run.stdout


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_stored_settings_are_read_as_all_settings_are(path, tmp_path):
    assert read_stored_settings(path) == read_settings(path)
    write_settings(tmp_path / "config.yaml", make_config(read_settings(path)))
    file = tmp_path / "config.yaml"
    assert read_stored_settings(file) == read_settings(file)


@pytest.mark.parametrize(
    "data",
    [
        *("two\nlines", "a: b", "'", '"', "null", "1e-3", "2024-01-01", "#", "x # y", "*a", "[a"),
        *("- a", "\u2028", " x ", "!!python/none", "{a: b}", "x" * 20_000, "ü", "~"),
    ],
)
def test_stored_text_is_read_as_it_was_written(data, tmp_path):
    file = tmp_path / "config.yaml"
    write_settings(file, make_config({"data": data}))
    assert read_stored_settings(file)["data"] == read_settings(file)["data"] == data


@pytest.mark.parametrize("text", ["lr: 1\nlr: 2\n", "a: *b\n", "x: a: b\n", "x: !!python/none\n"])
@pytest.mark.parametrize("read", [read_settings, read_stored_settings])
def test_what_is_refused_elsewhere_is_refused_here(text, read, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError):
        read(tmp_path / "config.yaml")
