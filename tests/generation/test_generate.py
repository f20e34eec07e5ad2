"""Greedy decoding, length limits, finished rows, and independence of the batch."""

import math

import pytest

from tests.generation.tables import BEGIN, END, Table, run
from vit.errors import WeightsError
from vit.generation.generate import generate
from vit.generation.generation_config import Hypothesis, Search

DRAWN = Search(temperature=1.3, top_k=6, top_p=0.95, max_tokens=12, seed=5)
KINDS = {
    "greedy": Search(max_tokens=12),
    "repetition": Search(max_tokens=12, repetition_penalty=1.7, min_tokens=3),
    "drawn": DRAWN,
    "beams": Search(beams=3, n_best=2, max_tokens=12),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_is_the_sum_of_the_networks_log_probabilities(kind):
    answers, table = run(KINDS[kind], list(range(20)))
    for image, sentences in enumerate(answers):
        for one in sentences:
            assert one.score == pytest.approx(table.score(image, one.ids, one.ended), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_of_an_image_does_not_depend_on_the_batch(kind):
    images = [7, 3, 11, 2, 5, 13, 0, 42]
    together, _ = run(KINDS[kind], images)
    backwards, _ = run(KINDS[kind], images[::-1])
    alone = [run(KINDS[kind], [image])[0][0] for image in images]
    assert together == alone  # to the last bit of the score
    assert backwards[::-1] == alone
    assert len({str(one) for one in alone}) == len(images)


@pytest.mark.parametrize("kind", KINDS)
def test_finished_rows_leave_the_batch(kind):
    search = KINDS[kind]
    answers, table = run(search, list(range(30)), lean=1.0)
    assert len(table.calls) <= search.max_tokens
    if search.beams == 1:
        lengths = [len(one.ids) for (one,) in answers]
        # A row is there for each of its words and its end.
        present = [sum(n >= step for n in lengths) for step in range(max(lengths) + 1)]
        assert table.calls == present[: search.max_tokens]
        assert table.calls[-1] < 15
    else:
        assert table.calls[:2] == [30, 90]
        assert table.calls[-1] < 90


def test_lengths_are_between_min_tokens_and_max_tokens():
    eager, _ = run(Search(min_tokens=4, max_tokens=9), [0, 1, 2], lean=50.0)
    assert [(len(one.ids), one.ended) for (one,) in eager] == [(4, True)] * 3
    empty, _ = run(Search(min_tokens=0, max_tokens=9), [0], lean=50.0)
    assert empty == [[Hypothesis((), empty[0][0].score, True)]]
    for search in (Search(max_tokens=5), Search(max_tokens=5, temperature=1.0)):
        never, table = run(search, [0, 1, 2], lean=-50.0)
        assert [(len(one.ids), one.ended) for (one,) in never] == [(5, False)] * 3
        assert table.calls == [3] * 5
        assert table.selected == []
    exact, _ = run(Search(min_tokens=3, max_tokens=3), [0], lean=50.0)
    assert (len(exact[0][0].ids), exact[0][0].ended) == (3, False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_that_are_not_finite_are_refused(kind, value):
    class Broken(Table):
        def logits(self, row):
            return super().logits(row) * 0 + value

    with pytest.raises(WeightsError, match="logits are not finite"):
        generate(Broken([0], 9), rows=1, begin=BEGIN, end=END, search=KINDS[kind])


def test_no_images_give_no_hypotheses():
    for search in KINDS.values():
        assert generate(Table([], 9), rows=0, begin=BEGIN, end=END, search=search) == []
