"""Text generation with any search, and captions from the memory of an encoder."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from vit.data.captions.tokenizer import Tokenizer
from vit.errors import ConfigError
from vit.generation.beam_search import beam_search
from vit.generation.caption import Caption
from vit.generation.generation_config import Hypothesis, IncrementalDecoder, Search
from vit.generation.sampling import GreedySelector, RandomSelector, TokenSelector, generate_tokens
from vit.model.captioner import CachedDecoder
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

    They depend only on the image's own logits (and its index, for sampling), not on the rest of
    the batch. There are fewer than `n_best` only with a very small vocabulary.

    Args:
        decoder: The decoder; its first call gets `begin` for each image.
        rows: Number of images.
        begin: Id of the begin token.
        end: Id of the end token.
        search: The settings; `max_tokens` is not 0.
        image_indices: Index of each image, for the random numbers of sampling; default: its row.
        device: Device of the decoder.
    """
    if not search.max_tokens:
        raise ValueError("max_tokens=0: give the maximum number of tokens")
    image_indices = range(rows) if image_indices is None else image_indices
    if len(image_indices) != rows:
        raise ValueError(f"{len(image_indices)} image indices for {rows} rows")
    if rows == 0:
        return []
    if search.beams > 1:
        return beam_search(decoder, rows=rows, begin=begin, end=end, search=search, device=device)
    selector: TokenSelector = (
        RandomSelector(search, image_indices, device=device)
        if search.temperature
        else GreedySelector()
    )
    hypotheses = generate_tokens(
        decoder, selector, rows=rows, begin=begin, end=end, search=search, device=device
    )
    return [[one] for one in hypotheses]


@torch.no_grad()
def generate_captions(
    decoder: TextDecoder,
    memory: Tensor,
    tokenizer: Tokenizer,
    search: Search,
    *,
    image_indices: Sequence[int] | None = None,
) -> list[list[Caption]]:
    """Captions of images, the best first.

    Args:
        decoder: In evaluation mode.
        memory: Output of the encoder, (batch, tokens, dim).
        tokenizer: Tokenizer of the decoder.
        search: Generation settings.
        image_indices: Index of each image, for the random numbers of sampling; default: its row.

    Returns:
        `search.n_best` captions for each image.
    """
    if not len(memory):
        return []
    limit = decoder.max_new_tokens
    if max(search.max_tokens, search.min_tokens) > limit:
        name = "max_tokens" if search.max_tokens > limit else "min_tokens"
        value = getattr(search, name)
        raise ConfigError(f"{name}={value}: this decoder writes at most {limit}")
    search = search if search.max_tokens else dataclasses.replace(search, max_tokens=limit)
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
