"""The snippets of docs/tour.md print what stands below them, and its figures show their numbers."""

import contextlib
import itertools
import re
from decimal import Decimal

import pytest
import torch

from tests.markers import DRAWS_AS_RECORDED
from tools import tour_figures

SNIPPETS = tour_figures.read_snippets()
TRAINED = {snippet.section for snippet in SNIPPETS if snippet.tolerance is not None}
SECTIONS = dict.fromkeys(snippet.section for snippet in SNIPPETS if snippet.section)
SEARCHED = (
    "soft lookup, query, key, value, general score, rank, convex hull, feed-forward, "
    "bottleneck, alignment, s~ = tanh(w [s; c]), pos + k, e^{iθ}, halves, interleaved, "
    "permutation, concatenated, shaw, scalar bias, t5, layernorm, gain, epsilon, recurrence, "
    "six products, parameters, 213 m, 1.5 b, 175 b, share of attention, windowed, "
    "linear attention, concat score, scaled dot, `<empty>`, padding, memory mask, "
    "memory_key_padding_mask, bidirectional, text-to-text, translator, value width, "
    "output projection, tied head"
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")


def last_place(number: str) -> float:
    """Value of one unit in the last place of a printed number; 0 for an integer."""
    exponent = Decimal(number).as_tuple().exponent
    return 10.0**exponent if "." in number or "e" in number else 0.0


def assert_agrees(found: str, shown: str, tolerance: float | None = None) -> None:
    """The same words, and numbers within `tolerance`, or else one unit in the last place."""
    words, wanted = (NUMBER.sub("#", text).split() for text in (found, shown))
    assert words == wanted, found
    for number, other in zip(NUMBER.findall(found), NUMBER.findall(shown), strict=True):
        allowed = last_place(other) if tolerance is None else tolerance
        assert abs(float(number) - float(other)) <= allowed * 1.001, f"{number} in:\n{found}"


@contextlib.contextmanager
def kept_random_state():
    with torch.random.fork_rng(devices=[]):
        yield


def run(snippets):
    """Names after the snippets, whose output is compared."""
    names: dict = {}
    with kept_random_state():
        for snippet in snippets:
            printed = tour_figures.run_snippet(snippet, names)
            if DRAWS_AS_RECORDED:
                assert_agrees(printed, snippet.output, snippet.tolerance)
    return names


@pytest.fixture(scope="module")
def names_of():
    """Names after a section that runs by itself; each section runs once."""
    known: dict = {}

    def names_of(section):
        if section not in known:
            known[section] = run(s for s in SNIPPETS if s.section in ("", section))
        return known[section]

    return names_of


@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in TRAINED])
def test_a_section_runs_by_itself_and_prints_what_the_page_shows(section, names_of):
    if not section.startswith("Encoder, decoder"):
        assert names_of(section)


def test_every_snippet_that_prints_has_its_output_on_the_page():
    assert len(SNIPPETS) > 20
    for snippet in SNIPPETS:
        assert ("print(" in snippet.code) == bool(snippet.output.strip()), snippet.code


def test_the_page_has_the_words_that_a_reader_of_the_papers_searches_for():
    text = " ".join(tour_figures.PAGE.read_text(encoding="utf-8").lower().split())
    missing = [words for words in SEARCHED.split(", ") if words not in text]
    assert not missing


@pytest.mark.parametrize(
    ("section", "file"),
    [("What attention costs", "tour-cost.svg"), ("Pre-LN and Post-LN", "tour-gradients.svg")],
)
def test_a_figure_is_drawn_from_the_numbers_of_its_section(section, file, names_of):
    shown = (tour_figures.ASSETS / file).read_text(encoding="utf-8")
    drawn = tour_figures.FIGURES[file](names_of(section))
    # pixels; a sum in another order moves a gradient's norm by less
    if DRAWS_AS_RECORDED:
        assert_agrees(drawn, shown, tolerance=1.0)


def test_output_is_put_below_its_snippet_only():
    page = "## A\n\n```python\nprint(1)\n```\n\n```text\nold\n```\n\n```python\nx = 2\n```\n"
    (first, second) = tour_figures.read_snippets(page)
    assert (first.output, second.output) == ("old\n", "")
    assert tour_figures.with_output(page, ["1\n", ""]) == page.replace("old", "1")
    with pytest.raises(AssertionError):
        assert_agrees("loss 0.52", "loss 0.50")
    with pytest.raises(AssertionError):
        assert_agrees("los 0.50", "loss 0.50")
    assert_agrees("loss 0.51, 3 of 4", "loss 0.50, 3 of 4")


def test_labels_of_a_figure_do_not_overlap():
    places = tour_figures.spread([100.0, 100.0, 101.0, 30.0], 18)
    assert places[3] == 30.0
    assert min(b - a for a, b in itertools.pairwise(sorted(places))) > 17.9


@pytest.mark.slow
def test_the_whole_page_runs_from_top_to_bottom_with_its_trainings():
    names = run(SNIPPETS)
    accuracy, sizes = names["accuracy"], names["sizes"]
    trained_at = sizes.index(16)
    assert all(shares[trained_at] == max(shares) for shares in accuracy.values())
    assert min(accuracy, key=lambda position: accuracy[position][trained_at]) == "none"
    assert max(accuracy, key=lambda position: accuracy[position][sizes.index(32)]) == "learned"
    assert names["single"][6] > names["accuracy_without"](0, range(4))
    with_attention, without = names["copied"]["attention"], names["copied"]["one vector"]
    assert without == sorted(without, reverse=True)  # the longer, the worse
    assert min(with_attention) > max(without[1:])
    assert (names["alignment"].argmax(-1) == torch.arange(len(names["word"]))).all()
    shown = (tour_figures.ASSETS / "tour-positions.svg").read_text(encoding="utf-8")
    # 0.15 of 266 pixels, and labels that make room for each other
    assert_agrees(tour_figures.draw_positions(names), shown, tolerance=80.0)
    shown = (tour_figures.ASSETS / "tour-alignment.svg").read_text(encoding="utf-8")
    assert_agrees(tour_figures.draw_alignment(names), shown, tolerance=0.3)  # of an opacity
