"""Which batch sizes give the same digits."""

import numpy as np

from vit.serving import exact_batch_sizes
from vit.serving.exact_batch_sizes import measure_batch_sizes


class Rounding:
    """A model whose digits change below a size, or with the place in a batch."""

    def __init__(self, exact_from=1, by_place=False):
        self.adapter, self.name = self, "rounding"
        self.exact_from, self.by_place, self.sizes = exact_from, by_place, []

    def probe(self, number):
        return float(number)

    def run(self, _names, images, rows):
        assert len(images) == rows
        self.sizes.append(rows)
        error = 1e-12 * (rows < self.exact_from)
        return [x + error + self.by_place * 1e-12 * place for place, x in enumerate(images)]

    def probabilities(self, output):
        return np.array([output])


def sizes_of(monkeypatch, model, largest, speed):
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
    measure_batch_sizes(model, largest)
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
