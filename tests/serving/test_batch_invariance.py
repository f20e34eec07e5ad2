"""Which batch sizes give the same digits."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from onnx import helper

from tests.exported.test_exported_classifier import graph_of, written
from vit import timing
from vit.output.prediction_results import ImageOutput
from vit.serving.batch_invariance import measure_batch_sizes
from vit.serving.model_registry import largest_batch
from vit.serving.served_model import ServedModel


class Rounding:
    """A model whose digits change below a size, with the place in a batch, or with its images."""

    def __init__(self, exact_from=1, by_place=False, by_range=False):
        self.predictor, self.name, self.by_range = self, "rounding", by_range
        self.exact_from, self.by_place, self.sizes = exact_from, by_place, []
        self.exact_on_all_cores = False

    def random_image(self, number):
        return float(number)

    def run(self, _names, images, rows):
        self.sizes.append(rows)
        error = 1e-12 * (rows < self.exact_from) + 1e-12 * max(images) * self.by_range
        found = [x + error + self.by_place * 1e-12 * place for place, x in enumerate(images)]
        return [ImageOutput("", np.array([one])) for one in found]


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
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    with ThreadPoolExecutor(1) as compute:
        measure_batch_sizes(model, largest, compute, all_cores)
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


def test_digits_that_depend_on_the_other_images_leave_batches_of_one(monkeypatch):
    assert sizes_of(monkeypatch, Rounding(by_range=True), 8, lambda n: 5 + n) == (1,)


def test_batches_of_an_int8_file_with_one_scale_for_all_images_have_one(tmp_path):
    graph = graph_of()
    graph.graph.node[2].input[0] = "rounded"
    for node in (
        helper.make_node("DequantizeLinear", ["bytes", "scale", "zero"], ["rounded"]),
        helper.make_node("DynamicQuantizeLinear", ["embedding"], ["bytes", "scale", "zero"]),
    ):
        graph.graph.node.insert(2, node)
    path = written(tmp_path / "small.onnx", model=graph)
    model = ServedModel("small", str(path), None, {"batch_size": 4})
    with ThreadPoolExecutor(1) as compute:
        measure_batch_sizes(model, largest_batch(model), compute)
    assert model.batch_sizes == (1,)


def test_requests_are_computed_between_measured_batches():
    """A reload of a model delays a request by one batch, not by all that are measured."""
    events = []

    class Watched(Rounding):
        def run(self, names, images, rows):
            if not events:
                compute.submit(events.append, "request")
            events.append("batch")
            return super().run(names, images, rows)

    with ThreadPoolExecutor(1) as compute:
        measure_batch_sizes(Watched(), 4, compute)
    assert events[:3] == ["batch", "request", "batch"]


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
            found = super().run(names, images, rows)
            return [ImageOutput("", one.probabilities + is_there * error) for one in found]

    model = OnAllCores()
    model.on_all_cores = []
    with ThreadPoolExecutor(1, "all") as pool:
        sizes_of(
            monkeypatch, model, 4, lambda n: n * (speed if model.on_all_cores[-1] else 1), pool
        )
    assert model.exact_on_all_cores is used
