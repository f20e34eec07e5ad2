"""The pages of `vit compare`: names stay text, and the images are those that runs differ on."""

import torch

from vit.evaluation.comparison_page import Disagreement, Flip, all_pairs_page, comparison_page
from vit.evaluation.paired_comparison import AllPairs, PairedComparison

RESULT = PairedComparison(1000, 900, 930, 10, 40)


def flips(paths, names):
    return [
        Flip(path=path, label=name, right=0.6, answer=names[0], wrong=0.5 + place / 100)
        for place, (path, name) in enumerate(zip(paths, names, strict=False))
    ]


def test_hostile_names_stay_text(assert_harmless, hostile_names, hostile_images):
    found = flips(hostile_images, hostile_names)
    page = assert_harmless(comparison_page(hostile_names[:2], RESULT, found, found[:1]))
    assert "B is better than A on 1,000 images" in page.prose
    assert len(page.find("img")) >= len(hostile_names) - 1


def test_the_surest_mistakes_come_first(parse, hostile_images):
    images = hostile_images[1:4]
    found = flips(images, ["cat", "dog", "owl"])
    page = parse(comparison_page(("old", "new"), RESULT, [], found))
    alternatives = [image["alt"].split(",")[0] for image in page.find("img")]
    assert alternatives == ["owl", "dog", "cat"]
    assert "A right, B wrong: 0 images" in page.prose
    assert "B right, A wrong: 3 images" in page.prose


def disagreement(path, label, *answers):
    right = [answer == label for answer, _ in answers]
    return Disagreement(path=path, label=label, answers=answers, right=right)


def test_hostile_names_of_several_runs_stay_text(assert_harmless, hostile_names, hostile_images):
    right = torch.ones(len(hostile_names), 300, dtype=torch.bool)
    right[0, :200] = False
    found = [
        disagreement(path, name, *((other, 0.5) for other in hostile_names))
        for path, name in zip(hostile_images, hostile_names, strict=False)
    ]
    page = assert_harmless(all_pairs_page(hostile_names, AllPairs.of(right), found))
    assert "B is better than A" in page.prose
    assert [table["class"] for table in page.find("table")] == ["wide sortable"] * 2
    assert len(page.find("img")) >= len(hostile_names) - 1


def test_images_that_divide_the_runs_come_first_and_equal_answers_share_a_line(
    parse, hostile_images
):
    one = disagreement(
        hostile_images[1], "cat", ("cat", 0.9), ("cat", 0.6), ("cat", 0.5), ("dog", 0.99)
    )
    two = disagreement(
        hostile_images[2], "owl", ("cat", 0.3), ("owl", 0.6), ("owl", 0.7), ("cat", 0.4)
    )
    assert two.lines() == [("B and C", "owl", 0.7), ("A and D", "cat", 0.4)]
    assert one.lines() == [("A, B and C", "cat", 0.9), ("D", "dog", 0.99)]
    alike = Disagreement(  # answers of other classes with the same text
        path="", label="a, b", answers=[("a, b", 0.9), ("a, b", 0.4)], right=[False, True]
    )
    assert alike.lines() == [("B", "a, b", 0.4), ("A", "a, b", 0.9)]
    right = torch.tensor([[True, False], [True, True], [True, True], [False, False]])
    page = parse(all_pairs_page(["a", "b", "c", "d"], AllPairs.of(right), [one, two]))
    assert [image["alt"] for image in page.find("img")] == ["owl", "cat"]
    assert "2 images on which they differ" in page.prose
    assert "A and D: cat 40.0%" in page.prose
