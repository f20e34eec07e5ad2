"""Captions of what an encoder saw: how they are looked for, and how likely given ones are."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from vit.data.captions.tokenizer import Tokenizer
from vit.errors import ConfigError, WeightsError
from vit.generation.caption import Caption
from vit.generation.caption_likelihood import word_losses
from vit.generation.generate import generate_captions
from vit.generation.generation_config import Search
from vit.model.captioner import Captioner
from vit.model.decoder import TextDecoder
from vit.weights.saved_model import LoadedRun

NO_CAPTIONS = "this network names classes and writes no captions"


@dataclass(frozen=True)
class Speaker:
    """Writes captions; its caller chooses arithmetic and device, and wants no gradients.

    Args:
        decoder: In evaluation mode.
        tokenizer: Of its words.
        search: How captions are looked for.
    """

    decoder: TextDecoder
    tokenizer: Tokenizer
    search: Search

    def write(
        self, memories: Sequence[Tensor], numbers: Sequence[int]
    ) -> list[tuple[Caption, ...] | WeightsError]:
        """Captions of each image, the best first, or why there are none.

        Args:
            memories: What the encoder saw of each, (tokens, dim).
            numbers: Of the images, which decide what is drawn.
        """
        found: dict[int, tuple[Caption, ...] | WeightsError] = {}
        for group in of_one_length(memories):
            memory = torch.stack([memories[place] for place in group])
            own = [numbers[place] for place in group]
            found |= zip(group, self._write(memory, own), strict=True)
        return [found[place] for place in range(len(memories))]

    def _write(
        self, memory: Tensor, numbers: Sequence[int]
    ) -> list[tuple[Caption, ...] | WeightsError]:
        """As `write`, for (images, tokens, dim)."""
        try:
            captions = generate_captions(
                self.decoder, memory, self.tokenizer, self.search, numbers=numbers
            )
            return [tuple(best) for best in captions]
        except WeightsError as error:
            if len(memory) == 1:
                return [error]
        # one of them is to blame; the others have their captions
        pairs = zip(torch.split(memory, 1), numbers, strict=True)
        return [found for one, number in pairs for found in self._write(one, [number])]

    def loss(self, memories: Sequence[Tensor], words: Tensor) -> tuple[float, int]:
        """Summed cross-entropy of each next word of given captions, and how many words there are.

        Args:
            memories: What the encoder saw of each image, (tokens, dim).
            words: (images, tokens) with begin and end, filled up with padding on the CPU.
        """
        total, count = 0.0, 0
        for group in of_one_length(memories):
            memory = torch.stack([memories[place] for place in group])
            ids = words[group].to(memory.device)
            logits = self.decoder(ids[:, :-1], memory).float()
            losses, counts = word_losses(logits, ids, self.tokenizer.pad)
            total += float(losses.sum())
            count += int(counts.sum())
        return total, count


def of_one_length(memories: Sequence[Tensor]) -> list[list[int]]:
    """Places of the memories with as many tokens, in groups."""

    def length(place: int) -> int:
        return len(memories[place])

    order = sorted(range(len(memories)), key=length)
    return [list(group) for _, group in groupby(order, key=length)]


def speaker_of(run: LoadedRun, search: Search | None) -> Speaker | None:
    """What writes the captions of `run`, whose model is on its device; None for a classifier.

    Args:
        run: What was loaded.
        search: How captions are looked for; the likeliest word each time when left out.

    Raises:
        ConfigError: A search is asked of a classifier, or longer captions than there are places.
    """
    if run.tokenizer is None or not isinstance(run.model, Captioner):
        if search is not None:
            raise ConfigError(f"{changed(search)}: {NO_CAPTIONS}; leave it out")
        return None
    search = Search() if search is None else search
    most = run.model.decoder.most_words
    for name in ("max_tokens", "min_tokens"):
        if getattr(search, name) > most:
            asked = f"{name}={getattr(search, name)}"
            raise ConfigError(f"{asked}: this decoder writes at most {most}; ask for fewer")
    return Speaker(run.model.decoder, run.tokenizer, search)


def changed(search: Search) -> str:
    """The settings of `search` that are not the usual ones, for an error."""
    usual = dataclasses.asdict(Search())
    asked = dataclasses.asdict(search)
    names = [f"{name}={value!r}" for name, value in asked.items() if value != usual[name]]
    return ", ".join(names) or "search"
