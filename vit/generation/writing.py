"""From what an encoder saw to captions that people read."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from vit.data.captioning.tokenizer import Tokenizer
from vit.errors import ConfigError
from vit.generation.caption import Caption
from vit.generation.generate import generate
from vit.generation.search import Search, Sentence
from vit.model.captioner import Continuation
from vit.model.decoder import TextDecoder


@torch.no_grad()
def write(
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
        Continuation(decoder, decoder.look(memory)),
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
