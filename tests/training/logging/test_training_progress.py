"""The estimated time remaining of a run, from its first steps."""

import time

import pytest

from tests.training.test_time_budget import GROWING, Clock
from vit.training.logging.training_progress import Progress, TimeRemaining, steps_left
from vit.training.lr_schedule import image_side


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def lines(pace: TimeRemaining, clock: Clock, seconds: list[float]) -> list[str | None]:
    said = []
    for each in seconds:
        clock.now += each
        said.append(pace.step())
    return said


def test_the_speed_of_an_epoch_excludes_what_follows_it(clock):
    progress = Progress("epoch 1/1", 100, visible=False)
    clock.now += 10.0
    progress.advance(100, 1.0, waited=1.0)
    progress.close()
    clock.now += 10.0  # the validation
    progress.close()
    assert (progress.seconds, progress.rate, progress.data_wait) == (10.0, 10.0, 0.1)


@pytest.mark.parametrize(
    ("given", "seconds", "place", "line"),
    [
        # the first two compile
        ({"steps": 1000}, [30.0, 5.0, *[0.2] * 20], 11, "about 3 min to go (0.2 s a step)"),
        ({"steps": 1000}, [6.0] * 8, 3, "about 100 min to go (6 s a step)"),
        (
            {"steps": 1000, "growing": True, "most": 150.0},
            [3.0] * 12,
            5,
            "at most about 2 min to go (3 s a step)",
        ),
    ],
)
def test_the_time_remaining_is_logged_once_after_the_first_steps(
    clock, given, seconds, place, line
):
    said = lines(TimeRemaining(**given), clock, seconds)
    assert [found for found in said if found] == [line]
    assert said[place] == line


def test_a_run_that_ends_soon_logs_no_time_remaining(clock):
    assert not any(lines(TimeRemaining(steps=40), clock, [0.3] * 40))


def test_remaining_steps_count_by_their_image_size(tiny_config):
    plain = tiny_config(epochs=4)
    assert steps_left(plain, step=0, steps_per_epoch=3) == 12
    assert steps_left(plain, step=7, steps_per_epoch=3) == 5
    assert steps_left(plain, step=12, steps_per_epoch=3) == 0
    size = plain.data.batch_size  # a validation costs the forward pass only
    assert steps_left(plain, step=7, steps_per_epoch=3, val_images=3 * size) == 5 + 2
    growing = tiny_config(epochs=4, **GROWING)
    sides = [image_side(growing, epoch, 4) for epoch in range(4)]
    assert (sides[0], sides[-1]) == (8, 32)
    expected = 3 * sum(side**2 for side in sides) / 8**2 - 1
    assert steps_left(growing, step=1, steps_per_epoch=3) == expected
