"""Holm's method against its definition as a step-down test, and its rate of false alarms."""

import numpy as np
import pytest

from vit.evaluation.exact_tests import holm


def rejected(p_values, level):
    """Holm's procedure as the paper has it: from the smallest p on, until one is too large."""
    found = [False] * len(p_values)
    for rank, place in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[place] > level / (len(p_values) - rank):
            break
        found[place] = True
    return found


def test_an_example_by_hand():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


@pytest.mark.parametrize("tests", [2, 5, 12])
def test_an_adjusted_value_is_the_least_level_at_which_the_procedure_rejects(tests):
    random = np.random.default_rng(tests)
    for _ in range(20):
        p_values = (random.random(tests) ** 3).tolist()
        p_values[1] = p_values[0]
        adjusted = holm(p_values)
        for level in [0.001, 0.01, 0.05, 0.2, *(one + 1e-12 for one in adjusted if one < 1)]:
            assert [one <= level for one in adjusted] == rejected(p_values, level)
