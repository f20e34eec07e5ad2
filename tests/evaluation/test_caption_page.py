"""The report of a captioner: its numbers are right, and every caption stays text."""

import base64
import re

import pytest
import torch
from PIL import Image

from vit.evaluation.caption_metrics import caption_scores
from vit.evaluation.caption_page import (
    CaptionedImage,
    CaptionFacts,
    CaptionOutcomes,
    write_caption_report,
)
from vit.evaluation.classification_metrics import Outcomes, summarize

PAIRS = (
    ("a red star", "a red star"),
    ("a red star", "a blue circle"),
    ("two dogs run on the grass", "two dogs run over green grass"),
    ("a cat", "a man rides a horse on a beach"),
)


def outcomes_of(pairs, paths=None, *, loss=1.0, shuffled_loss=2.0, ended=True) -> CaptionOutcomes:
    """Images with (caption, first reference)."""
    images = [
        CaptionedImage(
            path=paths[number] if paths else f"/nowhere/{number}.jpg",
            caption=caption,
            score=-1.5 - number,
            ended=ended,
            references=(reference, "something else"),
            loss=1.0 + number,
        )
        for number, (caption, reference) in enumerate(pairs)
    ]
    return CaptionOutcomes(images=images, loss=loss, shuffled_loss=shuffled_loss)


@pytest.fixture
def write(tmp_path, make_facts, make_epochs):
    """Write a report, and return its text."""

    def write(
        outcomes, *, epochs=3, classes=(), class_outcomes=None, event=None, val_images=4, **changes
    ):
        settings = {"task": "caption", **changes.pop("settings", {})}
        facts = {"val_held_out": False, "parameters": 205_000, **changes}
        advice = "hide words with --caption-dropout 0.3"
        events = make_epochs(epochs, **(event or {}))
        write_caption_report(
            make_facts(classes, settings, epochs=events, **facts),
            CaptionFacts(captions=198, mean_tokens=10.5, val_images=val_images, advice=advice),
            outcomes,
            class_outcomes,
        )
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


def test_hostile_captions_stay_text(write, assert_harmless, hostile_names, hostile_images):
    captions = [*hostile_names, "a \u202egod\u202c and a \u2066cat", ""]
    paths = hostile_images[1:] + hostile_images[:1]
    outcomes = outcomes_of([(text, text[::-1] or "x") for text in captions], paths)
    settings = {"data": "<u>pets</u>\x1b\u202e", "tokenizer": "<s>mine</s>\u202e"}
    unreadable = {paths[-1]: "<i>damaged</i>\x1b"}
    page = assert_harmless(write(outcomes, unreadable=unreadable, settings=settings))
    for text in ("\\u202egod", "two lines", "\\udce9", "(nothing)"):
        assert text in page.prose
    assert "1 image could not be read and took no part." in page.prose
    contents = [base64.b64decode(one["src"].partition(",")[2]) for one in page.find("img")]
    assert len(contents) == 8 + 6 + 6
    assert {content[:2] for content in contents} == {b"\xff\xd8"}


def test_numbers_are_the_metrics(write, parse):
    text = parse(write(outcomes_of(PAIRS, loss=1.25, shuffled_loss=1.5))).lines
    expected = caption_scores([a for a, _ in PAIRS], [(b, "something else") for _, b in PAIRS])
    for name, value in expected.items():
        assert f"\n{name}\n{value:.4f}\n" in text, name
    for told in (
        f"{expected['cider']:.3f}",
        f"\nBLEU-4\n{expected['bleu4']:.2%}",
        "\nexact\n25.00%",
        "\nloss of a token\n1.2500",
        "\nwith other images\n1.5000",
        "\ndifferent captions\n75.0%",
        "with 198 captions of 10.5 tokens on average",
        "\ncaptions\n4\n3.50\n2\n3\n6\n10\n",  # number, mean, shortest, median, longest, words
        "\nreferences\n8\n3.50\n2\n2.5\n8\n18\n",
    ):
        assert told in text, told


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (2.0, "Yes. A token of a true caption costs 1.0000 beside its own image and 2.0000"),
        (1.05, "A little. A token"),
        (1.009, "No. A token"),
        (0.9, "No. A token"),
    ],
)
def test_the_looking_test_in_words(write, parse, other, verdict):
    text = parse(write(outcomes_of(PAIRS, shuffled_loss=other))).prose
    assert verdict in text
    assert ("--caption-dropout" in text) == verdict.startswith("No")
    if other == 2.0:
        assert "100.0% more" in text
        assert "2.72 times as probable" in text


def test_saying_the_same_of_everything_is_loud(write, parse):
    text = parse(write(outcomes_of([("a man", b) for _, b in PAIRS]))).prose
    assert "One caption is said of 100% of the images: “a man”." in text
    assert "It says the same of all 4 images." in text
    quiet = parse(write(outcomes_of([(b, b) for _, b in PAIRS * 2]))).prose
    assert "4 different captions for 8 images (50.0%)" in quiet
    assert "One caption is said of 25%" in quiet
    varied = parse(write(outcomes_of([(f"a {n}", "x") for n in range(6)]))).prose
    assert "One caption is said" not in varied


def test_the_most_frequent_captions_are_counted(write, parse):
    said = [*3 * ["a dog"], *2 * ["a  cat "], "a cat", "a fish"]
    text = parse(write(outcomes_of([(s, "x") for s in said]))).lines
    assert "\na cat\n3\n42.9%\n" in text  # white space does not count
    assert "\na dog\n3\n42.9%\n" in text
    assert "\na fish\n1\n14.3%\n" in text
    assert text.index("\na cat\n3") < text.index("\na dog\n3") < text.index("\na fish\n1")


def test_the_best_and_the_worst_are_told_apart(write, tmp_path):
    paths = [str(tmp_path / f"{number}.png") for number in range(len(PAIRS))]
    for path in paths:
        Image.new("RGB", (8, 8)).save(path)
    page = write(outcomes_of(PAIRS, paths))
    _, *walls = re.split(r"<h3>(?:Any|The best|The worst)</h3>", page)
    names, best, worst = (re.findall(r"<bdi>(\d)\.png</bdi>", wall) for wall in walls)
    assert sorted(names) == ["0", "1", "2", "3"]
    assert (best, worst) == (["0", "2"], ["3", "1"])
    assert "ROUGE-L 1.00, score -1.50" in page


def test_few_or_one_image(write, parse):
    one = parse(write(outcomes_of(PAIRS[:1]), epochs=1)).prose
    assert "One image alone cannot tell" in one
    assert "No image can be read." in one
    part = parse(write(outcomes_of(PAIRS, ended=False), val_images=5000)).prose
    assert "4 (evenly spread) of the data's own validation images" in part
    assert "4 captions took all tokens" in part
    assert "took all tokens" not in one


@pytest.mark.parametrize("epochs", [1, 40])
def test_curves_over_the_epochs(write, parse, epochs):
    charts = parse(write(outcomes_of(PAIRS), epochs=epochs)).find("svg")
    titles = [found["aria-label"].split(" over ")[0] for found in charts]
    assert titles == ["Loss", "Loss of captions", "CIDEr", "BLEU-4"]
    assert f"own images: {2.5 / epochs:.4g} at the end" in charts[1]["aria-label"]
    assert "other images: 2.75 at the end" in charts[1]["aria-label"]


def test_both_heads_show_both(write, parse):
    chances = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3]])
    answers = Outcomes.of(chances, torch.tensor([0, 1, 1, 0]))
    page = write(
        outcomes_of(PAIRS),
        class_outcomes=answers,
        classes=("<i>cat", "dog"),
        settings={"task": "classify,caption", "num_classes": 2},
        event={"val_top1": 0.75, "val_caption_loss": 0.625},
    )
    text = parse(page).lines
    scores = summarize(answers, ("<i>cat", "dog"))
    assert "\ntop-1\n75.00%" in text
    assert f"macro F1 {scores['macro_f1']:.2%}" in text
    assert "What is taken for what" in text
    assert f"calibration error {scores['ece']:.4f}" in text
    assert "own images: 0.625 at the end" in page
    assert "\n0.6250\n2.7500\n" in text


def test_a_long_caption_is_cut(write, parse, hostile_images):
    page = write(outcomes_of([("word " * 4000, "x" * 10_000)], hostile_images[1:2]))
    assert len(page) < 40_000
    parse(page)
