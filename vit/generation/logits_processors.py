"""What logits go through before a word is chosen, and which of equal words comes first."""

from collections.abc import Callable

import torch
from torch import Tensor

from vit.generation.generation_config import Search

Penalty = Callable[[Tensor, Tensor], Tensor]
SIGN = 31  # the bit of a float32 that is its sign


def unpenalised(logits: Tensor, written: Tensor) -> Tensor:  # noqa: ARG001
    """`logits` as they are."""
    return logits


class RepetitionPenalty:
    """Divides the logits of words that a sentence has already; negative ones it multiplies.

    Begin is no such word. The paper divides all, which makes a word with a negative logit more
    likely; transformers multiplies those, and so do we.

    Args:
        penalty: More than 1.

    Source: Keskar et al., "CTRL", section 4.1, arXiv:1909.05858.
    """

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, logits: Tensor, written: Tensor) -> Tensor:
        """(rows, vocab) logits, (rows, words) written so far -> (rows, vocab)"""
        written = written.to(logits.device)
        values = logits.gather(1, written)
        values = torch.where(values < 0, values * self.penalty, values / self.penalty)
        return logits.scatter(1, written, values)


class Limits:
    """The repetition penalty, and no end before `min_tokens` words.

    Args:
        search: The settings.
        end: Id of the end.
    """

    def __init__(self, search: Search, *, end: int) -> None:
        self.end, self.min_tokens = end, search.min_tokens
        off = search.repetition_penalty == 1
        self.penalise: Penalty = (
            unpenalised if off else RepetitionPenalty(search.repetition_penalty)
        )

    def forbid(self, logits: Tensor, words: int) -> Tensor:
        """`logits`, (rows, vocab), without the end while a sentence has too few words."""
        if words >= self.min_tokens:
            return logits
        logits = logits.clone()
        logits[:, self.end] = -torch.inf
        return logits

    def __call__(self, logits: Tensor, written: Tensor) -> Tensor:
        """(rows, vocab) logits, (rows, words) written so far -> (rows, vocab)"""
        return self.forbid(self.penalise(logits, written), written.shape[1])


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, sorted, and their ids; of equal ones the lower id first.

    torch.topk leaves the order of equal values open, and a stable sort of a whole vocabulary takes
    thirty times as long.

    Args:
        logits: (rows, vocab) float32.
        count: At most vocab.

    Returns:
        Two tensors (rows, count).
    """
    values, ids = logits.topk(min(count + 1, logits.shape[1]), dim=1)
    ids = ids[:, :count]
    # Where the last one taken equals the first one left out, topk has chosen between the two.
    if values.shape[1] > count and not bool((values[:, count - 1] > values[:, count]).all()):
        ids = _largest_of_equals(logits, count)
    ids = ids.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _largest_of_equals(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest, (rows, count): topk of numbers that are never equal."""
    vocab = logits.shape[1]
    # A float32 in the order of whole numbers: negative ones with the other bits turned. Adding
    # zero makes -0 the same as 0.
    bits = (logits + 0.0).view(torch.int32)
    whole = bits ^ ((bits >> SIGN) & 0x7FFFFFFF)
    places = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (whole.long() << 32) + places
    return vocab - 1 - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
