"""report.html of numbers, and their page of `vit evaluate`: names stay text, values are right."""

import re

import pytest
import torch

from vit.evaluation.charts import SquareChart, scatter_chart
from vit.evaluation.classification_page import evaluation_page
from vit.evaluation.number_metrics import summarize_targets
from vit.evaluation.number_page import write_number_report
from vit.number_answers import NumberAnswers

AGE = NumberAnswers(("age",), ("years",), (50.0,), (20.0,), (False,), {0.9: (4.0,)})
SIZE = NumberAnswers(("size",), ("mm",), (1.0,), (1.0,), (True,), {0.9: (0.5,)})


@pytest.fixture
def write(tmp_path, make_facts, make_epochs):
    """Write a report about predicted and true numbers, (images, targets), and return its text."""

    def write(answers, values, true, paths=None, settings=None, **changes):
        paths = paths or [f"/nowhere/{number}.png" for number in range(len(true))]
        epochs = make_epochs(3, val_mae=2.5)
        settings = {"target": ",".join(answers.names), **(settings or {})}
        facts = make_facts((), settings, epochs=epochs, **changes)
        write_number_report(facts, answers, values, true, paths)
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def test_names_and_units_stay_text(write, assert_harmless, hostile_names, hostile_images):
    count = len(hostile_names)
    scale = (hostile_names, hostile_names[::-1], (0.0,) * count, (1.0,) * count)
    answers = NumberAnswers(*scale, (False, True) * (count // 2) + (False,), {})
    true = torch.rand(40, count, dtype=torch.float64) + 1
    html = write(answers, true + 0.1, true, hostile_images, {"data": "<u>ages</u>\x1b\u202e"})
    page = assert_harmless(html)
    assert len(page.find("svg")) == 2 + count  # the curves, and a chart of each target
    assert len(page.find("img")) == 3 * count
    scores = {**summarize_targets(answers, true + 0.1, true), "failed": []}
    assert_harmless(evaluation_page("run<script>", f"data{hostile_names[0]}", scores))


def test_scores_have_units_and_the_largest_errors_come_first(write, parse, hostile_images):
    true = column(*range(10, 50))
    values = true + column(*[1.0] * 39, 10.0)
    values[7] = true[7] - 5
    page = parse(write(AGE, values, true, hostile_images))
    scores = summarize_targets(AGE, values, true)
    low, high = scores["mae_interval"]
    assert f"MAE\n{scores['mae']:.5g}\nyears\n{low:.5g} to {high:.5g}" in page.lines
    assert scores["coverage"] == 38 / 40
    assert "It has 95.0% of these numbers, but was measured on these very images" in page.prose
    captions = re.findall(r"predicted\n([\d.]+)\nyears\ntrue\n([\d.]+)\nyears", page.lines)
    assert captions[:2] == [("59", "49"), ("12", "17")]
    assert len(captions) == 24


def test_logarithms_have_logarithmic_axes_and_errors_by_ratio(write, parse):
    true = column(0.1, 1, 10, 100, 1000, 0)
    values = column(0.2, 1, 10, 100, 1100, 5)
    page = parse(write(SIZE, values, true, settings={"report": "fast"}))
    errors = re.findall(r"predicted\n([\d.]+)\nmm\ntrue\n([\d.]+)\nmm", page.lines)
    assert errors[:3] == [("5", "0"), ("0.2", "0.1"), ("1100", "1000")]
    assert "5 of 6 images are drawn, evenly chosen of those above 0" in page.prose
    chart = scatter_chart([0.1, 1, 10], [0.1, 1, 10], half_width=0.5, log=True)
    places = [x for x, _, _ in chart.points]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)
    assert {text for _, text in chart.marks} >= {"0.1", "1", "10"}


def test_a_chart_has_a_few_thousand_points_and_says_so(write, parse):
    true = torch.linspace(0, 9, 4_000, dtype=torch.float64)[:, None]
    page = parse(write(AGE, true, true, settings={"report": "fast"}))
    (drawn,) = re.findall(r"([\d,]+) of 4,000 images are drawn, evenly chosen\.", page.prose)
    dots = [one for one in page.find("circle") if one["class"] == "dot"]
    assert 1000 < len(dots) == int(drawn.replace(",", "")) <= 3000


@pytest.mark.parametrize("log", [False, True])
def test_band_and_points_lie_in_the_chart_and_the_band_has_its_width(log):
    true, width = [1.0, 2.0, 5.0, 40.0], 0.25
    chart = scatter_chart(true, [1.5, 2.0, 4.0, 39.0], half_width=width, log=log)
    for x, y, *_ in (*chart.points, *chart.band):
        assert SquareChart.left <= x <= SquareChart.right
        assert SquareChart.top <= y <= SquareChart.bottom
    ((x1, y1, x2, y2, _),) = chart.lines
    assert (x2 - x1) == pytest.approx(y1 - y2)  # a unit is as long up as across
    span = float(torch.tensor(40.0).log()) if log else 39.0
    assert y1 - chart.band[1][1] == pytest.approx((y1 - y2) * width / span, abs=0.1)


def test_empty_cells_and_few_images_have_a_page(write, parse):
    answers = NumberAnswers(("a", "b"), ("", ""), (0.0, 0.0), (1.0, 1.0), (False, True))
    true = torch.full((1, 2), torch.nan, dtype=torch.float64)
    page = parse(write(answers, true.nan_to_num(1), true))
    assert page.prose.count("Of 0 images whose number is known.") == 2
    page = parse(write(AGE, column(3.0), column(3.0), best_epoch=2))
    assert "R²\n-" in page.lines
    assert page.find("polygon")


def test_an_evaluation_shows_each_target_and_what_could_not_be_read(parse):
    scale = (("age", "size"), ("", "mm"), (0.0, 1.0), (2.0, 1.0), (False, True))
    true = torch.rand(30, 2, dtype=torch.float64) + 1
    scores = summarize_targets(NumberAnswers(*scale), true + 1, true)
    failed = [{"image": "a.png", "error": "no <b>"}]
    page = parse(evaluation_page("runs/a", "ages.csv", {**scores, "failed": failed}))
    assert f"{scores['mae']:.5g}" in page.texts
    for name, found in scores["questions"].items():
        assert f"{name}\nscore\nvalue\n95% interval\nmeaning\nMAE\n{found['mae']:.5g}" in page.lines
    assert "a.png\nno <b>" in page.lines
