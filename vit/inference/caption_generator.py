"""Generates captions from the encoder's output, and computes the loss of given captions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from vit.data.captions.tokenizer import Tokenizer
from vit.errors import ConfigError, WeightsError
from vit.generation.generate import generate_captions
from vit.generation.generation_config import Caption, Search
from vit.model.captioner import Captioner, caption_losses
from vit.model.decoder import TextDecoder
from vit.weights.saved_model import LoadedRun


@dataclass(frozen=True)
class CaptionGenerator:
    """Generates captions; the caller sets autocast, device and inference mode."""

    decoder: TextDecoder
    tokenizer: Tokenizer
    search: Search

    def generate(
        self, memories: Sequence[Tensor], numbers: Sequence[int]
    ) -> list[tuple[Caption, ...] | WeightsError]:
        """Captions of each image, the best first, or its error.

        Args:
            memories: Image tokens of each image, (tokens, dim).
        """
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
            memories: Image tokens of each image, (tokens, dim).
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


def make_caption_generator(run: LoadedRun, search: Search | None) -> CaptionGenerator:
    """The caption generator of a captioner, which is on its device."""
    assert run.tokenizer is not None
    assert isinstance(run.model, Captioner), "a run with a tokenizer has a captioner"
    search = Search() if search is None else search
    limit = run.model.decoder.max_new_tokens
    for name in ("max_tokens", "min_tokens"):
        if getattr(search, name) > limit:
            setting = f"{name}={getattr(search, name)}"
            raise ConfigError(f"{setting}: this decoder writes at most {limit}; use fewer")
    return CaptionGenerator(run.model.decoder, run.tokenizer, search)
