"""Suspected labels: planted ones are found, and are the first of the list."""

import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from vit.config.setting_layers import make_config
from vit.config.stored_config import write_paths
from vit.data.checks.check_listing import DatasetListing, ListedImage
from vit.data.checks.dataset_check import CheckReport
from vit.data.sources.dataset_problem import Problem
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.image_list import read_list
from vit.evaluation.confident_learning import LabeledRow
from vit.inference.label_errors import (
    add_row_errors,
    check,
    has_learned,
    label_indices,
    neighbour_agreement,
    neighbours,
    similar_pairs,
    suspects,
    write_suspects,
)
from vit.inference.predictor import Predictor


def clusters(classes: int = 4, each: int = 60, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(classes).repeat_interleave(each)
    centres = torch.randn(classes, dim, generator=draw)
    return centres[labels] + 0.4 * torch.randn(len(labels), dim, generator=draw), labels


def test_planted_label_errors_are_found_with_few_false_alarms():
    features, labels = clusters()
    planted = set(range(0, len(labels), 16))
    wrong = labels.clone()
    for place in planted:
        wrong[place] = (labels[place] + 1) % 4
    found = suspects(features, neighbours(features), wrong, 4)
    places = [one.image for one in found]
    assert len(planted & set(places[: len(planted)])) >= 0.9 * len(planted)
    assert len(places) <= 1.3 * len(planted)
    right = [one for one in found if one.image in planted]
    assert all(one.likely == labels[one.image] for one in right)
    assert suspects(features, neighbours(features), labels, 4)[3:] == []


def test_images_with_copies_only_are_no_suspects_and_do_not_count():
    features, labels = clusters()
    normal = suspects(features, neighbours(features), labels, 4)
    agreement = neighbour_agreement(neighbours(features), labels, 4)
    copies = torch.randn(1, 16, generator=torch.Generator().manual_seed(1)).repeat(40, 1)
    features, labels = torch.cat([features, copies]), torch.cat([labels, labels.new_full((40,), 3)])
    nearest = neighbours(features)
    found = suspects(features, nearest, labels, 4)
    assert [one.image for one in found if one.image >= 240] == []
    assert {one.image for one in found} == {one.image for one in normal}
    assert neighbour_agreement(nearest, labels, 4) == pytest.approx(agreement, abs=0.01)
    only = neighbours(copies)
    assert suspects(copies, only, labels[-40:], 4) == []
    assert neighbour_agreement(only, labels[-40:], 4) == 0.0


def test_nearest_neighbours_equal_those_of_the_full_cosine_matrix():
    features, _ = clusters()
    cosines = torch.nn.functional.cosine_similarity(features[:, None], features[None], dim=2)
    cosines.fill_diagonal_(-2)
    expected = cosines.topk(5, dim=1)
    found = neighbours(features, 5)
    torch.testing.assert_close(found.similarity, expected.values)
    assert torch.equal(found.indices, expected.indices)


@pytest.mark.auto_precision
def test_weights_that_have_learned_the_labels_are_named(tiny_run, tiny_data, tmp_path):
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    (run / "config.yaml").write_text(f"data: {tiny_data / 'val'}\n")
    notes: list[str] = []
    settings = {"device": "cpu", "workers": 1, "cache": False, "notify": notes.append}
    check(tiny_data / "val", weights=tiny_run, **settings)
    assert not any("was trained on these labels" in one for one in notes)
    check(tiny_data / "val", weights=run, **settings)
    assert any("was trained on these labels, errors included" in one for one in notes)


def test_a_run_that_was_trained_in_another_working_folder_is_recognised(tmp_path, monkeypatch):
    data, run, here = (tmp_path / name for name in ("work/photos", "run", "here"))
    for folder in (data / "train", run, here):
        folder.mkdir(parents=True)
    (run / "config.yaml").write_text("data: photos/train\n")
    monkeypatch.chdir(here)
    assert not has_learned(str(run), data)
    monkeypatch.chdir(data.parent)
    write_paths(run, make_config({"data": "photos/train"}))
    monkeypatch.chdir(here)
    learned = [has_learned(str(run), one) for one in (data / "train", data, data.parent, here)]
    assert learned == [True, True, False, False]


def test_labels_match_classes_in_other_unicode():
    assert label_indices(["Hüte", "Hu\u0308te", "cat", "dog"], ["cat", "Hüte"]) == [1, 1, 0, None]
    both = ["Hu\u0308te", "Hüte"]
    assert label_indices(both, both) == [0, 1]


def test_rows_name_classes_in_other_unicode():
    """As on macOS, whose folders are decomposed."""
    images = [
        ListedImage(f"/data/{place}.png", "train", (label,))
        for place, label in enumerate(["Hu\u0308te", "cat", "cat"])
    ]
    report = CheckReport(DatasetListing(Path("/data"), images=images), {}, [])
    rows = [
        LabeledRow("/data/0.png", "Hüte", 0.1, (("cat", 0.9),)),
        LabeledRow("/data/1.png", "cat", 0.9, ()),
        LabeledRow("/data/2.png", "Hüte", 0.2, (("cat", 0.9),)),  # its label was corrected
    ]
    found = add_row_errors(report, rows, where="rows.jsonl").problems
    assert [(one.kind, *one.images) for one in found] == [("suspected_label", "/data/0.png")]


@pytest.mark.slow
@pytest.mark.auto_precision
def test_a_class_of_another_split_leaves_only_its_own_images_out(tiny_run, tiny_data, tmp_path):
    data, notes = tmp_path / "data", []
    shutil.copytree(tiny_data / "val", data / "train")
    settings = {"weights": tiny_run, "device": "cpu", "workers": 1, "cache": False}
    plain = check(data, **settings)
    shutil.copytree(data / "train" / "apple", data / "test" / "hat")
    found = check(data, notify=notes.append, **settings)
    assert any("9 images left out of the search for label errors" in one for one in notes)
    assert found.neighbour_agreement == pytest.approx(plain.neighbour_agreement)


def test_each_pair_of_similar_features_is_listed_once():
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.01], [1.0, 1.0]])
    assert [pair[:2] for pair in similar_pairs(neighbours(features))] == [(0, 2)]


@pytest.mark.parametrize("name", ["list.csv", "list.jsonl", "list.xlsx"])
def test_suspected_labels_are_a_list_that_a_spreadsheet_shows_right(tmp_path, name):
    if name.endswith("x"):
        pytest.importorskip("openpyxl")
    problems = [
        Problem("suspected_label", "", (f"/data/{one}",), labels=(one.split("/")[0], "Hüte"))
        for one in ("=a/1.png", "hat/-2.png")
    ]
    report = CheckReport(DatasetListing(Path("/data")), {}, problems)
    path = tmp_path / name
    assert write_suspects(report, str(path)) == 2
    rows = read_list(str(path), DatasetSpec(str(path)), []).rows
    guard = "'" if name.endswith(".csv") else ""
    found = {row.name: row.labels for row in rows}
    assert found == {f"{guard}=a/1.png": ("=a",), "hat/-2.png": ("hat",)}
    assert path.read_bytes().startswith("\ufeff".encode()) == name.endswith(".csv")


def test_the_network_has_progress_and_the_workers_of_the_check(tiny_run, tiny_data, monkeypatch):
    opened, told = Mock(wraps=partial(Predictor, precision="fp32")), Mock()
    monkeypatch.setattr("vit.inference.label_errors.Predictor", opened)
    settings = {"device": "cpu", "workers": 1, "cache": False, "progress": told}
    check(str(tiny_data / "val"), weights=tiny_run, **settings)
    assert [call.kwargs["workers"] for call in opened.mock_calls] == [1]
    told.assert_any_call("encoded", 27, 27)


@pytest.mark.auto_precision
def test_a_captioner_gives_features_and_writes_no_captions(
    run_of_both_heads, tiny_data, monkeypatch
):
    monkeypatch.setattr("vit.generation.generate.CaptionGenerator.generate", None)
    data = str(tiny_data / "val")
    report = check(data, weights=run_of_both_heads, device="cpu", workers=1, cache=False)
    assert len(report.stats) == 27
