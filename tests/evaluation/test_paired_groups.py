"""Paired tests of groups of images: against every flip of the signs, and by simulation."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from vit.evaluation.paired_comparison import AllPairs, PairedComparison
from vit.evaluation.paired_groups import PairedGroups, sign_flip_test
from vit.evaluation.paired_map import MapScores, PairedMap


@pytest.mark.parametrize(
    "sums", [[], [0, 0], [1], [3, -1, 2], [1, 1, 1, 1, 1], [4, -4, 2, 2, 0, 7, -1, 1], [2] * 9]
)
def test_p_counts_all_signs(sums):
    flipped = [sum(map(np.multiply, sums, signs)) for signs in product((-1, 1), repeat=len(sums))]
    expected = np.mean([abs(one) >= abs(sum(sums)) for one in flipped])
    assert sign_flip_test(sums) == pytest.approx(expected, rel=1e-12)


def test_groups_of_one_image_give_mcnemars_test():
    a, b = torch.arange(300) % 7 > 0, torch.arange(300) % 5 > 0
    alone, found = PairedComparison.of(a, b), PairedGroups.of_groups(a, b, torch.arange(300))
    discordant = alone.only_a_right + alone.only_b_right
    assert found.p_value == pytest.approx(binomtest(alone.only_a_right, discordant).pvalue)
    assert found.interval() == pytest.approx(alone.interval(), abs=2e-3)
    assert found.images_needed() == pytest.approx(alone.images_needed(), rel=0.02)
    assert "groups" not in alone.to_dict()
    assert found.to_dict()["groups"] == 300
    assert "with 300 images of 300 groups" in found.sentence()


def test_many_images_of_a_few_sizes_are_fast_and_exact():
    assert sign_flip_test([1] * 5200 + [-1] * 4800) == pytest.approx(
        binomtest(5200, 10_000).pvalue, rel=1e-6
    )


def draw(
    random: np.random.Generator, better: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Answers of two networks for 40 groups of 6 images, which differ by whole groups mostly."""
    groups = np.arange(40).repeat(6)
    prefer = random.normal(better, 1.0, 40)[groups]
    a = random.random(240) < 0.7 - 0.25 * prefer
    b = random.random(240) < 0.7 + 0.25 * prefer
    return torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(groups)


def test_false_alarms_and_intervals_of_groups():
    random = np.random.default_rng(0)
    alarms, held = {"groups": 0, "images": 0}, {"groups": 0, "images": 0}
    for _ in range(1000):
        a, b, groups = draw(random)
        both = {
            "groups": PairedGroups.of_groups(a, b, groups),
            "images": PairedComparison.of(a, b),
        }
        for name, found in both.items():
            low, high = found.interval()
            alarms[name] += found.p_value < 0.05
            held[name] += low <= 0 <= high
    assert 25 <= alarms["groups"] <= 65
    assert held["groups"] >= 930
    assert alarms["images"] > 150  # what groups are for
    assert held["images"] < 850


def test_the_sides_and_the_words_of_several_runs_are_of_groups():
    a, b, groups = draw(np.random.default_rng(1), better=0.8)
    found = PairedGroups.of_groups(a, b, groups)
    assert found.verdict == "better"
    narrow = PairedComparison.of(a, b)
    for place in (0, 1):
        own, other = (one.side(place)["top1_interval"] for one in (found, narrow))
        assert own[1] - own[0] > 1.2 * (other[1] - other[0])
    assert found.images_needed() > narrow.images_needed()
    pairs = AllPairs.of(
        torch.stack([a, b, a]),
        lambda one, two: PairedGroups.of_groups(*((a, b, a)[at] for at in (one, two)), groups),
    )
    assert pairs.sentence().startswith("On 240 images of 40 groups, B is better than A and C")
    assert pairs.to_dict("abc")["groups"] == 40


@pytest.mark.parametrize("number", [1, 2, 5])
def test_too_few_groups_show_nothing_whatever_their_size(number):
    groups = torch.arange(number).repeat_interleave(500)
    a, b = torch.arange(500 * number) % 3 > 0, torch.arange(500 * number) % 6 > 0
    found = PairedGroups.of_groups(a, b, groups)
    assert (found.verdict, found.interval()) == ("not distinguishable", (-1.0, 1.0))
    assert found.images_needed() is None
    assert found.sentence().endswith("give images of at least 6 groups")


def test_as_many_groups_as_a_sentence_asks_for_can_show_a_difference():
    a, b = torch.zeros(60, dtype=torch.bool), torch.ones(60, dtype=torch.bool)
    assert PairedGroups.of_groups(a, b, torch.arange(60) % 6).verdict == "better"

    def pairs(number: int) -> AllPairs:
        groups = torch.arange(60) % number
        return AllPairs.of(
            torch.stack([a, b, b]),
            lambda one, two: PairedGroups.of_groups(*((a, b, b)[at] for at in (one, two)), groups),
        )

    assert pairs(6).sentence().endswith("give images of at least 7 groups")
    assert pairs(6).needed((0, 1)) is None
    assert "B is better than A" in pairs(7).sentence()


def test_the_error_of_map_is_that_of_groups():
    random = torch.Generator().manual_seed(0)
    groups = torch.arange(40).repeat_interleave(6)
    targets = torch.randint(2, (40, 3), generator=random)[groups]
    noise = torch.randn(2, 40, 3, generator=random)[:, groups]
    a, b = (torch.sigmoid(targets + one).double() for one in noise)
    right = tuple(((one >= 0.5) == targets.bool()).all(dim=1) for one in (a, b))
    alone = PairedMap.between(*(MapScores.of(x, targets) for x in (a, b)), targets, right)
    both = (MapScores.of(x, targets, groups) for x in (a, b))
    found = PairedMap.between(*both, targets, right, groups)
    assert found.error > 1.5 * alone.error
    assert (found.groups, alone.groups) == (40, None)
    assert found.degrees <= 39
    assert "of 40 groups" in found.sentence()
