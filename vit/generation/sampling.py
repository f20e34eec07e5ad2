"""Greedy decoding, and sampling with temperature, top-k and nucleus.

    p_i = softmax(logits / temperature)_i,  of the top_k most likely tokens;
    of these the fewest whose probabilities sum to at least top_p

Random numbers are a function of (seed, image index, position), so that the result for an image does
not depend on the batch.

Sources: Fan et al., "Hierarchical Neural Story Generation", section 5.1, arXiv:1805.04833 (top-k);
Holtzman et al., "The Curious Case of Neural Text Degeneration", section 3.1, arXiv:1904.09751.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from vit.generation.generation_config import Hypothesis, IncrementalDecoder, Search, make_hypothesis
from vit.generation.logits_processors import LogitsProcessor, stable_topk


class TokenSelector(Protocol):
    """Chooses the next token of each row."""

    def __call__(self, logits: Tensor, index: int) -> Tensor:
        """(rows, vocab) float32 -> ids of the token at position `index`, (rows, 1)"""

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows, (kept,) int64."""


class GreedySelector:
    """Chooses the token with the largest logit; ties by the lower id."""

    def __call__(self, logits: Tensor, index: int) -> Tensor:  # noqa: ARG002
        """(rows, vocab) float32 -> (rows, 1)"""
        # the first of ties, as argmax, which takes twice the time on a CPU
        return logits.max(dim=1, keepdim=True).indices

    def select_rows(self, rows: Tensor) -> None:
        """No-op: it has no state."""


def generate_tokens(
    decoder: IncrementalDecoder,
    selector: TokenSelector,
    *,
    rows: int,
    begin: int,
    end: int,
    search: Search,
    device: torch.device | str,
) -> list[Hypothesis]:
    """One sequence for each row; finished rows leave the batch at once.

    Each step synchronises with the device once, to see which sequences ended.
    """
    processor = LogitsProcessor(search, end=end)
    finished: dict[int, Hypothesis] = {}
    open_rows = list(range(rows))
    ids = torch.full((rows, 1), begin, device=device)
    tokens, scores = ids[:, :0], torch.empty(rows, 0, device=device)
    for index in range(search.max_tokens):
        logits = decoder(ids).float()
        ids = selector(processor(logits, tokens), index)
        log_probabilities = logits.gather(1, ids) - logits.logsumexp(dim=1, keepdim=True)
        scores = torch.cat([scores, log_probabilities], dim=1)
        ended: list[bool] = (ids[:, 0] == end).tolist()
        if any(ended):
            done = [at for at, end_token in enumerate(ended) if end_token]
            kept = [at for at, end_token in enumerate(ended) if not end_token]
            finished |= _finish([open_rows[at] for at in done], tokens[done], scores[done], True)
            if not kept:
                break
            open_rows = [open_rows[at] for at in kept]
            rows_kept = torch.tensor(kept, device=device)
            ids, tokens, scores = ids[rows_kept], tokens[rows_kept], scores[rows_kept]
            decoder.select_rows(rows_kept)
            selector.select_rows(rows_kept)
        tokens = torch.cat([tokens, ids], dim=1)
    else:
        finished |= _finish(open_rows, tokens, scores, False)
    return [finished[row] for row in range(rows)]


def _finish(rows: list[int], tokens: Tensor, scores: Tensor, ended: bool) -> dict[int, Hypothesis]:
    """Hypotheses by row, from ids (rows, tokens) and log probabilities (rows, tokens and end)."""
    return {
        row: make_hypothesis(ids, math.fsum(parts), ended=ended)
        for row, ids, parts in zip(rows, tokens.tolist(), scores.tolist(), strict=True)
    }


BITS = 31


def random_integers(seed: int, number: int, count: int) -> list[int]:
    """`count` random integers of 31 bits for image `number`; a prefix of a larger count's."""
    stream = hashlib.shake_128(f"{seed} {number}".encode()).digest(4 * count)
    return [value >> 1 for value in struct.unpack(f"<{count}I", stream)]


def sampling_weights(logits: Tensor, search: Search) -> tuple[Tensor, Tensor]:
    """Candidate tokens and their sampling weights, each (rows, candidates) int64.

    Weights are integers with sum 2**31 in a row before the nucleus is taken: their sums have no
    rounding that depends on the order, so the result depends neither on batch nor on device. A
    token of a probability under 2**-31 is never sampled.

    Args:
        logits: (rows, vocab) float32.
        search: Its temperature is not 0.

    Returns:
        Ids, and weights; those outside the nucleus have weight 0.
    """
    values, ids = _candidates(logits, search)
    # The largest becomes 0, which stays finite at any temperature.
    values = (values - values.amax(dim=1, keepdim=True)) / search.temperature
    parts = (values.softmax(dim=1) * 2**BITS).long()
    nucleus = parts.sum(dim=1, keepdim=True) * round(search.top_p * 2**BITS) >> BITS
    before = parts.cumsum(dim=1) - parts
    return ids, parts.where(before < nucleus.clamp(min=1), 0)


def _candidates(logits: Tensor, search: Search) -> tuple[Tensor, Tensor]:
    """Logits and ids of the top_k most likely tokens; sorted if top_k or top_p is set."""
    vocab = logits.shape[1]
    if search.top_k:
        return stable_topk(logits, min(search.top_k, vocab))
    if search.top_p < 1:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    return logits, torch.arange(vocab, device=logits.device).expand_as(logits)


class RandomSelector:
    """Samples a token for each row, independently of the other rows.

    Args:
        search: The settings; its temperature is not 0.
        image_indices: Index of each row's image, for the random numbers.
        device: Device of the logits.
    """

    def __init__(
        self, search: Search, image_indices: Sequence[int], *, device: torch.device | str
    ) -> None:
        self.search = search
        table = [
            random_integers(search.seed, number, search.max_tokens) for number in image_indices
        ]
        self.random = torch.tensor(table, device=device)

    def __call__(self, logits: Tensor, index: int) -> Tensor:
        """(rows, vocab) float32 -> ids of the token at position `index`, (rows, 1)"""
        ids, parts = sampling_weights(logits, self.search)
        edges = parts.cumsum(dim=1)
        point = edges[:, -1:] * self.random[:, index : index + 1] >> BITS
        # Only nan logits come past the last edge; their score raises an error later.
        position = (edges <= point).sum(dim=1, keepdim=True).clamp(max=ids.shape[1] - 1)
        return ids.gather(1, position)

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows, (kept,) int64."""
        self.random = self.random[rows]
