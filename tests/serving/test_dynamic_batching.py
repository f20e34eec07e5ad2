"""Large images, and networks that fail or never answer."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from vit.data.image_io import EncodedImage
from vit.errors import BadImage, RunError, WeightsError
from vit.exported import exported_classifier
from vit.exported.image_prefetch import PixelBudget
from vit.output.prediction_results import ImageOutput
from vit.serving import dynamic_batching
from vit.serving.batch_invariance import measure_batch_sizes
from vit.serving.dynamic_batching import (
    BatchScheduler,
    ComputeFailed,
    QueueFull,
    ServerFailed,
)
from vit.serving.served_model import ServedModel
from vit.serving.server_metrics import ServerMetrics


class Word(str):
    shape = (1,)


class Network:
    """A model whose outputs are its images in capitals; `wrong` ones make it raise."""

    name, batch_sizes, exact_on_all_cores = "network", (1, 4), True

    def __init__(self, wrong="", ends=None):
        self.predictor, self.wrong, self.ends = self, wrong, ends
        self.batches, self.threads = [], []

    def decode(self, _name, upload):
        return Word(upload)

    def sizes_for(self, _pixels):
        return self.batch_sizes

    def random_image(self, _number):
        return Word("probe")

    def run(self, _names, images, rows):
        self.batches.append((tuple(images), rows))
        self.threads.append(threading.current_thread().name[:4])
        if self.ends is not None:
            self.ends.wait(20)
        if set(images) & set(self.wrong):
            raise RuntimeError("an error of a GPU")
        return [image.upper() for image in images]


def predict(network, images, compute_timeout=20.0):
    """Outputs or errors of `images`, each a request; the scheduler; and calls of on_failure."""
    failures = []

    async def main():
        pool = ThreadPoolExecutor(1)
        scheduler = BatchScheduler(pool, 1, None, 100, compute_timeout, ServerMetrics())
        scheduler.on_failure = lambda: failures.append(scheduler.failure)
        scheduler.idle = 0  # the images share a batch
        requests = [
            asyncio.ensure_future(scheduler.predict(network, [image], [image])) for image in images
        ]
        while sum(map(len, scheduler._groups.values())) + sum(one.done() for one in requests) < len(
            images
        ):
            await asyncio.sleep(0.001)
        scheduler.idle = 1
        scheduler._start_batches()
        found = await asyncio.gather(*requests, return_exceptions=True)
        return [one if isinstance(one, Exception) else one[0] for one in found], scheduler

    return *asyncio.run(main()), failures


def test_whole_images_count_against_the_budget_until_they_are_computed(exported, files):
    model = ServedModel("fruit", str(exported), None, {})
    run, held, budget = model.run, [], PixelBudget(1000)
    model.predictor.read.budget = budget

    def record(*batch):
        held.append(budget.held)
        return run(*batch)

    model.run = record
    size = np.prod(Image.open(BytesIO(files[0][1])).size)
    found, scheduler, _ = predict(model, [EncodedImage(*files[0]), EncodedImage("b", b"no image")])
    scheduler.close()
    assert (type(found[0]), type(found[1])) == (ImageOutput, BadImage)
    gc.collect()
    assert (held, budget.held) == ([size], 0)


def test_batches_of_large_photographs_are_no_larger_than_those_of_vit_predict(
    exported, monkeypatch
):
    monkeypatch.setattr(exported_classifier, "BATCH_PIXELS", 3 * 20 * 30)
    model = ServedModel("fruit", str(exported), None, {"batch_size": 8})
    run, batches = model.run, []

    def record(names, images, rows):
        batches.append((images[0].shape[:2], len(images), rows))
        return run(names, images, rows)

    model.run = record
    small, large, huge = (np.zeros((height, 30, 3), np.uint8) for height in (2, 20, 90))
    for model.batch_sizes in ((1, 2, 8), (8,)):
        found, scheduler, _ = predict(model, [*[small] * 5, *[large] * 4, *[huge] * 2])
        assert {type(one) for one in found} == {ImageOutput}
        scheduler.close()
    assert [one for one in batches if one[0] == (2, 30)] == [((2, 30), 5, 8)] * 2
    of_large = [one[1:] for one in batches if one[0] == (20, 30)]
    assert of_large == [(2, 2), (2, 2), (3, 3), (1, 3)]
    assert [one[1:] for one in batches if one[0] == (90, 30)] == [(1, 1)] * 4


def test_an_engine_that_fails_is_not_an_error_of_the_image(exported, monkeypatch, capsys):
    model = ServedModel("fruit", str(exported), None, {"batch_size": 2})
    session, bright = model.predictor.engine._session.__call__, np.full((2, 2, 3), 255, np.uint8)

    class Engine:
        outputs, broken = model.predictor.engine._session.outputs, False

        def __call__(self, inputs):
            if self.broken or inputs["images"].max() == 255:
                raise WeightsError("onnxruntime cannot compute it (no room)")
            return session(inputs)

    engine = Engine()
    monkeypatch.setattr(model.predictor.engine, "_session", engine)
    model.predictor.engine.random_image = lambda _number: np.zeros((2, 2, 3), np.uint8)
    model.batch_sizes = (1, 2)
    (good, bad), scheduler, failures = predict(model, [np.zeros_like(bright), bright])
    assert (type(good), type(bad), failures) == (ImageOutput, ComputeFailed, [])
    assert "(no room)" in capsys.readouterr().err
    scheduler.close()
    engine.broken = True
    (bad,), scheduler, failures = predict(model, [np.zeros_like(bright)])
    assert type(bad) is ServerFailed
    (reason,) = failures
    assert reason.startswith("the network fails on random pixels too: onnxruntime cannot")
    scheduler.close()
    with pytest.raises(RunError, match="fruit cannot be served: onnxruntime cannot compute it"):
        measure_batch_sizes(model, 2, ThreadPoolExecutor(1))


def test_work_on_an_accepted_image_is_done_when_the_queue_is_full():
    async def main():
        scheduler = BatchScheduler(ThreadPoolExecutor(1), 1, None, 2, 20.0, ServerMetrics())
        scheduler.accepted = 2
        with pytest.raises(QueueFull):
            scheduler.check_room()
        assert await scheduler.call(str.upper, "map") == "MAP"
        assert scheduler.accepted == 2
        scheduler.fail("a GPU")
        with pytest.raises(ServerFailed):
            await scheduler.call(str.upper, "map")
        scheduler.close()

    asyncio.run(main())


def test_an_image_on_which_the_network_fails_fails_alone(capsys):
    network = Network(wrong=["b"])
    (a, b, c), scheduler, failures = predict(network, "abc")
    assert (a, c, failures) == ("A", "C", [])
    assert type(b) is ComputeFailed
    assert network.batches == [(("a", "b", "c"), 4), (("a",), 1), (("b",), 1), (("c",), 1)]
    assert capsys.readouterr().err.count("RuntimeError: an error of a GPU") == 1
    assert not scheduler.close()


def test_a_single_image_that_fails_does_not_end_the_server(capsys):
    network = Network(wrong=["a"])
    (a,), scheduler, failures = predict(network, "a")
    assert (type(a), failures) == (ComputeFailed, [])
    assert network.batches == [(("a",), 1), (("probe",), 1)]
    scheduler.check_room()


def test_a_network_that_fails_on_random_pixels_too_ends_the_server(capsys):
    (a, b), scheduler, failures = predict(Network(wrong=["a", "b", "probe"]), "ab")
    assert {type(a), type(b)} == {ServerFailed}
    assert failures == ["the network fails on random pixels too: an error of a GPU"]
    with pytest.raises(ServerFailed, match="random pixels"):
        scheduler.check_room()


def test_a_network_that_never_ends_is_not_waited_for():
    ends = threading.Event()
    try:
        found, scheduler, failures = predict(Network(ends=ends), "abcdef", compute_timeout=0.05)
        assert {type(one) for one in found} == {ServerFailed}, "two of them have waited"
        assert failures == ["the network has not answered in 0.05 s (--compute-timeout)"]
        assert scheduler.close(), "it says that a thread still computes"
    finally:
        ends.set()


@pytest.mark.parametrize("exact", [True, False])
def test_an_image_has_all_cores_while_it_is_the_only_one(exact):
    network = Network(ends=threading.Event())
    network.exact_on_all_cores = exact

    async def main():
        pools = ThreadPoolExecutor(2, "part"), ThreadPoolExecutor(1, "all ")
        scheduler = BatchScheduler(pools[0], 2, pools[1], 100, 20.0, ServerMetrics())
        requests = []
        for image in "ab":
            requests.append(asyncio.ensure_future(scheduler.predict(network, [image], [image])))
            while len(network.batches) < len(requests):
                await asyncio.sleep(0.001)
        network.ends.set()
        await asyncio.gather(*requests)
        await scheduler.predict(network, ["c"], ["c"])
        assert not scheduler.close()

    asyncio.run(main())
    assert network.threads == (["all ", "part", "all "] if exact else ["part"] * 3)


def test_a_call_is_given_time_from_its_begin_or_from_the_last_end_of_another(monkeypatch):
    scheduler = BatchScheduler(ThreadPoolExecutor(1), 1, None, 100, 60.0, ServerMetrics())
    monkeypatch.setattr(dynamic_batching.time, "monotonic", lambda: 130.0)
    assert scheduler._seconds_left(10.0, [20.0]) == -50
    assert scheduler._seconds_left(10.0, []) == -60
    scheduler._progress = 100.0
    assert scheduler._seconds_left(10.0, []) == 30
