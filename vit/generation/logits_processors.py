"""Processing of logits before a token is chosen: repetition penalty, minimum length; and top-k."""

import torch
from torch import Tensor

from vit.generation.generation_config import Search

SIGN_BIT = 31  # of a float32


class LogitsProcessor:
    """Applies the repetition penalty, and suppresses the token `end` before `min_tokens` tokens."""

    def __init__(self, search: Search, *, end: int) -> None:
        self.end, self.min_tokens = end, search.min_tokens
        self.penalty = search.repetition_penalty

    def penalize(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Repetition penalty on the logits of tokens already in the sequence, without begin.

        Positive logits are divided and negative ones multiplied, as in transformers. The paper
        divides all, which makes a token with a negative logit more likely.

        Args:
            logits: (rows, vocab).
            tokens: The sequences, (rows, tokens).

        Returns:
            (rows, vocab); the same tensor if the penalty is 1.

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

    Args:
        logits: (rows, vocab) float32.
        count: At most vocab.

    Returns:
        Two tensors (rows, count).
    """
    values, ids = logits.topk(min(count + 1, logits.shape[1]), dim=1)
    ids = ids[:, :count]
    # If the last value taken equals the first one left out, topk has broken a tie.
    if values.shape[1] > count and not bool((values[:, count - 1] > values[:, count]).all()):
        ids = _topk_of_ties(logits, count)
    ids = ids.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _topk_of_ties(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest, (rows, count): topk of keys without ties."""
    vocab = logits.shape[1]
    # float32 as integers of the same order: for negative numbers the other bits are flipped.
    # Adding zero maps -0 to 0.
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> SIGN_BIT) & 0x7FFFFFFF)
    tie_break = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) + tie_break
    return vocab - 1 - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
