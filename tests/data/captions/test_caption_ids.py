"""Captions as padded rows of token ids."""

import io
import pickle

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from vit.data.captions.caption_ids import CaptionIds, pad_ids
from vit.data.captions.tokenizer import train_tokenizer

CAPTIONS = [
    *("a dog runs on the grass .", "two dogs run on the wet grass", "A man's dog (a big one)."),
    *("a red circle left of a blue square", "the blue square is red, the circle is not"),
    *("một con chó chạy trên cỏ", "一只红色的狗", "नमस्ते दुनिया", "family 👩‍👩‍👧 👩‍👩‍👧"),
]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(CAPTIONS * 2)


def test_caption_ids_are_the_tokens_of_the_captions_between_begin_and_end(trained):
    samples = [CAPTIONS[:3], [], CAPTIONS[3:4], ["", CAPTIONS[0] * 20], CAPTIONS[4:]]
    max_tokens = 25
    captions = CaptionIds(samples, trained, max_tokens)
    lengths, kept = [], []
    for number, texts in enumerate(samples):
        rows = [[trained.begin, *ids, trained.end] for ids in trained.encode(texts)]
        lengths += map(len, rows)
        rows = [row for row in rows if len(row) <= max_tokens]
        kept += rows
        assert captions.count(number) == len(rows)
        for which, row in enumerate(rows):
            ids = captions.ids(number, which)
            assert ids.dtype == np.int64
            assert ids.tolist() == row
    assert 0 < captions.too_long == len(lengths) - len(kept)
    assert captions.longest == max(lengths)
    assert captions.mean_tokens == pytest.approx(np.mean([len(row) - 1 for row in kept]))
    assert max(map(len, kept)) <= max_tokens


def test_a_caption_of_the_maximum_length_is_kept_and_a_longer_one_is_not(trained):
    (ids,) = trained.encode(["a red dog runs"])
    assert CaptionIds([["a red dog runs"]], trained, len(ids) + 2).too_long == 0
    assert CaptionIds([["a red dog runs"]], trained, len(ids) + 1).too_long == 1


@pytest.mark.parametrize(("repeats", "samples"), [(2, 8), (3, 12), (4, 8), (1, 6), (2, 2)])
def test_an_image_is_compared_with_one_of_other_words(trained, repeats, samples):
    """Captions that recur every few images are the same half of the images away."""
    said = [[CAPTIONS[number % repeats]] for number in range(samples)]
    by = CaptionIds(said, trained, 40).mismatch_shift
    assert all(said[n] != said[(n + by) % samples] for n in range(samples)) == (repeats > 1)
    plain = [[one] for one in CAPTIONS[:6]]
    assert CaptionIds(plain, trained, 40).mismatch_shift == 3


@pytest.mark.parametrize(
    ("samples", "counts", "lengths"),
    [
        ([["a b", "a b c d e f"], ["a"]], [1, 1], (1, 8, 4, 2.5)),
        ([[]], [0], (0, 0, 0, 0.0)),
        ([], [], (0, 0, 0, 0.0)),
    ],
)
def test_the_lengths_of_captions_and_of_those_kept_are_recorded(samples, counts, lengths):
    kept = CaptionIds(samples, train_tokenizer(["a b c d e f"] * 2), 5)
    assert (kept.too_long, kept.longest, kept.longest_kept, kept.mean_tokens) == lengths
    assert [kept.count(number) for number in range(len(samples))] == counts


def test_captions_take_little_memory_and_few_bytes_when_pickled(trained):
    captions = CaptionIds([["a red dog runs on the grass"]] * 1000, trained, 50)
    size = len(captions.ids(0, 0)) - 2
    arrays = [value for value in vars(captions).values() if isinstance(value, np.ndarray)]
    assert sum(value.nbytes for value in arrays) < 1000 * (4 * size + 17) + 100
    file = io.BytesIO()
    pickle.dump(captions, file)
    assert file.tell() < 1000 * (4 * size + 17) + 1000


def test_padding_equals_torch_s_pad_sequence():
    rows = [np.array(row) for row in ([1, 5, 2], [1, 2], [1, 7, 8, 9, 2])]
    padded = pad_ids(rows, 3)
    expected = pad_sequence([torch.tensor(row) for row in rows], True, padding_value=3)
    assert torch.equal(padded, expected)
    assert padded.dtype == torch.int64
