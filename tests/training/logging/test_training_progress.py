"""The estimated time remaining of a run, from its first steps."""

import time

import pytest

from tests.training.test_time_budget import GROWING, Clock
from vit.training.logging.training_progress import Progress, TimeRemaining, steps_left
from vit.training.lr_schedule import image_side


def lines(pace: TimeRemaining, clock: Clock, seconds: list[float]) -> list[str | None]:
    said = []
    for each in seconds:
        clock.now += each
        said.append(pace.step())
    return said


def test_the_speed_of_an_epoch_excludes_what_follows_it(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    progress = Progress("epoch 1/1", 100, visible=False)
    clock.now += 10.0
    progress.advance(100, 1.0, waited=1.0)
    progress.close()
    clock.now += 10.0  # the validation
    progress.close()
    assert (progress.seconds, progress.rate, progress.data_wait) == (10.0, 10.0, 0.1)


def test_the_time_remaining_is_logged_once_after_the_first_steps():
    clock = Clock()
    pace = TimeRemaining(steps=1000, validations=10, validation_share=3, clock=clock)
    said = lines(pace, clock, [30.0, 5.0, *[0.2] * 20])  # the first two compile
    assert said.index("about 3 min to go (0.2 s a step)") == 11  # 988 x 0.2 + 10 x 0.2
    assert sum(line is not None for line in said) == 1


def test_the_time_remaining_does_not_wait_for_ten_slow_steps():
    clock = Clock()
    pace = TimeRemaining(steps=1000, validations=0, validation_share=0, clock=clock)
    said = lines(pace, clock, [6.0] * 8)
    assert [line for line in said if line] == ["about 100 min to go (6 s a step)"]
    assert said[3]


@pytest.mark.parametrize(
    ("took", "minutes"),
    [(200.0, 31), (1000.0, 46)],  # 88 + 9 x 200 s; a start of loaders is not paid again
)
def test_the_time_remaining_counts_validations_by_their_own_time(took, minutes):
    clock = Clock()
    pace = TimeRemaining(steps=100, validations=10, validation_share=300, clock=clock)
    said = lines(pace, clock, [1.0] * 6)
    clock.now += took
    pace.validated()
    said += lines(pace, clock, [1.0] * 6)
    assert [line for line in said if line] == [f"about {minutes} min to go (1 s a step)"]


def test_the_time_remaining_is_at_most_that_of_the_time_budget():
    clock = Clock()
    growing = TimeRemaining(
        steps=1000, validations=0, validation_share=0, growing=True, most=150.0, clock=clock
    )
    said = lines(growing, clock, [3.0] * 12)
    assert [line for line in said if line] == ["at most about 2 min to go (3 s a step)"]


def test_a_run_that_ends_soon_logs_no_time_remaining():
    clock = Clock()
    pace = TimeRemaining(steps=40, validations=1, validation_share=1, clock=clock)
    assert not any(lines(pace, clock, [0.3] * 40))


def test_remaining_steps_count_by_their_image_size(tiny_config):
    plain = tiny_config(epochs=4)
    assert steps_left(plain, step=0, steps_per_epoch=3) == 12
    assert steps_left(plain, step=7, steps_per_epoch=3) == 5
    assert steps_left(plain, step=12, steps_per_epoch=3) == 0
    growing = tiny_config(epochs=4, **GROWING)
    sides = [image_side(growing, epoch, 4) for epoch in range(4)]
    assert (sides[0], sides[-1]) == (8, 32)
    expected = 3 * sum(side**2 for side in sides) / 8**2 - 1
    assert steps_left(growing, step=1, steps_per_epoch=3) == expected
