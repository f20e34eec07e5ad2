"""Recall of old and new classes: of each class, and of all of an age together."""

import pytest
import torch

from vit.evaluation.class_increment import ClassChange, compare_recall, recall_lines
from vit.evaluation.classification_metrics import Outcomes

CLASSES = ("ant", "bee", "cat", "dog")


def outcomes(labels: list[int], answers: list[int]) -> Outcomes:
    return Outcomes.of(torch.eye(4)[answers] * 0.5 + 0.1, torch.tensor(labels))


def test_classes_are_compared_by_name():
    change = ClassChange.between(("dog", "eel", "ant"), CLASSES)
    assert (change.kept, change.added, change.lost) == (("ant", "dog"), ("bee", "cat"), ("eel",))
    assert ClassChange.between(None, CLASSES).added == CLASSES


class Unsearched(tuple):
    """Names that are looked up elsewhere: of 100,000 classes, each search would read them all."""

    __contains__ = index = None


def test_many_classes_are_not_searched_one_by_one():
    old, new = Unsearched(("dog", "ant")), Unsearched(CLASSES)
    change = ClassChange.between(old, new)
    assert change.kept == ("ant", "dog")
    unsearched = ClassChange(*(Unsearched(names) for names in (change.kept, change.added, ())))
    rows = compare_recall(unsearched, outcomes([0, 1, 3], [0, 1, 0]), new, {"ant": 1})
    assert [row.before for row in rows[:3]] == [0.5, None, None]


def test_recall_is_that_of_each_class_and_of_all_of_an_age():
    change = ClassChange.between(("ant", "dog", "cat"), CLASSES)
    measured = outcomes([0, 0, 0, 0, 1, 1, 3, 3], [0, 0, 0, 1, 1, 3, 3, 3])
    rows = compare_recall(change, measured, CLASSES, {"ant": 4, "dog": 1})
    assert [(row.name, row.images, row.before, row.now) for row in rows] == [
        ("3 old classes", 6, 5 / 6, 5 / 6),
        ("1 new class", 2, None, 0.5),
        ("all classes", 8, None, 0.75),
        ("ant", 4, 1.0, 0.75),
        ("dog", 2, 0.5, 1.0),
        ("bee", 2, None, 0.5),
    ]
    assert [row.gain for row in rows[3:]] == [pytest.approx(-0.25), 0.5, None]


def test_the_table_for_a_terminal_escapes_names_and_has_the_worst_classes():
    names = (*(f"class{n}" for n in range(30)), "new\x1b")
    change = ClassChange.between(names[:-1], names)
    labels = torch.arange(31)
    probabilities = torch.eye(31)[labels.where(labels != 7, torch.tensor(8))]
    before = dict.fromkeys(names, 1)
    lines = recall_lines(compare_recall(change, Outcomes.of(probabilities, labels), names, before))
    assert lines[0].split() == ["recall", "images", "before", "now"]
    assert lines[1].split() == ["30", "old", "classes", "30", "100.0%", "96.7%"]
    assert lines[4].split() == ["class7", "1", "100.0%", "0.0%"]
    assert lines[-1] == "and 11 other classes"
    few = recall_lines(
        compare_recall(change, Outcomes.of(probabilities[29:], labels[29:]), names, {})
    )
    assert few[-1].split() == ["new\\x1b", "1", "-", "100.0%"]
