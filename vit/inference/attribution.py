"""Where a captioner looked at each word of its caption: the weights of its cross-attention.

    weights of a token = mean over blocks and heads of softmax(Q Kᵀ / √head_dim)
    weights of a word  = mean over its tokens

The query is that of the token before, which is what chose the token.

The finished caption is read once more, all words at the same time: each token sees what it saw when
it was written.

What a network's answer came from, read from its attention.

    rollout:    R_b = (a I + (1 - a) A_b) R_(b-1)
    relevance:  R_b = R_(b-1) + mean over heads of (A_b * dlogit/dA_b)^+ R_(b-1)

with R_0 = I, A_b the weights of block b, and ^+ what is above zero.

Source: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", section 3,
arXiv:2005.00928; Chefer et al., "Generic Attention-model Explainability", equations 5 to 7,
arXiv:2103.15679.
What speaks for the classes that a classifier finds most likely, and whether that is so.

All is computed in float32 of the image as the network saw it: resized and cut.
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
from vit.model.attention_maps import Recorder, record
from vit.model.decoder import TextDecoder
from vit.model.vision_transformer import VisionTransformer

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


EXPLAINED = 2  # classes: the best and the one that it was nearly
MOST_EXPLAINED = 5  # of those that an image has
DIGITS = 6


@dataclass(frozen=True)
class ClassAttribution:
    """What speaks for a class in one image.

    Args:
        label: Of the class.
        weights: Relevance above that of the weakest patch, (rows, cols), as shares that sum to 1;
            all 0 where no patch speaks for it more than another.
        deletion: Whether that is so.
    """

    label: str
    weights: Tensor
    deletion: Deletion

    @property
    def lines(self) -> list[str]:
        """What is written below the drawing."""
        result = "" if self.deletion.better else "not "
        return [
            f"{self.label} {self.deletion.curve.probabilities[0]:.3f}",
            f"deletion {self.deletion.curve.score:.3f}",
            f"random {self.deletion.chance:.3f}",
            f"{result}better than chance",
        ]


def attribute_classes(predictor: Predictor, answer: ImageOutput) -> list[ClassAttribution]:
    """What speaks for the two best classes of `answer`, the best first; one if it has no other.

    Where an image may have several classes, for those that are named, at most five; for the best
    one where none is.

    Raises:
        RunError: The network overflowed.
    """
    assert answer.probabilities is not None, "an answer without an error has probabilities"
    assert answer.pixels is not None, "an answer without an error has an image"
    classes = classes_to_explain(answer.probabilities, predictor.thresholds)
    pil_image = answer.pixels.to(predictor.device)
    image = predictor.preprocessing.normalise(pil_image)
    found = relevance(predictor.model, image.expand(len(classes), -1, -1, -1), classes)
    if not found.isfinite().all():
        raise RunError(f"{printable(answer.image)}: gradients overflowed, so nothing is explained")
    tested = deletions(
        predictor.model,
        image,
        found,
        classes,
        batch_size=predictor.batch_size,
        seed=zlib.crc32(answer.pixels.numpy().tobytes()),  # the same image, the same numbers
        multilabel=predictor.thresholds is not None,
    )
    return [
        ClassAttribution(predictor.classes[index], _shares(weights.cpu()), deletion)
        for index, weights, deletion in zip(classes, found, tested, strict=True)
    ]


def classes_to_explain(probabilities: Tensor, thresholds: Sequence[float] | None) -> list[int]:
    """The classes of which something is drawn, the best first; at least one."""
    order: list[int] = ranking(probabilities.unsqueeze(0))[0].tolist()
    if thresholds is None:
        return order[:EXPLAINED]
    named = [index for index in order if probabilities[index] >= thresholds[index]]
    return named[:MOST_EXPLAINED] or order[:1]


def _shares(weights: Tensor) -> Tensor:
    """What all patches have alike is left out: with mean pooling, the identity in R_0."""
    above = weights.double() - weights.double().min()
    return above / above.sum() if above.any() else above


def class_record(
    predictor: Predictor, answer: ImageOutput, seen: list[ClassAttribution]
) -> dict[str, Any]:
    """All of it as JSON has it."""
    preparing = predictor.preprocessing
    return {
        "image": answer.image,
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
            for one in seen
        ],
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {"score": _short(curve.score), "curve": [*map(_short, curve.probabilities)]}


def _short(value: float) -> float:
    """With as many significant digits as float32 is worth: some classes have 1e-9."""
    return float(f"{value:.{DIGITS}g}")


def seen_lines(predictor: Predictor) -> list[str]:
    """What is written below the plain image: which part of the file it shows."""
    preparing = predictor.preprocessing
    height, width = preparing.image_size
    share = f"{100 * preparing.crop_share:.0f} %"
    part = f"centre crop, {share}" if preparing.resize == "crop" else f"squashed, {share}"
    return [f"seen: {width} x {height} pixels", part]


def closing_line(tested: list[Deletion]) -> str:
    """For how many images the map of the best class was better than chance."""
    better = sum(deletion.better for deletion in tested)
    score = sum(deletion.curve.score for deletion in tested) / len(tested)
    chance = sum(deletion.chance for deletion in tested) / len(tested)
    return (
        f"the map of the best class beat all {RANDOM_ORDERS} random orders for {better} of "
        f"{len(tested)} images (by chance {len(tested) / (RANDOM_ORDERS + 1):.0f}); mean "
        f"deletion score {score:.3f}, random {chance:.3f}, less is better"
    )


# scripts that put no spaces between words: each of their signs is one
LONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fff\u3005-\u3007\u3040-\u30ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{LONE}]|[^\s{LONE}]+")


@dataclass(frozen=True)
class WordAttribution:
    """A word, and where the decoder looked when it wrote it.

    Args:
        text: The word.
        weights: Share of its attention that each patch had, (rows, cols) float32 on the CPU. They
            sum to less than 1 where the class token and registers had some.
    """

    text: str
    weights: Tensor


@torch.inference_mode()
def attribute_words(
    decoder: TextDecoder,
    tokenizer: Tokenizer,
    memory: Tensor,
    ids: Sequence[int],
    *,
    grid: tuple[int, int],
) -> list[WordAttribution]:
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
    return [WordAttribution(text, weights[start:end].mean(dim=0)) for text, start, end in words]


def token_maps(
    decoder: TextDecoder, memory: Tensor, ids: Sequence[int], *, grid: tuple[int, int]
) -> Tensor:
    """Where the decoder looks after each of `ids`, (tokens, rows, cols) float32 on the CPU."""
    recorder = Recorder()
    cache = decoder.look(memory.unsqueeze(0))
    decoder.states(torch.tensor([ids], device=memory.device), cache, attend=recorder)
    looks = recorder.maps[1::2]  # of each block first among the words, then at the image
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
