"""Confident learning: planted label errors are found; rows that are none are refused."""

import json

import pytest
import torch

from vit.errors import DataError
from vit.evaluation.confident_learning import (
    LabeledRow,
    find_disagreement,
    find_suspect_rows,
    read_labeled_rows,
    weak_predictions,
)


def draw(images: int = 600, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities that know the true class, labels, and which labels are planted errors."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randint(classes, (images,), generator=generator)
    logits = torch.randn(images, classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(images), true] += 4.0
    planted = torch.rand(images, generator=generator) < 0.05
    return logits.softmax(1), torch.where(planted, (true + 1) % classes, true), planted


def test_planted_errors_come_first():
    probabilities, labels, planted = draw()
    found = find_disagreement(probabilities, labels)
    order = found.margin.masked_fill(~found.suspected, -9).argsort(descending=True)
    suspects = planted[order[: int(found.suspected.sum())]]
    assert int(planted.sum()) >= 20
    assert suspects[:12].all()
    assert suspects.sum() >= 0.6 * planted.sum()


def test_the_rule_is_that_of_the_paper():
    """Each image by itself, from the definition."""
    probabilities, labels, _ = draw(80)
    found = find_disagreement(probabilities, labels)
    thresholds = [float(probabilities[labels == j, j].mean()) for j in range(5)]
    for image, row in enumerate(probabilities.tolist()):
        label = int(labels[image])
        confident = [j for j in range(5) if row[j] >= thresholds[j]]
        likely = max(confident, key=lambda j: row[j], default=label)
        suspected = likely != label and row[likely] > row[label]
        assert bool(found.suspected[image]) == suspected
        if suspected:
            assert int(found.likely[image]) == likely
            assert float(found.margin[image]) == pytest.approx(row[likely] - row[label])
    assert found.suspected.any()


def rows_of(probabilities: torch.Tensor, labels: torch.Tensor, top: int) -> list[LabeledRow]:
    rows = []
    for row, label in zip(probabilities.tolist(), labels.tolist(), strict=True):
        best = sorted(range(5), key=lambda j: -row[j])[:top]
        pairs = tuple((f"class{j}", row[j]) for j in best)
        rows.append(LabeledRow(f"{len(rows)}.png", f"class{label}", row[label], pairs))
    return rows


def dense_suspects(rows: list[LabeledRow]) -> list[tuple[LabeledRow, str, float]]:
    """The rule on a table of all images and classes, where classes that are not listed have 0."""
    names = sorted({row.label for row in rows} | {n for row in rows for n, _ in row.predictions})
    table = torch.zeros(len(rows), len(names), dtype=torch.float64)
    for place, row in enumerate(rows):
        for name, score in (*row.predictions, (row.label, row.label_score)):
            table[place, names.index(name)] = score
    found = find_disagreement(table, torch.tensor([names.index(row.label) for row in rows]))
    places = sorted(found.suspected.nonzero().flatten(), key=lambda at: rows[at].label_score)
    pairs = [(at, found.likely[at]) for at in places]
    return [(rows[at], names[likely], float(table[at, likely])) for at, likely in pairs]


@pytest.mark.parametrize("digits", [2, 17])  # with two, probabilities are often equal
def test_rows_give_the_suspects_of_the_whole_table(digits):
    for top in (1, 2, 5):
        probabilities, labels, _ = draw(300)
        rows = rows_of((probabilities**0.2).div(2).round(decimals=digits), labels, top)
        found = find_suspect_rows(rows)
        assert len(found) > 10
        assert [tuple(one) for one in found] == dense_suspects(rows)
        assert all(one.margin > 0 for one in found)


def test_a_class_without_a_labelled_image_is_not_the_likely_one():
    probabilities = torch.tensor([[0.4, 0.1, 0.5], [0.2, 0.7, 0.1]], dtype=torch.float64)
    for labels, suspected in (([0, 1], [False, False]), ([0, 2], [True, False])):
        found = find_disagreement(probabilities, torch.tensor(labels))
        assert found.suspected.tolist() == suspected
    pairs = (("horse", 0.5), ("cat", 0.4))
    assert find_suspect_rows([LabeledRow("a.png", "cat", 0.4, pairs)]) == []


ROW = {
    "image": "a.png",
    "label": "cat",
    "label_score": 0.25,
    "predictions": [{"label": "dog", "score": 0.75}],
}


@pytest.mark.parametrize(("right", "weak"), [(60, True), (69, True), (71, False), (100, False)])
def test_predictions_near_the_largest_class_are_weak(right, weak):
    """With half of the images in one class, 40 % of the way from it to all is 70 %."""
    rows = []
    for number in range(100):
        label, other = ("a", "b") if number % 2 else ("b", "a")
        best = label if number < right else other
        rows.append(LabeledRow(f"{number}.png", label, 0.5, ((best, 0.6),)))
    note = weak_predictions(rows)
    assert (note is not None) == weak
    if note is not None:
        assert f"agree with {right}% of the labels, and 50% are of one class" in note


def test_rows_are_read_without_those_of_unreadable_images(tmp_path):
    lines = [ROW, {"image": "b.png", "label": "cat", "error": "no image"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (row,) = read_labeled_rows(tmp_path / "rows.jsonl")
    assert row == LabeledRow("a.png", "cat", 0.25, (("dog", 0.75),))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(ROW) + "\nimage,label", "line 2: not a row of"),
        (json.dumps({"image": "a.png", "predictions": []}), "line 1: not a row of"),
        ("[1]", "line 1: not a row of"),
        ("", "has no rows of readable images"),
        (None, "No such file"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_labeled_rows(path)
