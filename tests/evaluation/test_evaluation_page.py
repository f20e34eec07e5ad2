"""The page of `vit evaluate`: names stay text, and numbers are those of the scores."""

import pytest
import torch

from vit.data.corruptions import CORRUPTIONS, SEVERITIES
from vit.errors import ConfigError
from vit.evaluation.accuracy_slices import Feature, accuracy_slices
from vit.evaluation.classification_metrics import Outcomes, summarize
from vit.evaluation.evaluation_page import evaluation_page

ROBUSTNESS = {
    "score": "top1",
    "clean": 0.9,
    "mean": 0.512,
    "corruptions": [
        {"corruption": name, "severity": severity, "top1": 0.9 - severity / 10}
        for name in CORRUPTIONS
        for severity in SEVERITIES
    ],
}


def scores_of(classes, values):
    """Scores of 200 images; answers are wrong where `values` has its first value."""
    labels = torch.arange(200) % len(classes)
    right = [values[number % len(values)] != values[0] for number in range(200)]
    shift = torch.tensor([0 if hit else 1 for hit in right])
    table = torch.eye(len(classes))[(labels + shift) % len(classes)]
    feature = Feature(
        key=f"column:{values[-1]}",
        title=f"column {values[-1]}",
        values=[values[number % len(values)] for number in range(200)],
    )
    slices = [row.to_dict() for row in accuracy_slices(right, [feature])]
    found = summarize(Outcomes.of(table, labels), classes)
    return {**found, "slices": slices, "robustness": ROBUSTNESS, "failed": []}


def test_hostile_names_stay_text(assert_harmless, hostile_names):
    scores = scores_of(hostile_names, hostile_names[:5])
    page = assert_harmless(evaluation_page("run<script>", f"data{hostile_names[0]}", scores))
    assert [row["flagged"] for row in scores["slices"]] == [True] + [False] * 4
    assert "less accurate where column " in page.prose
    assert "All 5 slices" in page.texts


def test_all_scores_groups_and_unreadable_images_are_on_the_page(parse):
    scores = scores_of(["cat", "dog"], ["x", "my_camera"])
    failed = [{"image": f"{name}.png", "error": f"no {name}"} for name in ("a", "<script>")]
    more = {"groups": 40, "nll_interval": [0.1234, 0.5678], "brier_interval": None}
    html = evaluation_page("run", "data", {**scores, **more, "failed": failed})
    page = parse(html)
    assert ", of 40 groups" in page.prose
    assert f"nll\n{scores['nll']:.4f}\n0.1234 to 0.5678\nbrier\n{scores['brier']:.4f}" in page.lines
    for key in ("ece_chance", "ece_adaptive", "ece_classwise"):
        assert f"{key}\n{scores[key]:.4f}" in page.lines
    assert "a.png\nno a\n<script>.png\nno <script>" in page.lines
    assert html.count("<script") == 1
    assert "column:my_camera" in page.lines
    assert "groups" not in parse(evaluation_page("run", "data", scores)).prose


def test_classes_that_are_taken_for_each_other_are_a_matrix(parse):
    classes = ["cat", "dog<script>", "owl"]
    counts = {"cat": {"cat": 40, "dog<script>": 7}, "owl": {"owl": 3}}
    scores = {**scores_of(classes, ["x", "y"]), "confusion": counts}
    page = parse(evaluation_page("run", "data", scores))
    assert "What is taken for what" in page.texts
    titles = [cell["title"] for cell in page.find("span") if "title" in cell]
    assert sorted(titles) == ["cat, right", "cat, taken for dog<script>", "owl, right"]
    # of many classes the most frequent pairs
    many = [f"class{number}" for number in range(300)]
    scores = scores_of(many, ["x", "y"])
    scores["confusion"] = {name: {many[0]: 1 + place} for place, name in enumerate(many)}
    page = parse(evaluation_page("run", "data", scores))
    assert "The 30 most frequent of 299 wrong pairs." in page.prose


def test_corruptions_have_a_curve_and_a_row(parse):
    page = parse(evaluation_page("runs/a", "photos", scores_of(["cat", "dog"], ["x", "y"])))
    charts = [chart["aria-label"] for chart in page.find("svg")]
    assert len(charts) == len(CORRUPTIONS)
    expected = "0: 90.0%, 1: 80.0%, 2: 70.0%, 3: 60.0%, 4: 50.0%, 5: 40.0%"
    assert f"gaussian noise, by severity: {expected}" in charts
    assert "51.20%" in page.prose
    assert "gaussian noise\n80.0%\n70.0%\n60.0%\n50.0%\n40.0%" in page.lines


def test_scores_of_captions_have_no_page():
    with pytest.raises(ConfigError, match="--json FILE"):
        evaluation_page("run", "data", {"count": 1, "bleu4": 0.5, "top1": 1.0})
