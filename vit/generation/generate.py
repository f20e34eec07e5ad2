"""From what an encoder saw to captions that people read.

From a decoder to sentences: the one entrance to every kind of search.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from vit.data.captions.tokenizer import Tokenizer
from vit.errors import ConfigError
from vit.generation.beam_search import beam_search
from vit.generation.caption import Caption
from vit.generation.generation_config import Continuation, Search, Sentence
from vit.generation.sampling import Choice, Drawn, Likeliest, generate_tokens
from vit.model.captioner import CachedContinuation
from vit.model.decoder import TextDecoder


@torch.inference_mode()
def generate(
    continuation: Continuation,
    *,
    rows: int,
    begin: int,
    end: int,
    search: Search,
    numbers: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> list[list[Sentence]]:
    """Sentences of each of `rows` images, up to `search.n_best`, the best first.

    They depend on the image's own logits alone (and its number, where words are drawn), not on
    the images beside it. There are fewer than `n_best` only where the vocabulary has no more.

    Args:
        continuation: The decoder; its first call gets `begin` for each image.
        rows: Images.
        begin: Id that stands before the first word.
        end: Id that follows the last word.
        search: The settings; `max_tokens` is not 0.
        numbers: Number of each image, which decides what is drawn; its row when left out.
        device: Where the decoder wants its ids and gives its logits.

    Raises:
        WeightsError: A logit is not a number, or no word is possible.
        ValueError: There is not one number a row, or no `max_tokens`.
    """
    if not search.max_tokens:
        raise ValueError("max_tokens=0: say how many words a sentence may have")
    numbers = range(rows) if numbers is None else numbers
    if len(numbers) != rows:
        raise ValueError(f"{len(numbers)} numbers of images for {rows} rows")
    if rows == 0:
        return []
    if search.beams > 1:
        return beam_search(
            continuation, rows=rows, begin=begin, end=end, search=search, device=device
        )
    choice: Choice = Drawn(search, numbers, device=device) if search.temperature else Likeliest()
    sentences = generate_tokens(
        continuation, choice, rows=rows, begin=begin, end=end, search=search, device=device
    )
    return [[one] for one in sentences]


@torch.no_grad()
def generate_captions(
    decoder: TextDecoder,
    memory: Tensor,
    tokenizer: Tokenizer,
    search: Search,
    *,
    numbers: Sequence[int] | None = None,
) -> list[list[Caption]]:
    """Captions of images, the best first.

    Args:
        decoder: In evaluation mode.
        memory: What the encoder saw, (batch, tokens, dim).
        tokenizer: That of the decoder.
        search: How sentences are chosen.
        numbers: Of the images, by which sampling draws; their places in the batch when left out.

    Returns:
        For each image `search.n_best` captions.

    Raises:
        ConfigError: `max_tokens` is more than the decoder has places for.
    """
    if not len(memory):
        return []
    most = decoder.most_words
    if max(search.max_tokens, search.min_tokens) > most:
        name = "max_tokens" if search.max_tokens > most else "min_tokens"
        value = getattr(search, name)
        raise ConfigError(f"{name}={value}: this decoder writes at most {most}")
    search = search if search.max_tokens else dataclasses.replace(search, max_tokens=most)
    found = generate(
        CachedContinuation(decoder, decoder.look(memory)),
        rows=len(memory),
        begin=tokenizer.begin,
        end=tokenizer.end,
        search=search,
        numbers=numbers,
        device=memory.device,
    )
    return [[_told(sentence, tokenizer) for sentence in sentences] for sentences in found]


def _told(sentence: Sentence, tokenizer: Tokenizer) -> Caption:
    text = tokenizer.decode(sentence.ids)
    return Caption(text, sentence.score, sentence.ids, sentence.ended)
