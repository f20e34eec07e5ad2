"""Beam search: the likeliest few beginnings are written side by side.

    rank(words) = sum of log p(word | image, words before) / tokens**length_penalty

A step knows all continuations of the open beams, sorted by their sums. Those of the first `beams`
that are the end are finished sentences; the first `beams` others stay open. So a finished sentence
takes no place from an open one, as in transformers with `early_stopping="never"`. `tokens` counts
the words and the end; a sentence that stops at `max_tokens` has no end.

Equal sums: the beam that stood first, then the lower id; equal ranks: the one that finished first.

Source: Wu et al., "Google's Neural Machine Translation System", section 7, arXiv:1609.08144; its
length penalty is another one, ours is that of transformers.
"""

from bisect import insort
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vit.generation.generation_config import Continuation, Search, Sentence, sentence
from vit.generation.logits_processors import Limits, largest


class Proposals(NamedTuple):
    """Best words after each row, on the host, each (rows, candidates).

    Args:
        ids: The words.
        ranks: Their log probabilities, after the repetition penalty.
        scores: Their log probabilities as the network gives them.
    """

    ids: Tensor
    ranks: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Beams:
    """Beginnings of sentences, the best first, on the host; sums are in float64.

    Args:
        images: Which rows of the answer they belong to.
        words: (images, beams, words) int64.
        ranks: Sums that are compared, (images, beams).
        scores: Sums of the network's log probabilities, (images, beams).
        parents: Beam of the step before that each one continues, (images, beams).
    """

    images: list[int]
    words: Tensor
    ranks: Tensor
    scores: Tensor
    parents: Tensor

    @staticmethod
    def of(images: int) -> "Beams":
        """One empty beginning for each image."""
        zeros = torch.zeros(images, 1, dtype=torch.float64)
        none = torch.zeros(images, 1, 0, dtype=torch.long)
        return Beams(list(range(images)), none, zeros, zeros, zeros.long())

    def extended(self, proposals: Proposals) -> "Beams":
        """All continuations, the best first, as many as there are candidates of an image."""
        images, width, _ = self.words.shape
        ids, ranks, scores = (part.view(images, width, -1) for part in proposals)
        ranks, order = (
            (self.ranks.unsqueeze(2) + ranks).flatten(1).sort(dim=1, descending=True, stable=True)
        )
        parents = order // ids.shape[2]
        row = torch.arange(images).unsqueeze(1)
        return replace(
            self,
            words=torch.cat(
                [self.words[row, parents], ids.flatten(1).gather(1, order).unsqueeze(2)], dim=2
            ),
            ranks=ranks,
            scores=(self.scores.unsqueeze(2) + scores).flatten(1).gather(1, order),
            parents=parents,
        )

    def chosen(self, places: Tensor) -> "Beams":
        """The beams at `places`, (images, kept), of each image."""
        row = torch.arange(len(self.images)).unsqueeze(1)
        parts = (self.words, self.ranks, self.scores, self.parents)
        return Beams(self.images, *(part[row, places] for part in parts))

    def kept(self, places: list[int]) -> "Beams":
        """Of the images at `places` alone."""
        parts = (self.words, self.ranks, self.scores, self.parents)
        return Beams([self.images[i] for i in places], *(part[places] for part in parts))


class Finished:
    """The `n_best` best finished sentences of one image.

    Args:
        search: The settings.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.count = 0
        self.best: list[tuple[float, int, Sentence]] = []

    def add(self, found: Sentence, rank: float) -> None:
        """Take `found` in; `rank` is the sum of its log probabilities."""
        tokens = len(found.ids) + found.ended
        self.count += 1
        insort(self.best, (-rank / tokens**self.search.length_penalty, self.count, found))
        del self.best[self.search.n_best :]

    def complete(self, rank: float, words: int) -> bool:
        """Whether no continuation of a beam with this sum and so many words can still get in.

        A sum never grows, as it is of log probabilities. The length that treats it best is the
        longest where the penalty is positive, otherwise the shortest; an equal one comes too late.
        """
        if rank == -torch.inf:
            return True
        search = self.search
        earliest = min(max(words, search.min_tokens) + 1, search.max_tokens)
        tokens = search.max_tokens if search.length_penalty > 0 else earliest
        bound = -rank / tokens**search.length_penalty
        return len(self.best) == search.n_best and self.best[-1][0] <= bound


def propose(logits: Tensor, words: Tensor, limits: Limits, *, count: int) -> Proposals:
    """The `count` best words after each row of `logits`, (rows, vocab) float32.

    Raises:
        WeightsError: A logit is nan.
    """
    penalised = limits.penalise(logits, words)
    values, ids = largest(limits.forbid(penalised, words.shape[1]), count)
    scores = logits.log_softmax(dim=1)
    ranks = scores if penalised is logits else penalised.log_softmax(dim=1)
    parts = torch.stack([ranks.gather(1, ids), scores.gather(1, ids)]).cpu().double()
    # What is forbidden or impossible has no rank, whatever its probability.
    ranks = parts[0].masked_fill((values == -torch.inf).cpu(), -torch.inf)
    if ranks.isnan().any():
        sentence((), torch.nan, ended=False)
    return Proposals(ids.cpu(), ranks, parts[1])


def harvest(beams: Beams, finished: list[Finished], *, search: Search, end: int) -> None:
    """Take what is finished among the first beams of each image."""
    words = beams.words[:, : search.beams]
    ended = words[:, :, -1] == end
    over = ended | (words.shape[2] == search.max_tokens)
    possible = beams.ranks[:, : search.beams] > -torch.inf
    for place, beam in (over & possible).nonzero().tolist():
        ids = words[place, beam].tolist()
        ends = ids[-1] == end
        score = float(beams.scores[place, beam])
        found = sentence(ids[:-1] if ends else ids, score, ended=ends)
        finished[beams.images[place]].add(found, float(beams.ranks[place, beam]))


def beam_search(
    continuation: Continuation,
    *,
    rows: int,
    begin: int,
    end: int,
    search: Search,
    device: torch.device | str,
) -> list[list[Sentence]]:
    """The best sentences of each row; rows whose answer is known leave the work at once.

    The decoder sees one row an image at first, then `beams` of them, fewer where the vocabulary
    has no more.

    Raises:
        WeightsError: An image has no sentence at all, as its logits are not numbers.
    """
    limits = Limits(search, end=end)
    finished = [Finished(search) for _ in range(rows)]
    beams = Beams.of(rows)
    ids = torch.full((rows, 1), begin, device=device)
    for length in range(1, search.max_tokens + 1):
        logits = continuation(ids).float()
        images, width, _ = beams.words.shape
        vocab = logits.shape[1]
        # So many hold the best `beams` that go on, and the end if it is among the best.
        count = min(vocab, search.beams + 1)
        proposals = propose(logits, beams.words.flatten(0, 1), limits, count=count)
        beams = beams.extended(proposals)
        harvest(beams, finished, search=search, end=end)
        if length == search.max_tokens:
            break
        ended = (beams.words[:, :, -1] == end).byte()
        going = ended.argsort(dim=1, stable=True)[:, : min(search.beams, width * (vocab - 1))]
        beams = beams.chosen(going)
        best = beams.ranks[:, 0].tolist()
        open_places = [
            place
            for place, image in enumerate(beams.images)
            if not finished[image].complete(best[place], length)
        ]
        if not open_places:
            break
        beams = beams.kept(open_places)
        parents = (torch.tensor(open_places).unsqueeze(1) * width + beams.parents).flatten()
        if not torch.equal(parents, torch.arange(images * width)):
            continuation.select(parents.to(device))
        ids = beams.words[:, :, -1].reshape(-1, 1).to(device)
    return [_answer(one) for one in finished]


def _answer(finished: Finished) -> list[Sentence]:
    if not finished.best:
        sentence((), -torch.inf, ended=False)
    return [found for _, _, found in finished.best]
