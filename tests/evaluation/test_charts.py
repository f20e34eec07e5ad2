"""Charts: ticks are few and round, and everything lies inside the plot."""

import pytest

from vit.evaluation.charts import (
    Chart,
    epoch_ticks,
    line_chart,
    nice_ticks,
    reliability_chart,
)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.97, 0.98), (2.3, 2.3), (0, 0), (0, 1e-7), (0.1, 5e4), (-1, 1)]
)
def test_ticks_are_few_round_and_span_the_values(low, high):
    ticks = nice_ticks(low, high)
    assert 3 <= len(ticks) <= 8
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= high - 1e-9
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 2), (1, 8), (1, 60), (1, 1200), (5, 90)])
def test_epoch_ticks_are_few_and_have_both_ends(first, last):
    ticks = epoch_ticks(first, last)
    assert (ticks[0], ticks[-1]) == (first, last)
    assert len(ticks) <= 9
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize("epochs", [1, 2, 41, 600])
def test_any_number_of_epochs_is_drawn_inside_the_chart(epochs):
    numbers = range(1, epochs + 1)
    values = [1 - 1 / (epoch + 1) for epoch in numbers]
    chart = line_chart("Top-1", numbers, {"validation": values}, best=epochs, unit="%")
    ((label, style, points),) = chart.curves
    assert (label, style, len(points)) == ("validation", "val", epochs)
    for x, y in points:
        assert Chart.left <= x <= Chart.right
        assert Chart.top <= y <= Chart.bottom
    assert chart.best == points[-1][0]
    assert chart.description.startswith(f"Top-1 over {epochs} epochs; validation: ")
    assert all(text.endswith("%") for _, text in chart.ticks)


def test_the_curve_to_compare_with_comes_first():
    chart = line_chart("Loss", [1, 2], {"training": [2, 1], "validation": [3, 2]}, best=2)
    styles = [(label, style) for label, style, _ in chart.curves]
    assert styles == [("training", "train"), ("validation", "val")]


def test_the_bars_of_a_reliability_chart_are_the_bins_and_their_shares():
    certain = (0.2, 0.9)
    bins = [(30, 0.11, 0.1, certain), (10, 0.2, 0.2, certain), (60, 1.0, 0.9, certain)]
    chart = reliability_chart("Right", bins)
    width, height = Chart.right - Chart.left, Chart.bottom - Chart.top
    places = [(x - 1 - Chart.left) / width for x, *_ in chart.bars]
    assert places == pytest.approx([1 / 15, 2 / 15, 14 / 15], abs=1e-3)
    assert [tall / height for *_, tall in chart.bars] == pytest.approx([0.3, 0.1, 0.6], abs=1e-3)
    assert {round(y + tall, 3) for _, y, _, tall in chart.bars} == {Chart.bottom}
    assert chart.notes[0] == "score 11.0%: 10.0% of 30 (95% interval 20.0% to 90.0%)"
