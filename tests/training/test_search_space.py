"""Trials of a search: the plan, and different changes of it."""

import dataclasses
import json

import pytest

from tests.training.searches import DIGITS, PHOTOS, trials_of
from vit.config.parser import make_config
from vit.training.plan_rules import (
    PHOTO_NETWORKS,
    TINY_NETWORKS,
    make_plan,
    neighbours,
    network_settings,
)
from vit.training.search_space import SPACE, network_name


@pytest.mark.parametrize("facts", [PHOTOS, DIGITS])
def test_trials_are_the_plan_and_different_changes_of_it(facts):
    trials = trials_of(facts)
    assert len(trials) == 12
    assert trials[0]["changes"] == {}
    plan = make_plan(facts, {"data": "photos"})
    planned = make_config({"data": "photos", **plan.settings, "time": None})
    assert make_config({**trials[0]["settings"], "time": None}) == planned
    assert all(trial["changes"] for trial in trials[1:])
    assert len({json.dumps(trial["settings"]) for trial in trials}) == 12
    for trial in trials:
        make_config(trial["settings"])  # they fit together


def test_each_setting_of_the_table_is_searched():
    trials = trials_of(most=18)
    assert {name for trial in trials for name in trial["changes"]} == {one.name for one in SPACE}
    plan = trials[0]["settings"]
    for trial in trials:
        settings = trial["settings"]
        # as the plan has it: the root of the batch above 64, times a factor between 0.4 and 2.5
        scale = max(settings["batch_size"] / max(plan["batch_size"], 64), 1) ** 0.5
        assert 0.39 < settings["lr"] / plan["lr"] / scale < 2.51
        ratio = plan["lr"] / plan["fallback_lr"]
        assert settings["lr"] / settings["fallback_lr"] == pytest.approx(ratio, rel=0.01)


def test_a_trial_is_a_function_of_the_seed_and_of_what_is_searched():
    assert trials_of() == trials_of()
    assert trials_of(most=4) == trials_of()[:4]
    assert trials_of(seed=1)[1:] != trials_of()[1:]
    # a setting that is given stays, and the others are drawn as if it were not
    free, fixed = trials_of(), trials_of(drop_path=0.15)
    assert {trial["settings"]["drop_path"] for trial in fixed} == {0.15}
    assert not any("drop_path" in trial["changes"] for trial in fixed)
    both = zip(free, fixed, strict=True)
    same = [("lr" in one["changes"]) == ("lr" in other["changes"]) for one, other in both]
    assert sum(same) >= 10


def test_images_of_characters_are_not_cropped():
    assert not any("min_crop" in trial["changes"] for trial in trials_of(DIGITS))


def test_a_chosen_network_is_not_searched():
    for given in ({"depth": 3}, {"image_size": 96, "patch_size": 8}):
        networks = {trial["values"]["network"] for trial in trials_of(**given)}
        assert len(networks) == 1


def test_neighbours_stand_beside_the_plan_on_the_ladder():
    plan = make_plan(dataclasses.replace(PHOTOS, seconds=6000.0), {})
    # of images of 160 px
    ladder = [network_settings(row) for row in PHOTO_NETWORKS if row.side <= 160]
    (at,) = (n for n, network in enumerate(ladder) if network.items() <= plan.settings.items())
    assert 0 < at < len(ladder) - 1
    assert neighbours(plan) == [ladder[at - 1], ladder[at + 1]]
    assert neighbours(make_plan(PHOTOS, {"dim": 100, "num_heads": 4})) == []
    smallest = make_plan(dataclasses.replace(DIGITS, seconds=10.0), {})
    (larger,) = neighbours(smallest)
    assert larger.items() >= {"image_size": 16, "patch_size": 4, "stem_width": 32}.items()


def test_each_network_of_a_ladder_has_a_name_of_its_own():
    for ladder in (PHOTO_NETWORKS, TINY_NETWORKS):
        assert len({network_name(network_settings(network)) for network in ladder}) == len(ladder)
