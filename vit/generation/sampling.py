"""Words that are drawn: temperature, top-k and nucleus, with random numbers from counters.

    share_i = softmax(logits / temperature)_i,  of the top_k likeliest words;
    of these the fewest that together have at least top_p

Sources: Fan et al., "Hierarchical Neural Story Generation", section 5.1, arXiv:1805.04833 (top-k);
Holtzman et al., "The Curious Case of Neural Text Degeneration", section 3.1, arXiv:1904.09751.
"""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from vit.generation.limits import largest
from vit.generation.search import Search

BITS = 31


def draws(seed: int, number: int, count: int) -> list[int]:
    """`count` random whole numbers of 31 bits for picture `number`; more of them start alike."""
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
        numbers: Number of each row's picture.
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
