"""GPTQ: weights rounded so that the errors of a product's inputs cancel each other.

    minimise  |X W - X Q S|²       X: inputs (rows, in), W: weights (in, out), S: scales of columns

Rows of W are rounded one after the other, and each error is moved to the rows that are left, as far
as their inputs can make up for it: by the inverse of XᵀX.

Source: Frantar et al., section 3, arXiv:2210.17323 (with the largest inputs first).
"""

import numpy as np

from vit.exported.onnx_session import Array

DAMPING = 0.01
"""Added to the diagonal of XᵀX, as a share of its mean: the inverse exists, and is stable."""
BLOCK = 64
"""Rows of which errors are moved to all later rows at once, in one product of matrices."""
MAX_INT8 = 127


def gptq(weights: Array, scales: Array, moments: Array) -> Array:
    """Integer weights, int8 of (in, out) from -127 to 127.

    Args:
        weights: (in, out)
        moments: XᵀX of the inputs, (in, in); inputs that are always 0 are rounded to the nearest.
    """
    matrix = moments.astype(np.float64)
    diagonal = np.diag_indices_from(matrix)
    unused = matrix[diagonal] <= 0
    matrix[diagonal] += DAMPING * matrix[diagonal].mean() + unused
    order = np.argsort(-matrix[diagonal], kind="stable")
    # row i: first row of the inverse of XᵀX without the inputs before i, over the root of its first
    feedback = np.linalg.cholesky(np.linalg.inv(matrix[np.ix_(order, order)])).T
    rest, rounded = weights[order].astype(np.float64), np.empty(weights.shape, np.int8)
    for start in range(0, len(rest), BLOCK):
        block = range(start, min(start + BLOCK, len(rest)))
        errors = np.empty((len(block), rest.shape[1]))
        for row in block:
            whole = np.clip(np.round(rest[row] / scales), -MAX_INT8, MAX_INT8)
            error = errors[row - start] = (rest[row] - whole * scales) / feedback[row, row]
            later = slice(row + 1, block.stop)
            rest[later] -= np.outer(feedback[row, later], error)
            rounded[order[row]] = whole
        rest[block.stop :] -= feedback[block.start : block.stop, block.stop :].T @ errors
    return rounded
