"""Beam search.

    rank = sum of log p(token | image, tokens before) / tokens**length_penalty

Each step sorts all continuations of the open beams by their sums. Of the first `beams`, those with
the end token are finished hypotheses; the first `beams` others stay open. So a finished
hypothesis takes up no beam, as in transformers with `early_stopping="never"`. `tokens` includes the
end token; a sequence that stops at `max_tokens` has none.

Ties of sums: the earlier beam, then the lower id; ties of ranks: the one that finished first.

Source: Wu et al., "Google's Neural Machine Translation System", section 7, arXiv:1609.08144; its
length penalty is different; this one is that of transformers.
"""

from bisect import insort
from typing import NamedTuple

import torch
from torch import Tensor

from vit.generation.generation_config import Hypothesis, IncrementalDecoder, Search, make_hypothesis
from vit.generation.logits_processors import LogitsProcessor, stable_topk


class Candidates(NamedTuple):
    """Best next tokens of each row, on the CPU, each (rows, candidates)."""

    ids: Tensor
    ranks: Tensor
    """Their log probabilities, after the repetition penalty."""
    scores: Tensor
    """Their log probabilities before the penalty."""


class Beams(NamedTuple):
    """The open beams of all images, the best first, on the CPU; sums are in float64."""

    images: Tensor
    """Index of the image in the result, (images, beams)."""
    tokens: Tensor
    """(images, beams, tokens) int64."""
    ranks: Tensor
    """Sums of log probabilities after the penalty, (images, beams)."""
    scores: Tensor
    """Sums of log probabilities before it, (images, beams)."""
    parents: Tensor
    """Index of the beam of the last step that each one continues, (images, beams)."""

    @staticmethod
    def start(images: int) -> "Beams":
        """One empty beam for each image."""
        zeros = torch.zeros(images, 1, dtype=torch.float64)
        none = torch.zeros(images, 1, 0, dtype=torch.long)
        return Beams(torch.arange(images).unsqueeze(1), none, zeros, zeros, zeros.long())

    def expand(self, candidates: Candidates) -> "Beams":
        """All continuations by the candidates, the best first."""
        ids, ranks, scores = (part.view(*self.ranks.shape, -1) for part in candidates)
        sums = (self.ranks.unsqueeze(2) + ranks).flatten(1)
        ranks, order = sums.sort(dim=1, descending=True, stable=True)
        parents = order // ids.shape[2]
        grown = self.select_beams(parents)
        newest = ids.flatten(1).gather(1, order).unsqueeze(2)
        return grown._replace(
            tokens=torch.cat([grown.tokens, newest], dim=2),
            ranks=ranks,
            scores=(self.scores.unsqueeze(2) + scores).flatten(1).gather(1, order),
            parents=parents,
        )

    def select_beams(self, positions: Tensor) -> "Beams":
        """The beams at `positions`, (images, kept), of each image."""
        row = torch.arange(len(self.images)).unsqueeze(1)
        return Beams(*(part[row, positions] for part in self))


class BeamHypotheses:
    """The `n_best` best finished hypotheses of one image."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.count = 0
        self.best: list[tuple[float, int, Hypothesis]] = []

    def add(self, hypothesis: Hypothesis, rank: float) -> None:
        """Add a hypothesis; `rank` is the sum of its log probabilities."""
        tokens = len(hypothesis.ids) + hypothesis.ended
        self.count += 1
        insort(self.best, (-rank / tokens**self.search.length_penalty, self.count, hypothesis))
        del self.best[self.search.n_best :]

    def is_complete(self, rank: float, length: int) -> bool:
        """Whether no continuation of a beam of this sum and length can still be among the best.

        A sum of log probabilities never grows. Its best possible length is the longest if the
        penalty is positive, otherwise the shortest; of equal ranks the earlier one is kept.
        """
        if rank == -torch.inf:
            return True
        search = self.search
        earliest = min(max(length, search.min_tokens) + 1, search.max_tokens)
        tokens = search.max_tokens if search.length_penalty > 0 else earliest
        bound = -rank / tokens**search.length_penalty
        return len(self.best) == search.n_best and self.best[-1][0] <= bound


def top_continuations(
    logits: Tensor, tokens: Tensor, processor: LogitsProcessor, *, count: int
) -> Candidates:
    """The `count` best next tokens of each row of `logits`, (rows, vocab) float32."""
    penalised = processor.penalize(logits, tokens)
    values, ids = stable_topk(processor.suppress_end(penalised, tokens.shape[1]), count)
    scores = logits.log_softmax(dim=1)
    ranks = scores if penalised is logits else penalised.log_softmax(dim=1)
    parts = torch.stack([ranks.gather(1, ids), scores.gather(1, ids)]).cpu().double()
    # Suppressed tokens get no rank, whatever their probability.
    ranks = parts[0].masked_fill((values == -torch.inf).cpu(), -torch.inf)
    if ranks.isnan().any():
        make_hypothesis((), torch.nan, ended=False)
    return Candidates(ids.cpu(), ranks, parts[1])


def collect_finished(
    beams: Beams, finished: list[BeamHypotheses], *, search: Search, end: int
) -> None:
    """Move finished hypotheses among the first beams of each image to `finished`."""
    tokens = beams.tokens[:, : search.beams]
    ended = tokens[:, :, -1] == end
    done = ended | (tokens.shape[2] == search.max_tokens)
    possible = beams.ranks[:, : search.beams] > -torch.inf
    for image, beam in (done & possible).nonzero().tolist():
        ids = tokens[image, beam].tolist()
        has_end = ids[-1] == end
        score = float(beams.scores[image, beam])
        hypothesis = make_hypothesis(ids[:-1] if has_end else ids, score, ended=has_end)
        finished[int(beams.images[image, 0])].add(hypothesis, float(beams.ranks[image, beam]))


def beam_search(
    decoder: IncrementalDecoder,
    *,
    rows: int,
    begin: int,
    end: int,
    search: Search,
    device: torch.device | str,
) -> list[list[Hypothesis]]:
    """The best hypotheses of each row; rows that are complete leave the batch at once."""
    processor = LogitsProcessor(search, end=end)
    finished = [BeamHypotheses(search) for _ in range(rows)]
    beams = Beams.start(rows)
    ids = torch.full((rows, 1), begin, device=device)
    for length in range(1, search.max_tokens + 1):
        logits = decoder(ids).float()
        images, width, _ = beams.tokens.shape
        vocab = logits.shape[1]
        # Enough for the best `beams` open continuations, and the end if it is among the best.
        count = min(vocab, search.beams + 1)
        candidates = top_continuations(logits, beams.tokens.flatten(0, 1), processor, count=count)
        beams = beams.expand(candidates)
        collect_finished(beams, finished, search=search, end=end)
        if length == search.max_tokens:
            break
        ended = (beams.tokens[:, :, -1] == end).byte()
        unfinished = ended.argsort(dim=1, stable=True)[:, : min(search.beams, width * (vocab - 1))]
        beams = beams.select_beams(unfinished)
        best = beams.ranks[:, 0].tolist()
        open_images = [
            position
            for position, image in enumerate(beams.images[:, 0].tolist())
            if not finished[image].is_complete(best[position], length)
        ]
        if not open_images:
            break
        beams = Beams(*(part[open_images] for part in beams))
        parents = (torch.tensor(open_images).unsqueeze(1) * width + beams.parents).flatten()
        if not torch.equal(parents, torch.arange(images * width)):
            decoder.select_rows(parents.to(device))
        ids = beams.tokens[:, :, -1].reshape(-1, 1).to(device)
    for image in finished:
        if not image.best:  # raise its error
            make_hypothesis((), -torch.inf, ended=False)
    return [[hypothesis for _, _, hypothesis in image.best] for image in finished]
