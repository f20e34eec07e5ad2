"""Beam search against brute force, against itself without early stopping, and against greedy."""

import pytest

from tests.generation.tables import BEGIN, END, Table, every_sentence, narrow_search, run
from tests.slow_cases import mostly_slow
from vit.generation.beam_search import beam_search
from vit.generation.generation_config import Search

PENALTIES = [-1.0, 0.0, 0.6, 1.0, 2.0]


@pytest.mark.parametrize("limits", [(0, 4), (1, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("penalty", mostly_slow(PENALTIES))
@pytest.mark.parametrize("repetition", [1.0, 1.6])
def test_an_exhaustive_beam_finds_the_best_sequences(limits, penalty, repetition):
    search = Search(
        beams=120, n_best=6, length_penalty=penalty, repetition_penalty=repetition,
        min_tokens=limits[0], max_tokens=limits[1],
    )  # fmt: skip
    answers, table = run(search, [0, 1, 2], 4, seed=7)
    for image, sentences in enumerate(answers):
        best = every_sentence(table, image, search)[:6]
        assert [(one.ids, one.ended) for one in sentences] == [(b[1], b[2]) for b in best]
        for one in sentences:
            score = table.score(image, one.ids, one.ended)
            assert one.score == pytest.approx(score, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(("beams", "n_best", "min_tokens"), [(2, 1, 1), (3, 3, 0), (4, 2, 4)])
def test_early_stopping_does_not_change_the_result(penalty, beams, n_best, min_tokens):
    search = Search(
        beams=beams, n_best=n_best, length_penalty=penalty, min_tokens=min_tokens, max_tokens=9
    )
    images = list(range(12))
    answers, table = run(search, images, 6, seed=3, lean=1.0)
    for image in images:
        found = [(one.ids, one.ended) for one in answers[image]]
        assert found == narrow_search(table, image, search)
    if penalty <= 0:
        assert sum(table.calls) < 12 * (1 + 8 * beams)


def test_complete_images_leave_the_batch():
    search = Search(beams=3, length_penalty=0.0, max_tokens=20)
    _, table = run(search, list(range(20)), 8, lean=2.0)
    assert table.calls[:2] == [20, 60]
    assert sorted(table.calls[1:], reverse=True) == table.calls[1:]
    assert all(rows % 3 == 0 for rows in table.calls[1:])
    assert len(table.calls) < 20
    _, table = run(Search(beams=3, length_penalty=2.0, max_tokens=20), [0], 8, lean=2.0)
    assert len(table.calls) > 2  # a longer one may still be better


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("repetition", [1.0, 1.5])
def test_one_beam_equals_greedy_decoding(ties, repetition):
    search = Search(length_penalty=0.0, max_tokens=8, min_tokens=2, repetition_penalty=repetition)
    images = list(range(40))
    greedy, _ = run(search, images, 7, ties=ties)
    beam = beam_search(
        Table(images, 7, ties=ties), rows=40, begin=BEGIN, end=END, search=search, device="cpu"
    )
    assert [[(b.ids, b.ended) for b in some] for some in beam] == [
        [(one.ids, one.ended)] for (one,) in greedy
    ]


def test_ties_go_to_the_earlier_beam_and_then_to_the_lower_id():
    search = Search(beams=4, n_best=4, max_tokens=3)
    answers, table = run(search, list(range(10)), 5, ties=True, spread=0.7)
    for image, sentences in enumerate(answers):
        found = [(one.ids, one.ended) for one in sentences]
        assert found == narrow_search(table, image, search)


def test_a_small_vocabulary_may_have_fewer_hypotheses():
    answers, table = run(Search(beams=5, n_best=5, max_tokens=2), [0], 2)
    assert sorted((one.ids, one.ended) for one in answers[0]) == [((0,), True), ((0, 0), False)]
    assert table.calls == [1, 1]
