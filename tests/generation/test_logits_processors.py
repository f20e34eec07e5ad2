"""Parity with transformers: its logits processors, and generate() on a small GPT-2; sampling."""

import collections

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LogitsProcessorList
from transformers.generation import logits_process as theirs

from tests.generation.tables import Table
from tests.markers import same_initial_weights
from tests.slow_cases import mostly_slow
from vit.generation.generate import generate
from vit.generation.generation_config import Search
from vit.generation.logits_processors import (
    LogitsProcessor,
    choose_tokens,
    random_integers,
    sampling_weights,
    stable_topk,
)

BEGIN, END, VOCAB, ROWS = 0, 1, 24, 6
LONGEST = 10


class GPT2:
    """An IncrementalDecoder of transformers' GPT-2; each image is another first word."""

    def __init__(self, model, rows):
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.first = torch.arange(2, 2 + rows).unsqueeze(1)

    def __call__(self, ids):
        if self.cache.get_seq_length() == 0:
            ids = torch.cat([self.first, ids], dim=1)
        # by position: transformers 5.24 renamed `past_key_values` to `cache`
        return self.model(ids, self.cache, use_cache=True).logits[:, -1]

    def select_rows(self, rows):
        self.cache.reorder_cache(rows)


@pytest.fixture(scope="module")
def gpt2():
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=2, initializer_range=0.4,
        bos_token_id=BEGIN, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = GPT2LMHeadModel(config).double().eval()
        # so that sentences end
        model.transformer.wte.weight.data[END] *= 1.5
    return model


def both(model, search, **settings):
    """Ours, and the ids (end included) that transformers generates."""
    ours = generate(GPT2(model, ROWS), rows=ROWS, begin=BEGIN, end=END, search=search)
    prompt = torch.cat([torch.arange(2, 2 + ROWS).unsqueeze(1), torch.full((ROWS, 1), BEGIN)], 1)
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
        max_new_tokens=search.max_tokens, min_new_tokens=search.min_tokens,
        num_return_sequences=search.n_best, return_dict_in_generate=True, output_scores=True,
        **settings,
    )  # fmt: skip
    return ours, out


def whole(one):
    return [*one.ids, END] if one.ended else list(one.ids)


def cut(row):
    """What transformers wrote, without the padding behind its end."""
    words = row[2:].tolist()
    return words[: words.index(END) + 1] if END in words else words


@same_initial_weights
@pytest.mark.parametrize("min_tokens", [0, 1, 5])
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_decoding_equals_transformers(gpt2, min_tokens, penalty):
    search = Search(min_tokens=min_tokens, max_tokens=LONGEST, repetition_penalty=penalty)
    # their penalty would count begin, too
    mine = theirs.RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=2)
    ours, out = both(gpt2, search, logits_processor=LogitsProcessorList([mine]))
    assert [whole(one) for (one,) in ours] == [cut(row) for row in out.sequences]
    if min_tokens < 5:
        assert {one.ended for (one,) in ours} == {True, False}


@pytest.mark.parametrize("min_tokens", [0, 4])
@pytest.mark.parametrize(("beams", "n_best"), [(2, 1), (4, 4), (7, 2)])
@pytest.mark.parametrize("penalty", mostly_slow([-0.5, 0.0, 0.6, 1.0, 2.0]))
def test_beam_search_equals_transformers(gpt2, min_tokens, beams, n_best, penalty):
    search = Search(
        beams=beams,
        n_best=n_best,
        length_penalty=penalty,
        min_tokens=min_tokens,
        max_tokens=LONGEST,
    )
    # their other ways of stopping are guesses where the penalty is positive
    ours, out = both(gpt2, search, num_beams=beams, length_penalty=penalty, early_stopping="never")
    flat = [one for some in ours for one in some]
    assert [whole(one) for one in flat] == [cut(row) for row in out.sequences]
    ranks = [one.score / len(whole(one)) ** penalty for one in flat]
    torch.testing.assert_close(
        torch.tensor(ranks), out.sequences_scores.float(), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "processors"),
    [
        ({"temperature": 0.7}, [theirs.TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "min_tokens": 6}, []),
        (
            {"temperature": 1.0, "min_tokens": 7},
            [theirs.MinNewTokensLengthLogitsProcessor(0, 7, END)],
        ),
        ({"temperature": 1.0, "top_k": 9}, [theirs.TopKLogitsWarper(9)]),
        ({"temperature": 1.0, "top_p": 0.75}, [theirs.TopPLogitsWarper(0.75)]),
        (
            {"temperature": 2.5, "top_k": 30, "top_p": 0.6, "repetition_penalty": 1.3,
             "min_tokens": 9},
            [
                theirs.RepetitionPenaltyLogitsProcessor(1.3),
                theirs.MinNewTokensLengthLogitsProcessor(0, 9, END),
                theirs.TemperatureLogitsWarper(2.5),
                theirs.TopKLogitsWarper(30),
                theirs.TopPLogitsWarper(0.6),
            ],
        ),
    ],
)  # fmt: skip
def test_top_k_and_top_p_equal_transformers(settings, processors):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 100, generator=generator) * 3
    written = torch.randint(2, 100, (64, 6), generator=generator)
    search = Search(**settings)
    expected = LogitsProcessorList(processors)(written, logits.clone()).softmax(dim=1)
    ids, parts = sampling_weights(LogitsProcessor(search, end=END)(logits, written), search)
    ours = torch.zeros_like(logits).scatter(1, ids, parts.float())
    ours = ours / ours.sum(dim=1, keepdim=True)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)
    sure = expected > 1e-8
    assert torch.equal(ours[sure] > 0, expected[sure] > 0)
    if search.top_k or search.top_p < 1:
        assert torch.equal(ours > 0, expected > 0)


def test_stable_topk_equals_a_stable_sort():
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(50, 200, generator=generator) * 3).round()
    logits[::3] *= -0.0  # zeros of both signs are equal
    logits[1::3] += torch.rand(200, generator=generator)  # hardly any tie
    logits[0, :9] = torch.tensor([0.0, -0.0, 0.0, -0.0, 1e-30, -1e-30, 3e38, -torch.inf, 5.0])
    values, ids = logits.sort(dim=1, descending=True, stable=True)
    for count in (1, 7, 199, 200):
        for row in range(
            50
        ):  # by itself, so that rows with and without ties use their own implementation
            found, indices = stable_topk(logits[row : row + 1], count)
            assert torch.equal(indices[0], ids[row, :count])
            assert torch.equal(found[0], values[row, :count])
        assert torch.equal(stable_topk(logits, count)[1], ids[:, :count])


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
    mostly_slow(
        [{"top_k": 7, "top_p": 0.9}, {}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}]
    ),
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


def test_the_extreme_random_numbers_sample_a_token_of_the_nucleus():
    search = Search(temperature=1.0, max_tokens=2)
    logits = torch.tensor([[-torch.inf, -90.0, 1.0, 2.0, -90.0, -torch.inf]])
    extremes = [torch.tensor([[number]]) for number in (0, 2**31 - 1)]
    assert [int(choose_tokens(logits, search, number)) for number in extremes] == [2, 3]
