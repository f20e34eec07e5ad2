"""The likeliest word each time, in numpy: what vit/generation does by default, without torch."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vit.errors import WeightsError

Array = npt.NDArray[Any]


class Written(NamedTuple):
    """One sentence."""

    ids: tuple[int, ...]
    """Without begin and end."""
    score: float
    """Sum of the log probabilities, the end included where it came."""
    ended: bool
    """Whether the network ended it."""


Step = Callable[[dict[str, Array]], list[Array]]


def greedy(
    step: Step,
    memory_key: Array,
    memory_value: Array,
    *,
    begin: int,
    end: int,
    min_tokens: int,
    max_tokens: int,
) -> list[Written]:
    """The likeliest word each time, of equal ones that of the lower id; ended rows leave the work.

    Args:
        step: The decoder's graph.
        memory_key, memory_value: Of the images, (layers, batch, kv_heads, tokens, head_dim).
        begin, end: Ids around a sentence.
        min_tokens: Words before a sentence may end.
        max_tokens: Words after which it stops, unended.

    Returns:
        One sentence an image.

    Raises:
        WeightsError: A log probability is no number.
    """
    going = np.arange(memory_key.shape[1])
    words: list[list[int]] = [[] for _ in going]
    scores: list[list[float]] = [[] for _ in going]
    memory = {"memory_key": memory_key, "memory_value": memory_value}
    past = {"past_key": memory_key[..., :0, :], "past_value": memory_value[..., :0, :]}
    ids = np.full((len(going), 1), begin, dtype=np.int64)
    for index in range(max_tokens):
        logits, *present = step({"ids": ids, **past, **memory})
        chosen = logits.copy()
        if index < min_tokens:
            chosen[:, end] = -np.inf
        ids = chosen.argmax(axis=1)[:, None]
        for row, word, score in zip(going, ids[:, 0], _log_probabilities(logits, ids), strict=True):
            scores[row].append(float(score))
            if word != end:
                words[row].append(int(word))
        kept = np.flatnonzero(ids[:, 0] != end)
        if not len(kept):
            break
        going, ids = going[kept], ids[kept]
        past = {name: x[:, kept] for name, x in zip(past, present, strict=True)}
        memory = {name: x[:, kept] for name, x in memory.items()}
    return [_written(*pair) for pair in zip(words, scores, strict=True)]


def _log_probabilities(logits: Array, ids: Array) -> Array:
    """Of one id in each row, float64: (rows, vocab), (rows, 1) -> (rows,)"""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    one = np.take_along_axis(wide, ids, axis=1)[:, 0]
    result: Array = one - np.log(np.exp(wide).sum(axis=1))
    return result


def _written(words: list[int], scores: list[float]) -> Written:
    score = math.fsum(scores)
    if not math.isfinite(score):
        raise WeightsError(
            f"a sentence has the log probability {score}: the network's logits are not numbers; "
            "check the weights that were exported"
        )
    return Written(tuple(words), score, len(scores) > len(words))
