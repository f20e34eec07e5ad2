"""Which batch sizes give the same digits."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from vit.serving import exact_batch_sizes
from vit.serving.exact_batch_sizes import measure_batch_sizes


class Rounding:
    """A model whose digits change below a size, or with the place in a batch."""

    def __init__(self, exact_from=1, by_place=False):
        self.adapter, self.name = self, "rounding"
        self.exact_from, self.by_place, self.sizes = exact_from, by_place, []
        self.exact_on_all_cores = False

    def probe(self, number):
        return float(number)

    def run(self, _names, images, rows):
        assert len(images) == rows
        self.sizes.append(rows)
        error = 1e-12 * (rows < self.exact_from)
        return [x + error + self.by_place * 1e-12 * place for place, x in enumerate(images)]

    def probabilities(self, output):
        return np.array([output])


def sizes_of(monkeypatch, model, largest, speed, all_cores=None):
    """The sizes, on a machine where a batch of n images takes speed(n) seconds."""
    now = 0.0

    def clock():
        nonlocal now
        begun = len(model.sizes)
        now += speed(model.sizes[-1]) if begun > clock.begun else 0
        clock.begun = begun
        return now

    clock.begun = 0
    monkeypatch.setattr(exact_batch_sizes.time, "perf_counter", clock)
    measure_batch_sizes(model, largest, all_cores)
    return model.batch_sizes


def test_sizes_of_other_digits_are_not_used(monkeypatch):
    assert sizes_of(monkeypatch, Rounding(), 16, lambda n: 5 + n) == (1, 2, 4, 8, 16)
    assert sizes_of(monkeypatch, Rounding(exact_from=3), 16, lambda n: 5 + n) == (4, 8, 16)
    assert sizes_of(monkeypatch, Rounding(exact_from=10), 12, lambda n: 5 + n) == (12,)


def test_a_batch_is_not_larger_than_what_is_fastest(monkeypatch):
    assert sizes_of(monkeypatch, Rounding(), 16, lambda n: n) == (1,)
    assert sizes_of(monkeypatch, Rounding(exact_from=4), 16, lambda n: n * n) == (4,)


def test_digits_that_depend_on_the_place_leave_batches_of_one(monkeypatch):
    assert sizes_of(monkeypatch, Rounding(by_place=True), 8, lambda n: 5 + n) == (1,)


@pytest.mark.parametrize(
    ("error", "speed", "used"), [(0, 0.6, True), (1e-12, 0.6, False), (0, 0.9, False)]
)
def test_all_cores_are_used_where_they_give_the_same_digits_sooner(monkeypatch, error, speed, used):
    class OnAllCores(Rounding):
        """Whose digits and seconds are others in the thread with all cores."""

        on_all_cores: list[bool]

        def run(self, names, images, rows):
            is_there = threading.current_thread().name.startswith("all")
            self.on_all_cores.append(is_there)
            return [x + is_there * error for x in super().run(names, images, rows)]

    model = OnAllCores()
    model.on_all_cores = []
    with ThreadPoolExecutor(1, "all") as pool:
        sizes_of(
            monkeypatch, model, 4, lambda n: n * (speed if model.on_all_cores[-1] else 1), pool
        )
    assert model.exact_on_all_cores is used
