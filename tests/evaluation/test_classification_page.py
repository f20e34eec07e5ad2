"""report.html of classifiers, and the page of `vit evaluate`: names stay text, values are right."""

import pytest
import torch
from PIL import Image

from tests.evaluation.drawn import draw_outcomes
from vit.data.corruptions import CORRUPTIONS, SEVERITIES
from vit.evaluation.accuracy_slices import Feature, accuracy_slices
from vit.evaluation.classification_metrics import CalibratedOutcomes, Outcomes, summarize
from vit.evaluation.classification_page import (
    MultilabelOutcomes,
    evaluation_page,
    write_classification_report,
    write_multilabel_report,
)
from vit.evaluation.multilabel_metrics import summarize_multilabel

IMAGES = 40


@pytest.fixture
def write(tmp_path, make_facts, make_epochs):
    """Write a report about made-up answers, and return its text."""

    def write(
        classes, *, epochs=3, outcomes=None, paths=None, settings=None, calibrated=None, **changes
    ):
        outcomes = draw_outcomes(len(classes)) if outcomes is None else outcomes
        write_classification_report(
            make_facts(classes, settings, epochs=make_epochs(epochs), **changes),
            outcomes,
            paths or [str(tmp_path / "missing.jpg")] * len(outcomes),
            calibrated=calibrated,
        )
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


@pytest.fixture
def write_multilabel(tmp_path, make_facts):
    """The same for several classes an image."""

    def write_multilabel(classes, probabilities, targets, paths=None, **changes):
        outcomes = MultilabelOutcomes(
            probabilities=probabilities,
            raw=probabilities,
            targets=targets,
            thresholds=[0.5] * len(classes),
            paths=paths or ["/nowhere/x.png"] * len(targets),
        )
        write_multilabel_report(make_facts(classes, **changes), outcomes)
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write_multilabel


def draw_multilabel(classes: int, images: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = (torch.rand(images, classes, generator=generator) < 0.3).long()
    noise = torch.rand(images, classes, generator=generator, dtype=torch.float64)
    return 0.7 * noise + 0.3 * targets, targets


@pytest.mark.parametrize("task", ["classify", "multilabel"])
@pytest.mark.parametrize("count", [11, 40], ids=["few classes", "many classes"])
def test_hostile_names_stay_text(
    write, write_multilabel, assert_harmless, hostile_names, hostile_images, count, task
):
    classes = (*hostile_names, *(f"class{i}" for i in range(count - len(hostile_names))))
    unreadable = {hostile_images[0]: "<i>damaged</i>\x1b"}
    settings = {"data": "<u>pets</u>\x1b\u202e"}
    shown = {"paths": hostile_images, "unreadable": unreadable, "settings": settings}
    if task == "classify":
        page = assert_harmless(write(classes, **shown))
    else:
        page = assert_harmless(write_multilabel(classes, *draw_multilabel(count), **shown))
    for name in ("gpj.\\u202efdp", "&amp;&lt;", "two\\nlines"):
        assert name in page.prose
    assert len(page.find("img")) > 5


def test_a_fast_report_names_mistakes_without_their_images(write, parse, tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "one.png")
    classes, paths = ("cat", "dog", "owl"), [str(tmp_path / "one.png")] * IMAGES
    assert len(parse(write(classes, paths=paths)).find("img")) > 5
    page = parse(write(classes, paths=paths, settings={"report": "fast"}))
    assert not page.find("img")
    assert len(page.find("figcaption")) > 5
    assert "images were not opened again" in page.prose


def test_numbers_are_the_metrics(write, parse):
    classes, outcomes = ("cat", "dog", "owl"), draw_outcomes(3)
    scores = summarize(outcomes, classes)
    text = parse(write(classes, outcomes=outcomes)).prose
    low, high = scores["top1_interval"]
    expected = [
        f"{scores['top1']:.2%}",
        f"{low:.2%} to {high:.2%}",
        f"{scores['macro_f1']:.2%}",
        f"{scores['balanced_accuracy']:.2%}",
        f"expected calibration error {scores['ece']:.4f}",
        f"as many images have {scores['ece_chance']:.4f} by chance",
        f"{int((outcomes.ranks > 0).sum())} of {IMAGES} answers are wrong",
    ]
    for row in scores["per_class"]:
        expected += [row["label"], *(f"{row[key]:.1%}" for key in ("precision", "recall", "f1"))]
    for number in expected:
        assert number in text, number


def test_many_classes_begin_with_the_worst(write, parse):
    classes = [f"class {i:04d}" for i in range(3000)]
    html = write(classes, outcomes=draw_outcomes(3000, images=500))
    page = parse(html)
    assert "Classes, the worst of 3,000 first" in page.texts
    assert "1,000 more are left out here: vit evaluate --json has all." in page.texts
    assert len([one for one in page.find("th") if one.get("class") == "name"]) == 2000
    assert "most frequent of" in page.prose
    assert "The 40 classes of these pairs" in page.prose
    assert len(html) < 1_500_000


def test_a_report_without_mistakes(write, parse):
    for size in (3, 30):
        outcomes = Outcomes.of(torch.eye(size), torch.arange(size))
        page = parse(write([f"c{i}" for i in range(size)], outcomes=outcomes))
        assert f"None: all of {size} answers are right." in page.prose
        assert "Nothing: every answer is right." in page.prose
        assert "a calibration needs 50 validation images, and fewer say little" in page.prose
        assert "can be read as the probability of being right" not in page.prose
        heats = [one for one in page.find("table") if "heat" in one.get("class", "")]
        assert len(heats) == (size == 3)


@pytest.mark.parametrize("epochs", [1, 41])
def test_losses_and_accuracy_are_drawn(write, parse, epochs):
    page = parse(write(("a", "b"), epochs=epochs))
    *curves, reliability = (chart["aria-label"] for chart in page.find("svg"))
    assert [label.split(" over ")[0] for label in curves] == ["Loss", "Top-1"]
    assert reliability.startswith("Right answers, by score: ")
    assert len(page.find("polyline")) == 3
    radii = [circle["r"] for circle in page.find("circle")]
    assert radii.count("2.6") == (3 if epochs == 1 else 0)
    assert radii.count("5") == reliability.count(" of ")


def test_scores_of_a_calibration_are_those_of_held_out_images(write, parse):
    outcomes, held_out = draw_outcomes(3), draw_outcomes(3, 30)
    calibrated = CalibratedOutcomes((0.5, 1.25), outcomes, held_out)
    page = parse(write(("cat", "dog", "owl"), outcomes=outcomes, calibrated=calibrated))
    text = page.prose
    raw, other = (summarize(one, ("cat", "dog", "owl")) for one in (outcomes, held_out))
    assert f"raw scores have a calibration error of {raw['ece']:.4f}" in text
    assert f"expected calibration error {other['ece']:.4f}" in text
    for title, row in (("temperature 0.500, exponent 1.250", other), ("raw", raw)):
        cells = "\n".join(f"{row[name]:.4f}" for name in ("ece", "ece_debiased", "brier", "nll"))
        assert f"{title}\n{cells}" in page.lines


def test_a_mistake_has_its_label_and_the_prediction(write, parse, tmp_path):
    Image.new("RGB", (900, 500)).save(tmp_path / "a.png")
    outcomes = Outcomes.of(torch.tensor([[0.9, 0.1]]), torch.tensor([1]))
    page = parse(write(("a", "b"), outcomes=outcomes, paths=[str(tmp_path / "a.png")]))
    small, image = page.find("img")
    assert small["alt"] == image["alt"] == "b, taken for a"
    assert (small["width"], small["height"]) == ("128", "71")
    assert (image["width"], image["height"]) == ("240", "133")
    assert "\na\n90.0%\nis\nb\n(10.0%)\na.png" in page.lines


def test_numbers_of_a_multilabel_run_are_the_metrics(write_multilabel, parse):
    probabilities, targets = draw_multilabel(3)
    scores = summarize_multilabel(probabilities, targets, "abc", [0.5] * 3)
    page = parse(write_multilabel(tuple("abc"), probabilities, targets))
    low, high = scores["map_interval"]
    assert f"{scores['map']:.2%}" in page.texts
    assert f"95% interval {low:.2%} to {high:.2%}" in page.prose
    for label, name in (("macro F1", "macro_f1"), ("wrong decisions", "hamming")):
        assert f"\n{label}\n{scores[name]:.2%}\n" in page.lines
    for row in scores["per_class"]:
        shares = [f"{row[name]:.1%}" for name in ("precision", "recall", "f1")]
        cells = [row["label"], row["count"], f"{row['average_precision']:.1%}", "0.500", *shares]
        assert "\n".join(map(str, cells)) in page.lines


def test_a_class_without_images_has_no_scores_and_comes_last(write_multilabel, parse):
    probabilities, targets = draw_multilabel(25)
    targets[:, 7] = 0
    page = parse(write_multilabel(tuple(f"c{i}" for i in range(25)), probabilities, targets))
    assert "Classes, the worst of 25 first" in page.texts
    assert "\nc7\n0\n-\n0.500\n-\n-\n-\nCan its scores be trusted?" in page.lines


def test_an_image_is_shown_with_its_worst_decision(write_multilabel, parse, tmp_path):
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for path in paths:
        Image.new("RGB", (8, 8)).save(path)
    probabilities = torch.tensor([[0.6, 0.9], [0.1, 0.4], [0.1, 0.9]], dtype=torch.float64)
    targets = torch.tensor([[0, 0], [1, 1], [0, 1]])
    page = parse(write_multilabel(("a", "b"), probabilities, targets, paths))
    alts = [image["alt"] for image in page.find("img")]
    assert alts == ["b: said, not labelled", "a: labelled, not said"]
    assert "2 images of 3 have a wrong decision" in page.prose
    assert "\nb\n90.0%\nsaid, not labelled\n0.png\na\n10.0%\nlabelled, not said" in page.lines


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


def test_hostile_names_of_an_evaluation_stay_text(assert_harmless, hostile_names):
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
    for key in ("ece_chance", "ece_debiased"):
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
