"""Successive halving: rungs of equal time, and the trials that advance."""

import dataclasses

import pytest

from tests.training.searches import COSTS, result
from vit.config.parser import make_config
from vit.errors import ConfigError
from vit.training import successive_halving
from vit.training.successive_halving import (
    MIN_STEPS,
    CostMeter,
    count_trials,
    first_rung_seconds,
    leaderboard,
    make_rungs,
    rung_sizes,
    steps_within,
    trials_of_rung,
    with_steps,
)


@pytest.mark.parametrize(
    ("trials", "sizes"),
    [(2, [2]), (3, [3]), (5, [5, 2]), (6, [6, 2]), (9, [9, 3]), (18, [18, 6, 2])],
)
def test_each_rung_has_a_third_of_the_trials(trials, sizes):
    assert rung_sizes(trials) == sizes
    parts = [size * 3**at for at, size in enumerate(sizes)]
    assert first_rung_seconds(trials, 60.0) * sum(parts) == pytest.approx(60.0)


def test_more_time_means_more_trials():
    config = make_config({"batch_size": 50, "schedule": "wsd"})

    def number(room):
        return count_trials(
            18, (config, COSTS), images=1000, startup=1.0, seconds=room, requested=None
        )

    numbers = [number(room) for room in (30.0, 300.0, 600.0, 3000.0, 30_000.0)]
    assert numbers == sorted(numbers)
    assert {numbers[0], numbers[-1]} == {3, 18}
    assert count_trials(5, (config, COSTS), images=1000, startup=1.0, seconds=1.0, requested=5) == 5
    with pytest.raises(ConfigError, match="leave only 2 different trials"):
        count_trials(2, (config, COSTS), images=1000, startup=1.0, seconds=1.0, requested=None)


def test_trials_are_measured_with_what_the_data_decided(monkeypatch):
    decided = {"task": "multilabel", "num_classes": 7, "intensity_range": (0.0, 4095.0)}
    completed = make_config({"batch_size": 8, "accumulate": 2, **decided})
    measured = []
    monkeypatch.setattr(
        successive_halving, "costs_of", lambda config, *_: measured.append(config) or COSTS
    )
    sizes = {
        "depth": 2,
        "dim": 32,
        "num_heads": 2,
        "image_size": 32,
        "patch_size": 16,
        "batch_size": 8,
    }
    CostMeter(completed, None, None, 1.0)({"settings": sizes})
    assert measured
    for config in measured:
        assert config.training.task == "multilabel"
        assert config.model.num_classes == 7
        assert config.data.intensity_range == (0.0, 4095.0)
        assert config.data.accumulate == 2
    measured.clear()
    CostMeter(completed, None, None, 1.0)({"settings": {**sizes, "accumulate": 4}})
    assert {config.data.accumulate for config in measured} == {4}  # as the trial is trained


def test_all_trials_of_a_rung_have_the_same_time():
    config = make_config({"batch_size": 50, "schedule": "wsd"})
    dearer = dataclasses.replace(COSTS, small_step=0.3, full_step=0.3)
    costs = [(config, COSTS), (config, dearer), (config, COSTS), (config, COSTS)]
    rungs = make_rungs(costs, startup=1.0, seconds=300.0, total_seconds=700.0, requested=True)
    assert [rung["trials"] for rung in rungs] == [4, 2]
    assert rungs[1]["seconds"] == pytest.approx(3 * rungs[0]["seconds"], abs=0.1)
    for rung in rungs:
        for (one, cost), steps in zip(costs, rung["steps"], strict=True):
            sized = with_steps(one, steps)
            took = 1.0 + cost.of(sized, sized.training.epoch_steps, steps)
            assert took <= rung["seconds"]
            assert took == pytest.approx(rung["seconds"], abs=0.9)
        assert rung["steps"][0] > 2.5 * rung["steps"][1]
    assert steps_within(0.0, config, COSTS) == MIN_STEPS
    with pytest.raises(
        ConfigError, match=r"time=20s: half of it .* use --time \d+s or more, or fe"
    ):
        make_rungs(costs, startup=1.0, seconds=8.0, total_seconds=20.0, requested=True)


def test_the_best_trials_and_the_plan_advance():
    record = {
        "trials": [{"trial": n} for n in range(6)],
        "rungs": [{"trials": 6}, {"trials": 2}],
        "results": [result(1, n, score) for n, score in enumerate([0.1, 0.5, 0.9, 0.4, 0.9, 0.2])],
    }
    assert trials_of_rung(record, 1) == [0, 1, 2, 3, 4, 5]
    assert trials_of_rung(record, 2) == [
        0,
        2,
    ]  # ties: the earlier trial; and the plan
    record["results"][2] = {"rung": 1, "trial": 2, "error": "the loss became nan"}
    assert trials_of_rung(record, 2) == [0, 4]


def test_the_winner_of_the_last_rung_leads_the_leaderboard():
    first = [result(1, n, score) for n, score in enumerate([0.1, 0.5, 0.9, 0.4])]
    last = [result(2, 0, 0.6), result(2, 2, 0.5)]  # the best of the first rung loses
    record = {
        "trials": [{"trial": n} for n in range(4)],
        "rungs": [{"trials": 4}, {"trials": 2}],
        "results": first + last,
    }
    assert leaderboard(record) == [last[0], last[1], first[1], first[3]]
