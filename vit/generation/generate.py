"""Text generation, greedy, sampled or by beam search, and captions from an encoder's memory."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from vit.data.captions.tokenizer import Tokenizer
from vit.errors import ConfigError, WeightsError
from vit.generation.beam_search import beam_search
from vit.generation.generation_config import (
    Caption,
    Hypothesis,
    IncrementalDecoder,
    Search,
    make_hypothesis,
)
from vit.generation.logits_processors import LogitsProcessor, choose_tokens, random_numbers
from vit.model.captioner import CachedDecoder, caption_losses
from vit.model.decoder import TextDecoder


@torch.inference_mode()
def generate(
    decoder: IncrementalDecoder,
    *,
    rows: int,
    begin: int,
    end: int,
    search: Search,
    image_indices: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> list[list[Hypothesis]]:
    """Hypotheses of each of `rows` images, up to `search.n_best`, the best first.

    They depend only on the image's own logits (and its index, for sampling), not on the rest of the
    batch. There are fewer than `n_best` only with a very small vocabulary. The decoder's first call
    gets the token `begin` for each image; `max_tokens` is not 0.
    """
    image_indices = range(rows) if image_indices is None else image_indices
    if rows == 0:
        return []
    if search.beams > 1:
        return beam_search(decoder, rows=rows, begin=begin, end=end, search=search, device=device)
    random = random_numbers(search, image_indices).to(device) if search.temperature else None
    hypotheses = generate_tokens(
        decoder, random, rows=rows, begin=begin, end=end, search=search, device=device
    )
    return [[one] for one in hypotheses]


def generate_tokens(
    decoder: IncrementalDecoder,
    random: Tensor | None,
    *,
    rows: int,
    begin: int,
    end: int,
    search: Search,
    device: torch.device | str,
) -> list[Hypothesis]:
    """One sequence for each row; finished rows leave the batch at once.

    Each step synchronises with the device once, to see which sequences ended. `random` is (rows,
    max_tokens), or None for greedy decoding.
    """
    processor = LogitsProcessor(search, end=end)
    finished: dict[int, Hypothesis] = {}
    open_rows = list(range(rows))
    ids = torch.full((rows, 1), begin, device=device)
    tokens, scores = ids[:, :0], torch.empty(rows, 0, device=device)
    for index in range(search.max_tokens):
        logits = decoder(ids).float()
        drawn = None if random is None else random[:, index : index + 1]
        ids = choose_tokens(processor(logits, tokens), search, drawn)
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
            random = None if random is None else random[rows_kept]
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


@torch.no_grad()
def generate_captions(
    decoder: TextDecoder,
    memory: Tensor,
    tokenizer: Tokenizer,
    search: Search,
    *,
    image_indices: Sequence[int] | None = None,
) -> list[list[Caption]]:
    """The `search.n_best` captions of each image, the best first; `memory` is (batch, tokens,
    dim)."""
    if not len(memory):
        return []
    check_length(search, decoder)
    if not search.max_tokens:
        search = dataclasses.replace(search, max_tokens=decoder.max_new_tokens)
    hypotheses = generate(
        CachedDecoder(decoder, decoder.init_cache(memory)),
        rows=len(memory),
        begin=tokenizer.begin,
        end=tokenizer.end,
        search=search,
        image_indices=image_indices,
        device=memory.device,
    )
    return [
        [Caption(tokenizer.decode(one.ids), one.score, one.ids, one.ended) for one in group]
        for group in hypotheses
    ]


def check_length(search: Search, decoder: TextDecoder) -> None:
    """Refuse more tokens than `decoder` writes."""
    limit = decoder.max_new_tokens
    for name in ("max_tokens", "min_tokens"):
        if (tokens := getattr(search, name)) > limit:
            raise ConfigError(f"{name}={tokens}: this decoder writes at most {limit}; use fewer")


@dataclass(frozen=True)
class CaptionGenerator:
    """Generates captions; the caller sets autocast, device and inference mode."""

    decoder: TextDecoder
    tokenizer: Tokenizer
    search: Search

    def generate(
        self, memories: Sequence[Tensor], numbers: Sequence[int]
    ) -> list[tuple[Caption, ...] | WeightsError]:
        """Captions of each image, the best first, or its error; memories are (tokens, dim)."""
        results: dict[int, tuple[Caption, ...] | WeightsError] = {}
        for group in group_by_length(memories):
            memory = torch.stack([memories[index] for index in group])
            seeds = [numbers[index] for index in group]
            results |= zip(group, self._generate(memory, seeds), strict=True)
        return [results[index] for index in range(len(memories))]

    def _generate(
        self, memory: Tensor, numbers: Sequence[int]
    ) -> list[tuple[Caption, ...] | WeightsError]:
        """As `generate`, for memory (batch, tokens, dim)."""
        try:
            captions = generate_captions(
                self.decoder, memory, self.tokenizer, self.search, image_indices=numbers
            )
            return [tuple(best) for best in captions]
        except WeightsError as error:
            if len(memory) == 1:
                return [error]
        # one image failed: generate one by one, so that the others have their captions
        pairs = zip(torch.split(memory, 1), numbers, strict=True)
        return [result for one, number in pairs for result in self._generate(one, [number])]

    def loss(self, memories: Sequence[Tensor], caption_ids: Tensor) -> tuple[float, int]:
        """Cross-entropy of given captions, summed over their tokens, and the number of tokens.

        Args:
            caption_ids: (images, tokens) with begin and end tokens, padded, on the CPU.
        """
        total, count = 0.0, 0
        for group in group_by_length(memories):
            memory = torch.stack([memories[index] for index in group])
            ids = caption_ids[group].to(memory.device)
            logits = self.decoder(ids[:, :-1], memory).float()
            losses, counts = caption_losses(logits, ids, self.tokenizer.pad)
            total += float(losses.sum())
            count += int(counts.sum())
        return total, count


def group_by_length(memories: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the memories, grouped by their number of tokens."""

    def length(index: int) -> int:
        return len(memories[index])

    order = sorted(range(len(memories)), key=length)
    return [list(group) for _, group in groupby(order, key=length)]
