"""Relevance against loops after the papers and hooks in timm; word maps."""

import pytest
import timm
import torch
from sklearn.metrics import auc
from timm.utils import AttentionExtract
from torch import Tensor, nn

from tests.inference.captioners import save_captioner
from tests.slow_cases import mostly_slow
from vit.config import ModelConfig
from vit.inference.attribution import (
    RANDOM_ORDERS,
    STEPS,
    Curve,
    attribute_words,
    deletions,
    merge_words,
    relevance,
    steps,
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


def timm_pair(mean: bool = False, registers: int = 0) -> tuple[nn.Module, VisionTransformer]:
    """A network of timm without fused attention, and ours with its weights."""
    pool = {"global_pool": "avg" if mean else "token", "fc_norm": mean}
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    tokens = {"reg_tokens": registers, "no_embed_class": bool(registers)}
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=3, **small, **pool, **tokens)
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    for block in theirs.blocks:
        block.attn.fused_attn = False
    pooling = "mean" if mean else "class_token"
    model = network(image_size=32, pooling=pooling, registers=registers)
    state = theirs.state_dict()
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flatten(1)
    model.load_state_dict(state)
    return theirs.eval().double(), model.double()


def test_maps_equal_those_that_timm_extracts():
    theirs, model = timm_pair()
    images = input_images(height=32, width=32).double()
    extracted = AttentionExtract(theirs, method="hook")(images)
    assert len(extracted) == 2
    torch.testing.assert_close(record_attention(model, images).maps, list(extracted.values()))


def by_hooks(model: nn.Module, image: Tensor, wanted: int, *, prefix: int, mean: bool) -> Tensor:
    """Chefer et al.'s rule for one image and a network of timm, by hooks and loops, in float64."""
    maps: list[Tensor] = []
    for block in model.blocks:
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
    theirs, model = timm_pair(mean, registers)
    images = input_images(2, height=32, width=32).double()
    found = relevance(model, images, [2, 0])
    for image, wanted, ours in zip(images, (2, 0), found, strict=True):
        expected = by_hooks(theirs, image, wanted, prefix=1 + registers, mean=mean)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


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


def test_relevance_works_with_activation_checkpointing():
    model, images = network(), input_images()
    expected = relevance(model, images, [0, 1])
    recompute_blocks(model)
    torch.testing.assert_close(relevance(model, images, [0, 1]), expected)


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


@pytest.fixture
def run(captioner_with_registers):
    """A captioner that a test may change."""
    return load_run(captioner_with_registers)


@pytest.fixture(scope="module")
def captioner_with_registers(tmp_path_factory):
    return save_captioner(tmp_path_factory.mktemp("run"), registers=2)


def words_of(run, memory: Tensor, said: str = "a red cat"):
    ids = run.tokenizer.encode([said])[0]
    return attribute_words(run.model.decoder, run.tokenizer, memory, ids, grid=(2, 3))


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
def test_a_decoder_that_attends_to_one_patch_has_a_map_of_that_patch(run, row, col):
    look_at_feature(run.model.decoder)
    memory = torch.zeros(3 + 6, 32)
    memory[3 + row * 3 + col, 0] = 1.0
    words = words_of(run, memory)
    assert [word.text for word in words] == ["a", "red", "cat"]
    for word in words:
        expected = torch.zeros(2, 3)
        expected[row, col] = 1.0
        torch.testing.assert_close(word.weights, expected, atol=1e-3, rtol=0)


@torch.no_grad()
def test_attention_to_class_token_and_registers_is_left_out(run):
    for block in run.model.decoder.blocks:
        block.cross_attn.q.weight.zero_()
        block.cross_attn.q.bias.zero_()
    for word in words_of(run, torch.randn(9, 32)):
        torch.testing.assert_close(word.weights, torch.full((2, 3), 1 / 9))


@torch.no_grad()
def test_the_map_of_a_word_is_the_mean_over_its_tokens(run):
    tokenizer, memory, said = run.tokenizer, torch.randn(9, 32), ("blue", "ẞ", "x")
    pieces = [len(tokenizer.encode([word])[0]) for word in said]
    assert pieces[1] > 2  # of bytes, most of them no sign by themselves
    words = words_of(run, memory, " ".join(said))
    ids = tokenizer.encode([" ".join(said)])[0]
    tokens = token_attention(run.model.decoder, memory, [tokenizer.begin, *ids[:-1]], grid=(2, 3))
    for word, part, text in zip(words, tokens.split(pieces), said, strict=True):
        assert word.text == text
        torch.testing.assert_close(word.weights, part.mean(dim=0))
    assert words_of(run, memory, "") == []


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


class Weighted(nn.Module):
    """Two classes; the first has what light is in patches, times a weight of each."""

    def __init__(self, weights=None) -> None:
        super().__init__()
        self.weights, self.seen = torch.linspace(-1, 1, 16) if weights is None else weights, 0

    def forward(self, images):
        self.seen += len(images)
        light = images.mean(1).unflatten(1, (4, 4)).unflatten(3, (4, 4)).mean((2, 4)).flatten(1)
        logits = (light * self.weights).sum(1)
        return torch.stack([logits, torch.zeros_like(logits)], dim=1)


def deletions_of(model, maps, *, seed=0, batch_size=8, classes=None):
    """The metric of maps of a white image."""
    wanted = classes or [0] * len(maps)
    image = torch.ones(3, 16, 16)
    return deletions(model, image, maps, wanted, batch_size=batch_size, seed=seed)


def by_loop(model, image, order, side, wanted):
    """The curve of one order, image by image."""
    cols = image.shape[2] // side
    found = []
    for step in range(STEPS + 1):
        deleted = image.clone()
        for patch in order[: round(len(order) * step / STEPS)]:
            top, left = side * (patch // cols), side * (patch % cols)
            deleted[:, top : top + side, left : left + side] = 0
        with torch.no_grad():
            found.append(float(model(deleted[None])[0].double().softmax(0)[wanted]))
    return found


@pytest.mark.parametrize("settings", mostly_slow(KINDS), ids=str)
def test_curves_equal_those_of_an_explicit_loop(settings):
    model, image = network(**settings), input_images(1, height=32, width=40)[0]
    maps, wanted = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(0)), [2, 0]
    found = deletions(model, image, maps, wanted, batch_size=7, seed=0)
    for one, weights, index in zip(found, maps, wanted, strict=True):
        order = weights.flatten().argsort(descending=True).tolist()
        expected = by_loop(model, image, order, 8, index)
        assert one.curve.probabilities == pytest.approx(expected, abs=1e-5)
        backwards = by_loop(model, image, order[::-1], 8, index)
        assert one.reverse.probabilities == pytest.approx(backwards, abs=1e-5)
        assert one.curve.deleted == tuple(step / 10 for step in range(11))
        assert one.curve.score == pytest.approx(auc(one.curve.deleted, expected), abs=1e-5)
        assert len(one.random) == RANDOM_ORDERS


def test_a_faithful_map_beats_chance_and_a_reversed_one_does_not():
    weights = torch.rand(16, generator=torch.Generator().manual_seed(1)) - 0.3
    model, true = Weighted(weights), weights.view(4, 4)
    found = deletions_of(model, torch.stack([true, -true]))
    assert [one.better for one in found] == [True, False]
    assert found[0].curve.score < found[0].chance < found[0].reverse.score
    assert found[1].curve.probabilities == found[0].reverse.probabilities
    assert found[0].random == found[1].random
    (other,) = deletions_of(model, -true[None], classes=[1])
    assert other.better  # what speaks against one class speaks for the other


@pytest.mark.slow
def test_a_random_map_beats_chance_once_in_ten_times():
    empty = torch.zeros(1, 4, 4)
    found = [deletions_of(Weighted(), empty, batch_size=128, seed=seed)[0] for seed in range(300)]
    better = sum(one.better for one in found)
    assert 15 <= better <= 45  # 1 in 10: 30, with a standard deviation of 5
    assert deletions_of(Weighted(), empty, seed=3) == deletions_of(Weighted(), empty, seed=3)
    assert found[3] != found[4]


@pytest.mark.parametrize(("patches", "maps"), [(1, 1), (4, 2), (16, 1), (16, 2)])
def test_the_number_of_forward_passes_is_as_stated(patches, maps):
    model, side = Weighted(torch.ones(16)), int(patches**0.5)
    deletions_of(model, torch.rand(maps, side, side), batch_size=5)
    assert model.seen == 2 + (len(steps(patches)) - 2) * (RANDOM_ORDERS + 2 * maps)


def test_deletion_steps_go_from_none_to_all():
    assert steps(100) == list(range(0, 101, 10))
    assert steps(3) == [0, 1, 2, 3]
    assert steps(1) == [0, 1]
    assert Curve((0.0, 0.5, 1.0), (1.0, 0.5, 0.0)).score == 0.5
