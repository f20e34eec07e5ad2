"""Words that are drawn: temperature, top-k and nucleus, with random numbers from counters.

    share_i = softmax(logits / temperature)_i,  of the top_k likeliest words;
    of these the fewest that together have at least top_p

Sources: Fan et al., "Hierarchical Neural Story Generation", section 5.1, arXiv:1805.04833 (top-k);
Holtzman et al., "The Curious Case of Neural Text Degeneration", section 3.1, arXiv:1904.09751.

One sentence a row, word by word: the likeliest word each time, or a drawn one.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from vit.generation.generation_config import Continuation, Search, Sentence, sentence
from vit.generation.logits_processors import Limits, largest


class Choice(Protocol):
    """How the next word is chosen."""

    def __call__(self, logits: Tensor, index: int) -> Tensor:
        """(rows, vocab) float32 -> ids of the word at place `index`, (rows, 1)"""

    def select(self, rows: Tensor) -> None:
        """Keep these rows, (kept,) int64."""


class Likeliest:
    """Chooses the word with the largest logit; of equal ones the one with the lower id."""

    def __call__(self, logits: Tensor, index: int) -> Tensor:  # noqa: ARG002
        """(rows, vocab) float32 -> (rows, 1)"""
        # of equals the first, as argmax, which takes twice the time on a CPU
        return logits.max(dim=1, keepdim=True).indices

    def select(self, rows: Tensor) -> None:
        """It remembers nothing of a row."""


def generate_tokens(
    continuation: Continuation,
    choice: Choice,
    *,
    rows: int,
    begin: int,
    end: int,
    search: Search,
    device: torch.device | str,
) -> list[Sentence]:
    """A sentence of each row; ended ones leave the work at once.

    A step waits for the device once, to see which sentences ended.
    """
    limits = Limits(search, end=end)
    done: dict[int, Sentence] = {}
    going = list(range(rows))
    ids = torch.full((rows, 1), begin, device=device)
    written, scores = ids[:, :0], torch.empty(rows, 0, device=device)
    for index in range(search.max_tokens):
        logits = continuation(ids).float()
        ids = choice(limits(logits, written), index)
        chances = logits.gather(1, ids) - logits.logsumexp(dim=1, keepdim=True)
        scores = torch.cat([scores, chances], dim=1)
        over: list[bool] = (ids[:, 0] == end).tolist()
        if any(over):
            left = [place for place, ended in enumerate(over) if ended]
            kept = [place for place, ended in enumerate(over) if not ended]
            done |= _finish([going[place] for place in left], written[left], scores[left], True)
            if not kept:
                break
            going = [going[place] for place in kept]
            rows_kept = torch.tensor(kept, device=device)
            ids, written, scores = ids[rows_kept], written[rows_kept], scores[rows_kept]
            continuation.select(rows_kept)
            choice.select(rows_kept)
        written = torch.cat([written, ids], dim=1)
    else:
        done |= _finish(going, written, scores, False)
    return [done[row] for row in range(rows)]


def _finish(rows: list[int], words: Tensor, scores: Tensor, ended: bool) -> dict[int, Sentence]:
    """Sentences of `rows` from (rows, words) ids and (rows, words and end) log probabilities."""
    return {
        row: sentence(ids, math.fsum(parts), ended=ended)
        for row, ids, parts in zip(rows, words.tolist(), scores.tolist(), strict=True)
    }


BITS = 31


def draws(seed: int, number: int, count: int) -> list[int]:
    """`count` random whole numbers of 31 bits for image `number`; more of them start alike."""
    stream = hashlib.shake_128(f"{seed} {number}".encode()).digest(4 * count)
    return [value >> 1 for value in struct.unpack(f"<{count}I", stream)]


def shares(logits: Tensor, search: Search) -> tuple[Tensor, Tensor]:
    """Words that may be drawn and how often, each (rows, candidates) int64.

    Shares are whole numbers, 2**31 a row before the nucleus is cut out: sums of them have no
    rounding that depends on the order, so neither the batch nor the device moves an edge. A word
    of a probability under 2**-31 is never drawn.

    Args:
        logits: (rows, vocab) float32.
        search: Its temperature is not 0.

    Returns:
        Ids, and shares; those outside the nucleus have share 0.
    """
    values, ids = _candidates(logits, search)
    # The largest becomes 0, which no temperature makes infinite.
    values = (values - values.amax(dim=1, keepdim=True)) / search.temperature
    parts = (values.softmax(dim=1) * 2**BITS).long()
    nucleus = parts.sum(dim=1, keepdim=True) * round(search.top_p * 2**BITS) >> BITS
    before = parts.cumsum(dim=1) - parts
    return ids, parts.where(before < nucleus.clamp(min=1), 0)


def _candidates(logits: Tensor, search: Search) -> tuple[Tensor, Tensor]:
    """Logits and ids of the top_k likeliest words; sorted where anything asks for an order."""
    vocab = logits.shape[1]
    if search.top_k:
        return largest(logits, min(search.top_k, vocab))
    if search.top_p < 1:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    return logits, torch.arange(vocab, device=logits.device).expand_as(logits)


class Drawn:
    """Draws a word for each row; what a row gets depends on no other row.

    Args:
        search: The settings; its temperature is not 0.
        numbers: Number of each row's image.
        device: Where the logits are.
    """

    def __init__(
        self, search: Search, numbers: Sequence[int], *, device: torch.device | str
    ) -> None:
        self.search = search
        table = [draws(search.seed, number, search.max_tokens) for number in numbers]
        self.random = torch.tensor(table, device=device)

    def __call__(self, logits: Tensor, index: int) -> Tensor:
        """(rows, vocab) float32 -> ids of the word at place `index`, (rows, 1)"""
        ids, parts = shares(logits, self.search)
        edges = parts.cumsum(dim=1)
        point = edges[:, -1:] * self.random[:, index : index + 1] >> BITS
        # Only logits that are not numbers come past the last edge; their score tells.
        place = (edges <= point).sum(dim=1, keepdim=True).clamp(max=ids.shape[1] - 1)
        return ids.gather(1, place)

    def select(self, rows: Tensor) -> None:
        """Keep these rows, (kept,) int64."""
        self.random = self.random[rows]
