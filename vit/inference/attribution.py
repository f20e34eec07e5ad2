"""Attribution maps: the patches behind a classifier's top classes or a captioner's words.

    relevance:  R_b = R_(b-1) + mean over heads of (A_b * dlogit/dA_b)^+ R_(b-1)

with R_0 = I, A_b the attention weights of block b, and ^+ the positive part. Maps of classes are
computed in float32 from the image as the network saw it, resized and cropped, and are tested by
the deletion metric: the strongest patches are deleted first, that is, have the mean colour of the
preprocessing. The score is the area under the probability of the class over the share of deleted
patches, from 0 to 1; lower is better. Random orders are the chance level.

    map of a token = mean over blocks and heads of the cross-attention softmax(Q Kᵀ / √head_dim)
    map of a word  = mean over its tokens

The query is that of the token before, which predicts the token. The finished caption goes through
the decoder once more, all tokens in parallel, under the causal mask it was generated with.

Source: Chefer et al., "Generic Attention-model Explainability", equations 5 to 7,
arXiv:2103.15679; Petsiuk et al., "RISE", arXiv:1806.07421 (the deletion metric).
"""

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange, repeat
from PIL import Image
from torch import Tensor

from vit.data.captions.tokenizer import Tokenizer
from vit.data.image_objects import to_rgb_image
from vit.data.image_tiles import TiledImage
from vit.data.instrument_images import Array
from vit.errors import RunError
from vit.evaluation.html_page import encode_thumbnail
from vit.inference.predictor import Predictor, ranked_classes
from vit.inference.torch_engine import Activation, to_probabilities
from vit.model.attention import AttentionRecorder, record_attention
from vit.model.decoder import TextDecoder
from vit.model.vision_transformer import VisionTransformer
from vit.output.prediction_results import ImageOutput
from vit.precision import autocast
from vit.text import printable

THUMBNAIL = 512
"""Pixels of the longer side of an image by tiles under a map."""
TOP_CLASSES = 2  # of a single-label model
MAX_CLASSES = 5  # of a multi-label model
DIGITS = 6
# scripts without spaces between words: each character is a word
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fff\u3005-\u3007\u3040-\u30ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
SOFTMAX: Activation = partial(torch.softmax, dim=1)
STEPS = 10  # until all patches are deleted
RANDOM_ORDERS = 9  # a random map beats all of them with probability 1/10
ROUNDING = 1e-4  # relative difference of scores that is no difference


@dataclass(frozen=True)
class Curve:
    """The probability of a class while the share `deleted` of the patches grows from 0 to 1."""

    deleted: tuple[float, ...]
    probabilities: tuple[float, ...]

    @property
    def score(self) -> float:
        """Area under the curve, by trapezoids."""
        return float(
            torch.trapezoid(
                torch.tensor(self.probabilities, dtype=torch.float64),
                torch.tensor(self.deleted, dtype=torch.float64),
            )
        )


@dataclass(frozen=True)
class Deletion:
    """Deletion metric of one map, and the scores of random orders."""

    curve: Curve
    reverse: Curve
    random: tuple[float, ...]

    @property
    def better(self) -> bool:
        """Whether the map is better than chance: its score is below that of all random orders."""
        return self.curve.score < min(self.random) * (1 - ROUNDING)

    @property
    def chance(self) -> float:
        """Mean score of the random orders."""
        return sum(self.random) / len(self.random)


def steps(patches: int) -> list[int]:
    """Number of deleted patches at each step, from none to all."""
    return sorted({round(patches * step / STEPS) for step in range(STEPS + 1)})


def deletions(
    model: VisionTransformer,
    image: Tensor,
    maps: Tensor,
    classes: Sequence[int],
    *,
    batch_size: int,
    seed: int,
    activation: Activation = SOFTMAX,
) -> list[Deletion]:
    """Deletion metric of each map, (maps, rows, cols), in one image, (channels, height, width)."""
    grid = (maps.shape[-2], maps.shape[-1])
    orders = _orders(maps.flatten(1).cpu(), seed)
    counts = steps(orders.shape[1])
    probabilities_of = partial(to_probabilities, activation=activation)
    found = _probabilities(model, image, orders, counts, grid, batch_size, probabilities_of)
    shares = tuple(count / orders.shape[1] for count in counts)

    def curve(order: int, label: int) -> Curve:
        return Curve(shares, tuple(found[order, :, label].tolist()))

    return [
        Deletion(
            curve(RANDOM_ORDERS + 2 * number, label),
            curve(RANDOM_ORDERS + 2 * number + 1, label),
            tuple(curve(order, label).score for order in range(RANDOM_ORDERS)),
        )
        for number, label in enumerate(classes)
    ]


def _orders(maps: Tensor, seed: int) -> Tensor:
    """Random orders, then each map descending and ascending, (orders, patches)."""
    generator = torch.Generator().manual_seed(seed)
    patches = maps.shape[1]
    orders = [torch.randperm(patches, generator=generator) for _ in range(RANDOM_ORDERS)]
    for weights in maps:
        mixed = torch.randperm(patches, generator=generator)  # a random order of equal weights
        order = mixed[weights[mixed].argsort(descending=True, stable=True)]
        orders += [order, order.flip(0)]
    return torch.stack(orders)


@torch.inference_mode()
def _probabilities(
    model: VisionTransformer,
    image: Tensor,
    orders: Tensor,
    counts: list[int],
    grid: tuple[int, int],
    batch_size: int,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Probabilities of all classes, float64 on the CPU, (orders, steps, classes)."""
    inner = torch.tensor(counts[1:-1])
    kept = orders.argsort(dim=1)[:, None, :] >= inner[:, None]  # (orders, inner steps, patches)
    patches = orders.shape[1]
    ends = torch.tensor([True, False])[:, None].expand(2, patches)
    masks = torch.cat([ends, kept.reshape(-1, patches)])
    rows, cols = grid
    height, width = image.shape[-2] // rows, image.shape[-1] // cols
    parts = []
    for mask in torch.split(masks, batch_size):
        pixels = repeat(
            mask.to(image),
            "batch (rows cols) -> batch 1 (rows height) (cols width)",
            rows=rows,
            height=height,
            width=width,
        )
        parts.append(activation(model(image * pixels)))
    found = torch.cat(parts)
    between = found[2:].view(*kept.shape[:2], found.shape[1])
    whole, empty = found[:2, None, None].expand(-1, len(orders), 1, -1)
    return torch.cat([whole, between, empty], dim=1)


VIEWS = {"crop": "centre crop", "squash": "squashed", "pad": "padded", "native": "in its shape"}
"""Value of `resize` -> words."""


class AttributionOverflow(RunError):
    """The maps of one image are not finite, for the `reason`."""

    def __init__(self, image: str, reason: str) -> None:
        super().__init__(f"{printable(image)}: {reason}")
        self.reason = reason


def attribute_classes(
    predictor: Predictor,
    output: ImageOutput,
    *,
    deletion: bool = True,
    threshold: float | None = None,
) -> "list[ClassAttribution]":
    """Attribution maps of the two most probable classes with their deletion metric; of a
    multi-label model, of the classes above their thresholds, at most five, or of the best one.

    The maps of tiles and of numbers are not tested by deletion; a number is explained by what makes
    it larger. Of several choices the best class of each is explained.
    """
    classes, image, maps = _class_relevance(predictor, output, threshold)
    assert output.pixels is not None, "an output without an error has an image"
    names = [predictor.classes[index] for index in classes]
    shares = [_normalised(weights.cpu()) for weights in maps]
    if isinstance(output.pixels, TiledImage) or predictor.answers is not None:
        assert output.probabilities is not None, "an output without an error has probabilities"
        return [*map(ClassAttribution, names, output.probabilities[classes].tolist(), shares)]
    if not deletion:
        with torch.inference_mode():
            logits = predictor.model(image.unsqueeze(0))
        probabilities = to_probabilities(logits, predictor.activation)[0, classes].tolist()
        return [*map(ClassAttribution, names, probabilities, shares)]
    tested = deletions(
        predictor.model,
        image,
        maps,
        classes,
        batch_size=predictor.batch_size,
        seed=zlib.crc32(output.pixels.numpy().tobytes()),  # the same image, the same numbers
        activation=predictor.activation,
    )
    probabilities = [one.curve.probabilities[0] for one in tested]
    return [*map(ClassAttribution, names, probabilities, shares, tested)]


def class_maps(
    predictor: Predictor, output: ImageOutput, *, threshold: float | None = None
) -> list[tuple[int, Tensor]]:
    """Index and map of each class that `attribute_classes` explains, without deletion metric."""
    classes, _, maps = _class_relevance(predictor, output, threshold)
    return [
        (index, _normalised(weights.cpu())) for index, weights in zip(classes, maps, strict=True)
    ]


def _class_relevance(
    predictor: Predictor, output: ImageOutput, threshold: float | None
) -> tuple[list[int], Tensor, Tensor]:
    """The classes to explain, the normalised image, (3, height, width), and a map of each class."""
    assert output.probabilities is not None, "an output without an error has probabilities"
    assert output.pixels is not None, "an output without an error has an image"
    thresholds = predictor.thresholds
    if thresholds is not None and threshold is not None:
        thresholds = (threshold,) * len(thresholds)
    classes = classes_to_explain(output.probabilities, thresholds)
    if predictor.answers is not None:
        classes = predictor.answers.best(output.probabilities)[:MAX_CLASSES]
    if isinstance(output.pixels, TiledImage):
        return classes, torch.empty(0), tile_relevance(predictor, output.pixels, classes)
    image = predictor.preprocessing.normalise(output.pixels.to(predictor.device))
    maps = relevance(predictor.model, image.expand(len(classes), -1, -1, -1), classes)
    if not maps.isfinite().all():
        raise AttributionOverflow(output.image, "gradients overflowed, so it cannot be explained")
    return classes, image, maps


@torch.inference_mode()
def tile_relevance(predictor: Predictor, image: TiledImage, classes: Sequence[int]) -> Tensor:
    """`TiledClassifier.relevance` of the tiles of an image, (classes, rows, cols)."""
    numbers, features = predictor.tile_features(image)
    exclusive = predictor.thresholds is None and predictor.answers is None
    maps: Tensor = features.new_zeros(len(classes), math.prod(image.shape))
    maps[:, numbers] = predictor.model.relevance(features, classes, exclusive=exclusive)
    return maps.view(len(classes), *image.shape)


def classes_to_explain(probabilities: Array, thresholds: Sequence[float] | None) -> list[int]:
    """Indices of the classes to explain, the most probable first; at least one."""
    order: list[int] = ranked_classes(probabilities).tolist()
    if thresholds is None:
        return order[:TOP_CLASSES]
    named = [index for index in order if probabilities[index] >= thresholds[index]]
    return named[:MAX_CLASSES] or order[:1]


def _normalised(weights: Tensor) -> Tensor:
    """Subtract what all patches share (with mean pooling, the identity in R_0); normalise."""
    above = weights.double() - weights.double().min()
    return above / above.sum() if above.any() else above


@dataclass(frozen=True)
class ClassAttribution:
    """Attribution map of one class: relevance above that of the weakest patch, (rows, cols), with a
    sum of 1, or all 0 where all patches are equal."""

    label: str
    probability: float
    weights: Tensor
    deletion: Deletion | None = None

    @property
    def lines(self) -> list[str]:
        """Text below the plot."""
        first = f"{self.label} {self.probability:.3f}"
        if self.deletion is None:
            return [first]
        result = "" if self.deletion.better else "not "
        return [
            first,
            f"deletion {self.deletion.curve.score:.3f}",
            f"random {self.deletion.chance:.3f}",
            f"{result}better than chance",
        ]


def class_attributions_to_json(
    predictor: Predictor, output: ImageOutput, attributions: Sequence[ClassAttribution]
) -> dict[str, Any]:
    """The maps of the classes, or numbers, of an image as a JSON object."""
    assert output.pixels is not None, "an output without an error has an image"
    return {
        "image": output.image,
        "seen": input_region(predictor, output.pixels),
        "classes": [
            {
                "label": one.label,
                score_name(predictor): _short(one.probability),
                "weights": rounded_weights(one.weights),
                **({} if one.deletion is None else {"deletion": _deletion_to_json(one.deletion)}),
            }
            for one in attributions
        ],
    }


def score_name(predictor: Predictor) -> str:
    """The key of what a map explains in a JSON object."""
    return "probability" if predictor.answers is None else "value"


def input_region(
    predictor: Predictor, pixels: Tensor | TiledImage, *, with_image: bool = False
) -> dict[str, Any]:
    """The part of an image that the network sees, for JSON; `with_image` also a JPEG of it."""
    preprocessing = predictor.preprocessing
    by_tiles = isinstance(pixels, TiledImage)
    region: dict[str, Any] = {
        "size": list(preprocessing.image_size if by_tiles else pixels.shape[1:]),
        "resize": preprocessing.resize,
        "crop_share": preprocessing.crop_share,
    }
    if preprocessing.tiles is not None:
        region["tiles"] = asdict(preprocessing.tiles)
    if with_image:
        region["image"] = encode_thumbnail(seen_image(predictor, pixels)).source
    return region


def seen_image(predictor: Predictor, pixels: Tensor | TiledImage) -> Image.Image:
    """An image as the network saw it; by tiles, all of it at THUMBNAIL."""
    if isinstance(pixels, TiledImage):
        return pixels.thumbnail(THUMBNAIL)
    return to_rgb_image(predictor.preprocessing.to_display(pixels), "an image")


def word_attributions_to_json(
    output: ImageOutput, attributions: "Sequence[WordAttribution]"
) -> dict[str, Any]:
    """The maps of the words of an image's best caption as a JSON object."""
    words = [{"text": word.text, "weights": rounded_weights(word.weights)} for word in attributions]
    return {"image": output.image, "caption": output.captions[0].text, "words": words}


def rounded_weights(weights: Tensor) -> list[list[float]]:
    return [[round(share, DIGITS) for share in row] for row in weights.tolist()]


def _deletion_to_json(deletion: Deletion) -> dict[str, Any]:
    return {
        "deleted": [round(share, DIGITS) for share in deletion.curve.deleted],
        **_curve(deletion.curve),
        "reverse": _curve(deletion.reverse),
        "random_scores": [_short(score) for score in deletion.random],
        "better_than_chance": deletion.better,
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {"score": _short(curve.score), "curve": [*map(_short, curve.probabilities)]}


def _short(value: float) -> float:
    """Round to significant digits, since probabilities may be 1e-9."""
    return float(f"{value:.{DIGITS}g}")


def view_lines(predictor: Predictor, pixels: Tensor | TiledImage) -> list[str]:
    """Text below the plain image: which part of the file it shows."""
    preprocessing = predictor.preprocessing
    if isinstance(pixels, TiledImage):
        return [f"tiles of {pixels.grid.size} pixels"]
    height, width = pixels.shape[1:]
    share = f"{100 * preprocessing.crop_share:.0f} %"
    part = f"{VIEWS[preprocessing.resize]}, {share}"
    return [f"seen: {width} x {height} pixels", part]


def deletion_summary(tested: list[Deletion]) -> str:
    """Number of images whose map of the best class was better than chance, as text."""
    better = sum(deletion.better for deletion in tested)
    score = sum(deletion.curve.score for deletion in tested) / len(tested)
    chance = sum(deletion.chance for deletion in tested) / len(tested)
    return (
        f"the map of the best class beat all {RANDOM_ORDERS} random orders for {better} of "
        f"{len(tested)} images (by chance {len(tested) / (RANDOM_ORDERS + 1):.0f}); mean "
        f"deletion score {score:.3f}, random {chance:.3f}, less is better"
    )


def relevance(model: VisionTransformer, images: Tensor, classes: Tensor | Sequence[int]) -> Tensor:
    """Relevance of each patch, at least 0, (batch, rows, cols), for the logit of one class of each
    image: attention times its gradient.

    The row of the pooling is returned: of the class token, the mean of the patches, or both for
    class_token_mean; attention pooling is one more step of the same rule. Works under
    `torch.inference_mode`, and leaves no gradient on a parameter.
    """
    with torch.inference_mode(False), torch.enable_grad():
        logits, blocks, pooling, _, context = record_attention(model, images.clone())
        indices = torch.as_tensor(classes, device=logits.device)
        maps = blocks if pooling is None else [*blocks, pooling]
        gradients = torch.autograd.grad(logits.gather(1, indices[:, None]).sum(), maps)
    batch, _, tokens, _ = blocks[0].shape
    dtype = torch.promote_types(blocks[0].dtype, torch.float32)
    rows_of_r = torch.eye(tokens, dtype=dtype, device=logits.device).expand(batch, -1, -1)
    prefix = model.num_prefix_tokens
    with torch.no_grad():
        pairs = zip(maps, gradients, strict=True)
        steps = [(a.to(rows_of_r) * g).clamp(min=0).mean(dim=1) for a, g in pairs]
        for step in steps[: len(blocks)]:
            rows_of_r = rows_of_r + step @ rows_of_r
        if pooling is None:  # these poolings are linear, so they may pool the rows of R
            pooled = model.attn_pool(rows_of_r, context)
        else:
            pooled = steps[-1] @ rows_of_r[:, model.attn_pool.prefix :]
        parts: Tensor = pooled.reshape(len(pooled), -1, rows_of_r.shape[-1])[..., prefix:]
        return parts.mean(dim=1).view(batch, *context.grid)


def attribute_caption(predictor: Predictor, output: ImageOutput) -> "list[WordAttribution]":
    """Attention map of each word of the best caption of `output`."""
    generator = predictor.caption_generator
    assert generator is not None, "only a captioner has captions"
    assert output.memory is not None, "an output with captions has a memory"
    assert output.pixels is not None, "an output with captions has an image"
    size = predictor.model.patch_embed.patch_size
    _, height, width = output.pixels.shape
    with autocast(predictor.precision, predictor.device):
        words = attribute_words(
            generator.decoder,
            generator.tokenizer,
            output.memory,
            output.captions[0].ids,
            grid=(height // size, width // size),
        )
    if not all(bool(word.weights.isfinite().all()) for word in words):
        reason = f"attention overflowed in {predictor.precision}; try precision fp32"
        raise AttributionOverflow(output.image, reason)
    return words


@torch.inference_mode()
def attribute_words(
    decoder: TextDecoder,
    tokenizer: Tokenizer,
    memory: Tensor,
    ids: Sequence[int],
    *,
    grid: tuple[int, int],
) -> "list[WordAttribution]":
    """Words of a caption with their attention maps, in order; the patches are the last of `memory`,
    (tokens, dim).

    Words are separated by white space; in scripts without it they are single characters, or those
    of one token.
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
    """Words of a text as (word, first token, end token)."""
    text = prefixes[-1]
    spans = [found.span() for found in WORD.finditer(text)]
    starts, count = [], 0  # (token, words before it) where a token begins a word
    for index, prefix in enumerate(prefixes):
        words, token = min(len(WORD.findall(prefix)), len(spans)), index
        if words > count:
            while token and is_space(prefixes, token - 1):
                token -= 1
            starts.append((token, count))
            count = words
    if not starts:
        return []
    starts[0] = (0, 0)  # tokens without text before the first word belong to it
    ends = [*starts[1:], (len(prefixes), count)]
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
    """Attention map of one word, (rows, cols) float32 on the CPU; the sum is less than 1 where the
    class token and registers have some."""

    text: str
    weights: Tensor
