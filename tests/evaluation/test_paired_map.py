"""The comparison of two multi-label networks, against scikit-learn and scipy."""

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from sklearn.metrics import average_precision_score

from vit.evaluation.paired_comparison import AllPairs
from vit.evaluation.paired_map import MapScores, PairedMap, student_tails

NEITHER = torch.zeros(60, dtype=torch.bool)


def scored(noise: float, seed: int, images: int = 60, classes: int = 4):
    """Targets, and scores that follow them with so much noise, (images, classes) both."""
    random = np.random.default_rng(seed)
    targets = (np.random.default_rng(99).random((images, classes)) < 0.35).astype(np.uint8)
    scores = targets + noise * random.standard_normal((images, classes))
    return torch.from_numpy(targets), torch.from_numpy(1 / (1 + np.exp(-scores)))


def paired_map(a, b, targets, right, groups=None) -> PairedMap:
    """The comparison of two networks by their probabilities, (images, classes) both."""
    both = (MapScores.of(scores, targets, groups) for scores in (a, b))
    return PairedMap.between(*both, targets, right, groups)


def compared(a, b, targets) -> PairedMap:
    return paired_map(a, b, targets, (NEITHER, NEITHER))


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 9.0])
@pytest.mark.parametrize("degrees", [3.0, 7.7, 199.0])
def test_the_p_value_is_that_of_scipys_student_distribution(t, degrees):
    assert student_tails(t, degrees) == pytest.approx(2 * student.sf(t, degrees), rel=1e-6)


def test_difference_and_error_are_those_of_scikit_learn():
    targets, a = scored(1.5, 0)
    _, b = scored(0.6, 1)
    found = compared(a, b, targets)

    def difference(kept):
        scores = [
            average_precision_score(targets[kept], one[kept], average="macro") for one in (a, b)
        ]
        return scores[1] - scores[0]

    everything = np.arange(60)
    assert found.difference == pytest.approx(difference(everything))
    without = [difference(np.delete(everything, left_out)) for left_out in everything]
    error = np.sqrt(59 / 60 * np.square(np.array(without) - np.mean(without)).sum())
    assert found.error == pytest.approx(error)
    assert found.p_value == pytest.approx(
        2 * student.sf(found.difference / error, found.degrees), rel=1e-6
    )
    low, high = found.interval()
    assert (high - low) / 2 == pytest.approx(error * student.ppf(0.975, found.degrees), rel=0.01)


def test_a_better_network_is_called_better_and_the_sentence_has_its_map():
    targets, a = scored(1.5, 0)
    _, b = scored(0.3, 1)
    found, reverse = compared(a, b, targets), compared(b, a, targets)
    assert (found.verdict, reverse.verdict) == ("better", "worse")
    assert f"{found.maps[1]:.2%} against {found.maps[0]:.2%} mAP" in found.sentence()
    assert 0 < found.images_needed() < 60
    pairs = AllPairs.of(torch.stack([NEITHER, NEITHER]), lambda _a, _b: found)
    assert pairs.sentence().startswith("On 60 images, B is better than A")
    assert [row["map"] for row in pairs.to_dict(["x", "y"])["runs"]] == [*found.maps]


def test_equal_networks_are_not_distinguishable():
    targets, a = scored(1.0, 0)
    found = compared(a, a.clone(), targets)
    assert (found.p_value, found.verdict, found.images_needed()) == (
        1.0,
        "not distinguishable",
        None,
    )


def is_unknown(found: PairedMap) -> bool:
    return (found.p_value, found.interval(), found.images_needed()) == (1.0, (-1.0, 1.0), None)


def test_nothing_is_known_where_one_part_has_all_images_of_the_classes():
    targets, a = scored(1.5, 0)
    _, b = scored(0.6, 1)
    targets = torch.zeros_like(targets)
    targets[7, 1] = 1
    found = compared(a, b, targets)
    assert is_unknown(found)
    assert found.verdict == "not distinguishable"
    assert "not distinguishable" in found.sentence()
    pairs = AllPairs.of(torch.stack([NEITHER, NEITHER]), lambda _a, _b: found)
    assert pairs.to_dict(["x", "y"])["pairs"][0]["images_needed"] is None


def test_nothing_is_known_where_no_image_changes_the_difference():
    targets, a = scored(1.5, 0)
    assert is_unknown(compared(a, a, targets))
    assert is_unknown(compared(targets.double(), 0.5 + 0.1 * targets.double(), targets))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_few_groups_of_images_show_nothing(groups):
    targets, a = scored(1.5, 0)
    _, b = scored(0.3, 1)
    numbers = torch.arange(60) % groups
    assert is_unknown(paired_map(a, b, targets, (NEITHER, NEITHER), numbers))


def test_the_error_of_large_tables_is_that_of_fewer_parts(monkeypatch):
    targets, a = scored(1.5, 0, images=400)
    _, b = scored(0.6, 1, images=400)
    whole = compared(a, b, targets)
    assert MapScores.of(a, targets).left_out.shape == (4, 200)
    monkeypatch.setattr("vit.evaluation.paired_map.MAX_WORK", 50 * a.numel())
    assert MapScores.of(a, targets).left_out.shape == (4, 50)
    assert compared(a, b, targets).error == pytest.approx(whole.error, rel=0.3)
    monkeypatch.setattr("vit.evaluation.paired_map.MAX_WORK", 1)
    assert MapScores.of(a, targets).left_out.shape == (4, 20)


@pytest.mark.slow
def test_equally_good_networks_are_called_different_in_about_five_of_a_hundred_comparisons():
    p_values = []
    for trial in range(250):
        random = np.random.default_rng(trial)
        targets = torch.from_numpy((random.random((80, 4)) < 0.35).astype(np.uint8))
        a, b = (targets + torch.from_numpy(random.standard_normal((80, 4))) for _ in "ab")
        p_values.append(
            paired_map(
                a.sigmoid(),
                b.sigmoid(),
                targets,
                (torch.zeros(80, dtype=torch.bool), torch.zeros(80, dtype=torch.bool)),
            ).p_value
        )
    assert 0.01 < np.mean(np.array(p_values) < 0.05) < 0.09
