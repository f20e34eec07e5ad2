"""How likely given captions are: what training minimises, and whether a decoder looks.

The looking test: where captions are as likely beside other images, the decoder does not look.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.model.decoder import TextDecoder

BLIND = 0.01
"""Share of the loss by which other images must be worse, for a decoder that looks."""


def word_losses(
    logits: Tensor, words: Tensor, pad: int, *, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of each caption's next words, and how many words those are.

    Args:
        logits: After each word but the last, (batch, tokens - 1, vocab).
        words: (batch, tokens), filled up with `pad`.
        pad: No word: it has no loss.
        smoothing: Share of a target spread over all words.

    Returns:
        Both (batch,); the losses in float32 or wider.
    """
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    targets = words[:, 1 : 1 + logits.shape[1]]
    losses = F.cross_entropy(
        logits.transpose(1, 2),
        targets,
        ignore_index=pad,
        label_smoothing=smoothing,
        reduction="none",
    )
    return losses.sum(dim=1), (targets != pad).sum(dim=1)


def losses_beside(
    decoder: TextDecoder, memory: Tensor, words: Tensor, others: Tensor, pad: int
) -> Tensor:
    """What `word_losses` says of captions of these images, and of captions of others.

    Args:
        decoder: Writes.
        memory: What the encoder saw, (batch, memory_tokens, dim).
        words: Captions of these images, (batch, tokens), filled up with `pad`.
        others: Captions of other images, likewise.
        pad: No word.

    Returns:
        float64 on the CPU, (4, batch): losses and numbers of words, then those of the others.
    """
    wrong = word_losses(decoder(others[:, :-1], memory), others, pad)
    right = word_losses(decoder(words[:, :-1], memory), words, pad)  # last: routers tell of it
    return torch.stack([part.cpu().double() for part in (*right, *wrong)])


def is_blind(right: float, wrong: float) -> bool:
    """Whether a loss of words is hardly lower than that beside other images."""
    return wrong - right <= BLIND * right
