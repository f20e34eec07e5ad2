"""The report of a multi-label classifier: its numbers are right, and names stay text."""

import pytest
import torch
from PIL import Image

from vit.evaluation.multilabel_metrics import summarize_multilabel
from vit.evaluation.multilabel_report import MultilabelOutcomes, write_multilabel_report


@pytest.fixture
def write(tmp_path, make_facts, make_epochs):
    """Write a report, and return its text."""

    def write(classes, probabilities, targets, paths=None, **changes):
        write_multilabel_report(
            tmp_path,
            facts=make_facts(classes, **changes),
            events=make_epochs(3),
            outcomes=MultilabelOutcomes(
                probabilities=probabilities,
                targets=targets,
                thresholds=[0.5] * len(classes),
                paths=paths or ["/nowhere/x.png"] * len(targets),
            ),
        )
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


def draw(classes: int, images: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = (torch.rand(images, classes, generator=generator) < 0.3).long()
    noise = torch.rand(images, classes, generator=generator, dtype=torch.float64)
    return 0.7 * noise + 0.3 * targets, targets


@pytest.mark.parametrize("count", [11, 40], ids=["few classes", "many classes"])
def test_hostile_names_stay_text(write, assert_harmless, hostile_names, hostile_images, count):
    classes = (*hostile_names, *(f"class{i}" for i in range(count - len(hostile_names))))
    page = assert_harmless(
        write(classes, *draw(count), hostile_images, unreadable={"<i>x": "<i>damaged</i>"})
    )
    assert len(page.find("img")) > 5


def test_numbers_are_the_metrics(write, parse):
    probabilities, targets = draw(3)
    scores = summarize_multilabel(probabilities, targets, "abc", [0.5] * 3)
    page = parse(write(tuple("abc"), probabilities, targets))
    low, high = scores["map_interval"]
    assert f"{scores['map']:.2%}" in page.texts
    assert f"95% interval {low:.2%} to {high:.2%}" in page.prose
    for label, name in (("macro F1", "macro_f1"), ("wrong decisions", "hamming")):
        assert f"\n{label}\n{scores[name]:.2%}\n" in page.lines
    for row in scores["per_class"]:
        shares = [f"{row[name]:.1%}" for name in ("precision", "recall", "f1")]
        cells = [row["label"], row["count"], f"{row['average_precision']:.1%}", "0.500", *shares]
        assert "\n".join(map(str, cells)) in page.lines


def test_a_class_without_images_has_no_scores_and_comes_last(write, parse):
    probabilities, targets = draw(25)
    targets[:, 7] = 0
    page = parse(write(tuple(f"c{i}" for i in range(25)), probabilities, targets))
    assert "Classes, the worst of 25 first" in page.texts
    assert "\nc7\n0\n-\n0.500\n-\n-\n-\nCan its scores be trusted?" in page.lines


def test_an_image_is_shown_with_its_worst_decision(write, parse, tmp_path):
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for path in paths:
        Image.new("RGB", (8, 8)).save(path)
    probabilities = torch.tensor([[0.6, 0.9], [0.1, 0.4], [0.1, 0.9]], dtype=torch.float64)
    page = parse(write(("a", "b"), probabilities, torch.tensor([[0, 0], [1, 1], [0, 1]]), paths))
    assert [image["alt"] for image in page.find("img")] == [
        "b: said, not labelled",
        "a: labelled, not said",
    ]
    assert "2 images of 3 have a wrong decision" in page.prose
    assert (
        "\nb\n90.0%\nsaid, not labelled\n0.png\na\n10.0%\nlabelled, not said\n1.png" in page.lines
    )
