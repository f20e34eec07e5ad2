"""The page of `vit compare`: names stay text, and the images are those that runs differ on."""

import pytest
import torch

from vit.evaluation.paired_comparison import Disagreement, RunsComparison, compare_all_pairs


def disagreement(path, label, *answers):
    right = [answer == label for answer, _ in answers]
    return Disagreement(path=path, label=label, answers=answers, right=right)


@pytest.mark.parametrize("runs", [2, 5])
def test_hostile_names_stay_text(assert_harmless, hostile_names, hostile_images, runs):
    names = hostile_names[:runs]
    right = torch.ones(runs, 300, dtype=torch.bool)
    right[0, :200] = False
    images = [
        disagreement(path, name, *((other, 0.5) for other in names))
        for path, name in zip(hostile_images, hostile_names, strict=False)
    ]
    found = RunsComparison(names, compare_all_pairs(right), images)
    page = assert_harmless(found.page())
    assert "B is better than A" in page.prose
    assert [table["class"] for table in page.find("table")] == ["wide sortable"] * 2
    assert len(page.find("img")) >= len(hostile_names) - 1


def test_images_that_divide_the_runs_come_first_and_equal_answers_share_a_line(
    parse, hostile_images
):
    answers = [("cat", 0.9), ("cat", 0.6), ("cat", 0.5), ("dog", 0.99)]
    one = disagreement(hostile_images[1], "cat", *answers)
    answers = [("cat", 0.3), ("owl", 0.6), ("owl", 0.7), ("cat", 0.4)]
    two = disagreement(hostile_images[2], "owl", *answers)
    assert two.lines() == [("B and C", "owl", 0.7), ("A and D", "cat", 0.4)]
    assert one.lines() == [("A, B and C", "cat", 0.9), ("D", "dog", 0.99)]
    answers = [("a, b", 0.9), ("a, b", 0.4)]  # of other classes with the same text
    alike = Disagreement(path="", label="a, b", answers=answers, right=[False, True])
    assert alike.lines() == [("B", "a, b", 0.4), ("A", "a, b", 0.9)]
    right = torch.tensor([[True, False], [True, True], [True, True], [False, False]])
    page = parse(RunsComparison("abcd", compare_all_pairs(right), [one, two]).page())
    assert [image["alt"] for image in page.find("img")] == ["owl", "cat"]
    assert "2 images on which they differ" in page.prose
    assert "A and D: cat 40.0%" in page.prose


def test_the_surest_mistakes_come_first(parse, hostile_images):
    shares = {"cat": 0.5, "dog": 0.51, "owl": 0.52}
    images = [
        disagreement(path, name, (name, 0.6), ("hat", share))
        for path, (name, share) in zip(hostile_images[1:], shares.items(), strict=False)
    ]
    right = torch.tensor([[True] * 3, [False] * 3])
    page = parse(RunsComparison(["old", "new"], compare_all_pairs(right), images).page())
    assert [image["alt"] for image in page.find("img")] == ["owl", "dog", "cat"]
