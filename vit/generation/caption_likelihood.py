"""Likelihood of given captions: the training loss, and a test of whether the image is used.

If captions are as likely with other images (shuffled), the decoder ignores the image.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.model.decoder import TextDecoder
from vit.precision import at_least_float32


def caption_losses(
    logits: Tensor, ids: Tensor, pad: int, *, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Summed next-token cross-entropy of each caption, and its number of target tokens.

    Args:
        logits: After each token but the last, (batch, tokens - 1, vocab).
        ids: Token ids, (batch, tokens), padded with `pad`.
        pad: Id of padding, which has no loss.
        smoothing: Label smoothing.

    Returns:
        Two tensors (batch,); the losses in float32 or wider.
    """
    logits = at_least_float32(logits)
    targets = ids[:, 1 : 1 + logits.shape[1]]
    losses = F.cross_entropy(
        logits.transpose(1, 2),
        targets,
        ignore_index=pad,
        label_smoothing=smoothing,
        reduction="none",
    )
    return losses.sum(dim=1), (targets != pad).sum(dim=1)


def matched_and_shuffled_losses(
    decoder: TextDecoder, memory: Tensor, ids: Tensor, shuffled_ids: Tensor, pad: int
) -> Tensor:
    """`caption_losses` of the images' own captions, and of captions of other images.

    Args:
        decoder: The decoder.
        memory: Output of the encoder, (batch, memory_tokens, dim).
        ids: Captions of these images, (batch, tokens), padded with `pad`.
        shuffled_ids: Captions of other images, likewise.
        pad: Id of padding.

    Returns:
        float64 on the CPU, (4, batch): losses and token counts, then those of `shuffled_ids`.
    """
    shuffled = caption_losses(decoder(shuffled_ids[:, :-1], memory), shuffled_ids, pad)
    # last, so that MoE layers keep the routing of the right captions
    logits = decoder(ids[:, :-1], memory, counted=ids[:, 1:] != pad)
    matched = caption_losses(logits, ids, pad)
    return torch.stack([part.cpu().double() for part in (*matched, *shuffled)])
