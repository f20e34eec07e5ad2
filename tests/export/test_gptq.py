"""GPTQ equals its paper's formula, and rounds for the outputs of a product."""

import numpy as np
import pytest

from vit.export.quantization import BLOCK, DAMPING, gptq


def problem(inputs=20, outputs=6, rows=300, seed=0):
    """Correlated inputs, weights, and their scales."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 5)) @ random.normal(size=(5, inputs))
    x += 0.3 * random.normal(size=x.shape)
    weights = random.normal(size=(inputs, outputs)).astype(np.float32)
    return x, weights, np.abs(weights).max(axis=0) / 127


def one_row_at_a_time(weights, scales, moments):
    """Optimal Brain Quantization, equations 2 and 3: the inverse of what is left at each step."""
    inputs = len(weights)
    hessian = moments + np.eye(inputs) * DAMPING * np.diag(moments).mean()
    rest, rounded = weights.astype(np.float64).copy(), np.zeros(weights.shape, np.int8)
    left = sorted(range(inputs), key=lambda row: -hessian[row, row])
    while left:
        inverse = np.linalg.inv(hessian[np.ix_(left, left)])
        row = left[0]
        rounded[row] = np.clip(np.round(rest[row] / scales), -127, 127)
        error = (rest[row] - rounded[row] * scales) / inverse[0, 0]
        rest[left] -= np.outer(inverse[0], error)
        left = left[1:]
    return rounded


@pytest.mark.parametrize("inputs", [1, 20, BLOCK + 9])
def test_gptq_equals_the_formula_of_its_paper(inputs):
    x, weights, scales = problem(inputs)
    moments = x.T @ x
    expected = one_row_at_a_time(weights, scales, moments)
    np.testing.assert_array_equal(gptq(weights, scales, moments), expected)


def test_gptq_halves_the_error_of_the_outputs():
    x, weights, scales = problem()
    wanted = x @ weights
    errors = [
        np.abs(x @ (whole * scales) - wanted).mean()
        for whole in (gptq(weights, scales, x.T @ x), np.round(weights / scales))
    ]
    assert errors[0] < 0.5 * errors[1]


def test_inputs_that_are_always_zero_are_rounded_to_the_nearest():
    x, weights, scales = problem()
    x[:, [3, 7]] = 0
    rounded = gptq(weights, scales, x.T @ x)
    np.testing.assert_array_equal(rounded[[3, 7]], np.round(weights / scales)[[3, 7]])
    nothing = gptq(weights, scales, np.zeros((20, 20), np.float32))
    np.testing.assert_array_equal(nothing, np.round(weights / scales))
