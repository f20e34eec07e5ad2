"""Token merging against the paper's sentences, one token at a time, in float64."""

import math

import pytest
import torch
from torch import Tensor

from vit.config import ModelConfig
from vit.model.attention import AttentionContext
from vit.model.build import build_classifier
from vit.model.rotary_embedding import Rotation
from vit.model.token_merging import merge_tokens
from vit.model.vision_transformer import VisionTransformer

SMALL = {"image_size": 12, "patch_size": 4, "dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
VARIANTS = [
    {},
    {"registers": 2, "pooling": "mean"},
    {"class_token": False, "pooling": "mean", "position": "rotary"},
    {"pooling": "attention", "position": "learned_rotary", "registers": 1},
    {"pooling": "class_token_mean", "num_kv_heads": 1, "qk_norm": True},
]


def network(**changes) -> VisionTransformer:
    torch.manual_seed(0)
    model = build_classifier(ModelConfig(**{**SMALL, **changes})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def images(count: int = 2, side: int = 12) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def groups_by_hand(keys: Tensor, count: int, prefix: int) -> list[list[int]]:
    """Which old tokens each new one is made of; `keys` are those of one image, (tokens, dim)."""
    patches = list(range(prefix, len(keys)))
    first, second = patches[::2], patches[1::2]
    edges = []
    for a in first:
        cosines = [float(keys[a] @ keys[b] / keys[a].norm() / keys[b].norm()) for b in second]
        best = max(cosines)
        edges.append((best, a, second[cosines.index(best)]))
    edges = sorted(edges, reverse=True)[: min(count, len(patches) // 2)]
    leaving = {a: b for _, a, b in edges}
    stay = [[a] for a in first if a not in leaving]
    return [
        *([token] for token in range(prefix)),
        *stay,
        *([b, *(a for a in first if leaving.get(a) == b)] for b in second),
    ]


def means(x: Tensor, groups: list[list[int]], sizes: list[int]) -> Tensor:
    """The mean of each group of tokens, each counted as often as its size says."""
    rows = []
    for group in groups:
        total = sum(sizes[token] for token in group)
        rows.append(sum(x[token] * sizes[token] for token in group) / total)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("tokens", "count", "prefix"), [(9, 3, 1), (8, 4, 0), (9, 99, 2), (4, 1, 0)]
)
def test_token_merging_equals_the_paper_s_steps(tokens, count, prefix):
    torch.manual_seed(0)
    x, keys = torch.randn(2, tokens, 5).double(), torch.randn(2, 3, tokens, 4).double()
    sizes, angles = torch.randint(1, 5, (2, tokens)), torch.randn(2, tokens, 2).double()
    context = AttentionContext(rope=Rotation(angles), token_sizes=sizes.double())
    y, new = merge_tokens(x, keys, context, count=count, prefix=prefix)
    for image in range(2):
        groups = groups_by_hand(keys[image].mean(dim=0), count, prefix)
        old = sizes[image].tolist()
        torch.testing.assert_close(y[image], means(x[image], groups, old))
        torch.testing.assert_close(new.rope.angles[image], means(angles[image], groups, old))
        assert new.token_sizes[image].tolist() == [sum(old[token] for token in g) for g in groups]
    torch.testing.assert_close(new.mask[:, 0, 0], new.token_sizes.log())
    assert new.token_sizes.sum(dim=1).tolist() == sizes.sum(dim=1).tolist()


def attention_by_hand(attn, x: Tensor, angles: Tensor | None, sizes: list[int]):
    """Each token as so many copies as its size says; keys as well, (tokens, heads, head_dim)."""
    width = attn.proj.in_features // attn.heads[0]
    query, key, value = (
        part.unflatten(1, (-1, width))
        for part in attn.qkv(x).split([heads * width for heads in attn.heads], dim=1)
    )
    query, key = attn.q_norm(query), attn.k_norm(key)
    if angles is not None:
        query, key = turned(query, angles), turned(key, angles)
    copies = [token for token, size in enumerate(sizes) for _ in range(size)]
    rows = []
    for token in range(len(x)):
        heads = []
        for head in range(attn.heads[0]):
            shared = head * attn.heads[1] // attn.heads[0]
            scores = query[token, head] @ key[copies, shared].T / math.sqrt(width)
            heads.append(scores.softmax(dim=0) @ value[copies, shared])
        rows.append(attn.proj(torch.cat(heads)))
    return torch.stack(rows), key


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """(tokens, heads, head_dim), each pair of channels as a complex number that is turned."""
    first, second = x.chunk(2, dim=-1)
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([z.real, z.imag], dim=-1)


def tokens_by_hand(model: VisionTransformer, image: Tensor, count: int, prefix: int):
    """Tokens of one image after the last block, and of how many patches each is made."""
    x, context = model.embed(image[None])
    x, sizes = x[0], [1] * x.shape[1]
    angles = context.rope.angles[0] if isinstance(context.rope, Rotation) else None
    for block in model.blocks:
        y, key = attention_by_hand(block.attn, block.norm1(x), angles, sizes)
        x = x + y
        groups = groups_by_hand(key.mean(dim=1), count, prefix)
        x = means(x, groups, sizes)
        angles = None if angles is None else means(angles, groups, sizes)
        sizes = [sum(sizes[token] for token in group) for group in groups]
        x = x + block.mlp(block.norm2(x))
    return x, sizes


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@torch.no_grad()
def test_a_merging_network_equals_a_plain_reference(options):
    model = network(merge_tokens=2, **options).double()
    input_images, prefix = images().double(), model.num_prefix_tokens
    tokens, context = model.encode(input_images)
    pooled = model.features(input_images)
    assert tokens.shape[1] == prefix + 9 - 2 - 2
    for image in range(2):
        x, sizes = tokens_by_hand(model, input_images[image], 2, prefix)
        x = model.norm(x)
        torch.testing.assert_close(tokens[image], x)
        assert context.token_sizes[image].tolist() == sizes
        # the head reads copies, of which nothing needs to be weighted
        copies = [token for token, size in enumerate(sizes) for _ in range(size)]
        torch.testing.assert_close(
            pooled[image : image + 1], model.pool(x[copies][None], AttentionContext())
        )


@torch.no_grad()
def test_a_block_merges_at_most_half_of_the_patches():
    model = network(merge_tokens=1000, depth=6, registers=1)
    maps = model.attention_maps(images())
    assert [weights.shape[-1] - 2 for weights in maps] == [9, 5, 3, 2, 1, 1]
    assert model(images()).isfinite().all()


@torch.no_grad()
def test_token_merging_works_in_half_precision():
    assert network(merge_tokens=2).bfloat16()(images().bfloat16()).isfinite().all()
