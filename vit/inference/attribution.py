"""Attribution maps: the patches behind a classifier's top classes or a captioner's words.

    rollout:    R_b = (a I + (1 - a) A_b) R_(b-1)
    relevance:  R_b = R_(b-1) + mean over heads of (A_b * dlogit/dA_b)^+ R_(b-1)

with R_0 = I, A_b the attention weights of block b, and ^+ the positive part. Maps of classes are
computed in float32 from the image as the network saw it, resized and cropped, and are tested by
the deletion metric.

    map of a token = mean over blocks and heads of the cross-attention softmax(Q Kᵀ / √head_dim)
    map of a word  = mean over its tokens

The query is that of the token before, which predicts the token. The finished caption goes through
the decoder once more, all tokens in parallel, under the causal mask it was generated with.

Source: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", section 3,
arXiv:2005.00928; Chefer et al., "Generic Attention-model Explainability", equations 5 to 7,
arXiv:2103.15679.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from vit.data.captions.tokenizer import Tokenizer
from vit.errors import ConfigError, RunError, printable
from vit.evaluation.classification_metrics import ranking
from vit.inference.deletion_metric import RANDOM_ORDERS, Curve, Deletion, deletions
from vit.inference.predictor import ImageOutput, Predictor
from vit.model.attention_maps import AttentionRecorder, record_attention
from vit.model.decoder import TextDecoder
from vit.model.vision_transformer import VisionTransformer

FUSIONS: dict[str, Any] = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}
EXPLAINED = 2  # the best class and the runner-up
MOST_EXPLAINED = 5  # classes of a multi-label model
DIGITS = 6
# scripts without spaces between words: each character is a word
LONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fff\u3005-\u3007\u3040-\u30ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{LONE}]|[^\s{LONE}]+")


def attribute_classes(predictor: Predictor, output: ImageOutput) -> "list[ClassAttribution]":
    """Attribution maps of the two most probable classes; of a multi-label model see below.

    A multi-label model: of the classes above their thresholds, at most five, or of the best one.

    Raises:
        RunError: The network overflowed.
    """
    assert output.probabilities is not None, "an output without an error has probabilities"
    assert output.pixels is not None, "an output without an error has an image"
    classes = classes_to_explain(output.probabilities, predictor.thresholds)
    image = predictor.preprocessing.normalise(output.pixels.to(predictor.device))
    found = relevance(predictor.model, image.expand(len(classes), -1, -1, -1), classes)
    if not found.isfinite().all():
        raise RunError(
            f"{printable(output.image)}: gradients overflowed, so it cannot be explained"
        )
    tested = deletions(
        predictor.model,
        image,
        found,
        classes,
        batch_size=predictor.batch_size,
        seed=zlib.crc32(output.pixels.numpy().tobytes()),  # the same image, the same numbers
        multilabel=predictor.thresholds is not None,
    )
    return [
        ClassAttribution(predictor.classes[index], _shares(weights.cpu()), deletion)
        for index, weights, deletion in zip(classes, found, tested, strict=True)
    ]


def classes_to_explain(probabilities: Tensor, thresholds: Sequence[float] | None) -> list[int]:
    """Indices of the classes to explain, the most probable first; at least one."""
    order: list[int] = ranking(probabilities.unsqueeze(0))[0].tolist()
    if thresholds is None:
        return order[:EXPLAINED]
    named = [index for index in order if probabilities[index] >= thresholds[index]]
    return named[:MOST_EXPLAINED] or order[:1]


def _shares(weights: Tensor) -> Tensor:
    """Subtract what all patches share (with mean pooling, the identity in R_0); normalise."""
    above = weights.double() - weights.double().min()
    return above / above.sum() if above.any() else above


@dataclass(frozen=True)
class ClassAttribution:
    """Attribution map of one class in one image.

    Args:
        label: Class name.
        weights: Relevance above that of the weakest patch, (rows, cols), normalised to a sum of 1;
            all 0 where all patches are equal.
        deletion: Deletion metric of the map.
    """

    label: str
    weights: Tensor
    deletion: Deletion

    @property
    def lines(self) -> list[str]:
        """Text below the plot."""
        result = "" if self.deletion.better else "not "
        return [
            f"{self.label} {self.deletion.curve.probabilities[0]:.3f}",
            f"deletion {self.deletion.curve.score:.3f}",
            f"random {self.deletion.chance:.3f}",
            f"{result}better than chance",
        ]


def attributions_to_json(
    predictor: Predictor, output: ImageOutput, attributions: list[ClassAttribution]
) -> dict[str, Any]:
    """The maps of an image as a JSON object."""
    preparing = predictor.preprocessing
    return {
        "image": output.image,
        "seen": {
            "size": list(preparing.image_size),
            "resize": preparing.resize,
            "crop_share": preparing.crop_share,
        },
        "classes": [
            {
                "label": one.label,
                "probability": _short(one.deletion.curve.probabilities[0]),
                "weights": [
                    [round(share, DIGITS) for share in row] for row in one.weights.tolist()
                ],
                "deletion": {
                    "deleted": [round(share, DIGITS) for share in one.deletion.curve.deleted],
                    **_curve(one.deletion.curve),
                    "reverse": _curve(one.deletion.reverse),
                    "random_scores": [_short(score) for score in one.deletion.random],
                    "better_than_chance": one.deletion.better,
                },
            }
            for one in attributions
        ],
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {"score": _short(curve.score), "curve": [*map(_short, curve.probabilities)]}


def _short(value: float) -> float:
    """Rounded to the significant digits of float32: some classes have 1e-9."""
    return float(f"{value:.{DIGITS}g}")


def view_lines(predictor: Predictor) -> list[str]:
    """Text below the plain image: which part of the file it shows."""
    preparing = predictor.preprocessing
    height, width = preparing.image_size
    share = f"{100 * preparing.crop_share:.0f} %"
    part = f"centre crop, {share}" if preparing.resize == "crop" else f"squashed, {share}"
    return [f"seen: {width} x {height} pixels", part]


def deletion_summary(tested: list[Deletion]) -> str:
    """Summary: for how many images the map of the best class was better than chance."""
    better = sum(deletion.better for deletion in tested)
    score = sum(deletion.curve.score for deletion in tested) / len(tested)
    chance = sum(deletion.chance for deletion in tested) / len(tested)
    return (
        f"the map of the best class beat all {RANDOM_ORDERS} random orders for {better} of "
        f"{len(tested)} images (by chance {len(tested) / (RANDOM_ORDERS + 1):.0f}); mean "
        f"deletion score {score:.3f}, random {chance:.3f}, less is better"
    )


def relevance(
    model: VisionTransformer, images: Tensor, classes: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Relevance of each patch for the logit of one class: attention times its gradient.

    The row of the pooling is returned: of the class token, the mean of the patches, or both for
    class_token_mean; attention pooling is one more step of the same rule. Works under
    `torch.inference_mode`, and leaves no gradient on a parameter.

    Args:
        model: In evaluation mode, or dropout is part of the result.
        images: (batch, channels, height, width).
        classes: The class of each image, (batch,); the most probable ones by default.

    Returns:
        Non-negative, (batch, rows, cols) of the patches.

    Raises:
        ConfigError: A class does not exist, or tokens were merged or dropped.
    """
    if not model.num_classes:
        raise ConfigError("num_classes=0: there is no class to explain; give the network a head")
    with torch.inference_mode(False), torch.enable_grad():
        logits, blocks, pooling, tokens, context = record_attention(model, images.clone())
        wanted = _classes(logits.detach(), classes)
        rows, cols = context.grid
        prefix = model.num_prefix_tokens
        _check_same_tokens(
            {tokens.shape[1], prefix + rows * cols, *(weights.shape[-1] for weights in blocks)}
        )
        maps = blocks if pooling is None else [*blocks, pooling]
        gradients = torch.autograd.grad(logits.gather(1, wanted[:, None]).sum(), maps)
    relevant = _identity(blocks[0])
    with torch.no_grad():
        pairs = zip(maps, gradients, strict=True)
        steps = [(a.to(relevant) * g).clamp(min=0).mean(dim=1) for a, g in pairs]
        for step in steps[: len(blocks)]:
            relevant = relevant + step @ relevant
        if pooling is None:  # these poolings are linear, so they may pool the rows of R
            read = model.attn_pool(relevant, context)
        else:
            read = steps[-1] @ relevant[:, prefix:]
        parts: Tensor = read.reshape(len(read), -1, relevant.shape[-1])[..., prefix:]
        return rearrange(parts.mean(dim=1), "batch (rows cols) -> batch rows cols", rows=rows)


def _classes(logits: Tensor, classes: Tensor | Sequence[int] | None) -> Tensor:
    """Class index of each image, (batch,): those given, or the most probable ones."""
    batch, count = logits.shape
    wanted = logits.argmax(1) if classes is None else torch.as_tensor(classes).to(logits.device)
    known = wanted.dtype in (torch.int64, torch.int32) and wanted.shape == (batch,)
    if not known or not ((wanted >= 0) & (wanted < count)).all():
        why = f"must be one number from 0 to {count - 1} for each of {batch} images"
        raise ConfigError(f"classes={wanted.tolist()}: {why}")
    return wanted.long()


def rollout(
    maps: Sequence[Tensor], *, residual: float = 0.5, fuse: str = "mean", discard: float = 0.0
) -> Tensor:
    """Attention rollout: the share of each input token in each output token, by attention alone.

    Args:
        maps: Attention weights of the blocks in order, each (batch, heads, tokens, tokens).
        residual: Share of a token that comes through the skip connection, in [0, 1].
        fuse: Reduction over heads: mean, max or min; rows are normalised to a sum of 1 again.
        discard: Share of the tokens, in [0, 1), with the least attention in each row to leave out.

    Returns:
        (batch, tokens, tokens); each row sums to 1. Row 0 is the class token's, if any.

    Raises:
        ConfigError: An argument is out of range, or the maps differ in their tokens.
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
            f"rows have no position; build the network without it"
        )


@torch.inference_mode()
def attribute_words(
    decoder: TextDecoder,
    tokenizer: Tokenizer,
    memory: Tensor,
    ids: Sequence[int],
    *,
    grid: tuple[int, int],
) -> "list[WordAttribution]":
    """Words of a caption with their attention maps, in order.

    Words are separated by white space; in scripts without it they are single characters, or those
    of one token.

    Args:
        decoder: In evaluation mode.
        tokenizer: Tokenizer of the decoder.
        memory: Image tokens, (tokens, dim), the patches last.
        ids: Token ids of the caption, without begin and end.
        grid: (rows, cols) of the patches.
    """
    if not ids:
        return []
    weights = token_attention(decoder, memory, [tokenizer.begin, *ids[:-1]], grid=grid)
    words = merge_words([tokenizer.decode(ids[: end + 1]) for end in range(len(ids))])
    return [WordAttribution(text, weights[start:end].mean(dim=0)) for text, start, end in words]


def token_attention(
    decoder: TextDecoder, memory: Tensor, ids: Sequence[int], *, grid: tuple[int, int]
) -> Tensor:
    """Attention to the patches from each of `ids`, (tokens, rows, cols) float32 on the CPU."""
    recorder = AttentionRecorder()
    cache = decoder.init_cache(memory.unsqueeze(0))
    decoder.hidden_states(torch.tensor([ids], device=memory.device), cache, attention_fn=recorder)
    maps = recorder.maps[1::2]  # each block has self-attention, then cross-attention
    mean = torch.stack([weights[0].float().mean(dim=0) for weights in maps]).mean(dim=0)
    rows, cols = grid
    patches = mean[:, -rows * cols :].cpu()
    return rearrange(patches, "tokens (rows cols) -> tokens rows cols", rows=rows)


def merge_words(prefixes: Sequence[str]) -> list[tuple[str, int, int]]:
    """Words of a text as (word, first token, end token).

    Args:
        prefixes: Text of the first token, of the first two, ... and of all.
    """
    text = prefixes[-1]
    spans = [found.span() for found in WORD.finditer(text)]
    starts, known = [], 0  # (token, words before it) where a token begins a word
    for place, prefix in enumerate(prefixes):
        words, token = min(len(WORD.findall(prefix)), len(spans)), place
        if words > known:
            while token and is_space(prefixes, token - 1):
                token -= 1
            starts.append((token, known))
            known = words
    if not starts:
        return []
    starts[0] = (0, 0)  # tokens without text before the first word belong to it
    ends = [*starts[1:], (len(prefixes), known)]
    return [
        (text[spans[first][0] : spans[after - 1][1]], start, end)
        for (start, first), (end, after) in zip(starts, ends, strict=True)
    ]


def is_space(prefixes: Sequence[str], token: int) -> bool:
    """Whether a token is white space only, which belongs to the word after it."""
    before = prefixes[token - 1] if token else ""
    return prefixes[token] != before and not prefixes[token].removeprefix(before).strip()


@dataclass(frozen=True)
class WordAttribution:
    """Attention map of one word of a caption.

    Args:
        text: The word.
        weights: Attention of each patch, (rows, cols) float32 on the CPU; the sum is less than 1
            where the class token and registers have some.
    """

    text: str
    weights: Tensor
