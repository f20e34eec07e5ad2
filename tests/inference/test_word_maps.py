"""Where a decoder looked: as when it wrote, at the crafted place, and whole words."""

import pytest
import torch

from tests.inference.captioners import save_captioner
from vit.inference.attribution import merged_words, token_maps, word_maps
from vit.model.attention_maps import Recorder
from vit.weights.saved_model import load_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(save_captioner(tmp_path_factory.mktemp("run"), registers=2))


@torch.no_grad()
def test_reading_again_sees_what_writing_saw(run):
    decoder, grid = run.model.decoder, (2, 3)
    memory = torch.randn(1, 3 + 6, 32)
    ids = [run.tokenizer.begin, *run.tokenizer.encode(["a red cat"])[0]]
    found = token_maps(decoder, memory[0], ids, grid=grid)
    cache = decoder.look(memory)
    for place, number in enumerate(ids):
        recorder = Recorder()
        decoder.states(torch.tensor([[number]]), cache, attend=recorder)
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
def test_a_crafted_decoder_looks_at_one_patch(row, col, tmp_path):
    run = load_run(save_captioner(tmp_path, registers=2))
    look_at_feature(run.model.decoder)
    memory = torch.zeros(3 + 6, 32)
    memory[3 + row * 3 + col, 0] = 1.0
    ids = run.tokenizer.encode(["a red cat"])[0]
    words = word_maps(run.model.decoder, run.tokenizer, memory, ids, grid=(2, 3))
    assert [word.text for word in words] == ["a", "red", "cat"]
    for word in words:
        expected = torch.zeros(2, 3)
        expected[row, col] = 1.0
        torch.testing.assert_close(word.weights, expected, atol=1e-3, rtol=0)


@torch.no_grad()
def test_what_class_token_and_registers_get_is_left_out(tmp_path):
    run = load_run(save_captioner(tmp_path, registers=2))
    for block in run.model.decoder.blocks:
        block.cross_attn.q.weight.zero_()
        block.cross_attn.q.bias.zero_()
    ids = run.tokenizer.encode(["a red cat"])[0]
    words = word_maps(run.model.decoder, run.tokenizer, torch.randn(9, 32), ids, grid=(2, 3))
    for word in words:
        torch.testing.assert_close(word.weights, torch.full((2, 3), 1 / 9))


@torch.no_grad()
def test_a_word_is_the_mean_of_its_pieces(run):
    tokenizer, memory = run.tokenizer, torch.randn(9, 32)
    ids = tokenizer.encode(["blue ẞ x"])[0]
    pieces = [len(tokenizer.encode([word])[0]) for word in ("blue", "ẞ", "x")]
    assert pieces[1] > 2  # of bytes, most of them no sign by themselves
    words = word_maps(run.model.decoder, tokenizer, memory, ids, grid=(2, 3))
    assert [word.text for word in words] == ["blue", "ẞ", "x"]
    tokens = token_maps(run.model.decoder, memory, [tokenizer.begin, *ids[:-1]], grid=(2, 3))
    expected = [part.mean(dim=0) for part in tokens.split(pieces)]
    for word, weights in zip(words, expected, strict=True):
        torch.testing.assert_close(word.weights, weights)


def test_no_words_have_no_maps(run):
    assert word_maps(run.model.decoder, run.tokenizer, torch.randn(9, 32), [], grid=(2, 3)) == []


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
def test_pieces_are_merged(beginnings, words):
    assert merged_words(beginnings) == words
