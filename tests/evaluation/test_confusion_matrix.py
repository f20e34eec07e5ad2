"""The confusion matrix of a report: its order, its numbers and the images of its cells."""

from itertools import pairwise

import numpy as np
import pytest
from PIL import Image
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from sklearn.metrics import confusion_matrix

from tests.evaluation.drawn import draw_outcomes
from vit.evaluation import confusion_matrix as module
from vit.evaluation.confusion_matrix import confusion_findings, similar_order


def neighbours(order, similarity) -> float:
    return sum(similarity[a, b] for a, b in pairwise(order))


def test_counts_are_those_of_scikit_learn_in_another_order():
    outcomes = draw_outcomes(12, 500, lean=1.5)
    found = confusion_findings(outcomes, [f"c{number}" for number in range(12)])
    expected = confusion_matrix(outcomes.labels, outcomes.answers)
    assert sorted(found.order) == [*range(12)]
    for row in found.matrix:
        counts = [0 if cell is None else cell.count for cell in row.cells]
        assert counts == expected[row.label][found.order].tolist()
        assert row.others == 0
    assert found.wrong_pairs == (expected > 0).sum() - (expected.diagonal() > 0).sum()
    assert found.pairs[0].count == (expected - np.diag(expected.diagonal())).max()


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_similar_classes_are_neighbours(seed):
    random = np.random.default_rng(seed)
    groups = random.permutation(np.arange(24) % 6)
    similarity = np.where(groups[:, None] == groups, 0.5, 0.0) + random.uniform(0, 0.1, (24, 24))
    order = similar_order(similarity + similarity.T)
    assert np.count_nonzero(np.diff(groups[order])) == 5


@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_nearly_as_good_as_the_optimal_one_of_scipy(seed):
    random = np.random.default_rng(seed)
    places = random.permutation(30)
    similarity = np.exp(-np.abs(places[:, None] - places) / 2.0) * random.uniform(0.5, 1, (30, 30))
    similarity = similarity + similarity.T
    distance = squareform(similarity.max() - similarity, checks=False)
    best = leaves_list(linkage(distance, "average", optimal_ordering=True))
    ours, plain = (neighbours(each, similarity) for each in (similar_order(similarity), range(30)))
    assert ours >= 0.9 * neighbours(best, similarity)
    assert ours > 2 * plain


def test_classes_without_confusions_keep_their_order():
    assert similar_order(np.zeros((4, 4))) == [0, 1, 2, 3]
    similarity = np.zeros((5, 5))
    similarity[1, 4] = similarity[4, 1] = 0.2
    assert similar_order(similarity) == [0, 1, 4, 2, 3]
    assert similar_order(np.zeros((0, 0))) == []


def test_of_many_classes_the_most_confused_are_shown():
    outcomes = draw_outcomes(300, 2000, lean=1.5)
    found = confusion_findings(outcomes, [f"c{number}" for number in range(300)])
    assert 20 <= len(found.order) <= 40
    assert len(found.pairs) == 30
    shown = {cell.label for cell in found.pairs[:20]} | {cell.answer for cell in found.pairs[:20]}
    assert shown <= set(found.order)
    for row in found.matrix:
        total = int((outcomes.labels == row.label).sum())
        assert sum(cell.count for cell in row.cells if cell) + row.others == total


def test_every_cell_has_an_image_before_any_has_a_second(tmp_path, monkeypatch):
    paths = [str(tmp_path / f"{number}.png") for number in range(40)]
    for path in paths[1:]:
        Image.new("RGB", (20, 20), (200, 90, 40)).save(path)
    (tmp_path / "0.png").write_bytes(b"no image")
    outcomes = draw_outcomes(4, 40, lean=1.5)
    found = confusion_findings(outcomes, list("abcd"), paths)
    cells = [cell for row in found.matrix for cell in row.cells if cell]
    pairs = [*zip(outcomes.labels.tolist(), outcomes.answers.tolist(), strict=True)]
    for cell, images in found.images.items():
        own = {f"{n}.png" for n, pair in enumerate(pairs) if pair == (cell.label, cell.answer)}
        assert {one.name for one in images} <= own
        scores = [one.confidence for one in images]
        assert scores == sorted(scores, reverse=cell.label != cell.answer)
        assert len(images) >= min(cell.count, 8) - 1
    assert {cell.count for cell in set(cells) - set(found.images)} <= {1}

    wrong = sum(cell.label != cell.answer for cell in cells)
    monkeypatch.setattr(module, "MAX_IMAGES", wrong + 1)
    fewer = confusion_findings(outcomes, list("abcd"), paths).images
    assert sum(map(len, fewer.values())) >= wrong
    assert all(cell.label != cell.answer for cell in fewer)
    monkeypatch.setattr(module, "MAX_BYTES", 1500)
    assert sum(map(len, confusion_findings(outcomes, list("abcd"), paths).images.values())) <= 3
