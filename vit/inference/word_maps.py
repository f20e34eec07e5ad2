"""Where a captioner looked at each word of its caption: the weights of its cross-attention.

    weights of a token = mean over blocks and heads of softmax(Q Kᵀ / √head_dim)
    weights of a word  = mean over its tokens

The query is that of the token before, which is what chose the token.

The finished caption is read once more, all words at the same time: each token sees what it saw when
it was written.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from vit.data.captioning.tokenizer import Tokenizer
from vit.model.decoder import TextDecoder
from vit.model.maps import Recorder

# scripts that put no spaces between words: each of their signs is one
LONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fff\u3005-\u3007\u3040-\u30ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{LONE}]|[^\s{LONE}]+")


@dataclass(frozen=True)
class SeenWord:
    """A word, and where the decoder looked when it wrote it.

    Args:
        text: The word.
        weights: Share of its attention that each patch had, (rows, cols) float32 on the CPU. They
            sum to less than 1 where the class token and registers had some.
    """

    text: str
    weights: Tensor


@torch.inference_mode()
def word_maps(
    decoder: TextDecoder,
    tokenizer: Tokenizer,
    memory: Tensor,
    ids: Sequence[int],
    *,
    grid: tuple[int, int],
) -> list[SeenWord]:
    """The words of a caption with their weights, in order.

    Words are what white space separates; in scripts without it they are single signs, or as many as
    one token has.

    Args:
        decoder: In evaluation mode.
        tokenizer: Of its words.
        memory: What the encoder saw, (tokens, dim): the patches come last.
        ids: The caption, without begin and end.
        grid: (rows, cols) of the patches.
    """
    if not ids:
        return []
    weights = token_maps(decoder, memory, [tokenizer.begin, *ids[:-1]], grid=grid)
    words = merged_words([tokenizer.decode(ids[: end + 1]) for end in range(len(ids))])
    return [SeenWord(text, weights[start:end].mean(dim=0)) for text, start, end in words]


def token_maps(
    decoder: TextDecoder, memory: Tensor, ids: Sequence[int], *, grid: tuple[int, int]
) -> Tensor:
    """Where the decoder looks after each of `ids`, (tokens, rows, cols) float32 on the CPU."""
    recorder = Recorder()
    cache = decoder.look(memory.unsqueeze(0))
    decoder.states(torch.tensor([ids], device=memory.device), cache, attend=recorder)
    looks = recorder.maps[1::2]  # of each block first among the words, then at the picture
    mean = torch.stack([weights[0].float().mean(dim=0) for weights in looks]).mean(dim=0)
    rows, cols = grid
    patches = mean[:, -rows * cols :].cpu()
    return rearrange(patches, "tokens (rows cols) -> tokens rows cols", rows=rows)


def merged_words(beginnings: Sequence[str]) -> list[tuple[str, int, int]]:
    """Words of a text, each with the first of its tokens and the one after its last.

    Args:
        beginnings: The text of the first token, of the first two, ... and of all.
    """
    text = beginnings[-1]
    spans = [found.span() for found in WORD.finditer(text)]
    starts, known = [], 0  # (token, words before it) where a token begins a word
    for place, beginning in enumerate(beginnings):
        words, token = min(len(WORD.findall(beginning)), len(spans)), place
        if words > known:
            while token and is_space(beginnings, token - 1):
                token -= 1
            starts.append((token, known))
            known = words
    if not starts:
        return []
    starts[0] = (0, 0)  # what shows nothing before the first word belongs to it
    ends = [*starts[1:], (len(beginnings), known)]
    return [
        (text[spans[first][0] : spans[after - 1][1]], start, end)
        for (start, first), (end, after) in zip(starts, ends, strict=True)
    ]


def is_space(beginnings: Sequence[str], token: int) -> bool:
    """Whether a token wrote white space alone, which belongs to the word after it."""
    before = beginnings[token - 1] if token else ""
    return beginnings[token] != before and not beginnings[token].removeprefix(before).strip()
