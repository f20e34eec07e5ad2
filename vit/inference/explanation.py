"""What a network's answer came from, read from its attention.

    rollout:    R_b = (a I + (1 - a) A_b) R_(b-1)
    relevance:  R_b = R_(b-1) + mean over heads of (A_b * dlogit/dA_b)^+ R_(b-1)

with R_0 = I, A_b the weights of block b, and ^+ what is above zero.

Source: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", section 3,
arXiv:2005.00928; Chefer et al., "Generic Attention-model Explainability", equations 5 to 7,
arXiv:2103.15679.
"""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from vit.errors import ConfigError
from vit.model.classifier import VisionTransformer
from vit.model.maps import record

FUSIONS: dict[str, Any] = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}


def rollout(
    maps: Sequence[Tensor], *, residual: float = 0.5, fuse: str = "mean", discard: float = 0.0
) -> Tensor:
    """How much of each token of the input is in each token at the end, by attention alone.

    Args:
        maps: Attention weights of the blocks in order, each (batch, heads, tokens, tokens).
        residual: Share of a token that comes by the residual branch, in [0, 1].
        fuse: How heads become one: mean, max or min; rows are scaled to a sum of 1 again.
        discard: Share of the tokens, in [0, 1), that each token looks at least and that are left
            out of its row.

    Returns:
        (batch, tokens, tokens); each row sums to 1. Row 0 is the class token's, if any.

    Raises:
        ConfigError: An argument is out of its range, or the maps are of different tokens.
    """
    if not (0 <= residual <= 1 and 0 <= discard < 1 and fuse in FUSIONS):
        what = f"residual={residual}, discard={discard}, fuse={fuse!r}"
        raise ConfigError(f"{what}: take shares from 0 to 1, discard below 1, mean, max or min")
    _check_same_tokens({side for weights in maps for side in weights.shape[-2:]})
    rolled = identity = _identity(maps[0])
    for weights in maps:
        fused = FUSIONS[fuse](weights.to(rolled), dim=1)
        least = fused.topk(int(discard * fused.shape[-1]), dim=-1, largest=False).indices
        fused = fused.scatter(-1, least, 0.0)
        shares = fused / fused.sum(-1, keepdim=True).clamp(min=torch.finfo(fused.dtype).tiny)
        rolled = (residual * identity + (1 - residual) * shares) @ rolled
    return rolled


def relevance(
    model: VisionTransformer, images: Tensor, classes: Tensor | Sequence[int] | None = None
) -> Tensor:
    """What each patch did for the logit of one class: gradient times attention.

    It is read where the pooling reads: at the class token, at the mean of the patches, at the
    mean of both for class_token_mean; attention pooling is one more step of the same rule, whose
    one row gathers from the patches. Gradients are made also under `torch.inference_mode`, and
    none is left on a parameter.

    Args:
        model: Usually in evaluation; in training its dropout is part of the answer.
        images: (batch, channels, height, width).
        classes: The class of each image, (batch,); the most probable ones when left out.

    Returns:
        At least 0, (batch, rows, cols) of the patches.

    Raises:
        ConfigError: A class does not exist, or tokens were merged or dropped on the way.
    """
    if not model.num_classes:
        raise ConfigError("num_classes=0: there is no class to explain; give the network a head")
    with torch.inference_mode(False), torch.enable_grad():
        logits, blocks, pooling, tokens, places = record(model, images.clone())
        wanted = _classes(logits.detach(), classes)
        rows, cols = places.grid
        prefix = model.num_prefix_tokens
        _check_same_tokens(
            {tokens.shape[1], prefix + rows * cols, *(weights.shape[-1] for weights in blocks)}
        )
        maps = blocks if pooling is None else [*blocks, pooling]
        gradients = torch.autograd.grad(logits.gather(1, wanted[:, None]).sum(), maps)
    relevant = _identity(blocks[0])
    with torch.no_grad():
        pairs = zip(maps, gradients, strict=True)
        looks = [(a.to(relevant) * g).clamp(min=0).mean(dim=1) for a, g in pairs]
        for look in looks[: len(blocks)]:
            relevant = relevant + look @ relevant
        if pooling is None:  # these poolings are linear, so they may pool the rows of R
            read = model.attn_pool(relevant, places)
        else:
            read = looks[-1] @ relevant[:, prefix:]
        parts: Tensor = read.reshape(len(read), -1, relevant.shape[-1])[..., prefix:]
        return rearrange(parts.mean(dim=1), "batch (rows cols) -> batch rows cols", rows=rows)


def _classes(logits: Tensor, classes: Tensor | Sequence[int] | None) -> Tensor:
    """The class of each image, (batch,): those wanted, or the most probable ones."""
    batch, count = logits.shape
    wanted = logits.argmax(1) if classes is None else torch.as_tensor(classes).to(logits.device)
    known = wanted.dtype in (torch.int64, torch.int32) and wanted.shape == (batch,)
    if not known or not ((wanted >= 0) & (wanted < count)).all():
        why = f"must be one number from 0 to {count - 1} for each of {batch} images"
        raise ConfigError(f"classes={wanted.tolist()}: {why}")
    return wanted.long()


def _identity(weights: Tensor) -> Tensor:
    """The identity for maps (batch, heads, tokens, tokens), in float32 or better."""
    dtype = torch.promote_types(weights.dtype, torch.float32)
    batch, _, tokens, _ = weights.shape
    return torch.eye(tokens, dtype=dtype, device=weights.device).expand(batch, -1, -1)


def _check_same_tokens(sides: set[int]) -> None:
    if len(sides) > 1:
        counts = " and ".join(map(str, sorted(sides)))
        raise ConfigError(
            f"attention maps of {counts} tokens: tokens were merged or dropped on the way, so "
            f"rows have no one place; build the network without it"
        )
