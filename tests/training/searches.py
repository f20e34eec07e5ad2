"""Plans, trials and results that tests of searches share."""

import dataclasses

from vit.training.plan_rules import Facts, make_plan
from vit.training.search_space import make_trials
from vit.training.time_budget import Costs

PHOTOS = Facts(
    images=3000,
    classes=10,
    side=160,
    grey=False,
    validation=600,
    divided=True,
    device="cpu",
    flops=80e9,
    memory=8 * 2**30,
    seconds=600.0,
)
DIGITS = dataclasses.replace(PHOTOS, images=1442, side=8, grey=True, validation=355)
COSTS = Costs(start=1.0, small_step=0.1, full_step=0.1, validation=0.5, saving=0.0, ending=0.0)


def trials_of(facts=PHOTOS, seed=0, most=12, **values):
    given = {"data": "photos", **values}
    return make_trials(make_plan(facts, given), given, seed, most)


def result(rung, trial, score, **more):
    return {
        "rung": rung,
        "trial": trial,
        "measure": "top1",
        "score": score,
        "loss": 1.0,
        "scores": {"top1": score, "loss": 1.0},
        "epochs": [score / 2, score],
        "epoch": 2,
        "steps": 10,
        "seconds": 1.0,
    } | more
