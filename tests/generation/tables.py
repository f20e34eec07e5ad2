"""A decoder without a network: its logits are random numbers seeded by the whole prefix."""

import hashlib
import itertools
import math

import torch
from torch import Tensor

from vit.generation.generate import generate
from vit.generation.generation_config import Search

BEGIN, END = 0, 1


class Table:
    """An IncrementalDecoder that checks and records its inputs.

    Args:
        images: Index of each row's image.
        vocab: Number of tokens; 0 is begin, 1 is end.
        seed: Seed of the logits.
        spread: Standard deviation of logits.
        ties: Whether logits are rounded, so that many are equal.
        lean: Added to the logit of the end token.
    """

    def __init__(self, images, vocab, *, seed=0, spread=2.0, ties=False, lean=0.0):
        self.rows = [(image,) for image in images]
        self.vocab, self.seed, self.spread, self.ties, self.lean = vocab, seed, spread, ties, lean
        self.calls: list[int] = []  # rows of each call
        self.selected: list[list[int]] = []

    def logits(self, row: tuple[int, ...]) -> Tensor:
        digest = hashlib.blake2b(repr((self.seed, row)).encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        values = torch.randn(self.vocab, generator=generator) * self.spread
        values[END] += self.lean
        return values.round() if self.ties else values

    def __call__(self, ids: Tensor) -> Tensor:
        assert ids.shape == (len(self.rows), 1)
        assert ids.dtype == torch.int64
        assert self.calls or bool((ids == BEGIN).all())
        self.calls.append(len(self.rows))
        self.rows = [(*row, new) for row, new in zip(self.rows, ids[:, 0].tolist(), strict=True)]
        return torch.stack([self.logits(row) for row in self.rows])

    def select_rows(self, rows: Tensor) -> None:
        assert rows.dtype == torch.int64
        assert len(rows) > 0
        self.selected.append(rows.tolist())
        self.rows = [self.rows[row] for row in rows.tolist()]

    def log_probs(self, image: int, words: tuple[int, ...], penalty: float = 1.0) -> Tensor:
        """Of what follows `words`, by the plain formula, in float64."""
        logits = self.logits((image, BEGIN, *words)).double()
        for word in set(words):
            logits[word] = logits[word] / penalty if logits[word] > 0 else logits[word] * penalty
        return logits - logits.exp().sum().log()

    def score(self, image: int, ids: tuple[int, ...], ended: bool, penalty: float = 1.0) -> float:
        """Sum of log probabilities of a sentence, by the plain formula."""
        whole = (*ids, END) if ended else ids
        return math.fsum(
            float(self.log_probs(image, whole[:place], penalty)[word])
            for place, word in enumerate(whole)
        )


def run(search: Search, images: list[int], vocab: int = 9, **settings) -> tuple[list, Table]:
    """What `generate` makes of a table, and the table that was asked."""
    table = Table(images, vocab, **settings)
    answers = generate(
        table, rows=len(images), begin=BEGIN, end=END, search=search, image_indices=images
    )
    return answers, table


def every_sentence(table: Table, image: int, search: Search) -> list[tuple[float, tuple, bool]]:
    """(rank, ids, ended) of all sentences that `search` allows, the best first: brute force."""
    words = [word for word in range(table.vocab) if word != END]
    found = []
    for length in range(search.max_tokens + 1):
        ended = length < search.max_tokens
        if ended and length < search.min_tokens:
            continue
        for ids in itertools.product(words, repeat=length):
            score = table.score(image, ids, ended, search.repetition_penalty)
            found.append((score / (length + ended) ** search.length_penalty, ids, ended))
    return sorted(found, reverse=True)


def narrow_search(table: Table, image: int, search: Search) -> list[tuple[tuple, bool]]:
    """(ids, ended) of beam search as one would write it down: no tensors, and never stopped early.

    Ties go to the beam that stood first, then the lower id.
    """
    beams, finished = [(0.0, ())], []
    for length in range(1, search.max_tokens + 1):
        grown = []
        for place, (total, ids) in enumerate(beams):
            values = table.log_probs(image, ids)
            grown += [
                (-(total + float(values[word])), place, word, ids)
                for word in range(table.vocab)
                if word != END or len(ids) >= search.min_tokens
            ]
        grown.sort(key=lambda one: (round(one[0], 6), *one[1:3]))
        last = length == search.max_tokens
        for cost, _, word, ids in grown[: search.beams]:
            if word == END or last:
                whole = ids if word == END else (*ids, word)
                finished.append((-cost / length**search.length_penalty, whole, word == END))
        beams = [(-cost, (*ids, word)) for cost, _, word, ids in grown if word != END]
        beams = beams[: search.beams]
    finished.sort(key=lambda one: -round(one[0], 6))
    return [(ids, ended) for _, ids, ended in finished[: search.n_best]]
