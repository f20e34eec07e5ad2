"""From logits to a token: repetition penalty, minimum length, temperature, top-k and nucleus.

    p_i = softmax(logits / temperature)_i,  of the top_k most likely tokens;
    of these the fewest whose probabilities sum to at least top_p

Random numbers are a function of (seed, image index, position), so that the result for an image does
not depend on the batch.

Sources: Fan et al., "Hierarchical Neural Story Generation", section 5.1, arXiv:1805.04833 (top-k);
Holtzman et al., "The Curious Case of Neural Text Degeneration", section 3.1, arXiv:1904.09751.
"""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from vit.generation.generation_config import Search

SIGN_BIT = 31  # of a float32
BITS = 31
"""Of random numbers, and of weights that they are compared with."""


class LogitsProcessor:
    """Applies the repetition penalty, and suppresses the token `end` before `min_tokens` tokens."""

    def __init__(self, search: Search, *, end: int) -> None:
        self.end, self.min_tokens = end, search.min_tokens
        self.penalty = search.repetition_penalty

    def penalize(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Repetition penalty on the logits, (rows, vocab), of the tokens, (rows, tokens), so far.

        Positive logits are divided and negative ones multiplied, as in transformers. The paper
        divides all, which makes a token with a negative logit more likely. Without a penalty it is
        the same tensor.

        Source: Keskar et al., "CTRL", section 4.1, arXiv:1909.05858.
        """
        if self.penalty == 1:
            return logits
        tokens = tokens.to(logits.device)
        values = logits.gather(1, tokens)
        values = torch.where(values < 0, values * self.penalty, values / self.penalty)
        return logits.scatter(1, tokens, values)

    def suppress_end(self, logits: Tensor, length: int) -> Tensor:
        """`logits`, (rows, vocab), with the end token at -inf if `length` is too short."""
        if length >= self.min_tokens:
            return logits
        logits = logits.clone()
        logits[:, self.end] = -torch.inf
        return logits

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """(rows, vocab) logits, (rows, tokens) of the sequences -> (rows, vocab)"""
        return self.suppress_end(self.penalize(logits, tokens), tokens.shape[1])


def stable_topk(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, sorted, and their ids; ties by the lower id.

    torch.topk does not define the order of ties, and a stable sort of a whole vocabulary takes
    thirty times as long.
    """
    values, ids = logits.topk(min(count + 1, logits.shape[1]), dim=1)
    ids = ids[:, :count]
    # If the last value taken equals the first one left out, topk has broken a tie.
    if values.shape[1] > count and not bool((values[:, count - 1] > values[:, count]).all()):
        vocab = logits.shape[1]
        # float32 as integers of the same order: for negative numbers the other bits are flipped.
        # Adding zero maps -0 to 0.
        bits = (logits + 0.0).view(torch.int32)
        ordered = bits ^ ((bits >> SIGN_BIT) & 0x7FFFFFFF)
        tie_break = torch.arange(vocab - 1, -1, -1, device=logits.device)
        keys = (ordered.long() << 32) + tie_break
        ids = vocab - 1 - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    ids = ids.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def choose_tokens(logits: Tensor, search: Search, random: Tensor | None) -> Tensor:
    """Ids of the next tokens, (rows, 1): sampled by 31-bit random integers, or the largest of
    (rows, vocab)."""
    if random is None:
        # the first of ties, as argmax, which takes twice the time on a CPU
        return logits.max(dim=1, keepdim=True).indices
    ids, parts = sampling_weights(logits, search)
    edges = parts.cumsum(dim=1)
    point = edges[:, -1:] * random >> BITS
    # Only nan logits come past the last edge; their score raises an error later.
    position = (edges <= point).sum(dim=1, keepdim=True).clamp(max=ids.shape[1] - 1)
    return ids.gather(1, position)


def random_numbers(search: Search, image_indices: Sequence[int]) -> Tensor:
    """Random integers of each image and position, (images, max_tokens)."""
    return torch.tensor([random_integers(search.seed, i, search.max_tokens) for i in image_indices])


def random_integers(seed: int, number: int, count: int) -> list[int]:
    """`count` random integers of 31 bits for image `number`; a prefix of a larger count's."""
    stream = hashlib.shake_128(f"{seed} {number}".encode()).digest(4 * count)
    return [value >> 1 for value in struct.unpack(f"<{count}I", stream)]


def sampling_weights(logits: Tensor, search: Search) -> tuple[Tensor, Tensor]:
    """Candidate tokens and their sampling weights, 0 outside the nucleus, each (rows, candidates).

    Weights are integers with sum 2**31 in a row before the nucleus is taken: their sums have no
    rounding that depends on the order, so the result depends neither on batch nor on device. A
    token of a probability under 2**-31 is never sampled.
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
