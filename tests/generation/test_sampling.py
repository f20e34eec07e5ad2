"""Sampling: its distribution, its limits and its random numbers."""

import collections

import pytest
import torch

from tests.generation.tables import BEGIN, END, Table
from vit.generation.generate import generate
from vit.generation.generation_config import Search
from vit.generation.logits_processors import choose_tokens, random_integers, sampling_weights

COUNT = 20_000


class Same:
    """An IncrementalDecoder that gives all rows the same logits."""

    def __init__(self, logits, rows):
        self.logits = logits.expand(rows, -1)

    def __call__(self, ids):
        assert len(ids) == len(self.logits)
        return self.logits

    def select_rows(self, rows):
        self.logits = self.logits[rows]


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 7, "top_p": 0.9}],
)
def test_sampled_tokens_have_the_filtered_distribution(settings):
    logits = torch.tensor([[0.3, -50.0, 1.2, 0.1, -0.4, 2.0, 1.1, -1.5, 0.9, 0.0]])
    search = Search(**{"temperature": 1.0, "max_tokens": 1, "seed": 4, **settings})
    answers = generate(Same(logits, COUNT), rows=COUNT, begin=BEGIN, end=END, search=search)
    counts = collections.Counter(one.ids[0] for (one,) in answers)
    expected = filtered(logits[0].double(), search)
    assert set(counts) == {word for word, share in enumerate(expected.tolist()) if share > 1e-6}
    chi = sum(
        (counts[w] - COUNT * p) ** 2 / (COUNT * p) for w, p in enumerate(expected) if p > 1e-6
    )
    # mean of a chi-square is its degrees of freedom, its variance twice that
    freedom = len(counts) - 1
    assert abs(float(chi) - freedom) < 3.5 * (2 * freedom) ** 0.5


def filtered(logits, search):
    """The distribution by its definition, word by word."""
    order = sorted(range(len(logits)), key=lambda word: -float(logits[word]))
    order = order[: search.top_k or None]
    parts = {word: float((logits[word] / search.temperature).exp()) for word in order}
    total, kept, sofar = sum(parts.values()), {}, 0.0
    for word in order:
        if sofar < search.top_p:
            kept[word] = parts[word]
        sofar += parts[word] / total
    result = torch.zeros(len(logits), dtype=torch.float64)
    for word, part in kept.items():
        result[word] = part / sum(kept.values())
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 3.0, "top_k": 1},
        {"temperature": 3.0, "top_p": 1e-12},
        {"temperature": 0.001},
        {"temperature": 0.001, "top_k": 4, "top_p": 0.9},
    ],
)
def test_the_limits_of_sampling_equal_greedy_decoding(settings):
    def run(search, **table):
        return generate(Table(range(30), 9, **table), rows=30, begin=BEGIN, end=END, search=search)

    limits = {"max_tokens": 8, "repetition_penalty": 1.3}
    assert run(Search(**settings, **limits)) == run(Search(**limits))
    if settings["temperature"] == 3.0:
        assert run(Search(**settings, **limits), ties=True) == run(Search(**limits), ties=True)


def test_the_image_index_determines_the_sample():
    def run(numbers, seed=0):
        table = Table([9] * len(numbers), 50)
        search = Search(temperature=2.0, max_tokens=10, seed=seed)
        rows = len(numbers)
        return generate(
            table, rows=rows, begin=BEGIN, end=END, search=search, image_indices=numbers
        )

    first, second, third = run([4, 5, 4])
    assert first == third != second
    assert run([4], seed=1) != [first]
    state = torch.random.get_rng_state()
    assert run([4]) == [first]
    assert torch.equal(state, torch.random.get_rng_state())


def test_random_numbers_are_uniform_and_prefixes_of_longer_ones():
    assert random_integers(1, 2, 5) == random_integers(1, 2, 40)[:5]
    assert random_integers(1, 23, 5) != random_integers(12, 3, 5)
    values = (
        torch.tensor([random_integers(0, number, 100) for number in range(300)]).double() / 2**31
    )
    assert 0 <= values.min() < 0.001
    assert 0.999 < values.max() < 1
    assert abs(float(values.mean()) - 0.5) < 0.005
    # neighbours in number and in place are unrelated
    centred = values - 0.5
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 0.002
    assert abs(float((centred[:, 1:] * centred[:, :-1]).mean())) < 0.002


def test_sampling_weights_do_not_depend_on_the_other_rows():
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(0)) * 4
    for settings in ({}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9}):
        search = Search(temperature=0.8, **settings)
        together = sampling_weights(logits, search)
        for row in range(8):
            alone = sampling_weights(logits[row : row + 1], search)
            assert torch.equal(alone[0][0], together[0][row])
            assert torch.equal(alone[1][0], together[1][row])


def test_the_extreme_random_numbers_sample_a_token_of_the_nucleus():
    search = Search(temperature=1.0, max_tokens=2)
    logits = torch.tensor([[-torch.inf, -90.0, 1.0, 2.0, -90.0, -torch.inf]])
    extremes = [torch.tensor([[number]]) for number in (0, 2**31 - 1)]
    assert [int(choose_tokens(logits, search, number)) for number in extremes] == [2, 3]
