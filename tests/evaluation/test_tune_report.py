"""tune.html and the verdict: the best trial, and whether its lead is more than noise."""

import re

import pytest

from tests.training.searches import result, trials_of
from vit.evaluation.tune_report import axis, noise, tune_page, verdict


def test_a_difference_within_noise_is_called_so():
    record = {"validation": 400, "results": [result(1, 0, 0.8), result(1, 3, 0.7)]}
    plan, little, much = result(1, 0, 0.80), result(1, 3, 0.81), result(1, 3, 0.95)
    assert 0.05 < noise(0.8, 0.81, 400) < 0.06
    assert noise(1.0, 1.0, 400) > 0.004
    assert "1.0 points above the plan" in verdict(record, little, plan)
    assert "and this is no more" in verdict(record, little, plan)
    assert "and this is more" in verdict(record, much, plan)
    assert "No trial was better than the plan" in verdict(record, plan, plan)
    assert "No trial was compared" in verdict({**record, "results": [plan]}, plan, plan)


def test_an_axis_is_logarithmic_where_many_numbers_are_above_zero():
    place, marks = axis([0.1, 0.2, 0.4, 0.8, 1.6, 3.2], 0.4)
    assert place(0.4) - place(0.2) == pytest.approx(place(3.2) - place(1.6))
    assert sorted(marks.values()) == [0.1, 0.4, 3.2]
    assert sorted(axis([0.1, 0.2, 0.4, 0.8, 1.6, 3.2], 3.0)[1].values()) == [0.1, 3.2]
    place, marks = axis(["b", "a", "b"], "a")
    assert (place("a"), place("b")) == (0.0, 1.0)


def test_the_page_draws_each_setting_where_there_are_enough_trials(tmp_path):
    trials = [{"trial": n, **trial} for n, trial in enumerate(trials_of(most=9))]
    record = {
        "settings": {"data": "photos", "time": "5m"},
        "validation": 100,
        "seconds": 1.0,
        "time": "150s",
        "trials": trials,
        "rungs": [{"trials": 9, "seconds": 3.0, "steps": [9] * 9}],
        "results": [result(1, n, 0.5 + n / 50) for n in range(9)],
        "result": {"epoch": 2, "scores": {"top1": 0.9, "loss": 0.1}},
    }
    leaderboard = record["results"][::-1]
    page = tune_page(record, leaderboard, record["results"][0], tmp_path / "runs")
    varied = {name for trial in trials for name in trial["changes"]}
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == len(varied) + 1  # and the curves
    for chart in charts[1:]:
        points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="5" class="(\w+)"', chart)
        assert len(points) == 9
        assert [style for *_, style in points].count("val") == 1
        assert all(54 <= float(x) <= 402 and 46 <= float(y) <= 220 for x, y, _ in points)
    assert "\\n" not in page
    assert "90.00%" in page


def test_hostile_names_stay_text(tmp_path, assert_harmless, hostile_names):
    trial = {"values": {"lr": 1.0}, "changes": {}, "settings": {"lr": 1.0}}
    evil = [
        {"trial": number, **trial, "changes": {"lr": name}, "values": {"lr": name}}
        for number, name in enumerate(hostile_names, 1)
    ]
    failed = [
        {"rung": 1, "trial": one["trial"], "steps": 1, "seconds": 1.0, "error": one["values"]["lr"]}
        for one in evil
    ]
    results = [result(1, 0, 0.5), *failed]
    record = {
        "settings": {"data": "<u>pets</u>\x1b", "time": "5m"},
        "validation": 10,
        "seconds": 1.0,
        "time": "9s",
        "trials": [{"trial": 0, **trial}, *evil],
        "rungs": [{"trials": 12, "seconds": 3.0, "steps": [1, 1]}],
        "results": results,
        "stopped": "<i>the search ended",
        "result": {"epoch": 2, "scores": {"top1": 0.9, "loss": 0.1}},
    }
    page = assert_harmless(tune_page(record, results, results[0], tmp_path / "<s>run"))
    assert "Trial 1 failed: <script>alert(1)</script>" in page.prose
    assert page.find("a") == [{"href": "best/report.html"}]
