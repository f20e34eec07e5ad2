"""Attention rollout and relevance against loops after the papers and hooks in timm; word maps."""

import pytest
import timm
import torch
from timm.utils import AttentionExtract
from torch import Tensor, nn

from tests.inference.captioners import save_captioner
from vit.config import ModelConfig
from vit.errors import ConfigError
from vit.inference.attribution import (
    attribute_words,
    merge_words,
    relevance,
    rollout,
    token_attention,
)
from vit.model.attention import AttentionRecorder, record_attention
from vit.model.build import build_classifier
from vit.model.vision_transformer import VisionTransformer
from vit.training.activation_checkpointing import recompute_blocks
from vit.weights.saved_model import load_run

SMALL = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
KINDS = [
    {},
    {"norm_order": "post"},
    {"norm_order": "sandwich", "registers": 2},
    {"parallel_blocks": True},
    {"position": "rotary", "class_token": False, "pooling": "mean"},
    {"num_kv_heads": 2, "pooling": "class_token_mean"},
    {"pooling": "attention", "class_token": False, "registers": 1},
    {"pooling": "attention"},
    {"repeat_blocks": 2, "qk_norm": True},
]


def network(**settings) -> VisionTransformer:
    torch.manual_seed(0)
    model = build_classifier(ModelConfig(**{**SMALL, **settings})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def input_images(count: int = 2, *, height: int = 16, width: int = 24) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_recording_attention_changes_no_output(settings):
    model, images = network(**settings), input_images()
    seen = record_attention(model, images)
    torch.testing.assert_close(seen.logits, model(images))
    torch.testing.assert_close(seen.tokens, model.forward_features(images))
    torch.testing.assert_close(seen.maps, model.attention_maps(images))
    assert seen.context.grid == (2, 3)
    assert (seen.pooling is not None) == (settings.get("pooling") == "attention")
    assert images.grad is None
    assert not images.requires_grad


def test_maps_equal_those_that_timm_extracts():
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4,
        num_classes=3,
    ).eval()  # fmt: skip
    model = network(image_size=32)
    state = theirs.state_dict()
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flatten(1)
    model.load_state_dict(state)
    images = input_images(height=32, width=32)
    for block in theirs.blocks:
        block.attn.fused_attn = False
    extracted = AttentionExtract(theirs, method="hook")(images)
    assert len(extracted) == 2
    torch.testing.assert_close(record_attention(model, images).maps, list(extracted.values()))


def fused(heads: list[list[list[float]]], fuse: str, discard: float) -> list[list[float]]:
    """One image's heads as one, with each row's smallest entries left out, by plain loops."""
    size = len(heads[0])
    pick = {"mean": lambda values: sum(values) / len(values), "max": max, "min": min}[fuse]
    rows = []
    for i in range(size):
        row = [pick([head[i][j] for head in heads]) for j in range(size)]
        for j in sorted(range(size), key=row.__getitem__)[: int(discard * size)]:
            row[j] = 0.0
        rows.append([value / sum(row) for value in row])
    return rows


@pytest.mark.parametrize(
    ("residual", "fuse", "discard"),
    [(0.5, "mean", 0.0), (0.3, "max", 0.4), (0.0, "min", 0.9), (1.0, "mean", 0.0)],
)
def test_rollout_equals_explicit_loops(residual, fuse, discard):
    maps = [weights.double() for weights in network().attention_maps(input_images())]
    rolled = rollout(maps, residual=residual, fuse=fuse, discard=discard)
    size = maps[0].shape[-1]
    for image in range(2):
        expected = [[float(i == j) for j in range(size)] for i in range(size)]
        for weights in maps:
            rows = fused(weights[image].tolist(), fuse, discard)
            expected = [
                [
                    residual * expected[i][j]
                    + (1 - residual) * sum(rows[i][k] * expected[k][j] for k in range(size))
                    for j in range(size)
                ]
                for i in range(size)
            ]
        torch.testing.assert_close(rolled[image].tolist(), expected)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(2, size).double())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"residual": 1.5}, "residual=1.5"),
        ({"discard": 1.0}, "discard=1.0"),
        ({"fuse": "median"}, "fuse='median'"),
    ],
)
def test_rollout_refuses_arguments_out_of_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        rollout([torch.eye(3)[None, None]], **settings)


def test_maps_of_merged_tokens_are_refused():
    with pytest.raises(ConfigError, match="maps of 3 and 5 tokens: tokens were merged"):
        rollout([torch.eye(5)[None, None], torch.eye(3)[None, None]])


@pytest.mark.parametrize("block", [0, 1])
def test_relevance_of_merged_tokens_is_refused(block):
    model = network()
    forward = model.blocks[block].forward

    def merging(x, places):
        x, places = forward(x, places)
        return x[:, :-1], places

    model.blocks[block].forward = merging
    with pytest.raises(ConfigError, match="tokens were merged or dropped on the way"):
        relevance(model, input_images())


def by_hooks(model: nn.Module, image: Tensor, wanted: int, *, prefix: int, mean: bool) -> Tensor:
    """Chefer et al.'s rule for one image and a network of timm, by hooks and loops, in float64."""
    maps: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _m, inputs, _out: maps.append(inputs[0]))
    logit = model(image[None])[0, wanted]
    gradients = torch.autograd.grad(logit, maps)
    size = maps[0].shape[-1]
    relevant = [[float(i == j) for j in range(size)] for i in range(size)]
    for weights, gradient in zip(maps, gradients, strict=True):
        heads = (weights * gradient)[0].tolist()
        new = [row[:] for row in relevant]
        for i in range(size):
            for k in range(size):
                step = sum(max(head[i][k], 0.0) for head in heads) / len(heads)
                for j in range(size):
                    new[i][j] += step * relevant[k][j]
        relevant = new
    table = torch.tensor(relevant, dtype=torch.float64)
    return (table[prefix:].mean(0) if mean else table[0])[prefix:].unflatten(0, (4, 4))


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("registers", [0, 2])
def test_relevance_equals_hooks_in_timm_s_network(mean, registers):
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4,
        num_classes=3, global_pool="avg" if mean else "token", fc_norm=mean, reg_tokens=registers,
        no_embed_class=bool(registers),
    ).eval().double()  # fmt: skip
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    pooling = "mean" if mean else "class_token"
    model = network(image_size=32, pooling=pooling, registers=registers).double()
    state = theirs.state_dict()
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flatten(1)
    model.load_state_dict(state)
    images = input_images(2, height=32, width=32).double()
    found = relevance(model, images, [2, 0])
    for image, wanted, ours in zip(images, (2, 0), found, strict=True):
        expected = by_hooks(theirs, image, wanted, prefix=1 + registers, mean=mean)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    top = model(images).argmax(1)
    assert torch.equal(relevance(model, images), relevance(model, images, top))


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_every_kind_of_network_explains_each_image_by_itself(settings):
    model, images = network(**settings), input_images(3)
    model.requires_grad_(False)
    with torch.inference_mode():
        both = relevance(model, images, [0, 1, 2])
        inside = relevance(model, input_images(3), [0, 1, 2])  # of an inference tensor
    assert both.shape == (3, 2, 3)
    assert (both >= 0).all()
    assert both.any()
    torch.testing.assert_close(inside, both)
    for index in range(3):
        alone = relevance(model, images[index : index + 1], torch.tensor([index]))
        torch.testing.assert_close(alone[0], both[index])
    model.requires_grad_(True)
    torch.testing.assert_close(relevance(model, images, [0, 1, 2]), both)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(relevance(model, images, [1, 2, 0]), both)


def test_attention_pooling_gathers_from_the_patches():
    model = network(pooling="attention", depth=1).double()
    images = input_images(1).double()
    seen = record_attention(model, images)
    logit = seen.logits[0, 1]
    (attention,), last = seen.maps, seen.pooling
    grads = torch.autograd.grad(logit, [attention, last])
    block = (attention * grads[0]).clamp(min=0).mean(1)[0]
    pool = (last * grads[1]).clamp(min=0).mean(1)[0]
    expected = (pool @ (torch.eye(7).double() + block)[1:])[0, 1:].view(2, 3)
    torch.testing.assert_close(relevance(model, images, [1])[0], expected)


@pytest.mark.parametrize("classes", [[3, 0], [-1, 0], [0], [0.0, 1.0], [True, False]], ids=str)
def test_relevance_of_unknown_classes_is_refused(classes):
    with pytest.raises(ConfigError, match="must be one number from 0 to 2 for each of 2 images"):
        relevance(network(), input_images(), classes)


def test_a_network_without_a_head_has_nothing_to_explain():
    with pytest.raises(ConfigError, match="num_classes=0: there is no class to explain"):
        relevance(network(num_classes=0), input_images())


def test_relevance_works_with_activation_checkpointing():
    model, images = network(), input_images()
    expected = relevance(model, images)
    recompute_blocks(model)
    torch.testing.assert_close(relevance(model, images), expected)


def test_relevance_finds_the_one_patch_that_decides():
    """Two classes: noise with a known patch somewhere, and noise without it."""
    torch.manual_seed(0)
    settings = {**SMALL, "image_size": 32, "num_classes": 2, "pooling": "mean"}
    model = build_classifier(ModelConfig(**settings))
    known = torch.randn(3, 8, 8)

    def put(images: Tensor, places: Tensor, patch: Tensor) -> None:
        for image, place in zip(images, places.tolist(), strict=True):
            top, left = 8 * (place // 4), 8 * (place % 4)
            image[:, top : top + 8, left : left + 8] = patch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(40):
        images = torch.randn(64, 3, 32, 32)
        put(images[:32], torch.randint(16, (32,)), known)
        optimizer.zero_grad()
        labels = torch.arange(64) // 32
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    model.eval()
    images, places = torch.randn(100, 3, 32, 32), torch.randint(16, (100,))
    put(images, places, known)
    found = relevance(model, images, [0] * 100).flatten(1)
    assert (model(images).argmax(1) == 0).float().mean() > 0.95
    assert (found.argmax(1) == places).float().mean() > 0.95
    # Without the most relevant patch the class is lost; without the least relevant one it is not.
    for chosen, lost in ((found.argmin(1), False), (found.argmax(1), True)):
        damaged = images.clone()
        put(damaged, chosen, torch.randn(3, 8, 8))
        assert ((model(damaged).argmax(1) == 1).float().mean() > 0.9) == lost


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(save_captioner(tmp_path_factory.mktemp("run"), registers=2))


@torch.no_grad()
def test_attention_of_the_finished_caption_equals_that_of_generation(run):
    decoder, grid = run.model.decoder, (2, 3)
    memory = torch.randn(1, 3 + 6, 32)
    ids = [run.tokenizer.begin, *run.tokenizer.encode(["a red cat"])[0]]
    found = token_attention(decoder, memory[0], ids, grid=grid)
    cache = decoder.init_cache(memory)
    for place, number in enumerate(ids):
        recorder = AttentionRecorder()
        decoder.hidden_states(torch.tensor([[number]]), cache, attention_fn=recorder)
        assert [m.shape[2:] for m in recorder.maps] == [(1, place + 1), (1, 9)] * 2
        expected = torch.stack(recorder.maps[1::2]).mean(dim=(0, 2))[0, 0, 3:].view(grid)
        torch.testing.assert_close(found[place], expected)
    assert not torch.allclose(found[0], found[1])


def look_at_feature(decoder) -> None:
    """Make every head look where the first number of a token is largest."""
    for block in decoder.blocks:
        cross, wide = block.cross_attn, block.cross_attn.q.weight.shape[0]
        head_dim = wide // cross.num_heads
        for part in (cross.q.weight, cross.q.bias, cross.kv.weight, cross.kv.bias):
            part.zero_()
        cross.q.bias[::head_dim] = 20.0
        cross.kv.weight[:wide:head_dim, 0] = 20.0


@torch.no_grad()
@pytest.mark.parametrize(("row", "col"), [(0, 0), (0, 2), (1, 0), (1, 2)])
def test_a_decoder_that_attends_to_one_patch_has_a_map_of_that_patch(row, col, tmp_path):
    run = load_run(save_captioner(tmp_path, registers=2))
    look_at_feature(run.model.decoder)
    memory = torch.zeros(3 + 6, 32)
    memory[3 + row * 3 + col, 0] = 1.0
    ids = run.tokenizer.encode(["a red cat"])[0]
    words = attribute_words(run.model.decoder, run.tokenizer, memory, ids, grid=(2, 3))
    assert [word.text for word in words] == ["a", "red", "cat"]
    for word in words:
        expected = torch.zeros(2, 3)
        expected[row, col] = 1.0
        torch.testing.assert_close(word.weights, expected, atol=1e-3, rtol=0)


@torch.no_grad()
def test_attention_to_class_token_and_registers_is_left_out(tmp_path):
    run = load_run(save_captioner(tmp_path, registers=2))
    for block in run.model.decoder.blocks:
        block.cross_attn.q.weight.zero_()
        block.cross_attn.q.bias.zero_()
    ids = run.tokenizer.encode(["a red cat"])[0]
    words = attribute_words(run.model.decoder, run.tokenizer, torch.randn(9, 32), ids, grid=(2, 3))
    for word in words:
        torch.testing.assert_close(word.weights, torch.full((2, 3), 1 / 9))


@torch.no_grad()
def test_the_map_of_a_word_is_the_mean_over_its_tokens(run):
    tokenizer, memory = run.tokenizer, torch.randn(9, 32)
    ids = tokenizer.encode(["blue ẞ x"])[0]
    pieces = [len(tokenizer.encode([word])[0]) for word in ("blue", "ẞ", "x")]
    assert pieces[1] > 2  # of bytes, most of them no sign by themselves
    words = attribute_words(run.model.decoder, tokenizer, memory, ids, grid=(2, 3))
    assert [word.text for word in words] == ["blue", "ẞ", "x"]
    tokens = token_attention(run.model.decoder, memory, [tokenizer.begin, *ids[:-1]], grid=(2, 3))
    expected = [part.mean(dim=0) for part in tokens.split(pieces)]
    for word, weights in zip(words, expected, strict=True):
        torch.testing.assert_close(word.weights, weights)


def test_an_empty_caption_has_no_maps(run):
    assert (
        attribute_words(run.model.decoder, run.tokenizer, torch.randn(9, 32), [], grid=(2, 3)) == []
    )


@pytest.mark.parametrize(
    ("beginnings", "words"),
    [
        (["a", "a red", "a red cat"], [("a", 0, 1), ("red", 1, 2), ("cat", 2, 3)]),
        (["a", "a r", "a red"], [("a", 0, 1), ("red", 1, 3)]),
        (["caf", "caf\ufffd", "café", "café x"], [("café", 0, 3), ("x", 3, 4)]),
        (["", "", "x"], [("x", 0, 3)]),
        (["a", "a", "a b"], [("a", 0, 2), ("b", 2, 3)]),
        (["a", "a ", "a  ", "a  b"], [("a", 0, 1), ("b", 1, 4)]),
        (["a ", "a b ", "a b"], [("a", 0, 1), ("b", 1, 3)]),
        (["a b", "a b c"], [("a b", 0, 1), ("c", 1, 2)]),
        (["猫", "猫の", "猫の\ufffd", "猫の写", "猫の写真"], [("猫", 0, 1), ("の", 1, 2),
         ("写", 2, 4), ("真", 4, 5)]),
        (["猫の", "猫の写"], [("猫の", 0, 1), ("写", 1, 2)]),
        (["a,", "a, b"], [("a,", 0, 1), ("b", 1, 2)]),
        (["do n", "do n '", "don't"], [("don't", 0, 3)]),
        (["", " "], []),
    ],
)  # fmt: skip
def test_tokens_are_merged_to_words(beginnings, words):
    assert merge_words(beginnings) == words
