"""One sentence a row, word by word: the likeliest word each time, or a drawn one."""

import math
from typing import Protocol

import torch
from torch import Tensor

from vit.generation.limits import Limits
from vit.generation.search import Continuation, Search, Sentence, sentence


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


def write(
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
