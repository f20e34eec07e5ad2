"""The report of a classifier: its numbers are right, its markup is whole, names stay text."""

import pytest
import torch
from PIL import Image

from vit.evaluation.classification_metrics import CalibratedOutcomes, Outcomes, summarize
from vit.evaluation.classification_report import write_classification_report

IMAGES = 40


def draw(classes: int, images: int = IMAGES) -> Outcomes:
    """Outcomes that are right about half of the time."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (images,), generator=generator)
    logits = torch.randn(images, classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(images), labels] += 1.0
    return Outcomes.of(logits.softmax(dim=1), labels)


@pytest.fixture
def write(tmp_path, make_facts, make_epochs):
    """Write a report about made-up answers, and return its text."""

    def write(
        classes, *, epochs=3, outcomes=None, paths=None, settings=None, calibrated=None, **changes
    ):
        outcomes = draw(len(classes)) if outcomes is None else outcomes
        write_classification_report(
            tmp_path,
            facts=make_facts(classes, settings, **changes),
            events=make_epochs(epochs),
            outcomes=outcomes,
            paths=paths or [str(tmp_path / "missing.jpg")] * len(outcomes),
            calibrated=calibrated,
        )
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


@pytest.mark.parametrize("count", [11, 40], ids=["few classes", "many classes"])
def test_hostile_names_stay_text(write, assert_harmless, hostile_names, hostile_images, count):
    classes = (*hostile_names, *(f"class{i}" for i in range(count - len(hostile_names))))
    page = assert_harmless(
        write(
            classes,
            paths=hostile_images,
            unreadable={hostile_images[0]: "<i>damaged</i>\x1b"},
            settings={"data": "<u>pets</u>\x1b\u202e"},
        )
    )
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
    classes, outcomes = ("cat", "dog", "owl"), draw(3)
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
    classes, outcomes = tuple(f"class {i:04d}" for i in range(3000)), draw(3000, images=500)
    html = write(classes, outcomes=outcomes)
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
    outcomes, held_out = draw(3), draw(3, 30)
    calibrated = CalibratedOutcomes((0.5, 1.25), outcomes, held_out)
    page = parse(write(("cat", "dog", "owl"), outcomes=outcomes, calibrated=calibrated))
    text = page.prose
    raw, other = (summarize(one, ("cat", "dog", "owl")) for one in (outcomes, held_out))
    assert f"raw scores have a calibration error of {raw['ece']:.4f}" in text
    assert f"expected calibration error {other['ece']:.4f}" in text
    for title, row in (("temperature 0.500, exponent 1.250", other), ("raw", raw)):
        cells = "\n".join(
            f"{row[name]:.4f}"
            for name in ("ece", "ece_debiased", "ece_adaptive", "ece_classwise", "brier", "nll")
        )
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
